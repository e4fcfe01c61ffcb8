"""`convert --kv-scales`: whose scales they are, what is written of them, what a resume and `verify` hold them to."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import make_cases
import numpy as np
import pytest
from cli_fixtures import Run, files_of
from forging import forge, forge_manifest, forge_rows, forge_tensors
from kv_checkpoints import BY_HEAD, SCHEME, VALUES, glm4, latent, scales_of, write

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.engines.check import find_problems
from kizami.formats.engines.served import Served
from kizami.formats.errors import KizamiError
from kizami.formats.kv_scales.neutral import KvScales
from kizami.formats.reader import TensorReader
from kizami.formats.strict_json import dump_json
from kizami.quantize.card import kv_statement
from kizami.quantize.kv_scales.merge import KvAsked
from kizami.quantize.manifest import read_manifest
from kizami.quantize.pipeline import RunEvent, ShardDone, run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.report import read_report
from kizami.quantize.settings import Method, Policy
from kizami.quantize.verify import verify

K0, V0 = (f"model.layers.0.self_attn.attn.{kind}_scale" for kind in "kv")
CARRIED = {"0.self_attn.k_proj.k_scale": 0.5, "0.self_attn.v_proj.v_scale": 0.25}


def plan_of(source: Checkpoint, scales: KvScales, policy: Policy = Policy(), *, force: bool = False) -> Plan:  # noqa: B008
    return build_plan(source, policy, Method("minmax"), kv=KvAsked(scales, force))


def convert(plan: Plan, source: Checkpoint, out: Path) -> Checkpoint:
    run(plan, source, out, workers=2)
    return Checkpoint.open(out)


def kv_tensors(out: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], list[float]]]:
    """By name: dtype, shape and numbers of every KV scale."""
    with TensorReader(out) as reader:
        return {
            name: (info.dtype, info.shape, np.frombuffer(reader.read(info).tobytes(), "<f4").tolist())
            for name, info in out.tensors.items()
            if name.endswith(("k_scale", "v_scale"))
        }


def scheme_of(out: Checkpoint) -> Any:
    return out.config["quantization_config"]["kv_cache_scheme"]


def codes(out: Path, **more: Any) -> set[str]:
    return {problem.code for problem in verify(out, **more).problems}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(glm4().save(tmp_path_factory.mktemp("glm4") / "src"))


@pytest.fixture(scope="module")
def mla(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="module")
def converted(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    out = tmp_path_factory.mktemp("kv") / "out"
    convert(plan_of(source, scales_of(source)), source, out)
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy to forge."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


# ---------------------------------------------------------------- what is written


def test_scales_are_tensors_of_the_output_and_the_config_has_the_scheme(source: Checkpoint, converted: Path) -> None:
    found = Checkpoint.open(converted)
    assert kv_tensors(found) == {
        f"model.layers.{i}.self_attn.attn.{kind}_scale": ("F32", (1,), list(VALUES[i][j]))
        for i in range(2)
        for j, kind in enumerate("kv")
    }
    assert scheme_of(found) == SCHEME
    plain = build_plan(source, Policy(), Method("minmax"))
    planned = plan_of(source, scales_of(source)).output
    written = sum(path.stat().st_size for path in converted.glob("*.safetensors"))
    assert (planned.bytes, planned.tensors, planned.file_bytes) == (
        plain.output.bytes + 16,
        plain.output.tensors + 4,
        written,
    )
    index = json.loads((converted / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == planned.bytes
    assert {K0, V0} <= index["weight_map"].keys()


def test_scales_by_head_have_the_shape_of_llmcompressor_and_its_strategy(source: Checkpoint, tmp_path: Path) -> None:
    found = convert(plan_of(source, scales_of(source, BY_HEAD)), source, tmp_path / "out")
    assert kv_tensors(found)[K0] == ("F32", (2, 1, 1), [0.5, 1.0])
    last = kv_tensors(found)["model.layers.1.self_attn.attn.v_scale"]
    assert last[2] == [1.0, 0.0625]
    assert scheme_of(found) == SCHEME | {"strategy": "attn_head"}
    assert verify(found.root, against=source).ok


def test_each_scale_lies_in_the_file_of_its_attention(source: Checkpoint, tmp_path: Path) -> None:
    found = convert(plan_of(source, scales_of(source), Policy(max_shard_bytes=400_000)), source, tmp_path / "out")
    assert len(found.headers) > 3
    for name, info in found.tensors.items():
        if name.endswith("k_scale"):
            assert info.file == found.tensors[name.replace("attn.k_scale", "o_proj.weight")].file


def test_bytes_do_not_depend_on_workers(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, scales_of(source), Policy(max_shard_bytes=400_000))
    for workers in (1, 2):
        run(plan, source, tmp_path / str(workers), workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_no_scales_change_no_plan(source: Checkpoint) -> None:
    plan = build_plan(source, Policy(), Method("minmax"))
    assert "kv_scales" not in plan.identity
    assert plan.hash != plan_of(source, scales_of(source)).hash


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_scales_of_the_source_are_replaced_and_it_is_said(tmp_path: Path, scheme: str) -> None:
    made = glm4(CARRIED | {"2.self_attn.k_scale": 0.125}, kv_cache_scheme=SCHEME)
    source = Checkpoint.open(made.save(tmp_path / "src"))
    policy = Policy(to="fp8") if scheme == "fp8" else Policy()
    plan = plan_of(source, scales_of(source), policy)
    assert "2 KV scales of the source are replaced by --kv-scales" in plan.warnings
    found = convert(plan, source, tmp_path / "out")
    assert len(kv_tensors(found)) == 5  # with the next-token layer's, which no file of scales has
    assert kv_tensors(found)[K0][2] == [0.5]
    assert verify(found.root, against=source).ok


def test_one_everywhere_that_nothing_vouches_for_is_called_not_calibrated(source: Checkpoint) -> None:
    ones = (((1.0,), (1.0,)),) * 2
    for word, said in (("not calibrated", True), ("carried over", True), ("certificate", False)):
        scales = scales_of(source, ones)
        plan = plan_of(source, replace(scales, layers=tuple(replace(one, source=word) for one in scales.layers)))
        assert plan.kv_scales is not None
        assert any("not calibrated (uncalibrated)" in line for line in plan.warnings) == said
        assert plan.kv_scales.statement.endswith("every scale is 1.0" + ", not calibrated" * said)


def test_findings_and_the_range_are_told(source: Checkpoint) -> None:
    scales = scales_of(source)
    layers = (scales.layers[0], replace(scales.layers[1], findings=("a channel of K has a bias",)))
    plan = plan_of(source, replace(scales, layers=layers))
    assert plan.kv_scales is not None
    assert plan.kv_scales.statement == (
        "2 layers, one scale per tensor: 2 calibrated; K 0.5 to 2, V 0.25 to 1; 1 with findings"
    )
    assert "KV scales, layer 1: a channel of K has a bias" in plan.warnings


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config_sha256": "0" * 64}, "made from another checkpoint"),
        ({"model_type": "qwen3_moe"}, "are of a qwen3_moe"),
        ({"kv_heads": 8}, "are of 8 KV heads; the source has 2"),
    ],
)
def test_scales_of_another_model_are_refused(source: Checkpoint, change: dict[str, Any], words: str) -> None:
    with pytest.raises(KizamiError, match=words) as e:
        plan_of(source, scales_of(source, **change), force=True)
    assert e.value.code == "kv_scales_mismatch"


def test_scales_of_another_attention_are_refused(source: Checkpoint) -> None:
    one_row = (((0.5,), (0.5,)),) * 2
    with pytest.raises(KizamiError, match="are of mla attention; the source has gqa"):
        plan_of(source, scales_of(source, one_row, attention="mla", kv_heads=0), force=True)


def test_scales_are_those_that_a_file_would_hold(source: Checkpoint, tmp_path: Path) -> None:
    """A number that float32 does not hold is what float32 makes of it, in the record as in the tensor."""
    found = convert(plan_of(source, scales_of(source, (((0.04,), (0.25,)), VALUES[1]))), source, tmp_path / "out")
    exact = struct.unpack("<f", struct.pack("<f", 0.04))[0]
    assert kv_tensors(found)[K0][2] == [exact]
    assert read_manifest(found.root)["kv_scales"]["document"]["layers"][0]["k"] == [exact]
    assert verify(found.root, against=source).ok


def test_scales_of_too_few_layers_are_refused(source: Checkpoint) -> None:
    with pytest.raises(KizamiError, match="are of 1 layers; the source has 2"):
        plan_of(source, scales_of(source, VALUES[:1]))


@pytest.mark.parametrize("policy", [Policy(format="gptq"), Policy(format="awq"), Policy(to="bf16")])
def test_a_config_without_a_place_for_the_scheme_is_refused(
    source: Checkpoint, mla: Checkpoint, policy: Policy
) -> None:
    with pytest.raises(KizamiError) as e:
        plan_of(source, scales_of(source), policy)
    assert e.value.code == "kv_scales_unplaced"
    assert e.value.hint is not None
    assert plan_of(mla, latent(1.0)(mla), policy).output.bytes  # of a latent nothing is written


def test_a_latent_takes_no_scale_but_one_unless_forced(mla: Checkpoint, tmp_path: Path) -> None:
    scales = latent(2.0)(mla)
    with pytest.raises(KizamiError) as e:
        plan_of(mla, scales)
    assert (e.value.code, "layer 0 has a KV scale of 2" in e.value.message) == ("kv_scales_refused", True)
    plan = plan_of(mla, scales, force=True)
    assert any(line.startswith("--force-kv-scales: layer 0") for line in plan.warnings)
    found = convert(plan, mla, tmp_path / "out")
    assert kv_tensors(found)["model.layers.1.self_attn.v_proj.v_scale"] == ("F32", (1,), [2.0])
    assert verify(found.root, against=mla).ok
    card = (found.root / "README.md").read_text()
    assert "--kv-scales FILE --force-kv-scales" in card
    assert "The KV scales were written though kizami refuses them: layer 0" in card
    assert any(hit.code == "kv_scale_on_mla" for hit in find_problems(Served.of(found), "sglang"))


def test_of_a_latent_the_range_is_stated_and_nothing_written(mla: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(mla, latent(1.0)(mla), force=True)
    assert plan.output == build_plan(mla, Policy(), Method("minmax")).output
    found = convert(plan, mla, tmp_path / "out")
    assert (kv_tensors(found), scheme_of(found)) == ({}, None)
    record = read_manifest(found.root)["kv_scales"]
    assert (record["tensors"], record["forced"]) == (0, None)
    assert "store the latent of MLA at scale 1.0" in record["statement"]
    assert record["statement"] in (found.root / "README.md").read_text()
    assert verify(found.root, against=mla, kv_scales=latent(1.0)(mla)).ok


def test_scales_of_a_latent_in_the_source_are_left_out(tmp_path: Path) -> None:
    import make_cases

    made = make_cases.tiny()
    made.shards[make_cases.shard_name(1, 3)]["model.layers.0.self_attn.k_proj.k_scale"] = make_cases.f32([0.5])
    source = Checkpoint.open(made.save(tmp_path / "src"))
    plan = plan_of(source, latent(1.0)(source))
    assert "1 KV scales of the source are left out because of --kv-scales" in plan.warnings
    assert not any(spec.name.endswith("k_scale") for step in plan.steps for spec in step.outputs)


# ---------------------------------------------------------------- resume


def test_a_resume_with_other_scales_is_refused_and_both_are_shown(source: Checkpoint, tmp_path: Path) -> None:
    policy, out = Policy(max_shard_bytes=400_000), tmp_path / "out"
    plan, other = plan_of(source, scales_of(source), policy), plan_of(source, scales_of(source, BY_HEAD), policy)
    assert plan.kv_scales is not None
    assert other.kv_scales is not None

    def stop(event: RunEvent) -> None:
        if isinstance(event, ShardDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, source, out, workers=1, on_event=stop)
    for now, shown in ((other, other.kv_scales.sha256), (build_plan(source, policy, Method("minmax")), "None")):
        with pytest.raises(KizamiError) as e:
            run(now, source, out, workers=1)
        assert e.value.code == "resume_mismatch"
        assert f"kv_scales: {plan.kv_scales.sha256[:40]}" in e.value.message
        assert f"{shown[:40]}" in e.value.message
    run(plan, source, out, workers=1)
    run(plan, source, tmp_path / "straight", workers=2)
    assert files_of(out) == files_of(tmp_path / "straight")


# ---------------------------------------------------------------- verify


def test_what_was_written_verifies(source: Checkpoint, converted: Path) -> None:
    found = verify(converted, against=source, kv_scales=scales_of(source))
    assert found.problems == ()
    assert [note.partition(":")[0] for note in found.notes] == ["KV scales are those of FILE"]


def put(out: Path, name: str, value: bytes) -> None:
    """Other bytes for a tensor; every hash agrees, and the report's checksum does not."""
    info = Checkpoint.open(out).tensors[name]
    assert len(value) == info.nbytes
    forge(out, info.file, lambda data: data.__setitem__(slice(info.begin, info.end), value))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.50000006, "other_kv_scale"),
        (0.0, "bad_kv_scale"),
        (-0.5, "bad_kv_scale"),
        (float("nan"), "bad_kv_scale"),
        (float("inf"), "bad_kv_scale"),
        (1e-45, "other_kv_scale"),
    ],
)
def test_another_scale_is_found_without_the_source(out: Path, value: float, code: str) -> None:
    put(out, K0, struct.pack("<f", value))
    assert code in codes(out)


def test_a_missing_scale_is_found_without_the_source(out: Path) -> None:
    forge_tensors(out, {V0})
    forge_rows(out, lambda rows: rows.remove(next(row for row in rows if row["name"] == V0)))
    forge_manifest(out, lambda manifest: manifest["counts"].update(kv_scale=3))
    assert codes(out) == {"missing_kv_scale"}


def test_a_scheme_without_scales_is_found(out: Path) -> None:
    names = {name for name in Checkpoint.open(out).tensors if name.endswith(("k_scale", "v_scale"))}
    forge_tensors(out, names)
    forge_rows(out, lambda rows: rows.__setitem__(slice(None), [row for row in rows if row["name"] not in names]))
    forge_manifest(out, lambda manifest: manifest.pop("kv_scales"))
    assert codes(out) == {"kv_scheme_without_scales"}


def put_scheme(out: Path, scheme: Any) -> None:
    config = json.loads((out / "config.json").read_bytes())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    forge(out, "config.json", lambda data: data.__setitem__(slice(None), dump_json(config)))


def test_scales_without_a_scheme_are_found(out: Path) -> None:
    put_scheme(out, None)
    assert codes(out) == {"kv_scales_without_scheme"}


@pytest.mark.parametrize(
    "odd",
    [
        {"strategy": "channel"}, {"strategy": None}, {"strategy": ["tensor"]}, {"strategy": "attn_head"},
        {"type": "int"}, {"num_bits": 4}, {"symmetric": False}, {"dynamic": True}, {"symmetric": 1},
        {"num_bits": 8.0}, {"dynamic": 0}, {"group_size": 128}, {"block_structure": None},
    ],
)  # fmt: skip
def test_a_scheme_of_another_form_is_found(out: Path, odd: dict[str, Any]) -> None:
    put_scheme(out, SCHEME | odd)
    assert codes(out) == {"kv_scheme"}


def test_scales_that_the_manifest_does_not_record_are_found(out: Path, source: Checkpoint) -> None:
    other = scales_of(source, (((0.5,), (0.25,)), ((4.0,), (1.0,)))).document()
    forge_manifest(out, lambda manifest: manifest["kv_scales"].update(document=other))
    assert codes(out) == {"other_kv_scale", "other_manifest"}


def test_scales_forged_in_record_tensor_and_report_are_found_by_the_source_or_the_file(
    out: Path, source: Checkpoint
) -> None:
    value, other = struct.pack("<f", 8.0), scales_of(source, (((8.0,), (0.25,)), VALUES[1]))
    plan = plan_of(source, other)
    assert plan.kv_scales is not None
    record = asdict(plan.kv_scales)
    put(out, K0, value)

    def honest(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["name"] == K0)["crc32"] = {K0: f"{zlib.crc32(value):08x}"}

    forge_rows(out, honest)
    forge_manifest(out, lambda manifest: manifest.update(kv_scales=record))
    assert codes(out) == set()
    assert codes(out, kv_scales=scales_of(source)) == {"other_kv_scales"}
    assert codes(out, against=source) == {"other_plan"}


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(tensors=0),
        lambda record: record.update(forced="because"),
        lambda record: record.update(statement="calibrated on everything"),
        lambda record: record["document"]["layers"][0].update(source="carried over"),
        lambda record: record["document"].update(kv_heads=4),
        lambda record: record["document"].update(architecture="LlamaForCausalLM"),
        lambda record: record["document"].update(model_type="llama"),
        lambda record: record["document"].update(layers=record["document"]["layers"][:1]),
    ],
)
def test_no_field_of_the_record_can_be_changed(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge_manifest(out, lambda manifest: change(manifest["kv_scales"]))
    assert "other_manifest" in codes(out)


def test_the_hash_of_the_source_is_held_to_the_source(out: Path, source: Checkpoint) -> None:
    forge_manifest(out, lambda manifest: manifest["kv_scales"]["document"].update(config_sha256="0" * 64))
    assert codes(out, against=source)


def test_scales_without_their_record_are_not_taken_for_the_sources(out: Path) -> None:
    put(out, K0, struct.pack("<f", 1.0))
    forge_manifest(out, lambda manifest: manifest.update(kv_scales=None))
    assert "other_manifest" in codes(out)


def test_report_and_record_name_the_same_voucher(out: Path) -> None:
    """The sums of sources are the same: only the rows tell."""

    def swap(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["name"] == K0)["reason"] = "FP8 KV scale, certificate"

    forge_rows(out, swap)
    assert "other_manifest" in codes(out)


@pytest.mark.parametrize("value", [7, {}, {"document": {}}, "x"])
def test_a_record_that_is_none_is_a_bad_manifest(out: Path, value: Any) -> None:
    forge_manifest(out, lambda manifest: manifest.update(kv_scales=value))
    assert codes(out) == {"bad_manifest"}


def test_a_record_with_scales_that_no_file_may_have_is_a_bad_manifest(out: Path) -> None:
    forge_manifest(out, lambda manifest: manifest["kv_scales"]["document"]["layers"][0].update(k=[0.0]))
    assert codes(out) == {"bad_manifest"}


def test_an_output_is_held_to_the_file(out: Path, source: Checkpoint, mla: Checkpoint, converted: Path) -> None:
    other = scales_of(source, (((0.5,), (0.25,)), ((2.0,), (0.5,))))
    found = verify(out, kv_scales=other).problems
    assert [problem.code for problem in found] == ["other_kv_scales"]
    assert "layer 1 k [2.0], v [1.0]" in found[0].message
    assert codes(out, kv_scales=latent(1.0)(mla)) == {"other_kv_scales"}


def test_carried_over_scales_verify_as_before(tmp_path: Path) -> None:
    source = Checkpoint.open(glm4(CARRIED, kv_cache_scheme=SCHEME).save(tmp_path / "src"))
    plan = build_plan(source, Policy(), Method("minmax"))
    assert plan.kv_scales is None
    found = convert(plan, source, tmp_path / "out")
    assert (len(kv_tensors(found)), scheme_of(found)) == (2, SCHEME)
    assert verify(found.root, against=source).ok
    assert codes(found.root, kv_scales=scales_of(source)) == {"other_kv_scales"}
    put(found.root, "model.layers.0.self_attn.k_proj.k_scale", struct.pack("<f", 0.0))
    assert "bad_kv_scale" in codes(found.root)


def test_scales_that_a_source_has_without_a_scheme_are_a_note(tmp_path: Path) -> None:
    source = Checkpoint.open(glm4(CARRIED).save(tmp_path / "src"))
    found = verify(convert(build_plan(source, Policy(), Method("minmax")), source, tmp_path / "out").root)
    assert found.ok
    assert "2 KV scales are there, and no kv_cache_scheme" in found.notes[0]
    plan = build_plan(source, Policy(), Method("minmax"))
    assert kv_statement(plan) == "the source's tensors, without a kv_cache_scheme: engines use 1.0"
    assert f"KV scales: {kv_statement(plan)}" in plan.warnings


def test_an_odd_scheme_of_the_source_is_a_note(tmp_path: Path) -> None:
    source = Checkpoint.open(glm4(CARRIED, kv_cache_scheme=SCHEME | {"num_bits": 4}).save(tmp_path / "src"))
    found = verify(convert(build_plan(source, Policy(), Method("minmax")), source, tmp_path / "out").root)
    assert found.ok
    assert "num_bits is 4, expected 8" in found.notes[0]


def test_a_carried_scheme_goes_with_its_scales(tmp_path: Path) -> None:
    made = glm4({"2.self_attn.k_proj.k_scale": 0.5}, kv_cache_scheme=SCHEME)
    source = Checkpoint.open(made.save(tmp_path / "src"))
    for mtp, scheme in (("quantize", SCHEME), ("drop", None)):
        plan = build_plan(source, Policy(mtp=mtp), Method("minmax"))  # type: ignore[arg-type]
        assert plan.quantization_config["kv_cache_scheme"] == scheme, mtp


# ---------------------------------------------------------------- readers


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_no_engine_rule_finds_fault_with_the_scales(converted: Path, engine: Any) -> None:
    found = find_problems(Served.of(Checkpoint.open(converted)), engine)
    assert [hit.code for hit in found if hit.code.startswith("kv_") and hit.severity != "note"] == []


@pytest.mark.parametrize(("values", "heads"), [(VALUES, 1), (BY_HEAD, 2)])
def test_compressed_tensors_reads_the_scheme_and_makes_parameters_of_these_shapes(
    source: Checkpoint, values: Any, heads: int
) -> None:
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    plan = plan_of(source, scales_of(source, values))
    parsed = quantization.QuantizationConfig.model_validate(plan.quantization_config).kv_cache_scheme
    assert (parsed.num_bits, parsed.type, parsed.strategy) == (8, "float", "tensor" if heads == 1 else "attn_head")
    module = torch.nn.Module()
    for kind in "kv":
        initialize_qparams(
            module, kind, parsed, observed_shape=(2, None, 64), observed_dtype=torch.bfloat16, force_zero_point=False
        )
    made = {f"model.layers.0.self_attn.attn.{name}": tuple(p.shape) for name, p in module.named_parameters()}
    assert made == {s.outputs[0].name: s.outputs[0].shape for s in plan.steps if s.place.layer == 0 and s.values}


# ---------------------------------------------------------------- the commands


def test_the_commands_tell_of_the_scales(kizami: Run, source: Checkpoint, tmp_path: Path) -> None:
    file, out = write(scales_of(source), tmp_path / "kv.json"), tmp_path / "out"
    said = "2 layers, one scale per tensor: 2 calibrated; K 0.5 to 2, V 0.25 to 1"
    planned = kizami("plan", source.root, "--kv-scales", file, "-o", tmp_path / "plan.json", "--json").json
    entries = json.loads((tmp_path / "plan.json").read_bytes())["tensors"]
    assert [(e["action"], e["source"]) for e in entries if e["name"] == K0] == [("kv_scale", None)]
    assert (planned["kv_scales"]["statement"], planned["actions"]["kv_scale"]) == (said, 4)
    done = kizami("convert", source.root, out, "--kv-scales", file, "--method", "minmax", "--json").json
    assert done["output"]["bytes"] == planned["output"]["bytes"]
    for body in (done, kizami("report", out, "--json").json):
        assert body["kv_scales"] == {"statement": said, "forced": None, "tensors": 4}
    assert f"KV scales: {said}" in kizami("report", out).out
    assert f"| KV-cache scales | {said} |" in (out / "README.md").read_text()
    assert {row["source_bytes"] for row in read_report(out) if row["action"] == "kv_scale"} == {0}
    held = kizami("verify", out, "--against", source.root, "--kv-scales", file)
    assert (held.code, "64 tensors held to the source" in held.out + held.err) == (0, True), held
    other = write(scales_of(source, BY_HEAD), tmp_path / "other.json")
    assert kizami("verify", out, "--kv-scales", other).code == 1


def test_bad_files_and_bad_options_end_with_two_and_write_nothing(
    kizami: Run, source: Checkpoint, mla: Checkpoint, tmp_path: Path
) -> None:
    zero = tmp_path / "zero.json"
    zero.write_bytes(dump_json(scales_of(source).document() | {"layers": []}))
    twice = write(latent(2.0)(mla), tmp_path / "two.json")
    for words in (("--kv-scales", zero), ("--kv-scales", tmp_path / "none.json"), ("--force-kv-scales",),
                  ("--kv-scales", twice)):  # fmt: skip
        assert kizami("convert", mla.root, tmp_path / "out", *words).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.json", "zero.json"]


@pytest.mark.parametrize("value", [float("nan"), 0.0, float("inf"), -1.0])
def test_a_scale_of_the_source_that_no_engine_could_use_is_not_copied(tmp_path: Path, value: float) -> None:
    bad = {"0.self_attn.k_proj.k_scale": value, "0.self_attn.v_proj.v_scale": 0.25}
    source = Checkpoint.open(glm4(bad, kv_cache_scheme=SCHEME).save(tmp_path / "src"))
    with pytest.raises(KizamiError) as refused:
        convert(build_plan(source, Policy(), Method("minmax")), source, tmp_path / "out")
    assert (refused.value.code, refused.value.tensor) == ("bad_kv_scale", "model.layers.0.self_attn.k_proj.k_scale")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("odd", [{"config_sha256": "0" * 64}, {"architecture": "X"}, {"statistics_sha256": "1" * 64}])
def test_scales_of_another_source_are_found_by_verify(source: Checkpoint, converted: Path, odd: dict[str, Any]) -> None:
    assert codes(converted, kv_scales=replace(scales_of(source), **odd)) == {"other_kv_scales"}


def test_scales_that_are_not_of_the_models_cache_stay(tmp_path: Path) -> None:
    """An adapter's, a vision tower's, the indexer's: `k_scale` is a common name."""
    made = glm4(CARRIED, kv_cache_scheme=SCHEME)
    strange = ["model.layers.0.mlp.adapter.k_scale", "visual.blocks.0.attn.k_scale",
               "model.layers.0.self_attn.indexer.k_scale"]  # fmt: skip
    for name in strange:
        made.shards["model-00001-of-00003.safetensors"][name] = make_cases.f32([3.0])
    source = Checkpoint.open(made.save(tmp_path / "src"))
    found = convert(plan_of(source, scales_of(source)), source, tmp_path / "out")
    assert set(strange) <= found.tensors.keys()
    assert verify(found.root, against=source).ok
