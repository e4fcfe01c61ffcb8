"""A paged KV cache in BF16 and FP8, the reference for what engines keep on a GPU. Needs PyTorch."""
