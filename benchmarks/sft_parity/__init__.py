"""`tinkex train` next to the same recipe in `transformers` and `peft`, and its RL loop's reward."""
