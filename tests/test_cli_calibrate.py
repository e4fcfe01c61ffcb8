"""`kizami calibrate`: its ends, its words, and the object of --json."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_fixtures import Done, Run, files_of, on_terminal, process

from kizami.calibration.forward.journal import check_same
from kizami.calibration.forward.memory import Chunks
from kizami.calibration.forward.run import LayerDone, Progress, Started
from kizami.cli import calibrate, calibrate_watch
from kizami.cli.calibrate_summary import SERVED, serves_words
from kizami.cli.calibrate_watch import CalibrationWatch, layer_line
from kizami.cli.output import Ui
from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.statistics import STARVED, Statistics

SMALL = ("--samples", "4", "--seq-len", "64", "--threads", "1")
Calibrate = Callable[..., Done]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(
        "".join(f"The tide of day {i} came in at {i * 50 // 60 % 24}:{i * 50 % 60:02}.\n" for i in range(90))
    )
    return path


@pytest.fixture
def run(kizami: Run, demo_checkpoint: Path, text: Path) -> Calibrate:
    """`kizami calibrate` of the demo on the text, four sequences of 64 tokens."""
    return lambda out, *words: kizami("calibrate", demo_checkpoint, "-o", out, "--data", text, *SMALL, *words)


# --------------------------------------------------------------------------------------------------------- what it says


def test_the_summary_ends_with_size_and_starved_experts(run: Calibrate, tmp_path: Path) -> None:
    done = run(tmp_path / "stats")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert f"{tmp_path / 'stats'}: 4 sequences of 64 tokens, 1 of them held out" in lines
    assert re.search(r"^notes\.txt +\d+ +256$", done.out, re.M)
    assert re.search(r"^code 0%, chats 0%, chats with tool calls 0%; letters outside code: Latin 100%$", done.out, re.M)
    assert re.search(r"^layer +experts +min +median +max +under 32 +none$", done.out, re.M)
    assert "KV cache" not in done.out
    assert "serves weighted and report; not gptq, which needs --keep all" in lines
    assert re.search(r"^MTP layers \[5\] were not run", done.out, re.M)
    assert re.search(r"^data +pieces +tokens$", done.out, re.M)
    assert re.fullmatch(r"[\d.]+ KiB of statistics, \d+ of 64 experts with fewer than 32 tokens", lines[-1])
    needs, *layers = done.err.splitlines()[1:]
    sizes = r"[\d.]+ [KM]iB of scratch, about [\d.]+ [KM]iB of STATS, [\d.]+ MiB of memory"
    assert re.fullmatch(f"4 x 64 tokens: {sizes}", needs)
    assert [line.split("  ")[0] for line in layers] == [f"layer {i} ({i + 1} of 5)" for i in range(5)]


def test_json_is_one_object_with_what_stats_says(run: Calibrate, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "stats"
    body = run(out, "--json").json
    statistics = Statistics.open(out)
    assert body["schema"] == "kizami.calibrate/1"
    assert body["tokens"]["sha256"] == statistics.manifest["tokens"]["sha256"]
    assert body["tokens"]["sources"] == statistics.manifest["tokens"]["sources"]
    assert body["tokens"]["sources"][0]["name"] == "notes.txt"
    assert body["tokens"]["mix"]["scripts"] == {"Latin": 1.0}
    assert body["settings"] == statistics.manifest["settings"]
    counts = {layer: statistics.layer(layer).experts for layer in statistics.layers}
    hungry = {
        f"model.layers.{layer}.mlp.experts.{expert}": n
        for layer, experts in counts.items()
        if experts is not None
        for expert, n in enumerate(experts.n.tolist())
        if n < STARVED
    }
    assert hungry
    assert set(body["experts"]["starved"]) == {name for name, n in hungry.items() if n}
    assert set(body["experts"]["unused"]) == {name for name, n in hungry.items() if not n}
    assert body["experts"]["count"] == 64
    first = body["layers"][1]
    ordered = sorted(counts[1].n.tolist())  # type: ignore[union-attr]
    assert (first["min"], first["median"], first["max"]) == (ordered[0], np.median(ordered), ordered[-1])
    assert body["needs"]["scratch_bytes"] > 256 * 256 * 4 * 2
    assert 0.5 < body["needs"]["stats_bytes"] / body["stats_bytes"] < 1
    assert 420e6 < body["needs"]["memory_bytes"] < 2e9
    assert body["serves"] == ["weighted", "report"]
    assert body["experts"]["few_held_out"] == []
    assert body["notes"] == statistics.manifest["notes"] != []
    assert sum(ordered) == 3 * 64 * 4  # three sequences to fit, four experts each
    latent = next(kv for kv in body["kv"] if kv["what"] == "latent")
    assert latent["amax"] == max(statistics.layer(layer).kv["latent"].amax for layer in statistics.layers)
    assert body["stats_bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    tensors = Checkpoint.open(body["source"]).tensors.values()
    assert body["bytes_read"] == sum(t.nbytes for t in tensors if re.match(r"model\.layers\.[0-4]\.", t.name))


def test_quiet_leaves_the_last_line(run: Calibrate, tmp_path: Path) -> None:
    done = run(tmp_path / "stats", "-q")
    assert len(done.out.splitlines()) == 1
    assert done.err == ""


@pytest.mark.long
def test_verbose_says_what_the_work_takes(run: Calibrate, tmp_path: Path) -> None:
    done = run(tmp_path / "stats", "-v")
    assert re.search(r"^[\d,]+ tokens and [\d,]+ queries at once$", done.err, re.M)
    assert re.search(r"^latent +[\d.]+ +\d +", done.out, re.M)


def test_with_all_inputs_the_experts_are_named_that_gptq_leaves_to_weighted(run: Calibrate, tmp_path: Path) -> None:
    done = run(tmp_path / "stats", "--keep", "all")
    assert "serves weighted, gptq and report" in done.out.splitlines()
    statistics = Statistics.open(tmp_path / "stats")
    experts = [found for layer in statistics.layers if (found := statistics.layer(layer).experts) is not None]
    few = sum(int((found.n_held_out < 32).sum()) for found in experts)
    assert few > 0
    assert f"experts with fewer than 32 held-out tokens: {few} (model.layers.1.mlp.experts." in done.out
    assert "gptq falls back to weighted there: more --samples" in done.out


@pytest.mark.parametrize(("keep", "said"), [("none", "not report, which needs --keep held-out"), ("all", "gptq and")])
def test_what_stats_serves_is_said(keep: str, said: str) -> None:
    assert said in serves_words(list(SERVED[keep]), 1)
    assert "no sequence was held out" in serves_words(list(SERVED["none"]), 0)


@pytest.mark.long
def test_what_is_kept_is_what_was_asked_for(run: Calibrate, tmp_path: Path) -> None:
    for keep, tokens in (("none", None), ("held-out", 64), ("all", 256)):
        out = tmp_path / keep
        assert run(out, "--keep", keep, "-q").code == 0
        assert (out / "inputs-00001.safetensors").exists() == (tokens is not None)
        if tokens is not None:
            with Statistics.open(out).inputs(1) as inputs:
                assert inputs.shape[0] == tokens


def test_without_data_the_sample_is_used_and_said(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    done = kizami("calibrate", demo_checkpoint, "-o", tmp_path / "stats", *SMALL)
    assert done.code == 0, done.err
    assert "kizami: warning: no --data: this is the small sample that comes with kizami; " in done.err
    assert "prose.jsonl (built-in sample)" in done.out
    sources = Statistics.open(tmp_path / "stats").manifest["tokens"]["sources"]
    assert all(source["name"].endswith("(built-in sample)") for source in sources)
    page = re.sub(r"[\s│]+", " ", kizami("calibrate", "--help").out)
    assert "a small built-in sample of about 50,000 tokens, good for trying; your own data is better." in page
    assert 'which kizami\'s extra "calibrate" installs' in page


def test_what_the_model_is_for_and_the_data_lacks_is_warned_about(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path, text: Path
) -> None:
    source = shutil.copytree(demo_checkpoint, tmp_path / "source")
    (source / "README.md").write_text("---\nlanguage:\n- en\n- zh\n---\n")
    (source / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}{{ messages }}")
    words = ("calibrate", source, "-o", tmp_path / "stats", "--data", text, *SMALL)
    body = kizami(*words, "--json").json
    assert [re.sub(r"^.*?(0\.0% .*)$", r"\1", warning) for warning in body["warnings"]] == [
        "0.0% of the data is code",
        "0.0% of the data is chats with tool calls",
        "0.0% of the data's letters are Han",
    ]
    assert kizami(*words, "--restart").code == 2  # STATS is there; --restart is about STATS.partial


def test_another_folders_tokenizer_is_used(kizami: Run, demo_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    source = shutil.copytree(demo_checkpoint, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    words = ("calibrate", source, "-o", tmp_path / "stats", "--data", text, *SMALL)
    done = kizami(*words, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "no_tokenizer")
    assert "--tokenizer DIR" in done.json["error"]["hint"]
    assert kizami(*words, "--tokenizer", demo_checkpoint, "-q").code == 0


# ----------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--data", "nowhere.txt"), "missing_file", "nowhere.txt: not found"),
        (("--max-memory", "2XB"), "bad_option", "--max-memory '2XB' is not a size"),
        (("--max-memory", "1MB"), "memory", "max-memory is 0.00 GB"),
        (("--samples", "0"), "usage", "'--samples': 0 is less than 1"),
        (("--seq-len", "5000"), "bad_token", "the model takes at most 4096"),
        (("--seq-len", "4096"), "no_data", "expected at least one sequence of 4,096"),
        (("--keep", "some"), "usage", "'--keep'"),
        (("--device", "tpu"), "usage", "'--device'"),
    ],
)
def test_bad_options_are_refused(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path, text: Path, words: tuple[str, ...], code: str, said: str
) -> None:
    if words[0] != "--data":
        longer = tmp_path / "longer.txt"
        longer.write_text(text.read_text() * (20 if "5000" in words else 1))
        words = ("--data", str(longer), *words)
    every = ("calibrate", demo_checkpoint, "-o", tmp_path / "stats", *SMALL, *words)
    assert said in kizami(*every).err
    done = kizami(*every, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "stats").exists()


def test_a_bad_line_is_named_before_the_work(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "tide"}\n{"txt": "marsh"}\n')
    done = kizami("calibrate", demo_checkpoint, "-o", tmp_path / "stats", "--data", data, *SMALL)
    assert done.code == 2
    assert done.err.endswith(f"kizami: error: {data} line 2: has the keys txt; expected text or messages\n")
    assert not (tmp_path / "stats.partial").exists()


def test_stats_in_the_source_are_refused_by_that_name(run: Calibrate, demo_checkpoint: Path) -> None:
    done = run(demo_checkpoint / "stats")
    assert done.code == 2
    assert "STATS (or STATS.partial, where the work is done) and SRC are one folder or lie in each other" in done.err


@pytest.mark.parametrize("out", [".", "/", "", ".."])
def test_a_place_is_no_name_for_stats(run: Calibrate, out: str) -> None:
    done = run(out)
    assert (done.code, done.err.count("is a place, not the name of a new folder")) == (2, 1)


def test_stats_are_not_put_into_an_output(run: Calibrate, tmp_path: Path) -> None:
    for file, said in (("kizami.json", "would not verify any more"), ("kizami-stats.json", "a STATS folder")):
        (tmp_path / file).write_text("{}")
        done = run(tmp_path / "stats")
        assert (done.code, said in done.err) == (2, True)
        (tmp_path / file).unlink()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_has_a_way_out(run: Calibrate, tmp_path: Path) -> None:
    done = run(tmp_path / "stats", "--device", "cuda", "--json")
    assert (done.json["error"]["code"], done.json["error"]["hint"]) == ("bad_device", "use --device cpu")


def test_missing_packages_are_one_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(KizamiError) as refused:
        calibrate.refuse_missing_packages()
    assert refused.value.message == "torch, transformers and accelerate are not installed"


def test_output_is_required(kizami: Run, demo_checkpoint: Path) -> None:
    done = kizami("calibrate", demo_checkpoint)
    assert done.code == 2
    assert "'--output' / '-o'" in done.err or "'-o' / '--output'" in done.err


def test_missing_packages_are_named_with_the_command_that_installs_them(
    kizami: Run, demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    whole = metadata.version

    def version(name: str) -> str:
        if name == "accelerate":
            raise metadata.PackageNotFoundError(name)
        return "5.17.2" if name == "transformers" else whole(name)

    monkeypatch.setattr(metadata, "version", version)
    done = kizami("calibrate", demo_checkpoint, "-o", tmp_path / "stats")
    assert (done.code, done.err) == (
        2,
        "kizami: error: transformers 5.17.2 is older than 5.24, accelerate is not installed. "
        "hint: pip install 'kizami[calibrate]'\n",
    )


def test_the_packages_asked_for_are_those_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    asked = [f"{name}>={'.'.join(map(str, least))}" for name, least in calibrate.NEEDED.items()]
    assert project["optional-dependencies"]["calibrate"] == asked


def test_too_small_a_disk_is_warned_about_before_the_work(
    run: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kizami.cli.convert.free_bytes", lambda out: 1000)
    done = run(tmp_path / "stats", "--keep", "all")
    assert done.code == 0
    assert done.err.splitlines()[1].startswith("kizami: warning: the run will take about 2.5")
    assert "and 1000 B are free" in done.err.splitlines()[1]


def test_the_disk_that_is_foretold_is_that_of_the_run(run: Calibrate, demo_checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((demo_checkpoint / "config.json").read_text())
    assert run(tmp_path / "stats", "--keep", "all", "-q").code == 0
    written = sum(path.stat().st_size for path in (tmp_path / "stats").iterdir())
    state = 256 * 256 * 4 * (4 + 3)
    assert 0.8 < (calibrate.disk_bytes(config, 256, 64, "all", 4) - state) / written < 1.0
    kimi = {"hidden_size": 7168, "num_hidden_layers": 61, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    kimi |= {"n_routed_experts": 384}
    assert calibrate.disk_bytes(kimi, 1 << 18, 26624, "all", 4) == pytest.approx(82.7e9 + 229e9 + 2e9, rel=0.01)
    assert calibrate.disk_bytes({}, 256, 64, "none", 4) == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory")]
)
def test_out_of_memory_says_what_helps(
    run: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kizami.calibration.forward.run.run_calibration", fails)
    done = run(tmp_path / "stats", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "out_of_memory")
    assert "--max-memory is 2GB" in done.json["error"]["hint"]


def test_another_runtime_error_is_a_bug(run: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("shapes")

    monkeypatch.setattr("kizami.calibration.forward.run.run_calibration", fails)
    assert run(tmp_path / "stats").code == 101


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_says_how_to_resume_and_goes_on(
    run: Calibrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    assert run(tmp_path / "whole", "--keep", "all").code == 0
    out, heard = tmp_path / "stats", calibrate_watch.CalibrationWatch._layer

    def stops(self: CalibrationWatch, event: LayerDone) -> None:
        heard(self, event)
        if self.done == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(calibrate_watch.CalibrationWatch, "_layer", stops)
    done = run(out, "--keep", "all")
    assert done.code == 128 + number
    assert done.err.splitlines()[-1] == (
        "kizami: interrupted: run the same command again to resume; 2 of 5 layers are done"
    )
    assert not out.exists()
    monkeypatch.setattr(calibrate_watch.CalibrationWatch, "_layer", heard)
    done = run(out, "--keep", "all")
    assert done.code == 0
    assert "resumed: 2 of 5 layers were done" in done.err
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.long
def test_other_data_do_not_resume_a_run(
    run: Calibrate, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = calibrate_watch.CalibrationWatch._layer

    def stops(self: CalibrationWatch, event: LayerDone) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(calibrate_watch.CalibrationWatch, "_layer", stops)
    assert run(tmp_path / "stats").code == 130
    monkeypatch.setattr(calibrate_watch.CalibrationWatch, "_layer", heard)
    text.write_text(text.read_text() + "More.\n")
    error = run(tmp_path / "stats", "--json").json["error"]
    assert error["code"] == "resume_mismatch"
    assert re.search(r"\(files\.notes\.txt: \w{12} then, \w{12} now; tokens\.sha256: \w+", error["message"])
    assert run(tmp_path / "stats", "--restart").code == 0


def test_other_data_are_told_by_files_and_hashes(tmp_path: Path) -> None:
    def identity(ids: str, mix: float, **files: str) -> dict[str, object]:
        sources = [{"name": name, "sha256": sha256 * 32, "pieces": 1, "tokens": 64} for name, sha256 in files.items()]
        return {"tokens": {"sha256": ids, "sequences": 4, "held_out": [1], "sources": sources, "mix": {"code": mix}}}

    check_same(identity("aa", 0.1, a="01"), identity("aa", 0.1, a="01"), tmp_path)
    with pytest.raises(KizamiError) as refused:
        check_same(identity("aa", 0.1, a="01", b="02"), identity("bb", 0.2, a="03", b="02", c="04"), tmp_path)
    assert refused.value.message.endswith(
        "(files.a: 010101010101 then, 030303030303 now; files.c: not among the data then, 040404040404 now; "
        "tokens.sha256: aa then, bb now)"
    )
    with pytest.raises(KizamiError, match=r"tokens\.mix\.code: 0\.1 then, 0\.2 now"):
        check_same(identity("aa", 0.1, a="01"), identity("aa", 0.2, a="01"), tmp_path)


@pytest.mark.long
def test_the_help_needs_no_torch() -> None:
    code = (
        "import sys, runpy\nsys.argv = ['kizami', 'calibrate', '--help']\n"
        "try:\n runpy.run_module('kizami.cli', run_name='__main__')\n"
        "except SystemExit as e:\n assert e.code == 0\n"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.long
def test_a_terminal_shows_the_bar_only(demo_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    words = ("calibrate", demo_checkpoint, "-o", tmp_path / "stats", "--data", text, *SMALL)
    code, seen = on_terminal(*words)
    assert code == 0
    assert "━" in seen
    assert "tokens min" not in seen


@pytest.mark.long
def test_data_may_come_from_a_pipe(demo_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "kizami.cli", "calibrate", demo_checkpoint, "-o", tmp_path / "a", *SMALL]
    data = "".join(json.dumps({"text": line}) + "\n" for line in text.read_text().splitlines())
    done = subprocess.run(
        [*map(str, command), "--data", "/dev/stdin", "--json"], input=data, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"]["sources"][0]["tokens"] == 256
    rows = tmp_path / "rows.jsonl"
    rows.write_text(data)
    same = process(*command[3:5], "-o", tmp_path / "b", *SMALL, "--data", rows, "--json").json
    assert same["tokens"]["sha256"] == json.loads(done.stdout)["tokens"]["sha256"]


# ------------------------------------------------------------------------------------------------------------- progress


def test_a_layers_line_has_counts_time_and_eta() -> None:
    done = LayerDone(4, (0, 3, 4812, 20431), 0)
    assert layer_line(done, 61, 123.4, 6740.0) == (
        "layer 4 (5 of 61)  4 experts, tokens min 0 median 2,408 max 20,431  2m03s  eta 1h52m"
    )
    assert layer_line(LayerDone(60, (), 7), 61, 2.0, 0.0) == "layer 60 (61 of 61)  dense  7 tokens not finite  2.0 s"


def test_the_eta_counts_only_the_layers_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kizami.cli.calibrate_watch.time.monotonic", lambda: now[0])
    watch = CalibrationWatch(Ui(quiet=True))
    chunks = Chunks(64, 64, 10**9)
    watch(Started(layers=10, first=6, tokens=256, chunks=chunks, disk=0))
    assert watch.eta() == 0.0
    now[0] += 30.0
    watch(LayerDone(6, (), 0))
    assert watch.eta() == pytest.approx(90.0)
    now[0] += 18.75
    watch(Progress(7, "experts", 10, 16))  # 0.25 + 0.7 * 10 / 16 of the layer
    assert watch.eta() == pytest.approx(48.75 / 1.6875 * 2.3125)
    watch(Progress(7, "combining", 4, 4))
    assert watch.eta() == pytest.approx(48.75 / 2 * 2)
