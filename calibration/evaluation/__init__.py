"""A and B on the same questions or tokens: what a difference shows, and what it does not."""
