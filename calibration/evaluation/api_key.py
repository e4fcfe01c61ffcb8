"""The API key of servers that are asked: of the environment, as OpenAI's own client has it."""

import os

KEY = "OPENAI_API_KEY"


def api_key() -> str | None:
    """None where it is not set, or empty."""
    return os.environ.get(KEY) or None
