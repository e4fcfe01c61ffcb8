"""`kizami report --format html`: one file, nothing from outside, nothing of an untrusted name that runs."""

import importlib.util
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from cli_fixtures import Run
from client_fixtures import convert
from forging import forge_manifest, forge_rows
from kv_checkpoints import glm4, scales_of
from make_cases import bf16_to_f32
from output_oracle import PACKED, SCALE, Folder, codes_of, decoded, scale_names

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.quantize.figures import error_map, expert_errors
from kizami.quantize.report import pooled_error, read_report
from kizami.quantize.weight_figures import weight_figures

pytestmark = pytest.mark.long

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECTIONS = (
    "What was done", "Error by layer and module", "Experts", "The worst tensors", "Clipped weights and groups of zeros",
    "KV cache", "Which engines load it", "Hashes",
)  # fmt: skip


@pytest.fixture(scope="module")
def out(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_checkpoint, tmp_path_factory.mktemp("html") / "out", "-q")


@pytest.fixture
def changed(out: Path, tmp_path: Path) -> Path:
    return shutil.copytree(out, tmp_path / "out")


def page(kizami: Run, out: Path, file: Path, *words: object) -> str:
    done = kizami("report", out, "--format", "html", "-o", file, *words)
    assert done.code == 0, done.err
    return file.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Tags, what they load, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


# ------------------------------------------------------------------------------------------------------------- the page


def test_everything_is_on_the_page(kizami: Run, out: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    text = page(kizami, out, tmp_path / "r.html", "--against", demo_checkpoint)
    read = Reader(text)
    assert tuple(re.findall(r"<h2>(.*?)</h2>", text)) == SECTIONS
    assert read.tags.count("svg") == 3 + 4 + 1
    rows = read_report(out)
    worst = max(rows, key=lambda row: row.get("rel_error") or 0)
    assert worst["name"] in read.text
    assert f"{pooled_error([row for row in rows if row.get('rel_error')]):.4f}" in read.text
    assert "before" in read.text
    assert Checkpoint.open(out).config["model_type"] in read.text


@pytest.mark.long
def test_nothing_is_loaded_and_nothing_runs(kizami: Run, out: Path, tmp_path: Path) -> None:
    read = Reader(page(kizami, out, tmp_path / "r.html"))
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(read.tags)
    assert [load for load in read.loads if not load.startswith(("data:image/png", "#"))] == []
    assert read.handlers == []


@pytest.mark.long
def test_the_same_output_gives_the_same_page(kizami: Run, out: Path, tmp_path: Path) -> None:
    assert page(kizami, out, tmp_path / "a.html") == page(kizami, out, tmp_path / "b.html")


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>$\\frac{1}{0}$&quot;"


def test_names_of_a_hostile_checkpoint_are_text(kizami: Run, changed: Path, tmp_path: Path) -> None:
    def rename(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["role"] == "routed_expert":
                row.update(name=HOSTILE + row["name"], part=HOSTILE, role=HOSTILE)

    forge_rows(changed, rename)
    read = Reader(page(kizami, changed, tmp_path / "r.html"))
    assert not {"script", "img"} & set(read.tags)
    assert read.handlers == []
    assert HOSTILE in read.text


def test_an_output_without_packed_weights_has_a_page(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    plain = convert(demo_checkpoint, tmp_path / "bf16", "--scheme", "bf16", "-q")
    text = page(kizami, plain, tmp_path / "r.html")
    assert "Experts" not in text
    assert "no weight was rounded" in text


def test_a_cache_by_head_shows_the_scales_that_were_written(kizami: Run, tmp_path: Path) -> None:
    source = Checkpoint.open(glm4().save(tmp_path / "src"))
    scales_of(source).write(tmp_path / "kv.json")
    words = ["convert", source.root, tmp_path / "out", "--kv-scales", tmp_path / "kv.json", "-q"]
    assert kizami(*words).code == 0
    text = page(kizami, tmp_path / "out", tmp_path / "r.html")
    assert "KV scales: 2 layers, one scale per tensor: 2 calibrated" in text


def test_other_layouts_are_shown_without_a_close_look(kizami: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    other = convert(demo_checkpoint, tmp_path / "gptq", "--format", "gptq", "-q")
    assert "No close look at" in page(kizami, other, tmp_path / "r.html")


@pytest.mark.parametrize("words", [["--format", "html"], ["--format", "html", "--json", "-o", "x.html"]])
def test_html_is_a_file(kizami: Run, out: Path, words: list[str]) -> None:
    assert kizami("report", out, *words).code == 2


def test_what_is_not_installed_is_named(
    kizami: Run, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    done = kizami("report", out, "--format", "html", "-o", tmp_path / "r.html")
    assert done.code == 2
    assert "matplotlib not installed" in done.err
    assert "kizami[report]" in done.err


# ---------------------------------------------------------------------------------------------------------- the figures


def test_the_map_pools_what_shares_a_module_and_a_layer(out: Path) -> None:
    rows = read_report(out)
    found = error_map(rows)
    assert found.layers == (1, 2, 3, 4, 5)
    assert set(found.modules) == {f"routed_expert {part}" for part in ("gate_proj", "up_proj", "down_proj")}
    for i, module in enumerate(found.modules):
        for j, layer in enumerate(found.layers):
            part = module.split()[1]
            those = [row for row in rows if row["layer"] == layer and row["part"] == part and row.get("rel_error")]
            assert found.errors[i, j] == pytest.approx(pooled_error(those))
    assert np.nanmax(found.errors[0]) == np.nanmax(found.errors), "the module with the largest error first"


def test_an_expert_that_stands_out_is_found(changed: Path) -> None:
    def spoil(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if (row["layer"], row.get("expert")) == (3, 7) and row["role"] == "routed_expert":
                row["error_energy"] *= 4

    forge_rows(changed, spoil)
    found = expert_errors(read_report(changed))
    assert [len(errors) for errors in found.errors] == [16] * 5
    first = found.outliers[0]
    assert (first.layer, first.expert) == (3, 7)
    assert first.distance > 4
    assert first.rel_error == pytest.approx(2 * np.median(found.errors[2]), rel=0.05)


def test_a_close_look_counts_every_weight_code_and_scale(out: Path, demo_checkpoint: Path) -> None:
    ours, theirs = Folder(out), Folder(demo_checkpoint)
    module = ours.packed[5]
    found = weight_figures(Checkpoint.open(out), module, Checkpoint.open(demo_checkpoint))
    codes, scale = codes_of(ours.array(module + PACKED)), bf16_to_f32(ours.array(module + SCALE))
    assert found.codes.tolist() == np.bincount(codes.ravel() + 8, minlength=16).tolist()
    values = codes * np.repeat(scale, 32, axis=1)
    source = decoded(theirs, f"{module}.weight", scale_names(theirs)[f"{module}.weight"])
    assert found.before is not None
    assert found.after.tolist() == np.histogram(values, found.edges)[0].tolist()
    assert found.before.tolist() == np.histogram(source, found.edges)[0].tolist()
    assert found.scales.sum() == found.groups == scale.size
    assert found.after.sum() == codes.size


def test_a_weight_that_is_not_packed_has_no_close_look(out: Path) -> None:
    with pytest.raises(KizamiError, match="is not packed INT4"):
        weight_figures(Checkpoint.open(out), "lm_head")


# ------------------------------------------------------------------------------------------------------------- browser


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_it_without_a_network_or_an_error(
    kizami: Run, out: Path, demo_checkpoint: Path, tmp_path: Path, width: int
) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    page(kizami, out, tmp_path / "r.html", "--against", demo_checkpoint)
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_context(viewport={"width": width, "height": 800}, offline=True).new_page()
        said: list[str] = []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        asked: list[str] = []
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto((tmp_path / "r.html").as_uri())
        assert said == []
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        boxes = [picture.bounding_box() for picture in shown.query_selector_all("figure svg")]
        assert len(boxes) == 8
        assert all(box["width"] > 300 and box["height"] > 80 for box in boxes)
        assert shown.query_selector("details summary").is_visible()
        browser.close()


@pytest.mark.long
def test_sixty_thousand_tensors_are_a_small_file_and_do_not_take_long(
    kizami: Run, changed: Path, tmp_path: Path
) -> None:
    """GLM-5.2 has 58,368 packed weights: 76 layers of 256 experts."""

    def grow(rows: list[dict[str, Any]]) -> None:
        (pattern,) = [row for row in rows if row["name"] == "model.layers.1.mlp.experts.0.down_proj"]
        rng = np.random.default_rng(1)
        for layer in range(3, 79):
            for expert in range(256):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                    error = float(rng.normal(0.5, 0.01))
                    figures = {"error_energy": error, "rel_error": (error / pattern["weight_energy"]) ** 0.5}
                    rows.append(pattern | {"layer": layer, "expert": expert, "part": part, "name": name} | figures)

    forge_rows(changed, grow)
    more = 76 * 256 * 3  # a report without all of its rows is refused
    forge_manifest(changed, lambda found: found["counts"].update(quantize=found["counts"]["quantize"] + more))
    started = time.monotonic()
    text = page(kizami, changed, tmp_path / "r.html")
    assert time.monotonic() - started < 30
    assert len(text) < 3e6
    assert f"{76 * 256 + 2 * 16:,} experts" in text
