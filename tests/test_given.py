"""Codes that another program has chosen: taken as they are, measured, proved as far as that goes, resumed as one unit.

The engine here is a stand-in that nobody could mistake for a good one: codes of minmax, every seventh one moved.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import files_of

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.reader import TensorReader
from kizami.formats.writer import ShardWriter, WrittenShard
from kizami.quantize import reference
from kizami.quantize.calibrated.solver import pack, source_weight
from kizami.quantize.decode import packed_of
from kizami.quantize.given import CODES, RECORD, engine_facts, given_specs, given_steps
from kizami.quantize.pipeline import RunEvent, ShardDone, Started, run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.report import read_report
from kizami.quantize.settings import Method, Policy
from kizami.quantize.verification.tensors import check_codes
from kizami.quantize.verify import verify

LIBRARIES = {"llmcompressor": "0.14.0.1"}
POLICY = Policy(max_shard_bytes=300_000)
EXPERTS = 12  # packed modules of the tiny checkpoint that are in the model, and as many in its MTP layer


def plan_of(checkpoint: Checkpoint, policy: Policy = POLICY, name: str = "gptq", tokens: str = "a") -> Plan:
    facts = engine_facts(tokens, 4096, ["text.txt"], LIBRARIES, {})
    method = Method(f"llmcompressor-{name}", stats=facts["sha256"])  # type: ignore[arg-type]
    return build_plan(checkpoint, policy, method, facts)


class Engine:
    """Writes what `quantize/given.py` reads; `calls` counts."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint, shift: int = 1) -> None:
        self.plan, self.checkpoint, self.shift, self.calls = plan, checkpoint, shift, 0

    def __call__(self, path: Path) -> WrittenShard:
        self.calls += 1
        g = self.plan.policy.group_size
        steps = given_steps(self.plan)
        specs = [spec for step in steps for spec in given_specs(step, g)]
        with TensorReader(self.checkpoint) as reader, ShardWriter(path, specs) as writer:
            for step in steps:
                codes, scale = reference.minmax(source_weight(step, reader), g)
                codes[:, ::7] = np.clip(codes[:, ::7] + self.shift, -8, 7)
                for spec, array in zip(given_specs(step, g), (pack(codes), reference.to_bf16(scale)), strict=True):
                    writer.append(spec.name, array)
            return writer.finish()


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="module")
def made(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    out = tmp_path_factory.mktemp("given") / "out"
    plan = plan_of(source)
    run(plan, source, out, engine=Engine(plan, source))
    return plan, out


def test_the_output_holds_the_engines_codes_and_scales(made: tuple[Plan, Path], source: Checkpoint) -> None:
    plan, out = made
    opened = Checkpoint.open(out)
    assert len(given_steps(plan)) == EXPERTS
    with TensorReader(opened) as ours, TensorReader(source) as theirs:
        for step in given_steps(plan):
            packed, scale = packed_of("pack-quantized", step.module, step.shape, 32, opened, ours)
            codes, steps = reference.minmax(source_weight(step, theirs), 32)
            codes[:, ::7] = np.clip(codes[:, ::7] + 1, -8, 7)
            np.testing.assert_array_equal(reference.unpack(packed), codes)
            np.testing.assert_array_equal(reference.from_bf16(scale), steps)


def test_the_mtp_layer_is_packed_by_search_and_says_so(made: tuple[Plan, Path], source: Checkpoint) -> None:
    rows = [row for row in read_report(made[1]) if row["dtype"] == "INT4"]
    assert [row["method"] for row in rows if not row["mtp"]] == ["llmcompressor-gptq"] * EXPERTS
    mtp = [row for row in rows if row["mtp"]]
    assert [row["method"] for row in mtp] == ["search"] * EXPERTS
    assert {row["fallback"] for row in mtp} == {"the engine's model has no MTP layer"}
    searched = made[1].parent / "searched"
    run(build_plan(source, POLICY, Method()), source, searched)
    theirs = {row["name"]: row for row in read_report(searched)}
    assert all(row["error_energy"] == theirs[row["name"]]["error_energy"] for row in mtp)


def test_nothing_of_the_engine_is_left_in_the_output(made: tuple[Plan, Path]) -> None:
    assert not (made[1] / ".kizami").exists()


def test_the_manifest_names_engine_tokens_and_libraries(made: tuple[Plan, Path]) -> None:
    manifest = json.loads((made[1] / "kizami.json").read_text())
    assert manifest["method"] == "llmcompressor-gptq"
    assert manifest["calibration"]["libraries"] == LIBRARIES
    assert manifest["calibration"]["tokens_sha256"] == "a"
    card = (made[1] / "README.md").read_text()
    assert "kizami convert SRC OUT --engine llmcompressor --method gptq --data FILE" in card
    assert "GPTQ of llm-compressor" in card
    assert "chosen by another program (llmcompressor 0.14.0.1)" in card
    assert "with no calibration data" not in card


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize("layout", ["pack-quantized", "gptq", "awq"])
def test_verify_proves_what_can_be_proved(source: Checkpoint, tmp_path: Path, name: str, layout: Any) -> None:
    plan = plan_of(source, replace(POLICY, format=layout, group_size=64), name)
    run(plan, source, tmp_path / "out", engine=Engine(plan, source))
    found = verify(tmp_path / "out", against=source)
    assert found.problems == ()
    assert found.checked["tensors against the source"] > 2 * EXPERTS


def test_verify_finds_another_scale_than_max_over_7_5() -> None:
    w = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    codes, steps = reference.minmax(w, 32)
    gptq, awq = Method("llmcompressor-gptq", stats="x"), Method("llmcompressor-awq", stats="x")
    assert check_codes(w, codes, steps, 32, gptq) is None
    assert check_codes(w, -codes, steps, 32, gptq) is None  # error feedback may have led anywhere
    steps[2, 1] *= 2
    assert check_codes(w, codes, steps, 32, gptq) == "scales are not max|W| / 7.5"
    assert check_codes(w, codes, steps, 32, awq) is None
    assert check_codes(w, codes, -steps, 32, awq) == "a scale is negative"


def test_the_note_on_awq_is_in_card_and_warnings(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source, name="awq")
    manifest = run(plan, source, tmp_path / "out", engine=Engine(plan, source))
    assert any("count the factors as errors" in text for text in manifest["warnings"])
    assert "count the factors as errors" in (tmp_path / "out" / "README.md").read_text()


class Cut(BaseException):
    """The run ends here as if it were killed."""


def cut_after(shards: int) -> Callable[[RunEvent], None]:
    def listen(event: RunEvent) -> None:
        if isinstance(event, ShardDone) and event.done == shards:
            raise Cut

    return listen


@pytest.fixture
def partial(source: Checkpoint, tmp_path: Path) -> Path:
    """OUT.partial after the engine and two shards."""
    plan = plan_of(source)
    with pytest.raises(Cut):
        run(plan, source, tmp_path / "out", engine=Engine(plan, source), workers=1, on_event=cut_after(2))
    return tmp_path / "out.partial"


def test_a_resumed_run_does_not_ask_the_engine_again(
    source: Checkpoint, partial: Path, made: tuple[Plan, Path]
) -> None:
    plan = plan_of(source)
    engine, events = Engine(plan, source), []
    run(plan, source, partial.with_name("out"), engine=engine, on_event=events.append)
    assert engine.calls == 0
    assert 2 <= next(event for event in events if isinstance(event, Started)).resumed < len(plan.shards)
    assert files_of(partial.with_name("out")) == files_of(made[1])


@pytest.mark.parametrize("file", [CODES, RECORD])
def test_a_damaged_answer_is_asked_for_again_and_all_shards_are_made_from_the_new_one(
    source: Checkpoint, partial: Path, file: str
) -> None:
    path = partial / ".kizami" / file
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    plan = plan_of(source)
    engine, events = Engine(plan, source, shift=2), []
    run(plan, source, partial.with_name("out"), engine=engine, on_event=events.append)
    assert engine.calls == 1
    assert next(event for event in events if isinstance(event, Started)).resumed == 0
    clean = partial.with_name("clean")
    run(plan, source, clean, engine=Engine(plan, source, shift=2))
    assert files_of(partial.with_name("out")) == files_of(clean)


def test_a_finished_run_that_only_lacks_its_rename_needs_no_engine(source: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(source)
    last = cut_after(len(plan.shards))
    with pytest.raises(Cut):
        run(plan, source, tmp_path / "out", engine=Engine(plan, source), workers=1, on_event=last)
    (tmp_path / "out.partial" / ".kizami" / CODES).unlink()
    engine = Engine(plan, source)
    run(plan, source, tmp_path / "out", engine=engine)
    assert engine.calls == 0


@pytest.mark.parametrize("change", [{"tokens": "b"}, {"name": "awq"}])
def test_other_tokens_or_another_method_do_not_resume(source: Checkpoint, partial: Path, change: Any) -> None:
    plan = plan_of(source, **change)
    with pytest.raises(KizamiError) as found:
        run(plan, source, partial.with_name("out"), engine=Engine(plan, source))
    assert found.value.code == "resume_mismatch"


def test_restart_throws_the_answer_away(source: Checkpoint, partial: Path) -> None:
    plan = plan_of(source, tokens="b")
    engine = Engine(plan, source)
    run(plan, source, partial.with_name("out"), engine=engine, restart=True)
    assert engine.calls == 1


@pytest.mark.parametrize("fault", ["fewer", "zero", "infinite"])
def test_an_answer_that_is_none_is_refused(source: Checkpoint, tmp_path: Path, fault: str) -> None:
    plan = plan_of(source)
    g = plan.policy.group_size
    steps = given_steps(plan)[fault == "fewer" :]

    def engine(path: Path) -> WrittenShard:
        with ShardWriter(path, [spec for step in steps for spec in given_specs(step, g)]) as writer:
            for step in steps:
                packed, scale = (np.ones(spec.shape, np.int32) for spec in given_specs(step, g))
                writer.append(given_specs(step, g)[0].name, packed)
                bits = np.where(scale, {"zero": 0x8000, "infinite": 0x7F80}.get(fault, 0x3F80), 0).astype(np.uint16)
                writer.append(given_specs(step, g)[1].name, bits)
            return writer.finish()

    with pytest.raises(KizamiError) as found:
        run(plan, source, tmp_path / "out", engine=engine)
    assert found.value.code == "bad_given"
    assert not (tmp_path / "out").exists()


def test_the_answer_counts_in_the_free_space_that_is_asked_for(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kizami.quantize.given import given_bytes
    from kizami.quantize.place import needed_bytes

    plan = plan_of(source)
    searched = build_plan(source, POLICY, Method())
    more = needed_bytes(plan, plan.shards, 0) - needed_bytes(searched, searched.shards, 0)
    assert more == given_bytes(plan) == EXPERTS * (128 * 256 // 2 + 128 * 256 // 32 * 2)
