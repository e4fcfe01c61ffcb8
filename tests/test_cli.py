"""The command line as scripts and terminals see it: exit codes, one-line errors, pure stdout, safe output, resume."""

import errno
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import make_cases
import pytest
from cli_fixtures import Done, Run, files_of, on_terminal, process

from kizami.cli import options, output
from kizami.formats.errors import KizamiError

COMMANDS = ("demo", "inspect", "plan", "convert", "verify", "report", "env")


# --------------------------------------------------------------------------------------------------- start-up and help


@pytest.mark.parametrize("words", [["--help"], *([name, "-h"] for name in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom kizami.cli.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "print('LOADED', sorted({'numba', 'numpy', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_version(kizami: Run) -> None:
    from importlib.metadata import version

    assert kizami("--version") == Done(0, f"kizami {version('kizami')}\n", "")


def test_a_bare_kizami_shows_help_and_exits_2(kizami: Run) -> None:
    done = kizami()
    assert done.code == 2
    assert "convert" in done.out + done.err


# ------------------------------------------------------------------------------------------------------ stdout is data


def test_json_of_every_command_is_the_whole_of_stdout(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    lines: dict[str, tuple[object, ...]] = {
        "inspect": (tiny_checkpoint, "--tensors", "*.eh_proj.*"),
        "plan": (tiny_checkpoint,),
        "convert": (tiny_checkpoint, tmp_path / "out"),
        "verify": (converted, "--against", tiny_checkpoint),
        "report": (converted,),
        "env": (),
    }
    for name, words in lines.items():
        done = kizami(name, *words, "--json")
        talk = [line for line in done.err.splitlines() if not line.startswith("shard ")]
        assert (done.code, talk) == (0, []), name
        assert done.json["schema"] == f"kizami.{name}/1"


def test_plan_counts_the_bytes_that_convert_writes(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    planned = kizami("plan", tiny_checkpoint, "--json").json
    shards = [path.stat().st_size for path in converted.glob("*.safetensors")]
    assert planned["output"]["file_bytes"] == sum(shards)
    assert planned["output"]["shards"] == len(shards)
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    assert planned["output"]["bytes"] == index["metadata"]["total_size"]
    assert planned["actions"]["quantize"] == 24


def test_plan_file_has_one_entry_with_action_and_reason_per_tensor(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    done = kizami("plan", tiny_checkpoint, "-o", tmp_path / "plan.json", "--json")
    whole = json.loads((tmp_path / "plan.json").read_text())
    assert whole["output"] == done.json["output"]
    assert len(whole["tensors"]) == 121 - 48  # a scale belongs to its weight
    assert all(entry["action"] and entry["reason"] for entry in whole["tensors"])
    assert sum(spec["bytes"] for entry in whole["tensors"] for spec in entry["outputs"]) == whole["output"]["bytes"]


def test_verbose_plan_lists_every_tensor(kizami: Run, tiny_checkpoint: Path) -> None:
    done = kizami("plan", tiny_checkpoint, "-v")
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in done.out
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in done.out


def test_the_last_line_of_a_summary_is_the_number_to_compare(
    kizami: Run, tiny_checkpoint: Path, converted: Path
) -> None:
    assert "bits per weight" in kizami("plan", tiny_checkpoint).out.splitlines()[-1]
    assert kizami("verify", converted).out.splitlines()[-1].startswith("verified: ")
    assert "relative error" in kizami("report", converted).out.splitlines()[-1]


def test_quiet_leaves_only_the_last_line(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "-q")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)


def test_inspect_lists_the_tensors_that_match(kizami: Run, tiny_checkpoint: Path) -> None:
    found = kizami("inspect", tiny_checkpoint, "--tensors", "*.layers.2.*norm.weight", "--json").json["matching"]
    assert {entry["dtype"] for entry in found} == {"BF16"}
    assert "model.layers.2.enorm.weight" in {entry["name"] for entry in found}


def test_report_as_markdown_goes_to_a_file(kizami: Run, converted: Path, tmp_path: Path) -> None:
    done = kizami("report", converted, "--format", "markdown", "-o", tmp_path / "errors.md")
    text = (tmp_path / "errors.md").read_text()
    assert (done.code, done.out) == (0, "")
    assert "| routed_expert | quantize | 24 |" in text
    assert kizami("report", converted, "--format", "markdown").out == text


def test_report_as_text_is_the_same_in_a_file(kizami: Run, converted: Path, tmp_path: Path) -> None:
    kizami("report", converted, "-o", tmp_path / "errors.txt")
    assert (tmp_path / "errors.txt").read_text() == kizami("report", converted).out


# ---------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize("name", ["convert", "verify", "report"])
def test_a_threshold_that_is_not_met_exits_1_and_names_the_tensors(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    words = (tiny_checkpoint, tmp_path / "out") if name == "convert" else (converted,)
    done = kizami(name, *words, "--max-rel-error", "0.0001")
    assert done.code == 1
    assert re.search(r"^kizami: failed: .*model\.layers\.1\.mlp\.experts\.2\.gate_proj: ", done.err, re.M)


@pytest.mark.parametrize("name", ["convert", "verify", "report"])
def test_a_threshold_that_is_met_exits_0(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    words = (tiny_checkpoint, tmp_path / "out") if name == "convert" else (converted,)
    assert kizami(name, *words, "--max-rel-error", "0.5", "-q").code == 0


def test_verify_exits_1_for_a_changed_byte_and_names_file_and_tensor(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = kizami("verify", damaged)
    assert done.code == 1
    assert f"kizami: failed: {shard.name}: " in done.err
    assert done.out.splitlines()[-1] == "NOT verified: 2 problems"
    problems = kizami("verify", damaged, "--json").json["problems"]
    assert [(problem["code"], problem["file"]) for problem in problems] == [
        ("changed_file", shard.name), ("changed_tensor", shard.name),
    ]  # fmt: skip
    assert f"{shard.name}: {problems[1]['tensor']}: its bytes have CRC-32 " in done.err


def test_plan_tp_exits_1_with_the_module_and_the_numbers(kizami: Run, tiny_checkpoint: Path) -> None:
    done = kizami("plan", tiny_checkpoint, "--tp", "8")
    assert done.code == 1
    assert re.search(r"down_proj: K = 128 on 8 ranks is 16 per rank; expected a multiple of .* 32", done.err)
    assert kizami("plan", tiny_checkpoint, "--tp", "2").code == 0
    heads = kizami("plan", tiny_checkpoint, "--tp", "4")
    assert heads.code == 1
    assert (
        "no serving engine loads it at tp 4, with ep 1 or 4: sglang: 2 attention heads on 4 ranks is 0.5 each"
        in heads.err
    )
    as_json = kizami("plan", tiny_checkpoint, "--tp", "8", "--json")
    assert (as_json.code, as_json.err) == (1, done.err), "stdout has the object, and a log the reason"
    assert as_json.json["tensor_parallel"]["findings"][0]["size"] == 128


def test_convert_tp_is_refused_before_the_first_byte(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--tp", "8")
    assert done.code == 2
    assert "K = 128 on 8 ranks" in done.err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_writes_nothing_and_states_the_free_space(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "deep" / "out", "--dry-run")
    assert done.code == 0
    assert re.search(r"^free +.*: enough$", done.out, re.M)
    assert list(tmp_path.iterdir()) == []
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--dry-run", "--json").json["fits"] is True


def test_an_existing_out_is_refused(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    before = files_of(converted)
    assert kizami("convert", tiny_checkpoint, converted).code == 2
    assert files_of(converted) == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["plan", "nowhere/at/all"], "nowhere/at/all"),
        (["plan", "{src}", "--ignore", "re:("], "re:("),
        (["plan", "{src}", "--group-size", "64", "--scheme", "w4a16-g32"], "--scheme"),
        (["plan", "{src}", "--max-shard-size", "5XB"], "5XB"),
        (["plan", "{src}", "--executor", "ray"], "--executor"),
        (["plan", "{src}", "--group-size", "48"], "48"),
        (["plan", "{src}", "--tp", "0"], "--tp"),
        (["convert", "{src}"], "OUT"),
        (["convert", "{src}", "{src}/inside"], "OUT"),
        (["convrt", "{src}"], "'convert'"),
        (["verify", "{src}"], "kizami.json"),
        (["report", "{src}"], "kizami.json"),
    ],
    ids=" ".join,
)
def test_a_refusal_is_one_line_or_one_object(kizami: Run, tiny_checkpoint: Path, words: list[str], named: str) -> None:
    before = files_of(tiny_checkpoint)
    filled = [word.replace("{src}", str(tiny_checkpoint)) for word in words]
    done = kizami(*filled)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"kizami: error: [^\n]+\n", done.err)
    assert named in done.err
    as_json = kizami(*filled, "--json")
    assert (as_json.code, as_json.err) == (2, "")
    assert as_json.json["schema"] == "kizami.error/1"
    assert set(as_json.json["error"]) == {"code", "message", "file", "tensor", "hint"}
    assert files_of(tiny_checkpoint) == before


def test_a_bad_checkpoint_is_refused_naming_file_and_tensor(
    kizami: Run, save: Callable[[make_cases.Checkpoint], Path], tmp_path: Path
) -> None:
    checkpoint = make_cases.mini(128, 128)
    module = "model.layers.1.mlp.experts.0.gate_proj"
    del checkpoint.find(f"{module}.weight_scale_inv")[f"{module}.weight_scale_inv"]
    src = save(checkpoint)
    error = kizami("convert", src, tmp_path / "out", "--json").json["error"]
    assert error["code"] == "missing_scale"
    assert (error["file"], error["tensor"]) == ("model.safetensors", f"{module}.weight")
    assert kizami("inspect", src).code == 2
    assert kizami("inspect", src, "--json").json["problems"][0]["code"] == "missing_scale"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.partial/x"), 2, "out.partial/x: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 2, "out: Permission denied"),
        (MemoryError(), 2, "out of memory"),
        (KizamiError("wrong", code="x", file="f", tensor="t", hint="h"), 2, "f: t: wrong. hint: h"),
        (RuntimeError("two\nlines"), 101, "RuntimeError: two lines. hint: this is a bug in kizami"),
        (AssertionError(), 101, "AssertionError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exceptions_become_exit_codes(
    kizami: Run,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("kizami.quantize.pipeline.run", fail)
    done = kizami("convert", tiny_checkpoint, tmp_path / "out")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("kizami: ")
    assert len(done.err.splitlines()) == 1
    assert said in done.err
    assert kizami("convert", tiny_checkpoint, tmp_path / "out", "--json").json["error"]["message"]


def test_debug_adds_the_traceback(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr("kizami.quantize.pipeline.run", fail)
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--debug")
    assert done.code == 101
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("kizami: error: RuntimeError: inside")


# --------------------------------------------------------------------------------------------------------- environment


def test_an_option_beats_the_environment_and_the_environment_beats_the_default(
    kizami: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_GROUP_SIZE", "64")
    monkeypatch.setenv("KIZAMI_JSON", "1")
    assert kizami("plan", tiny_checkpoint).json["scheme"] == "w4a16-g64"
    assert kizami("plan", tiny_checkpoint, "--group-size", "128").json["scheme"] == "w4a16-g128"
    assert kizami("plan", "nowhere").json["error"]["code"] == "missing_file"


def test_a_wrong_value_in_the_environment_is_a_usage_error(
    kizami: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_GROUP_SIZE", "31")
    done = kizami("plan", tiny_checkpoint)
    assert done.code == 2
    assert "31" in done.err


def test_env_names_versions_and_never_a_token(kizami: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("KIZAMI_WORKERS", "3")
    done = kizami("env")
    assert done.code == 0
    assert "hf_secretsecret" not in done.out
    body = kizami("env", "--json").json
    assert body["packages"]["numba"]
    assert body["variables"]["KIZAMI_WORKERS"] == "3"


@pytest.mark.long
def test_a_hub_id_is_found_in_the_local_cache(tiny_checkpoint: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_checkpoint, repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for name in ("org/name", f"org/name@{'a' * 40}"):
        done = process("plan", name, "--json", env=env)
        assert done.json["source"]["bytes"] == 2_714_624, done.err
    missing = process("plan", "org/other@v2", "--json", env=env)
    assert missing.code == 2
    assert missing.json["error"]["code"] == "not_in_cache"
    assert missing.json["error"]["hint"] == "HF_HUB_OFFLINE is set: unset it, or download it before"


# ------------------------------------------------------------------------------------------------------ terminal, logs


def test_piped_progress_is_plain_lines(tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = process("convert", tiny_checkpoint, tmp_path / "out", "--max-shard-size", "1MB", env={"FORCE_COLOR": ""})
    assert done.code == 0
    assert not set("\r\x1b") & set(done.out + done.err)
    lines = [line for line in done.err.splitlines() if line.startswith("shard ")]
    assert len(lines) == len(list((tmp_path / "out").glob("*.safetensors")))
    pattern = (
        r"shard \d+/\d+  experts \d+"
        r"(  rel err max 0\.\d{3} mean 0\.\d{3})?  \d+\.\d s(  eta [\dhms. ]+)?"
    )
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert max(map(len, lines)) < 80


HOSTILE_NAME = "model.[red]norm\u202e.weight"


@pytest.fixture
def hostile(save: Callable[[make_cases.Checkpoint], Path]) -> Path:
    """A checkpoint with escape sequences in its model type, and markup and a direction override in a tensor's name."""
    checkpoint = make_cases.mini(128, 128)
    checkpoint.config["model_type"] = "x\x1b[31m\x1b]0;owned\x07[bold]"
    checkpoint.rename(lambda name: HOSTILE_NAME if name == "model.norm.weight" else name)
    assert HOSTILE_NAME in checkpoint.tensors()
    return save(checkpoint)


@pytest.mark.parametrize(
    "words", [("inspect", "-v"), ("plan", "-v"), ("plan", "--ignore", "re:\x1b[31m(")], ids=" ".join
)
def test_names_from_a_checkpoint_cannot_write_escape_sequences(hostile: Path, words: tuple[str, ...]) -> None:
    name, *rest = words
    code, seen = on_terminal(name, hostile, *rest)
    assert code in (0, 2)
    assert "\x07" not in seen
    assert "\x1b]" not in seen
    assert "\x1b[31m" not in re.sub(r"\x1b\[1;31m", "", seen)
    assert "\u202e" not in seen
    piped = process(name, hostile, *rest)
    assert not set("\x1b\x07\u202e") & set(piped.out + piped.err)


def test_markup_in_a_name_is_shown_not_obeyed(hostile: Path) -> None:
    code, seen = on_terminal("inspect", hostile, "--tensors", "*norm*")
    assert code == 0
    assert "model.[red]norm\\u202e.weight" in re.sub(r"\s", "", seen)


def test_no_color_is_respected(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = re.compile(r"\x1b\[[\d;]*3[0-7]m")
    assert colours.search(on_terminal("report", converted)[1])
    monkeypatch.setenv("NO_COLOR", "1")
    code, seen = on_terminal("report", converted)
    assert code == 0
    assert not colours.search(seen)


def test_a_name_that_the_terminal_cannot_encode_is_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    output._print(stream, "刻み")
    stream.seek(0)
    assert stream.read() == "\\u523b\\u307f\n"


# ----------------------------------------------------------------------------------------------- interrupt and resume

SLOW = """
import sys, time
import kizami.quantize.run.local_pool as local_pool
from kizami.cli.app import main
real = local_pool.convert_shard
def slow(*args, **kwargs):
    time.sleep(0.3)
    return real(*args, **kwargs)
local_pool.convert_shard = slow
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_says_how_to_resume_and_resumes(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    words = ["convert", str(tiny_checkpoint), str(tmp_path / "out"), "--max-shard-size", "200KB"]
    with subprocess.Popen([sys.executable, "-c", SLOW, *words], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        next(line for line in child.stderr if line.startswith("shard 2/"))
        child.send_signal(sent)
        rest = child.stderr.read().splitlines()
    assert child.returncode == code
    said = re.fullmatch(
        r"kizami: interrupted: run the same command again to resume; (\d+) of (\d+) shards are done", rest[-1]
    )
    assert said, rest
    assert 2 <= int(said[1]) < int(said[2])
    assert not (tmp_path / "out").exists()

    done = kizami(*words)
    assert done.code == 0
    assert f"resumed: {said[1]} of {said[2]} shards were done" in done.err
    assert kizami("convert", tiny_checkpoint, tmp_path / "plain", "--max-shard-size", "200KB", "-q").code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "plain")


# ---------------------------------------------------------------------------------------------------------------- demo


def test_demo_takes_the_tour(kizami: Run, tmp_path: Path) -> None:
    done = kizami("demo", tmp_path / "demo")
    assert done.code == 0, done.err
    for name in ("plan", "convert", "verify", "report"):
        assert f"$ kizami {name} " in done.out
    assert "verified: 359 tensors held to the source, 0 problems" in done.out
    assert kizami("verify", tmp_path / "demo" / "tiny-glm-int4").code == 0
    assert "PSF" in (tmp_path / "demo" / "README.md").read_text()


def test_demo_as_json_is_one_object(kizami: Run, tmp_path: Path) -> None:
    done = kizami("demo", tmp_path / "demo", "--json", "-q")
    assert (done.code, done.err) == (0, "")
    assert done.json["schema"] == "kizami.demo/1"
    assert done.json["plan"]["output"]["bytes"] == done.json["convert"]["output"]["bytes"]
    assert done.json["verify"]["ok"] is True


def test_demo_refuses_a_folder_that_is_not_empty(kizami: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert kizami("demo", tmp_path).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_shipped_checkpoint_is_what_the_archive_says(demo_checkpoint: Path) -> None:
    with tarfile.open(Path(options.__file__).with_name("tiny-glm-fp8.tar.xz")) as archive:
        named = {Path(member.name).name for member in archive.getmembers() if member.isfile()}
    assert {path.name for path in demo_checkpoint.iterdir()} == named


# -------------------------------------------------------------------------------------------------------- small pieces


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5_000_000_000), ("2GiB", 2 << 30), ("500 mb", 500_000_000), ("1.5KiB", 1536), ("123", 123), ("7B", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert options.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 gigabytes", "1e9", "٣GB", "9" * 30])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(KizamiError, match="is not a size"):
        options.parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.14, "3.1 s"), (160, "2m40s"), (59.99, "60.0 s"), (3600, "1h00m"), (18150, "5h02m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_plain_tables_align() -> None:
    assert output.plain_table(("name", ">n"), [("a", "1"), ("long", "100")]) == ["name    n", "a       1", "long  100"]
