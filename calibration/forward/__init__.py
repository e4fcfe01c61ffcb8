"""The forward pass over calibration tokens, one layer and one expert at a time."""
