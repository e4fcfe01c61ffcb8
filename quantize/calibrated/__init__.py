"""Methods that use STATS: weights of columns, and GPTQ."""
