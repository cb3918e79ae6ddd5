"""Training passes: batches of operations, losses, gradients and optimizer steps."""
