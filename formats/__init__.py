"""What is on disk: safetensors, FP8 in, INT4 out, model families. No arithmetic on weights, no printing."""
