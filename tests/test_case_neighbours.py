"""The neighbours of the cases: the same kinds of fault at other places, shapes, dtypes and moments."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from case_runner import (
    FILE_LIMIT,
    Said,
    assert_converted,
    assert_mentions,
    assert_refused,
    in_a_process,
    kizami,
    measure,
)
from make_cases import (
    DOWN,
    EXPERT,
    GATE,
    UP,
    Checkpoint,
    Tensor,
    bf16,
    f32,
    grid,
    mini,
    rng,
    shard_name,
    tiny,
)
from output_oracle import contents, parse_json

pytestmark = pytest.mark.long  # each of them converts

Save = Callable[[Checkpoint], Path]
ATTENTION = "model.layers.0.self_attn.o_proj"


# ---------------------------------------------------------------- reading FP8


@pytest.mark.parametrize(
    "options", ["minmax", "signed", "search", "search --clip-allowance 0.5", "search --scale-sign positive"]
)
@pytest.mark.parametrize(
    ("shape", "group"), [((1, 32), 32), ((127, 160), 32), ((257, 384), 128), ((300, 96), 32), ((129, 192), 64)]
)
def test_any_shape_is_packed_row_by_row_and_block_by_block(
    save: Save, tmp_path: Path, shape: tuple[int, int], group: int, options: str
) -> None:
    source, out = save(mini(*shape)), tmp_path / "out"
    said = kizami("convert", source, out, "--group-size", str(group), "--method", *options.split())
    folder = assert_converted(said, source, out)
    if options in ("minmax", "search --scale-sign positive"):
        assert not (folder.array(GATE + ".weight_scale") >> 15).any()


def test_every_scale_may_lie_in_another_shard(save: Save, tmp_path: Path) -> None:
    checkpoint = tiny()
    files = list(checkpoint.shards)
    for name in [n for n in checkpoint.tensors() if n.endswith("_scale_inv")]:
        shard = next(f for f in files if name in checkpoint.shards[f])
        checkpoint.shards[files[files.index(shard) - 2]][name] = checkpoint.shards[shard].pop(name)
    source, out = save(checkpoint), tmp_path / "out"
    assert_converted(kizami("convert", source, out, "--rest", "fp8"), source, out)


def as_scale(values: np.ndarray, dtype: str) -> Tensor:
    match dtype:
        case "BF16":
            data = bf16(values).tobytes()
        case "F16":
            data = values.astype("<f2").tobytes()
        case _:
            data = (127 + np.rint(np.log2(values))).astype(np.uint8).tobytes()
    return Tensor(dtype, values.shape, data)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E8M0"])
@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_scales_of_every_dtype_are_widened_exactly(
    save: Save, tmp_path: Path, dtype: str, rest: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(make_cases.SIZES, "F16", 2)
    checkpoint = tiny()
    for name, tensor in checkpoint.tensors().items():
        if name.endswith("_scale_inv"):
            values = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
            checkpoint.set(name, as_scale(values, dtype))
    if dtype == "F8_E8M0":
        checkpoint.config["quantization_config"]["scale_fmt"] = "ue8m0"
    source, out = save(checkpoint), tmp_path / "out"
    assert_converted(kizami("convert", source, out, "--rest", rest), source, out)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(("module", "rest"), [(DOWN, "bf16"), (ATTENTION, "bf16"), (ATTENTION, "fp8")])
def test_a_nan_code_names_tensor_and_position(
    save: Save, tmp_path: Path, module: str, rest: str, code: int, place: str
) -> None:
    checkpoint = tiny()
    weight = checkpoint.tensors()[module + ".weight"]
    data = bytearray(weight.data)
    data[0 if place == "first" else -1] = code
    checkpoint.set(module + ".weight", Tensor(weight.dtype, weight.shape, bytes(data)))
    source, out = save(checkpoint), tmp_path / "out"
    row, col = (0, 0) if place == "first" else (n - 1 for n in weight.shape)
    said = kizami("convert", source, out, "--rest", rest, "--quiet")
    assert_refused(said, [module + ".weight", f"row {row}", f"column {col}", f"0x{code:02X}"])
    assert not out.exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize(("module", "rest"), [(DOWN, "bf16"), (ATTENTION, "bf16"), (ATTENTION, "fp8")])
def test_a_scale_that_is_no_scale_names_its_weight(
    save: Save, tmp_path: Path, module: str, rest: str, bad: float
) -> None:
    checkpoint = tiny()
    name = module + ".weight_scale_inv"
    scale = np.frombuffer(checkpoint.tensors()[name].data, "<f4").reshape(checkpoint.tensors()[name].shape).copy()
    scale[-1, -1] = bad
    checkpoint.set(name, f32(scale))
    source, out = save(checkpoint), tmp_path / "out"
    assert_refused(kizami("convert", source, out, "--rest", rest, "--quiet"), [module + ".weight"])
    assert not out.exists()


# ---------------------------------------------------------------- what is converted, and to what


def test_what_is_no_linear_weight_passes_through_whatever_its_dtype(
    save: Save, tmp_path: Path, monkeypatch: Any
) -> None:
    """0-D, empty, 3-D, odd sizes; names that look like experts' or scales'."""
    layer = "model.layers.1."
    made = {
        layer + "self_attn.rotary_emb.inv_freq": ("F32", (7,)),
        layer + "mlp.tokens_per_expert": ("I64", (4,)),
        layer + "mlp.experts.0.gate_proj.bias": ("BF16", (128,)),
        layer + "mlp.experts.3.flag": ("BOOL", (3,)),
        layer + "input_layernorm.zero": ("F64", (0,)),
        "model.step": ("I64", ()),
        "model.table": ("U8", (3, 5, 7)),
        "model.halves": ("F16", (3, 3)),
    }
    for dtype, size in (("I64", 8), ("F64", 8), ("BOOL", 1), ("U8", 1), ("F16", 2)):
        monkeypatch.setitem(make_cases.SIZES, dtype, size)
    checkpoint = tiny()
    for name, (dtype, shape) in made.items():
        nbytes = make_cases.SIZES[dtype] * int(np.prod(shape))
        checkpoint.shards[shard_name(2, 3)][name] = Tensor(dtype, shape, rng(name).bytes(nbytes))
    source, out = save(checkpoint), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out), source, out)
    assert {name: (folder.dtype(name), folder.shape(name)) for name in made} == made


@pytest.mark.parametrize("method", ["search", "minmax", "signed"])
def test_a_model_of_zeros_has_no_error_and_every_report_says_so(save: Save, tmp_path: Path, method: str) -> None:
    source, out = save(mini(128, 256, 0, 1.0)), tmp_path / "out"
    folder = assert_converted(kizami("convert", source, out, "--method", method), source, out)
    assert {folder.report[module]["rel_error"] for module in (GATE, UP, DOWN)} == {0.0}
    for form in ("text", "json", "markdown"):
        said = kizami("report", out, "--format", form)
        assert said.code == 0, said.stderr
        assert "nan" not in said.stdout.lower()
    assert "exact" in (out / "README.md").read_text()


@pytest.mark.parametrize("method", ["search", "minmax", "signed"])
def test_a_lone_weight_in_a_group_and_a_group_of_equal_weights(save: Save, tmp_path: Path, method: str) -> None:
    byte = np.zeros((4, 96), np.uint8)
    byte[0, 31], byte[1, 32], byte[2, 95] = 0x01, 0xFE, 0x7E  # the smallest, the largest of both signs, at group ends
    byte[3] = 0x38
    source, out = save(mini(4, 96, byte, 2.0**-100)), tmp_path / "out"
    assert_converted(kizami("convert", source, out, "--method", method), source, out)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("--ignore", r"re:.*layers\.2\.mlp\.experts\.3\.gate_proj$"),
        ("--ignore", "model.layers.1.mlp.experts.0.up_proj"),
        ("--targets", r"re:.*experts\.\d+\.(gate|down)_proj$"),
        ("--targets", r"re:.*shared_experts\.up_proj$"),
    ],
)
def test_no_option_splits_a_fused_pair(tiny_checkpoint: Path, tmp_path: Path, option: str, pattern: str) -> None:
    out = tmp_path / "out"
    assert_refused(kizami("convert", tiny_checkpoint, out, option, pattern), ["gate_proj", "up_proj"])
    assert not out.exists()


@pytest.mark.parametrize("rest", ["bf16", "fp8"])
def test_everything_but_embeddings_can_be_forced_to_int4(tiny_checkpoint: Path, tmp_path: Path, rest: str) -> None:
    out, command = (
        tmp_path / "out",
        ["convert", tiny_checkpoint, tmp_path / "out", "--targets", "re:.*", "--rest", rest],
    )
    assert_refused(kizami(*command), ["model.embed_tokens.weight", "--ignore"])
    said = kizami(*command, "--ignore", "re:.*embed_tokens$")
    folder = assert_converted(said, tiny_checkpoint, out)
    assert {"lm_head", "model.layers.1.mlp.gate", ATTENTION} <= set(folder.packed)
    assert_mentions(said.stderr, ["packed modules (gate, kv_a_proj_with_mqa, kv_b_proj, q_a_proj)", "SGLang"])


@pytest.mark.parametrize("shard", [1, 3])
def test_a_name_that_a_packed_module_needs_is_taken(save: Save, tmp_path: Path, shard: int) -> None:
    checkpoint = tiny()
    name = "model.layers.1.mlp.experts.0.up_proj.weight_shape"
    checkpoint.shards[shard_name(shard, 3)][name] = f32([128.0, 256.0])
    source, out = save(checkpoint), tmp_path / "out"
    assert_refused(kizami("convert", source, out), [name, shard_name(shard, 3)])
    assert not out.exists()


# ---------------------------------------------------------------- what is said


def test_a_run_says_what_it_packed_copied_and_left(save: Save, tmp_path: Path) -> None:
    checkpoint = tiny()
    checkpoint.side |= {".gitattributes": b"x\n", "tiktoken.model": b"YQ== 0\n", "consolidated.safetensors": b"no\n"}
    source, out = save(checkpoint), tmp_path / "out"
    said = kizami("convert", source, out, "--group-size", "64")
    assert_converted(said, source, out)
    assert_mentions(
        said.stdout, ["24 modules packed", "w4a16-g64", "tiktoken.model", ".gitattributes", "bits per weight"]
    )
    assert "consolidated.safetensors" in said.stderr
    card = (out / "README.md").read_text()
    assert "license: mit" in card
    assert "1, 2" in card  # down_proj [256, 128] in groups of 64: two ranks at most


def test_a_tied_head_is_planned_with_a_reason(save: Save, tmp_path: Path) -> None:
    checkpoint = tiny()
    checkpoint.config["tie_word_embeddings"] = True
    plan = tmp_path / "plan.json"
    assert kizami("plan", save(checkpoint), "-o", plan).code == 0
    [head] = [entry for entry in parse_json(plan.read_bytes())["tensors"] if entry["name"] == "lm_head.weight"]
    assert head["action"] in ("copy", "drop")
    assert head["reason"]


# ---------------------------------------------------------------- files and disks


@pytest.mark.parametrize("shard", [1, 3])
@pytest.mark.parametrize("change", [-1, 1, "in the header", "empty"])
def test_a_file_of_the_wrong_size_is_refused_from_its_header(tmp_path: Path, shard: int, change: int | str) -> None:
    path = tiny().save(tmp_path / "src") / shard_name(shard, 3)
    size = path.stat().st_size
    new = {"in the header": 100, "empty": 0}.get(str(change)) if isinstance(change, str) else size + change
    with open(path, "r+b") as file:
        file.truncate(new)
    out = tmp_path / "out"
    assert_refused(kizami("convert", tmp_path / "src", out), [path.name, str(new)])
    assert not out.exists()
    assert not out.with_name("out.partial").exists()


def test_a_disk_that_fills_at_a_later_shard_keeps_the_finished_ones(
    tiny_checkpoint: Path, tmp_path: Path, fault_row: Callable[[str, int, str], None]
) -> None:
    """A dense [512, 256] in BF16 is larger than the limit; shards before it are final and are not written again."""
    command = ["convert", str(tiny_checkpoint), str(tmp_path / "out"), "--max-shard-size", "100KB", "--workers", "1"]
    done = in_a_process(FILE_LIMIT, 200 << 10, *command, "--quiet")
    assert_refused(Said(done.returncode, done.stdout, done.stderr), ["File too large"])
    partial = tmp_path / "out.partial"
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
    assert kept
    assert not [*partial.glob(".*.tmp")]
    again = kizami(*command)
    assert again.code == 0
    assert f"resumed: {len(kept)} of" in again.stderr
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept
    assert kizami(*[w.replace(str(tmp_path / "out"), str(tmp_path / "clean")) for w in command]).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
    fault_row("RLIMIT_FSIZE below the size of a later shard", 1, "refused; then resumed")


def test_only_the_same_command_tidies_a_published_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A kill after the last rename leaves OUT complete, with what is left of the journal inside."""
    out = tmp_path / "out"
    assert kizami("convert", tiny_checkpoint, out).code == 0
    clean = contents(out)
    (out / ".kizami").mkdir()
    (out / ".kizami" / "rows-00001.jsonl").write_text("{}\n")
    left = contents(out)
    assert_refused(kizami("convert", tiny_checkpoint, out, "--group-size", "64"), ["not empty"])
    assert contents(out) == left
    assert kizami("convert", tiny_checkpoint, out).code == 0
    assert contents(out) == clean
    assert_refused(kizami("convert", tiny_checkpoint, out), ["not empty"])


@pytest.mark.parametrize("out", [".", "..", ""])
def test_out_needs_a_name_even_where_nothing_is(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert kizami("convert", tiny_checkpoint, out).code == 2
    assert contents(tmp_path) == {"here": "folder"}


# ---------------------------------------------------------------- memory


@pytest.mark.long
@pytest.mark.parametrize("kind", ["BF16 expert", "FP8 dense", "F32 copied"])
def test_memory_is_bounded_for_every_way_a_tensor_goes(tmp_path: Path, kind: str) -> None:
    """8 tensors of 32 MiB as file holes, one worker: never more than two of them and their outputs."""
    shape = {"BF16 expert": (2048, 8192), "FP8 dense": (4096, 8192), "F32 copied": (1024, 8192)}[kind]
    source = holes(tmp_path / "src", kind, shape)
    tiny_source = tiny().save(tmp_path / "tiny")
    one = ["--workers", "1"]
    found = measure(
        ["convert", str(tiny_source), str(tmp_path / "o1"), *one], ["convert", str(source), str(tmp_path / "o2"), *one]
    )
    assert (found["loaded"], found["code"]) == (0, 0)
    assert found["mib"] < 80, kind
    shutil.rmtree(tmp_path)


def holes(folder: Path, kind: str, shape: tuple[int, int]) -> Path:
    """mini(8, 64) and 8 more weights [rows, cols] of zeros in a second file, which takes no room on the disk."""
    small = mini(8, 64)
    small.indexed = True
    dtype = kind.split()[0].replace("FP8", "F8_E4M3")
    size = make_cases.SIZES[dtype] * shape[0] * shape[1]
    entries: dict[str, Any] = {}
    tail = b""
    for i in range(8):
        name = f"{EXPERT[:-2]}{i + 1}.down_proj" if "expert" in kind else f"model.layers.{i}.self_attn.o_proj"
        entries[name + ".weight"] = {"dtype": dtype, "shape": list(shape), "data_offsets": [i * size, (i + 1) * size]}
        if dtype == "F8_E4M3":
            begin, data = 8 * size + len(tail), f32(np.ones(grid(*shape))).data
            tail += data
            entries[name + ".weight_scale_inv"] = {
                "dtype": "F32",
                "shape": list(grid(*shape)),
                "data_offsets": [begin, begin + len(data)],
            }
    small.weight_map = dict.fromkeys(entries, "holes.safetensors")
    small.total_size = 0
    small.save(folder)
    head = make_cases.header_bytes(entries)
    with open(folder / "holes.safetensors", "wb") as file:
        file.write(head)
        file.seek(len(head) + 8 * size)
        file.write(tail)
        file.truncate(len(head) + 8 * size + len(tail))
    return folder
