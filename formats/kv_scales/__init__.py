"""KV-cache scales on disk: kizami's JSON, SGLang's, tensors in a checkpoint; and what engines do with them."""
