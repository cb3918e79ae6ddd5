"""Causal attention in plain torch: packed for training, paged for sampling."""
