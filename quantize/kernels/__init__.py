"""numba kernels: raw FP8 bytes in, packed INT4, scales and error sums out, in passes over rows. No torch, no GIL."""
