"""A small model behind OpenAI's API on loopback, for `kizami evaluate http://A http://B`.

    python benchmarks/small_server.py DIR [--port 8000]

float32 on the CPU, greedy, one request at a time; weights as in_memory.py decodes them (FP8, BF16, INT4). It answers
/v1/models, /v1/chat/completions (by the checkpoint's chat template, if it has one; tool calls are what the model writes
as <tool_call>{...}</tool_call>), and /v1/completions with `echo` and `logprobs`, by which lm-eval scores given answers.
"""

import argparse
import json
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from in_memory import load
from transformers import AutoTokenizer

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Model:
    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = load(folder)
        self.longest: int = self.model.config.max_position_embeddings
        self.lock = threading.Lock()

    @torch.inference_mode()
    def complete(self, prompt: str, count: int, stop: Sequence[str]) -> tuple[str, str]:
        """Text and finish_reason."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids[:, -(self.longest - count) :]
        with self.lock:
            made = self.model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
        text = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        cut = min((at for word in stop if (at := text.find(word)) >= 0), default=None)
        ended = made.shape[1] < ids.shape[1] + count or cut is not None
        return text[:cut], "stop" if ended else "length"

    @torch.inference_mode()
    def score(self, prompt: str) -> dict[str, Any]:
        """Log-probability of each token of the prompt and one more, as `echo` and `max_tokens` 1 give them."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids[:, -self.longest :]
        with self.lock:
            logs = self.model(ids).logits[0].log_softmax(-1)
        best = logs.max(-1)
        tokens = [*ids[0].tolist(), int(best.indices[-1])]
        own = [None, *(float(logs[i, token]) for i, token in enumerate(tokens[1:]))]
        top: list[dict[str, float] | None] = [None]
        for i, value in enumerate(best.values.tolist()):
            top.append({self.tokenizer.decode([int(best.indices[i])]): value})
        words = [self.tokenizer.decode([token]) for token in tokens]
        return {"tokens": words, "token_logprobs": own, "top_logprobs": top}

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.tokenizer.chat_template is None:
            lines = [f"{message['role']}: {message.get('content') or ''}" for message in body["messages"]]
            prompt = "\n".join([*lines, "assistant:"])
        else:
            prompt = self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=False
            )
        text, reason = self.complete(prompt, int(body.get("max_tokens") or 256), ())
        calls = [made for found in TOOL_CALL.finditer(text) if (made := _call(found[1])) is not None]
        message: dict[str, Any] = {"role": "assistant", "content": TOOL_CALL.sub("", text).strip()}
        if calls:
            message["tool_calls"] = calls
        return {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else reason}


def _call(text: str) -> dict[str, Any] | None:
    """As a server's parser for tool calls has it: what is no JSON with a name is no call."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    function = {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}))}
    return {"id": f"call-{uuid.uuid4().hex[:8]}", "type": "function", "function": function}


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": model.name, "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/chat/completions"):
                self._send({"object": "chat.completion", "model": model.name, "choices": [model.chat(body)]})
                return
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
            if not all(isinstance(prompt, str) for prompt in prompts):
                self._send({"error": {"message": "prompts are text here: lm-eval needs tokenized_requests=False"}}, 400)
                return
            choices = []
            for index, prompt in enumerate(prompts):
                if body.get("echo"):
                    choice = {"text": prompt, "finish_reason": "length", "logprobs": model.score(prompt)}
                else:
                    words = body.get("stop") or []
                    stop = [words] if isinstance(words, str) else words
                    text, reason = model.complete(prompt, int(body.get("max_tokens") or 16), stop)
                    choice = {"text": text, "finish_reason": reason, "logprobs": None}
                choices.append(choice | {"index": index})
            self._send({"object": "text_completion", "model": model.name, "choices": choices})

        def _send(self, body: Mapping[str, Any], status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(Model(options.folder)))
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
