"""What FP8 in the KV cache does to a model: the forward pass with and without it."""
