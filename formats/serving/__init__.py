"""What serving takes: the KV cache by layout, the memory pool, launch commands, and what would go wrong. No I/O."""
