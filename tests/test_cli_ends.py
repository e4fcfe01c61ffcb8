"""How a command ends when the world is rough: signals, closed and full streams, pipes and places that are not files."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fixtures import Run, files_of, process

from kizami.cli import target
from kizami.cli.stop import Stop, Stopped
from kizami.cli.streams import Guarded
from kizami.formats.errors import KizamiError

# ------------------------------------------------------------------------------------------------------------- signals

# argv: the place where signals come, the signals, the command. They arrive in the main thread as if from outside.
SIGNALLED = """
import os, signal, sys
place, numbers, *words = sys.argv[1:]
def send(*args, **kwargs):
    for number in numbers.split(","):
        os.kill(os.getpid(), int(number))
def after(module, name):
    call = getattr(module, name)
    def called(*args, **kwargs):
        result = call(*args, **kwargs)
        send()
        return result
    setattr(module, name, called)
if place == "import":  # the first thing that is imported by a command
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "kizami.cli.plan":
                send()
    sys.meta_path.insert(0, Finder())
from kizami.cli.app import main
if place == "parse":
    import kizami.cli.usage as usage
    after(usage, "unknown_variables")
elif place == "options":
    import kizami.cli.options as options
    after(options, "policy_from")
elif place == "finish":
    import kizami.quantize.pipeline as pipeline
    pipeline.finish = lambda *a, **k: send()
elif place == "renamed":  # OUT is there, the journal is still in it
    import kizami.quantize.finish as finish
    after(finish.os, "rename")
elif place == "published":
    import kizami.cli.convert_run as convert_run
    after(convert_run, "convert_body")
elif place == "destructor":
    import kizami.cli.options as options
    class Last:
        def __del__(self):
            send()
    def lost(*args):
        import time
        Last()
        time.sleep(10)
    options.policy_from = lost
elif place == "thread":  # started, and not yet known to its pool
    import threading, kizami.cli.options as options
    from queue import SimpleQueue
    def forever(*args):
        threading.Thread(target=SimpleQueue().get).start()
        send()
    options.policy_from = forever
elif place == "end":
    import kizami.cli.app as app
    after(app, "_end")
main(words)
"""
INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)


def signalled(place: str, numbers: list[int], *words: object) -> tuple[int, str, list[str]]:
    command = [sys.executable, "-c", SIGNALLED, place, ",".join(map(str, numbers)), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if not line.startswith("shard ")]


@pytest.mark.parametrize("numbers", [[INT, INT], [TERM]], ids=str)
@pytest.mark.parametrize("place", ["import", "parse", "options", "thread"])
def test_signals_before_the_work_give_one_line(tiny_checkpoint: Path, place: str, numbers: list[int]) -> None:
    code, out, err = signalled(place, numbers, "plan", tiny_checkpoint)
    assert (code, out, err) == (128 + numbers[0], "", ["kizami: interrupted"])


@pytest.mark.long
@pytest.mark.parametrize("numbers", [[TERM, INT], [INT, INT, INT, INT]], ids=str)
def test_signals_during_the_work_say_how_to_resume(tiny_checkpoint: Path, tmp_path: Path, numbers: list[int]) -> None:
    code, out, err = signalled("finish", numbers, "convert", tiny_checkpoint, tmp_path / "out")
    said = "kizami: interrupted: run the same command again to resume; 1 of 1 shards are done"
    assert (code, out, err) == (128 + numbers[0], "", [said])
    assert process("convert", tiny_checkpoint, tmp_path / "out", "-q").code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "numbers"), [("renamed", [TERM, TERM]), ("published", [INT]), ("published", [TERM, INT])], ids=str
)
def test_a_signal_after_the_work_says_that_out_is_complete(
    tiny_checkpoint: Path, tmp_path: Path, place: str, numbers: list[int]
) -> None:
    code, out, err = signalled(place, numbers, "convert", tiny_checkpoint, tmp_path / "out")
    assert (code, out) == (128 + numbers[0], "")
    assert err == [f"kizami: interrupted; {tmp_path / 'out'} is complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert process("verify", tmp_path / "out", "-q").code == 0


def test_a_signal_after_the_last_word_changes_nothing(converted: Path) -> None:
    code, out, err = signalled("end", [TERM, INT], "report", converted, "-q")
    assert (code, len(out.splitlines()), err) == (0, 1, [])


def test_an_interrupted_command_writes_one_object_under_json(tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, out, err = signalled("published", [TERM], "convert", tiny_checkpoint, tmp_path / "out", "--json", "-q")
    assert (code, err) == (143, [])
    assert json.loads(out)["error"]["code"] == "interrupted"


def test_a_signal_that_a_destructor_swallows_is_raised_again(tiny_checkpoint: Path) -> None:
    before = time.monotonic()
    code, out, err = signalled("destructor", [TERM], "plan", tiny_checkpoint)
    assert (code, out, err) == (143, "", ["kizami: interrupted"])
    assert time.monotonic() - before < 8


def test_what_breaks_after_a_signal_is_not_called_a_bug(
    kizami: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr("kizami.quantize.planner.build_plan", broken)
    done = kizami("plan", tiny_checkpoint)
    assert (done.code, done.err) == (143, "kizami: interrupted\n")


def test_only_the_first_signal_raises_and_the_third_interrupt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(os, "write", lambda fd, data: len(data))
    stop = Stop()
    stop.armed = True
    with pytest.raises(Stopped):
        stop._receive(signal.SIGTERM, None)
    stop._receive(signal.SIGTERM, None)
    stop._receive(signal.SIGTERM, None)
    assert left == []
    stop._receive(signal.SIGINT, None)
    assert left == [143]
    stop.reset()


def test_an_end_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a library waits in a thread for a server's answer, and its pool for the thread."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(os, "write", lambda fd, data: len(data))
    monkeypatch.setattr("kizami.cli.stop.CLEAN_SECONDS", 0.05)
    for ended, expected in ((True, []), (False, [143])):
        stop = Stop()
        stop.armed = True
        with pytest.raises(Stopped):
            stop._receive(signal.SIGTERM, None)
        if ended:
            stop.reset()
        time.sleep(0.5)
        assert left == expected
        stop.reset()


def test_a_signal_that_was_ignored_from_the_start_stays_ignored(tiny_checkpoint: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SIGNALLED}"
    command = [sys.executable, "-c", code, "options", str(INT), "plan", str(tiny_checkpoint), "-q"]
    assert subprocess.run(command, capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------------------------------- streams


def ended(shell: str, *words: object) -> tuple[int, str, str]:
    """A command line with redirections by a shell: exit code, stdout, stderr."""
    line = f'exec "$0" -m kizami.cli "$@" {shell}'
    done = subprocess.run(["sh", "-c", line, sys.executable, *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", ["env", "env --json", "--version", "--help"])
def test_stdout_that_cannot_be_written_exits_2_and_says_so(words: str) -> None:
    for shell, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        assert ended(shell, *words.split()) == (2, "", f"kizami: error: stdout could not be written: {why}\n")


def test_a_finished_output_is_called_complete_when_stdout_is_full(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _, err = ended(">/dev/full", "convert", tiny_checkpoint, out, "-q")
    said = f"kizami: error: stdout could not be written: No space left on device; {out} is complete\n"
    assert (code, err) == (2, said)
    assert process("verify", out, "-q").code == 0


@pytest.mark.long
@pytest.mark.parametrize("shell", ["2>/dev/full", "2>&-"])
def test_talk_that_cannot_be_written_is_dropped(tiny_checkpoint: Path, tmp_path: Path, shell: str) -> None:
    code, out, _ = ended(shell, "convert", tiny_checkpoint, tmp_path / "out", "--max-shard-size", "1MB")
    assert code == 0
    assert "bits per weight" in out.splitlines()[-1]
    assert process("verify", tmp_path / "out", "-q").code == 0
    assert ended(shell, "plan", "nowhere") == (2, "", "")
    assert ended(f"{shell} >/dev/full", "plan", "nowhere", "--json")[0] == 2


def test_an_error_object_that_cannot_be_written_becomes_a_line() -> None:
    code, _, err = ended(">/dev/full", "plan", "nowhere", "--json")
    assert code == 2
    assert re.fullmatch(r"kizami: error: \S*nowhere: does not exist\. [^\n]+\n", err)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["report", "OUT"], 0),
        (["convert", "SRC", "NEW", "-q"], 0),
        (["convert", "SRC", "NEW", "--json", "--max-rel-error", "0.0001"], 1),
    ],
    ids=str,
)
def test_a_reader_that_has_left_changes_no_exit_code(
    tiny_checkpoint: Path, converted: Path, tmp_path: Path, words: list[str], code: int
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    places = {"OUT": converted, "SRC": tiny_checkpoint, "NEW": tmp_path / "new"}
    command = [sys.executable, "-m", "kizami.cli", *(str(places.get(word, word)) for word in words)]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert done.returncode == code
    assert "could not" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_guard_keeps_the_first_reason() -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

        def fileno(self) -> int:
            raise ValueError("no descriptor")

    guarded = Guarded(Broken())  # type: ignore[arg-type]
    assert guarded.whole is False
    assert guarded.write("x") == 1
    assert guarded.error is not None
    assert guarded.error.errno == 5


# ---------------------------------------------------------------------------------------------------------- -o FILE


def refused(kizami: Run, said: str, *words: object) -> None:
    done = kizami(*words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["plan", "report"])
def test_o_never_touches_a_checkpoint(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    read, other = (tiny_checkpoint, converted) if name == "plan" else (converted, tiny_checkpoint)
    before = files_of(read), files_of(other)
    (tmp_path / "way").symlink_to(read)
    (tmp_path / "link").symlink_to(read / "config.json")
    for file in (read / "config.json", read / "new.txt", read / "new" / ".." / "x", tmp_path / "way" / "x"):
        refused(kizami, f"lies in {read}", name, read, "-o", file) if file.parent.is_dir() else None
    refused(kizami, f"lies in {read}", name, read, "-o", tmp_path / "link")
    shard = next(path.name for path in other.glob("*.safetensors"))
    for file in (other / shard, other / "config.json", other / "new.txt"):
        refused(kizami, "in a checkpoint", name, read, "-o", file)
    assert (files_of(read), files_of(other)) == before


def test_o_does_not_touch_the_blobs_of_the_hub_cache(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for path in tiny_checkpoint.iterdir():
        (repo / "blobs" / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    before = files_of(repo)
    refused(kizami, "lies in", "plan", snapshot, "-o", repo / "blobs" / "config.json")
    refused(kizami, "blobs of the Hub cache", "plan", tiny_checkpoint, "-o", repo / "blobs" / "config.json")
    assert files_of(repo) == before


@pytest.mark.parametrize("name", ["plan", "report"])
def test_o_refuses_what_is_not_a_file(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    read = tiny_checkpoint if name == "plan" else converted
    (tmp_path / "nothing").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    for file, said in (
        ("", "the name is empty"),
        ("-", "is no name of a file here"),
        (tmp_path, "is a folder"),
        (tmp_path / "nothing", "is a link to absent, which does not exist"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "no" / "file", "its folder does not exist"),
    ):
        refused(kizami, said, name, read, "-o", file)
    assert {path.name for path in tmp_path.iterdir()} == {"nothing", "loop"}


def test_o_follows_a_link_to_a_file_and_keeps_it(kizami: Run, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "errors.txt").write_text("old")
    (tmp_path / "link").symlink_to("there/errors.txt")
    assert kizami("report", converted, "-o", tmp_path / "link").code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "errors.txt").read_text() == kizami("report", converted).out


@pytest.mark.parametrize("name", ["plan", "report"])
def test_o_writes_into_a_pipe_and_leaves_it_there(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()), daemon=True)
    reader.start()
    words = (name, tiny_checkpoint if name == "plan" else converted)
    assert kizami(*words, "-o", pipe).code == 0
    reader.join(20)
    assert pipe.is_fifo()
    assert kizami(*words, "-o", tmp_path / "file").code == 0
    assert seen == [(tmp_path / "file").read_text()]


def test_o_opens_a_device_and_never_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain file stands in for the device: its mode is what lstat and stat would say of one."""
    stand_in = tmp_path / "device"
    stand_in.write_text("12345")
    inode = stand_in.stat().st_ino
    real_stat, real_fstat = Path.stat, os.fstat

    def as_device(found: os.stat_result) -> os.stat_result:
        if found.st_ino != inode:
            return found
        return os.stat_result((stat.S_IFCHR | 0o666, *found[1:]))

    monkeypatch.setattr(Path, "stat", lambda path, **more: as_device(real_stat(path, **more)))
    monkeypatch.setattr(os, "fstat", lambda fd: as_device(real_fstat(fd)))
    target.Target.checked(str(stand_in), tmp_path / "src").write(b"abc")
    assert stand_in.read_text() == "abc45"  # neither truncated nor replaced
    assert real_stat(stand_in).st_ino == inode


def test_o_dev_stdout_writes_to_the_file_that_the_shell_has_opened(converted: Path, tmp_path: Path) -> None:
    with open(tmp_path / "all", "w") as out:
        command = [sys.executable, "-m", "kizami.cli", "report", str(converted), "-o", "/proc/self/fd/1", "-q"]
        assert subprocess.run(command, stdout=out).returncode == 0
    inode = (tmp_path / "all").stat().st_ino
    assert (tmp_path / "all").read_text() == process("report", converted).out
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [inode]


def test_a_file_that_turns_into_something_else_meanwhile_is_refused(tmp_path: Path) -> None:
    chosen = target.Target.checked(str(tmp_path / "file"), tmp_path / "src")
    (tmp_path / "file").mkdir()
    with pytest.raises(KizamiError, match="is a folder"):
        chosen.write(b"x")


# --------------------------------------------------------------------------------------------- options and environment


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "NaN"])
@pytest.mark.parametrize("name", ["convert", "verify", "report"])
def test_a_threshold_must_be_finite(kizami: Run, tiny_checkpoint: Path, tmp_path: Path, name: str, value: str) -> None:
    words = (tiny_checkpoint, tmp_path / "out") if name == "convert" else (tiny_checkpoint,)
    done = kizami(name, *words, "--max-rel-error", value, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert "--max-rel-error" in done.json["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("convert", "--workers", "0", "0 is less than 1"),
        ("convert", "--workers", "-1", "-1 is less than 1"),
        ("convert", "--workers", "100000", "100000 is more than 4096"),
        ("convert", "--workers", "1.5", "'1.5' is not a whole number"),
        ("convert", "--workers", "nan", "'nan' is not a whole number"),
        ("convert", "--tp", "0", "0 is less than 1"),
        ("convert", "--clip-allowance", "nan", "'nan' is not one of 'auto', '0.5', '0.75', '1', '2', 'none'"),
        ("convert", "--max-shard-size", "1e400", "'1e400' is not a size"),
        ("convert", "--max-shard-size", "-1", "'-1' is not a size"),
        ("convert", "--max-shard-size", "nan", "'nan' is not a size"),
        ("convert", "--max-shard-size", "0", "'0' is less than 1 byte"),
        ("convert", "--max-shard-size", "0.0000001KB", "'0.0000001KB' is less than 1 byte"),
        ("convert", "--max-rel-error", "-0.1", "-0.1 is less than 0"),
        ("convert", "--max-rel-error", "much", "'much' is not a number"),
        ("verify", "--sample", "0", "0 is less than 1"),
        ("report", "--top", "-1", "-1 is less than 0"),
    ],
)
def test_numbers_out_of_range_are_usage_errors_before_the_work(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, name: str, option: str, value: str, said: str
) -> None:
    words = (tiny_checkpoint, tmp_path / "out") if name == "convert" else (tiny_checkpoint,)
    done = kizami(name, *words, option, value)
    assert (done.code, done.out) == (2, "")
    assert option in done.err
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_variable_that_numba_refuses_is_named(tiny_checkpoint: Path, tmp_path: Path, value: str) -> None:
    done = process("convert", tiny_checkpoint, tmp_path / "out", env={"NUMBA_NUM_THREADS": value})
    assert done.code == 2
    assert "numba cannot start: Number of threads specified must be > 0. hint: correct or unset " in done.err
    assert "NUMBA_NUM_THREADS" in done.err
    assert "numba cannot be imported" in process("env", env={"NUMBA_NUM_THREADS": value}).out


@pytest.mark.parametrize("value", [" 1 ", "TRUE", "On", "y", "t"])
def test_a_usage_error_is_an_object_when_the_variable_says_so(
    kizami: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KIZAMI_JSON", value)
    assert kizami("plan", "--tp", "none").json["error"]["code"] == "usage"
    assert kizami("env").json["schema"] == "kizami.env/1"


@pytest.mark.parametrize("words", [["verify", ""], ["report", ""], ["plan", ""], ["convert", "", "out"]], ids=str)
def test_an_empty_name_is_not_the_current_folder(
    kizami: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kizami(*words)
    assert done.code == 2
    assert " is empty. hint: name a folder" in done.err


# ----------------------------------------------------------------------------------------------------- what is at OUT


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("elsewhere")


def file(path: Path) -> None:
    path.write_text("mine")


def full(path: Path) -> None:
    path.mkdir()
    (path / "mine").touch()


KINDS = [(pipe, "is a named pipe"), (link, "is a link"), (file, "is a file"), (full, "is not empty")]


@pytest.mark.parametrize(("make", "said"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_what_stands_in_the_way_is_called_what_it_is(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, make: Callable[[Path], None], said: str, name: str
) -> None:
    make(tmp_path / name)
    before = (tmp_path / name).lstat()
    refused(kizami, f"{tmp_path / name}: ", "convert", tiny_checkpoint, tmp_path / "out")
    refused(kizami, said, "convert", tiny_checkpoint, tmp_path / "out")
    assert (tmp_path / name).lstat().st_ino == before.st_ino
    if name == "out":
        assert said in kizami("convert", tiny_checkpoint, tmp_path / "out", "--dry-run").err
        refused(kizami, said, "demo", tmp_path / "out")


def test_a_signal_in_native_code_waits_for_its_end() -> None:
    stop, reached = Stop(), []
    stop.listen()

    def native() -> None:
        with stop.held():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end")

    with pytest.raises(Stopped):
        native()
    assert reached == ["the end"]
    assert stop.code == 130
    os.kill(os.getpid(), signal.SIGTERM)  # later ones change nothing
    assert stop.code == 130
    stop.reset()


def test_without_a_signal_holding_changes_nothing() -> None:
    stop = Stop()
    stop.listen()
    with stop.held():
        pass
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.code == 143
    stop.reset()
