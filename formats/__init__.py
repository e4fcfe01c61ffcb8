"""What is on disk: safetensors, FP8 dialects in, INT4 layout out, model families. No arithmetic on weights, no printing."""
