"""KV-cache scales: the certificate from weights, the rule for measured ranges, and which of them holds. NumPy."""
