"""What goes wrong between a client and local_hub's server, and the connection that carries it out.

Faults are chosen per request, before it is read; everything else of an answer is made by local_hub."""

import dataclasses
import json
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

Kind = Literal["status", "reset", "cut", "corrupt", "slow", "lost", "move"]

RANDOM_PATHS = re.compile(r"/resolve/|^/cdn/|/objects/batch$|/preupload/|/commit/")
OF_BODIES = ("cut", "corrupt", "slow")  # random ones hit GET alone: other answers have next to no body
PIECE = 1 << 20
SLOW_PIECE = 1 << 16


@dataclass(frozen=True)
class Fault:
    """Hits `times` requests after the first `skip` of those whose method and path?query fit the two expressions.

    status: that answer instead, the request having been read and not done. reset: RST, the request not read.
    cut: all headers, half of the body, end of the connection. corrupt: one flipped byte in the middle of the body.
    slow: `seconds` before each 64 kB, in and out. lost: all is done, then the connection ends without an answer.
    move: `files` are committed to main of `repo` (by default a new MOVED.md), then the request is answered."""

    kind: Kind
    method: str = "GET"
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=lambda: {"error": "a fault of the local hub"})
    seconds: float = 0.02
    repo: str = ""
    files: Mapping[str, bytes | Path | None] = field(default_factory=dict)

    def fits(self, method: str, target: str) -> bool:
        return re.fullmatch(self.method, method) is not None and re.search(self.path, target) is not None


class Faults:
    """Those that wait for their request. `hits` says what hit which, in order."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        self._waiting: list[Fault] = []
        self._random: Callable[[str, str, int], Fault | None] | None = None
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._waiting += faults

    def clear(self) -> None:
        with self._lock:
            self._waiting, self._random = [], None

    @property
    def left(self) -> list[Fault]:
        """The faults not used up, with the times and skips that remain."""
        with self._lock:
            return list(self._waiting)

    def random(self, seed: int, share: float, kinds: Sequence[Kind]) -> None:
        """Hits that share of all requests for content, uploads and commits; a share of 0 ends it.

        The draw is by the request and how often it came, not by the order of all: threads change nothing."""
        if "move" in kinds:
            raise ValueError("a move needs its repo: add it as a Fault")

        def draw(method: str, target: str, number: int) -> Fault | None:
            dice = random.Random(f"{seed} {method} {target} {number}")
            fitting = [kind for kind in kinds if method == "GET" or kind not in OF_BODIES]
            if not fitting or not RANDOM_PATHS.search(urlsplit(target).path) or dice.random() >= share:
                return None
            status = dice.choice((429, 500, 502, 503, 504))
            headers = {"Retry-After": "0"} if status == 429 else {}
            return Fault(dice.choice(fitting), status=status, headers=headers)

        with self._lock:
            self._random = draw

    def take(self, method: str, target: str) -> Fault | None:
        """The fault that hits this request, counted as used."""
        with self._lock:
            self._seen[method, target] += 1
            chosen = self._added(method, target)
            if chosen is None and self._random is not None:
                chosen = self._random(method, target, self._seen[method, target])
            if chosen is not None:
                self.hits.append(f"{chosen.kind} {method} {target}")
            return chosen

    def _added(self, method: str, target: str) -> Fault | None:
        for i, fault in enumerate(self._waiting):
            if not fault.fits(method, target):
                continue
            if fault.skip:
                self._waiting[i] = dataclasses.replace(fault, skip=fault.skip - 1)
                continue
            if fault.times > 1:
                self._waiting[i] = dataclasses.replace(fault, times=fault.times - 1)
            else:
                del self._waiting[i]
            return fault
        return None


@dataclass(frozen=True)
class Request:
    """One that is over. `status` is 0 where no answer went out, `sent` and `received` are bytes of the bodies;
    `authorization` says whether there was such a header, not that it was right."""

    method: str
    path: str
    query: str
    status: int
    authorization: bool
    range: str | None
    sent: int
    received: int


class Body:
    """The body of a request, in pieces: by length or chunked, as httpx sends files whose size it cannot tell."""

    def __init__(self, file: BufferedIOBase, headers: Message, pause: float) -> None:
        self.received = 0
        self._file, self._pause = file, pause
        chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
        self._pieces = self._chunks() if chunked else self._exactly(int(headers.get("Content-Length", 0)))

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def read(self) -> bytes:
        return b"".join(self)

    def _exactly(self, size: int) -> Iterator[bytes]:
        while size:
            if self._pause:
                time.sleep(self._pause)
            piece = self._file.read(min(size, SLOW_PIECE if self._pause else PIECE))
            if not piece:
                raise ConnectionResetError("the client left in the middle of a body")
            size -= len(piece)
            self.received += len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._file.readline().split(b";")[0] or b"0", 16):
            yield from self._exactly(size)
            self._file.readline()
        while self._file.readline().strip():  # trailers
            pass


@dataclass(frozen=True)
class Call:
    """A request as the code that answers it sees it. `groups` are those of the path's expression."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Message
    body: Body
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """`part` (start, size) is what is sent of a body that lies in a file: files are never read whole."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Path = b""
    part: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, value: object, status: int = 200, **headers: str) -> "Answer":
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, {"Content-Type": "application/json; charset=utf-8"} | named, json.dumps(value).encode())

    @property
    def size(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.part[1]

    def pieces(self, size: int, piece: int) -> Iterator[bytes]:
        """The first `size` bytes."""
        if isinstance(self.body, bytes):
            yield from (self.body[i : min(i + piece, size)] for i in range(0, size, piece))
            return
        with self.body.open("rb") as file:
            file.seek(self.part[0])
            while size and (read := file.read(min(piece, size))):
                size -= len(read)
                yield read


NO_ONE = "Invalid username or password."


class Refusal(Exception):
    """An error answer. The client makes its exceptions from the code, not from the status."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named |= {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = dataclasses.replace(
            answer := Answer.of({"error": message}, status), headers={**answer.headers, **named}
        )


@dataclass(frozen=True)
class Ends:
    """What a connection needs of the hub."""

    answer: Callable[[Call], Answer]
    faults: Faults
    note: Callable[[Request], None]
    move: Callable[[Fault], None]


class Server(ThreadingHTTPServer):
    """One origin on loopback. Closing it closes the connections too: clients keep theirs for the next request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Connection)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms without
    server: Server

    def _one(self) -> None:
        self._noted = False
        ends = self.server.ends
        fault = ends.faults.take(self.command, self.path)
        kind = fault.kind if fault else ""
        pause = fault.seconds if fault and kind == "slow" else 0.0
        self._body = Body(self.rfile, self.headers, pause)
        if kind == "reset":
            self._note(0, 0)
            return self._reset()
        try:
            if fault and kind == "move":
                ends.move(fault)
            answer = self._answer() if not fault or kind != "status" else Answer.of(fault.body, fault.status)
            for _ in self._body:  # what the answer did not need, so that the next request starts where it starts
                pass
            if fault and kind == "status":
                answer = dataclasses.replace(answer, headers={**answer.headers, **fault.headers})
            if kind == "lost":
                self._note(0, 0)
                self.close_connection = True
            else:
                self._send(answer, kind, pause)
        except ConnectionError:
            self._note(0, 0)
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _one

    def _answer(self) -> Answer:
        parts = urlsplit(self.path)
        call = Call(self.command, parts.path, dict(parse_qsl(parts.query)), self.headers, self._body)
        return self.server.ends.answer(call)

    def _send(self, answer: Answer, kind: str, pause: float) -> None:
        """Notes the request before its last byte: a client that has it all finds it among the requests."""
        size = 0 if self.command == "HEAD" else answer.size
        end, middle, sent = (size // 2 if kind == "cut" else size), size // 2, 0
        self.close_connection = self.close_connection or kind == "cut"
        if not end:
            self._note(answer.status, 0)
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(answer.size)}.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in answer.pieces(end, SLOW_PIECE if pause else PIECE):
            if pause:
                time.sleep(pause)
            if kind == "corrupt" and sent <= middle < sent + len(piece):
                at = middle - sent
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            sent += len(piece)
            if sent == end:
                self._note(answer.status, sent)
            self.wfile.write(piece)

    def _reset(self) -> None:
        """RST and not FIN: the client's read fails, as it does when a proxy dies."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # it holds the socket open
        self.connection.close()

    def _note(self, status: int, sent: int) -> None:
        if self._noted:
            return
        self._noted = True
        path, query = urlsplit(self.path)[2:4]
        known, of = "Authorization" in self.headers, self.headers.get("Range")
        received = self._body.received
        self.server.ends.note(Request(self.command, unquote(path), query, status, known, of, sent, received))

    def log_message(self, format: str, *args: Any) -> None:
        pass
