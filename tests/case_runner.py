"""Runs kizami's command line, in this process or watched in another, and holds what it says to the contract."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from output_oracle import (
    Folder,
    assert_folder_is_whole,
    assert_rules_are_the_tensors,
    assert_tensors_are_right,
    parse_json,
)

from kizami.cli.app import main

LARGE_SOURCE = 1 << 28  # beyond it the oracle of `verify` takes tens of seconds


@dataclass(frozen=True)
class Said:
    code: int
    stdout: str
    stderr: str


def kizami(*words: str | Path) -> Said:
    """The command line, in this process: kernels are loaded once for all runs."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert isinstance(exit.value.code, int)
    return Said(exit.value.code, out.getvalue(), err.getvalue())


def assert_converted(said: Said, source: Path, out: Path, dropped: Collection[str] = ()) -> Folder:
    """Exit code 0, and OUT is, to the oracle and to `kizami verify`, what it must be for this source, of which the
    tensors `dropped` are left out."""
    assert said.code == 0, f"exit {said.code}\n{said.stderr}"
    assert not out.with_name(out.name + ".partial").exists()
    folder, from_folder = Folder(out), Folder(source)
    assert_folder_is_whole(folder)
    assert_tensors_are_right(folder, from_folder, dropped)
    assert_rules_are_the_tensors(folder)
    large = sum(path.stat().st_size for path in source.glob("*.safetensors")) > LARGE_SOURCE
    verified = kizami("verify", out, "--against", source, *(["--sample", 1] if large else []))
    assert verified.code == 0, verified.stderr
    return folder


def assert_refused(said: Said, mentions: list[str]) -> None:
    assert said.code == 2, f"exit {said.code}\n{said.stderr}"
    lines = said.stderr.splitlines()
    assert len(lines) == 1, said.stderr
    assert said.stdout == ""
    assert "Traceback" not in said.stderr
    assert_mentions(said.stderr, mentions)


def assert_mentions(text: str, mentions: list[str]) -> None:
    bare = re.sub(r"\s", "", text)
    missing = [mention for mention in mentions if re.sub(r"\s", "", mention) not in bare]
    assert not missing, f"{missing} not in: {text}"


def error_object(said: Said) -> dict[str, Any]:
    document = parse_json(said.stdout)
    assert set(document) == {"schema", "error"}
    assert document["schema"] == "kizami.error/1"
    error = document["error"]
    assert set(error) == {"code", "message", "file", "tensor", "hint"}
    assert re.fullmatch(r"[a-z][a-z0-9_]*", error["code"])
    assert error["message"]
    assert all(value is None or isinstance(value, str) for value in error.values())
    return dict(error)


def in_a_process(script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


FILE_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from kizami.cli.app import main
main(sys.argv[2:])
"""


KILL_AFTER = """
import os, signal, sys
from kizami.quantize.run.journal import Journal
append = Journal.append
def append_and_die(self, record):
    append(self, record)
    if len(self.done) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = append_and_die
from kizami.cli.app import main
main(sys.argv[2:])
"""


# argv: a command that loads everything, the command that is measured
MEASURE = """
import contextlib, io, json, sys, time
from kizami.cli.app import main
opened = []
def kib(key):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(key + ":")).split()[1])
def call(words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit as e:
            return e.code
loaded = call(json.loads(sys.argv[1]))
with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # VmHWM starts anew
idle = kib("VmRSS")
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
begin = time.monotonic()
code = call(json.loads(sys.argv[2]))
seconds = time.monotonic() - begin
mib = (kib("VmHWM") - idle) / 1024
print(json.dumps({"loaded": loaded, "code": code, "seconds": seconds, "mib": mib, "opened": opened}))
"""


def measure(loading: list[str], command: list[str]) -> dict[str, Any]:
    done = in_a_process(MEASURE, json.dumps(loading), json.dumps(command))
    assert done.returncode == 0, done.stderr
    return dict(parse_json(done.stdout))
