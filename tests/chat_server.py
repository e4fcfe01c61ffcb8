"""An OpenAI-compatible server on loopback that follows a script."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any] | tuple[int, Mapping[str, str]]]


@contextmanager
def serving(answer: Answer, model: str = "tiny") -> Iterator[str]:
    """The base URL of a server whose answers `answer` makes of the request's body: a choice, or status and headers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections
        disable_nagle_algorithm = True  # which would hold the body back for 40 ms

        def do_GET(self) -> None:
            self._send(200, {}, {"data": [{"id": model}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made = answer(body | {"authorization": self.headers.get("Authorization")})
            if isinstance(made, tuple):
                self._send(made[0], made[1], {"error": "no"})
            else:
                self._send(200, {}, {"choices": [made]})

        def _send(self, status: int, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | dict(headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with _running(Handler) as url:
        yield url


def say(text: str) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"role": "assistant", "content": text}}


def call(*calls: tuple[str, Any]) -> dict[str, Any]:
    """(name, arguments): an object, or the very text."""
    made = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": name, "arguments": text if isinstance(text, str) else json.dumps(text)},
        }
        for i, (name, text) in enumerate(calls)
    ]
    return {"finish_reason": "tool_calls", "message": {"role": "assistant", "content": None, "tool_calls": made}}


@contextmanager
def raw(data: bytes, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """The base URL of a server that answers everything with these bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in ({"Content-Length": str(len(data))} | dict(headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # who reads may have had enough
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with _running(Handler) as url:
        yield url


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # seconds until it sees its end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
