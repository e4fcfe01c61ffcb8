"""What a model does on your data: tokens, the forward pass, and STATS, what its linears saw."""
