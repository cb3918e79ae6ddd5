"""Base models: configuration, weights, forward pass, tokenizer."""
