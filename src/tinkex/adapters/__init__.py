"""LoRA adapters as files: read and checked without torch, sent, renamed, merged, compared."""
