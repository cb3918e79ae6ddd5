"""What the engine does on a CPU, next to `transformers` and `peft` doing the same work."""
