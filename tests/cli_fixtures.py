"""Ways to run a command line: in this process, in its own, on a terminal."""

import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kizami.cli.app import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The whole of stdout is one object."""
        value: dict[str, Any] = json.loads(self.out)
        return value


Run = Callable[..., Done]


def in_this_process(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command line in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        streams = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return Done(stop.value.code, streams.out, streams.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def process(*words: object, env: dict[str, str] | None = None) -> Done:
    """Runs a command line in its own process, with pipes."""
    command = [sys.executable, "-m", "kizami.cli", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def on_terminal(*words: object, columns: int = 100) -> tuple[int, str]:
    """Runs a command line on a pseudo-terminal and gives everything it printed."""
    command = [sys.executable, "-m", "kizami.cli", *(str(word) for word in words)]
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as child:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # Linux: EIO when the other side is closed
            pass
    os.close(ours)
    return child.returncode, seen.decode()
