"""The command line in a forked child with limits, and the rules that hold whatever it was given."""

import contextlib
import json
import os
import resource
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kizami.cli.app import main

MAX_SECONDS, MAX_MIB = 2.0, 500
GUARD_SECONDS, GUARD_BYTES = 30, 2 << 30  # where a run is stopped: beyond the rules, so that it is seen how far


def run_here(words: list[str], folder: Path) -> int:
    os.chdir(folder)
    try:
        main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 99


def _in_fork(stdout: int, stderr: int, call: Callable[[], object]) -> tuple[int, resource.struct_rusage]:
    """The child's exit code (negative: a signal) and what it used."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            code = int(call() or 0)  # type: ignore[call-overload]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage


def _written(stream: int) -> bytes:
    os.lseek(stream, 0, os.SEEK_SET)
    with open(stream, "rb") as file:
        return file.read()


def in_child(call: Callable[[], object]) -> tuple[int, bytes]:
    """The child's exit code and what it wrote on its streams."""
    stream = os.memfd_create("streams")
    code, _ = _in_fork(stream, stream, call)
    return code, _written(stream)


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str
    seconds: float
    mib: float


def status_kib(key: str) -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(key + ":")).split()[1])


def run(words: list[str], folder: Path) -> Ran:
    """`kizami WORDS` in `folder`, in a child of this process. Seconds are the CPU's, memory the peak of the child."""
    stdout, stderr, peak = (os.memfd_create(name) for name in ("stdout", "stderr", "peak"))

    def limited() -> int:
        signal.setitimer(signal.ITIMER_REAL, GUARD_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (status_kib("VmSize") * 1024 + GUARD_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as start:
            start.write("5")  # VmHWM starts anew
        code = run_here(words, folder)
        os.write(peak, str(status_kib("VmHWM")).encode())
        return code

    code, usage = _in_fork(stdout, stderr, limited)
    said = [_written(stream).decode("utf-8", "surrogateescape") for stream in (stdout, stderr, peak)]
    return Ran(code, said[0], said[1], usage.ru_utime + usage.ru_stime, int(said[2] or 0) / 1024)


def broken_rules(words: list[str], ran: Ran) -> Iterator[str]:
    may = {0, 1, 2} if words[0] in ("verify", "report", "check", "serve") or "--tp" in words else {0, 2}
    if ran.code not in may:
        yield f"exit code {ran.code}"
    if "Traceback" in ran.stderr:
        yield "a traceback"
    if ran.seconds > MAX_SECONDS:
        yield f"{ran.seconds:.1f} s"
    if ran.mib > MAX_MIB or "out of memory" in ran.stderr + ran.stdout:
        yield f"{ran.mib:.0f} MiB"
    if bad := {
        c for c in ran.stdout + ran.stderr if c != "\n" and (unicodedata.category(c)[0] == "C" or c in "\u2028\u2029")
    }:
        yield f"characters {sorted(map(ascii, bad))}"
    lines = ran.stderr.splitlines()
    if ran.code == 2:
        errors = [line for line in lines if line.startswith("kizami: error: ")]
        if "--json" not in words and not (len(errors) == 1 or (words[0] == "inspect" and len(errors) == 2)):
            yield f"{len(errors)} lines of error"
        if "--json" not in words and words[0] != "inspect" and ran.stdout:
            yield "data on stdout beside a refusal"
        if "--json" in words and errors:
            yield "words instead of an object"
    if words[0] in ("inspect", "plan", "report") and not all(line.startswith("kizami: ") for line in lines):
        yield "a line of stderr that says not whose it is"
    if any(len(line) > 12_000 for line in lines):
        yield "a line without end"
    if "--json" in words and ran.code in may:
        yield from broken_json(words, ran)


def broken_json(words: list[str], ran: Ran) -> Iterator[str]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} in --json")

    try:
        body = json.loads(ran.stdout, parse_constant=refuse)
    except ValueError as error:
        yield f"not one object: {error}"
        return
    expected = (
        {"kizami.error/1"} if ran.code == 2 and words[0] != "inspect" else {f"kizami.{words[0]}/1", "kizami.error/1"}
    )
    if body.get("schema") not in expected:
        yield f"schema {body.get('schema')} with exit code {ran.code}"
