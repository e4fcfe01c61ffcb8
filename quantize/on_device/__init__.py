"""The arithmetic of the kernels in torch, on any device, to the bit: `convert --device cuda`."""
