"""LoRA adapters as files, without torch: read, checked, renamed, packed, compared."""
