"""What LoRA adapters of different shapes learn on SmolLM2-135M, with the tasks of `examples/`."""
