"""`kizami evaluate` on text: its words, the object of --json, domains, thresholds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from cli_fixtures import Done, Run
from client_fixtures import convert

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.kv_scales.neutral import KvScales, LayerScales

pytestmark = pytest.mark.long

SMALL = ("--samples", "2", "--seq-len", "144", "--threads", "1")
Evaluate = Callable[..., Done]


@pytest.fixture(scope="module")
def int4(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_checkpoint, tmp_path_factory.mktemp("int4") / "out", "-q")


@pytest.fixture
def run(kizami: Run, demo_checkpoint: Path, int4: Path, tmp_path: Path) -> Evaluate:
    """`kizami evaluate` of the demo and its INT4 form on two files, which are two domains."""
    tides, tables = tmp_path / "tides.txt", tmp_path / "tables.txt"
    tides.write_text("".join(f"The tide of day {i} came in at {i % 24}:{i * 50 % 60:02}.\n" for i in range(90)))
    tables.write_text("".join(f"| {i} | {i * i} | {i**3} |\n" for i in range(90)))
    return lambda *words: kizami("evaluate", demo_checkpoint, int4, "--data", tides, "--data", tables, *SMALL, *words)


def test_json_and_the_file_are_one_object_with_all_figures(
    run: Evaluate, demo_checkpoint: Path, int4: Path, tmp_path: Path
) -> None:
    body = run("--json", "--control", "--layout", "fp8", "-o", tmp_path / "e.json").json
    assert body == json.loads((tmp_path / "e.json").read_text())
    assert (body["schema"], body["kind"], body["ok"], body["problems"]) == ("kizami.evaluate/1", "text", True, [])
    assert body["reference"] == str(demo_checkpoint)
    assert [domain["name"] for domain in body["tokens"]["domains"]] == ["tides.txt", "tables.txt"]
    plain, rounded, again = body["compared"]
    assert [plain["name"], rounded["name"], again["name"]] == [str(int4), f"{int4}, KV fp8 at 1.0", "A again"]
    assert [(at["first"], at["last"], at["tokens"]) for at in plain["positions"]] == [(0, 128, 512), (128, 144, 64)]
    assert [domain["tokens"] for domain in plain["domains"]] == [288, 288]
    assert plain["all"]["tokens"] == 576
    assert 0 < plain["all"]["kl_median"] < plain["all"]["kl_mean"] < plain["all"]["kl_p999"]
    assert rounded["all"]["kl_mean"] > plain["all"]["kl_mean"]
    assert plain["all"]["flips"] == round((1 - plain["all"]["top1"]) * 576)
    low, high = plain["all"]["nll_delta_interval"]
    assert low < plain["all"]["nll_delta"] < high
    assert plain["all"]["perplexity"] > 1
    assert [again["all"][key] for key in ("flips", "lost", "won", "kl_max", "nll_delta")] == [0] * 5


def test_the_summary_has_domains_positions_and_the_whole(run: Evaluate) -> None:
    done = run()
    assert done.code == 0, done.err
    for name in ("tides.txt", "tables.txt", "positions 0-127", "positions 128-143", "all"):
        assert any(line.startswith(name + " ") for line in done.out.splitlines()), name
    assert done.out.splitlines()[-1].startswith("largest mean KL ")
    assert "layer 1 of 5" in done.err


@pytest.mark.long
def test_a_threshold_holds_in_every_domain(run: Evaluate) -> None:
    done = run("--max-kl", "1e-9", "--min-top1", "0.1")
    assert done.code == 1
    assert "tides.txt: mean KL" in run("--max-kl", "1e-9", "--json").json["problems"][3]
    assert "top-1" not in done.err


@pytest.mark.long
def test_a_file_that_is_named_twice_counts_once(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text("one two three " * (300 if folder == "c" else 200))
    data = [word for folder in "abc" for word in ("--data", tmp_path / folder / "text.txt")]
    done = kizami("evaluate", demo_checkpoint, demo_checkpoint, *data, "--samples", 1, "--seq-len", 16, "--json")
    names = [domain["name"] for domain in done.json["tokens"]["domains"]]
    assert names == [str(tmp_path / "a" / "text.txt"), str(tmp_path / "c" / "text.txt")]
    assert any("it is used once" in warning for warning in done.json["warnings"])


def test_another_tokenizer_is_told(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    other, text = shutil.copytree(demo_checkpoint, tmp_path / "other"), tmp_path / "a.txt"
    text.write_text("one two three " * 200)
    with open(other / "tokenizer.json", "a") as file:
        file.write("\n")
    done = kizami("evaluate", demo_checkpoint, other, "--data", text, "--samples", 1, "--seq-len", 16, "--threads", 1)
    assert done.code == 0, done.err
    assert "has another tokenizer than" in done.err


def test_without_data_the_sample_of_kizami_is_taken_by_domain(kizami: Run, demo_checkpoint: Path) -> None:
    words = ["--samples", 1, "--seq-len", 16, "--threads", 1, "--json"]
    body = kizami("evaluate", demo_checkpoint, demo_checkpoint, *words).json
    names = [domain["name"] for domain in body["tokens"]["domains"]]
    assert {"code.jsonl", "maths.jsonl", "prose.jsonl"} <= set(names)
    assert body["tokens"]["built_in"]
    assert any("small sample that comes with kizami" in warning for warning in body["warnings"])


def test_a_card_of_files_in_the_publishers_folders(
    kizami: Run, demo_checkpoint: Path, int4: Path, tmp_path: Path
) -> None:
    """Texts and scales of one name, folders with spaces and with the words of a cache in their names."""
    home = tmp_path / "my secret clients"
    out = shutil.copytree(int4, home / "acme" / "out, KV x")
    config = Checkpoint.open(demo_checkpoint).config
    words: list[object] = []
    for folder, scale in (("a", 2.0**-10), ("b", 1.0)):
        (home / folder).mkdir()
        layers = tuple(LayerScales(at, (scale,), (scale,), "calibrated") for at in range(5))
        KvScales(
            config["model_type"], config["architectures"][0], "dsa", 0, "tensor", "0" * 64, None, layers
        ).write(home / folder / "kv.json")  # fmt: skip
        (home / folder / "x.txt").write_text(f"one two {folder} " * 200)
        words += ["--data", home / folder / "x.txt", "--kv-scales", home / folder / "kv.json"]
    shutil.copy(home / "a" / "x.txt", home / "z.txt")
    words += ["--data", home / "z.txt", "--samples", 1, "--seq-len", 16, "--threads", 1, "--max-kl", 0]
    done = kizami("evaluate", demo_checkpoint, out, *words, "-o", tmp_path / "e.json", "--json")
    assert done.code == 1, done.err
    rows = done.json["compared"]
    assert [row["model"] for row in rows] == [str(out)] * 3
    assert len({row["name"] for row in rows}) == 3
    assert [row["scales"] for row in rows] == [None, *(str(home / folder / "kv.json") for folder in "ab")]
    assert done.json["tokens"]["repeated"] == [str(home / "z.txt")]
    card = kizami("card", out, "--evaluation", tmp_path / "e.json").out
    section = card.split("## Evaluation\n")[1].split("<!--")[0]
    assert "on 2 sequences of 16 tokens (x.txt (1), x.txt (2))" in section
    found = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")][1:]
    texts = ["x.txt (1)", "x.txt (2)"]
    caches = ["KV cache BF16", "KV cache fp8, kv.json (1) (per layer)", "KV cache fp8, kv.json (2) (per layer)"]
    assert found == [label for cache in caches for label in (cache, *texts)]
    assert "- z.txt has the bytes of x.txt (1): it is used once" in section
    assert "- out, KV x, KV fp8, kv.json (1) (per layer), x.txt (2): mean KL" in section
    for word in ("secret", "clients", "acme", "/", str(tmp_path)):
        assert word not in section, word


def test_one_sequence_is_one(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 10)
    words = ["--data", tmp_path / "a.txt", "--samples", 9, "--seq-len", 30, "--threads", 1]
    done = kizami("evaluate", demo_checkpoint, demo_checkpoint, *words)
    assert done.code == 0, done.err
    assert " 1 sequence of 30 instead of 9" in " ".join(done.err.split())
    assert "1 sequences" not in done.err + done.out
