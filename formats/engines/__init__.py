"""Would this checkpoint load in SGLang, vLLM or transformers, and as what was meant? From config and headers alone."""
