"""The engine on one GPU next to `transformers` and `peft`: see benchmarks/README.md."""
