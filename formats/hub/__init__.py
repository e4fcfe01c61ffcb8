"""The Hugging Face Hub as source and as target, through huggingface_hub: its cache, its files, its commits."""
