"""A generation tag on every page of a KV cache, and the check before a decode step. Needs PyTorch."""
