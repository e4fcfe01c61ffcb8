"""llm-compressor's GPTQ and AWQ as an engine, for models that fit into memory."""
