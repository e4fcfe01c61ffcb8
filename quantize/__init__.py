"""Pure arithmetic (decode, scale search, pack), the plan, the shard pipeline, verify and the error report."""
