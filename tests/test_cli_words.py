"""What the command line says: no more than was done, in plain words, short enough for a terminal."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import make_cases
import pytest
from cli_fixtures import Run, on_terminal, process

from kizami.cli import output, watch
from kizami.quantize.pipeline import Progress, ShardDone, Started

# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_says_what_was_compared(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    bare = kizami("verify", converted)
    assert bare.out.splitlines()[-1] == (
        "verified: files and structure are intact, 0 problems; weights were not compared (--against SRC does)"
    )
    assert "(as the run recorded it)" in bare.out
    whole = kizami("verify", converted, "--against", tiny_checkpoint)
    assert whole.out.splitlines()[-1] == "verified: 73 tensors held to the source, 0 problems"
    assert "recorded" not in whole.out
    sample = kizami("verify", converted, "--against", tiny_checkpoint, "--sample", "10")
    assert sample.out.splitlines()[-1] == "verified: a sample of 11 of 73 tensors, 0 problems"
    as_json = kizami("verify", converted, "--against", tiny_checkpoint, "--sample", "10", "--json").json
    assert as_json["sampled_from"] == 73


def test_a_limit_that_is_missed_does_not_make_a_proof_less(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    done = kizami("verify", converted, "--against", tiny_checkpoint, "--max-rel-error", "0.0001")
    assert done.code == 1
    assert done.out.splitlines()[-1] == (
        "verified: 73 tensors held to the source, 0 problems; 24 tensors above --max-rel-error"
    )


def test_an_unfinished_output_is_called_that(kizami: Run, converted: Path, tmp_path: Path) -> None:
    partial = shutil.copytree(converted, tmp_path / "out.partial")
    (partial / "kizami.json").unlink()
    (partial / ".kizami").mkdir()
    (partial / ".kizami" / "journal.jsonl").write_text("")
    for words in (("verify", partial), ("report", partial), ("card", partial)):
        done = kizami(*words, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "unfinished"), words


@pytest.mark.long
def test_verify_against_another_commit_names_both(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_checkpoint, repo / "snapshots" / commit)
    (repo / "snapshots" / ("b" * 40) / "notes.txt").write_text("new")
    out = tmp_path / "out"
    assert kizami("convert", repo / "snapshots" / ("a" * 40), out, "-q").code == 0
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    done = process("verify", out, "--against", f"org/tiny@{'b' * 40}", "--json", env=env)
    (problem,) = done.json["problems"]
    assert problem["message"] == f"was made of org/tiny@{'a' * 40}, and the source here is org/tiny@{'b' * 40}"
    assert process("verify", out, "--against", f"org/tiny@{'a' * 40}", env=env).code == 0


def test_a_sample_of_nothing_is_a_usage_error(kizami: Run, converted: Path) -> None:
    done = kizami("verify", converted, "--sample", "10", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert "--against" in done.json["error"]["hint"]


def test_verify_says_what_was_skipped_and_what_should_be_known(kizami: Run, converted: Path, tmp_path: Path) -> None:
    out = shutil.copytree(converted, tmp_path / "out")
    with open(out / "README.md", "a") as card:
        card.write("mine\n")
    edited = kizami("verify", out)
    assert edited.code == 0
    assert re.search(r"^note: README.md was edited", edited.err, re.M)
    assert kizami("verify", out, "--json").json["notes"]
    (out / "config.json").write_text("{}")
    damaged = kizami("verify", out)
    assert damaged.code == 1
    assert "not checked after these problems: structure" in damaged.err
    assert "structure" in kizami("verify", out, "--json").json["skipped"]


@pytest.mark.parametrize("name", ["convert", "verify", "report"])
def test_five_failures_of_a_threshold_are_enough(
    kizami: Run, tiny_checkpoint: Path, converted: Path, tmp_path: Path, name: str
) -> None:
    words = (tiny_checkpoint, tmp_path / "out") if name == "convert" else (converted,)
    failed = re.compile(r"^kizami: failed: .*", re.M)
    lines = failed.findall(kizami(name, *words, "--max-rel-error", "0.0001").err)
    assert len(lines) == 6
    assert lines[-1] == "kizami: failed: ... and 19 more (-v shows all)"
    if name != "convert":
        assert len(failed.findall(kizami(name, *words, "--max-rel-error", "0.0001", "-v").err)) == 24


def test_a_finished_output_is_found_in_the_local_cache(tiny_checkpoint: Path, converted: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--int4"
    shutil.copytree(converted, repo / "snapshots" / ("b" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("b" * 40)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = process("verify", "org/int4", "--against", tiny_checkpoint, "-q", env=env)
    assert (done.code, done.out) == (0, "verified: 73 tensors held to the source, 0 problems\n")
    assert process("report", "org/int4", "--json", env=env).json["packed_modules"] == 24


# ------------------------------------------------------------------------------------------------------- usage, options


def test_a_bare_kizami_shows_help_and_no_error(kizami: Run) -> None:
    done = kizami()
    assert (done.code, done.err) == (2, "")
    assert "Usage: kizami" in done.out


def test_who_names_a_format_gets_the_report_under_q(kizami: Run, converted: Path) -> None:
    assert kizami("report", converted, "--format", "markdown", "-q").out.startswith("# Error report\n")
    assert kizami("report", converted, "--format", "text", "-q").out == kizami("report", converted).out
    assert len(kizami("report", converted, "-q").out.splitlines()) == 1


def test_json_and_another_format_contradict_each_other(
    kizami: Run, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = kizami("report", converted, "--json", "--format", "markdown")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert kizami("report", converted, "--json", "--format", "json").json["schema"] == "kizami.report/1"
    monkeypatch.setenv("KIZAMI_FORMAT", "markdown")
    assert "KIZAMI_FORMAT markdown" in kizami("report", converted, "--json").json["error"]["message"]


def test_the_command_line_wins_over_a_variable_that_says_the_same(
    kizami: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIZAMI_GROUP_SIZE", "64")
    assert kizami("plan", tiny_checkpoint, "--scheme", "w4a16-g128", "--json").json["scheme"] == "w4a16-g128"
    monkeypatch.setenv("KIZAMI_SCHEME", "w4a16-g32")
    assert kizami("plan", tiny_checkpoint, "--group-size", "128", "--json").json["scheme"] == "w4a16-g128"
    both = kizami("plan", tiny_checkpoint)
    assert both.code == 2
    assert "KIZAMI_GROUP_SIZE 64 and KIZAMI_SCHEME w4a16-g32 contradict" in both.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KIZAMI_GROUP_SIZE", "48", "invalid value for KIZAMI_GROUP_SIZE: '48' is not one of '32', '64', '128'. "),
        ("KIZAMI_TP", "two", "invalid value for KIZAMI_TP: 'two' is not a whole number. "),
        ("KIZAMI_JSON", "perhaps", "invalid value for KIZAMI_JSON: 'perhaps' is neither true nor false. "),
        ("KIZAMI_MAX_SHARD_SIZE", "5XB", "KIZAMI_MAX_SHARD_SIZE '5XB' is not a size. "),
    ],
)
def test_a_bad_variable_is_named(
    kizami: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = kizami("plan", tiny_checkpoint)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--group-size", "48"), "'--group-size': '48' is not one of '32', '64', '128'. "),
        (("--tp", "two"), "'--tp': 'two' is not a whole number. "),
        (("--tp", "0"), "'--tp': 0 is less than 1. "),
        (("--tp", "4096"), "'--tp': 4096 is more than 1024. "),
    ],
)
def test_a_bad_value_is_named_in_plain_words(kizami: Run, words: tuple[str, str], said: str) -> None:
    assert f"kizami: error: invalid value for {said}" in kizami("plan", "src", *words).err


def test_a_misspelled_variable_is_warned_about_once(kizami: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIZAMI_GRUP_SIZE", "64")
    monkeypatch.setenv("KIZAMI_WORKERS", "2")
    assert kizami("env", "--json").err == (
        "kizami: warning: KIZAMI_GRUP_SIZE in the environment belongs to no option; did you mean KIZAMI_GROUP_SIZE?\n"
    )


def test_the_options_of_a_convert_give_the_plan_of_that_convert(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    words = ("--method", "minmax", "--group-size", "64", "--json", "-q")
    planned = kizami("plan", tiny_checkpoint, *words).json
    assert planned["plan_hash"] == kizami("convert", tiny_checkpoint, tmp_path / "out", *words).json["plan_hash"]
    assert planned["estimate"]["method"] == "minmax"


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/x"])
def test_a_place_that_cannot_be_written_has_a_hint(kizami: Run, tiny_checkpoint: Path, out: str) -> None:
    done = kizami("convert", tiny_checkpoint, out)
    assert done.code == 2
    assert "hint: choose another OUT" in done.err


# ------------------------------------------------------------------------------------------------------------ progress


def test_convert_as_json_still_writes_its_lines_to_stderr(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "a", "--json", "--max-shard-size", "1MB")
    assert [line.split("  ")[0] for line in done.err.splitlines()] == [f"shard {i}/4" for i in range(1, 5)]
    assert kizami("convert", tiny_checkpoint, tmp_path / "b", "--json", "-q").err == ""


def test_the_file_is_named_under_v(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "-v")
    assert re.search(r"^shard 1/1  model-00001-of-00001\.safetensors  experts 24", done.err, re.M)


@pytest.mark.long
def test_a_terminal_shows_the_bar_only(tiny_checkpoint: Path, tmp_path: Path) -> None:
    code, seen = on_terminal("convert", tiny_checkpoint, tmp_path / "out", "--max-shard-size", "1MB")
    assert code == 0
    assert "experts 12" not in seen
    assert "━" in seen
    code, seen = on_terminal("convert", tiny_checkpoint, tmp_path / "again", "--max-shard-size", "1MB", "-v")
    assert "experts 12" in seen


def test_compiling_is_mentioned_only_while_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kizami.quantize.kernels.jit.cache_folder", lambda: tmp_path)
    assert watch.kernels_are_cold()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kernel.nbi").touch()
    assert not watch.kernels_are_cold()
    monkeypatch.setattr("kizami.quantize.kernels.jit.cache_folder", lambda: None)
    assert watch.kernels_are_cold()


@pytest.mark.long
@pytest.mark.parametrize("cold", [True, False])
def test_plan_and_demo_foretell_the_compilation(
    kizami: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    monkeypatch.setattr("kizami.cli.watch.kernels_are_cold", lambda: cold)
    done = kizami("demo", tmp_path / "demo")
    assert ("the first run compiles" in done.err) == cold
    estimate = re.search(r"^estimate +about 1 s, [\d,]+ MiB on .*", done.out, re.M)
    assert estimate
    assert estimate[0].endswith(", and 10 s once to compile kernels") == cold


def test_a_resumed_bar_starts_at_what_is_done(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.planner import build_plan
    from kizami.quantize.settings import Method, Policy

    plan = build_plan(Checkpoint.open(tiny_checkpoint), Policy(max_shard_bytes=1_000_000), Method())
    sizes = [sum(step.weight.nbytes for step in shard.steps) for shard in plan.shards]
    monkeypatch.setattr(output.Ui, "shows_bar", True)
    with watch.Watch(output.Ui(), plan.shards) as seen:
        assert seen._bar is not None
        (task,) = seen._bar.tasks
        seen(Started(len(sizes), 2, (), sizes[0] + sizes[1]))
        assert (task.completed, task.total) == (sizes[0] + sizes[1], sum(sizes))
        seen(Progress(sizes[2]))
        assert task.completed == sum(sizes[:3])


def test_a_resume_reports_the_bytes_of_the_finished_shards(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from kizami.formats.checkpoint import Checkpoint
    from kizami.quantize.pipeline import RunEvent, run
    from kizami.quantize.planner import build_plan
    from kizami.quantize.settings import Method, Policy

    checkpoint = Checkpoint.open(tiny_checkpoint)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=1_000_000), Method("minmax"))
    events: list[RunEvent] = []

    def stop_after_two(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, ShardDone) and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, checkpoint, tmp_path / "out", workers=1, on_event=stop_after_two)
    events.clear()
    run(plan, checkpoint, tmp_path / "out", workers=1, on_event=events.append)
    (started,) = (event for event in events if isinstance(event, Started))
    now = sum(event.source_bytes for event in events if isinstance(event, Progress))
    assert started.resumed >= 2
    assert started.source_bytes + now == sum(step.weight.nbytes for step in plan.steps)


def test_verify_is_quiet_for_ten_seconds(kizami: Run, converted: Path, tiny_checkpoint: Path) -> None:
    assert kizami("verify", converted, "--against", tiny_checkpoint).err == ""


def test_a_long_verify_writes_a_line_now_and_then(
    kizami: Run, converted: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kizami.cli.verify.LINE_EVERY", 0.0)
    assert "compared 73 of 73 tensors\n" in kizami("verify", converted, "--against", tiny_checkpoint).err


# --------------------------------------------------------------------------------------------------------------- texts


def test_plan_and_convert_name_the_size_in_one_form(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    lines = [kizami("plan", tiny_checkpoint, "-q").out, kizami("convert", tiny_checkpoint, tmp_path / "o", "-q").out]
    assert [re.findall(r"\d\.\d\dx the source's size", line) for line in lines] == [["1.29x the source's size"]] * 2


def test_side_files_are_summed_up(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("convert", tiny_checkpoint, tmp_path / "out")
    assert "not copied: 3 weight files (converted), index and config.json (rewritten)" in done.out
    assert " in 1 file, " in done.out


def test_plan_has_a_legend_and_short_reasons(kizami: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("plan", tiny_checkpoint, "-o", tmp_path / "plan.json")
    assert "(73 tensors; 48 scales go with their weights)" in done.out
    assert "no: 128 / 8 = 16 columns, group is 32 (down_proj)" in done.out
    assert done.err == f"written to {tmp_path / 'plan.json'}\n"


def test_inspect_ends_with_a_verdict(kizami: Run, tiny_checkpoint: Path, converted: Path) -> None:
    assert kizami("inspect", tiny_checkpoint).out.splitlines()[-1] == "convertible: yes"
    assert kizami("inspect", tiny_checkpoint, "--json").json["convertible"] is True
    packed = kizami("inspect", converted)
    assert packed.code == 0
    assert packed.out.splitlines()[-1].startswith("convertible: not without options: the checkpoint is already INT4 (")


def test_inspect_knows_what_only_options_make_convertible(
    kizami: Run, save: Callable[[make_cases.Checkpoint], Path]
) -> None:
    checkpoint = make_cases.mini(128, 128)
    checkpoint.rename(lambda name: name.replace(".mlp.experts.", ".mlp.parts."))
    done = kizami("inspect", save(checkpoint))
    assert done.out.splitlines()[-1].startswith("convertible: not without options: 0 modules matched")


def test_inspect_tensors_shows_matches_and_nothing_else(kizami: Run, tiny_checkpoint: Path) -> None:
    done = kizami("inspect", tiny_checkpoint, "--tensors", "*.eh_proj.*")
    assert [line.split()[0] for line in done.out.splitlines()] == ["dtype", "BF16", "1"]
    none = kizami("inspect", tiny_checkpoint, "--tensors", "eh_proj")
    assert none.err == "kizami: warning: no tensor matches --tensors eh_proj\n"


def test_ten_warnings_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"number {i}" for i in range(1, 14)]
    output.Ui().warn(texts)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "kizami: warning: ... and 3 more (-v shows all)"
    output.Ui(verbose=True).warn(texts)
    assert len(capsys.readouterr().err.splitlines()) == 13


def test_a_refused_resume_names_the_cause_and_not_its_hash(
    kizami: Run, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kizami.quantize.pipeline.finish", stop)
    assert kizami("convert", tiny_checkpoint, tmp_path / "out").code == 130
    done = kizami("convert", tiny_checkpoint, tmp_path / "out", "--group-size", "64")
    assert "policy.group_size: 32 then, 64 now)" in done.err
    assert "plan_hash" not in done.err


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("model.layers.11.mlp.experts.3", 16, ["model.layers.11", ".mlp.experts.3"]),
        ("one two three", 8, ["one two", "three"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("", 4, [""]),
        ("fits", 4, ["fits"]),
    ],
)
def test_text_is_folded_at_spaces_and_dots(text: str, width: int, lines: list[str]) -> None:
    assert output.fold(text, width) == lines


def test_a_table_fits_a_terminal_by_folding_its_last_names() -> None:
    rows = [("0.1", "model.layers.11.mlp.experts.12.down_proj"), ("0.2", "short")]
    assert output.plain_table((">x", "tensor"), rows, 30) == [
        "  x  tensor",
        "0.1  model.layers.11.mlp",
        "     .experts.12.down_proj",
        "0.2  short",
    ]


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (1234, "1,234 files")])
def test_counts(number: int, text: str) -> None:
    assert output.counted(number, "file") == text


@pytest.mark.parametrize("name", ["plan", "inspect", "report"])
def test_eighty_columns_hold_every_line(tiny_checkpoint: Path, converted: Path, name: str) -> None:
    code, seen = on_terminal(name, converted if name == "report" else tiny_checkpoint, columns=80)
    assert code == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", seen).splitlines()
    assert max(map(len, shown)) <= 80
