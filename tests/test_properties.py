"""What holds for every input of a kind, by inputs that nobody chose."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import make_cases
import mutations
import numpy as np
import pytest
from fuzz.fuzz_readers import check_header, check_index, check_json
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.index import encode_index
from kizami.formats.tensors import DTYPE_BITS, TensorSpec
from kizami.quantize import reference as ref
from kizami.quantize.linear import NonFiniteError, dequantize_rows, quantize_linear
from kizami.quantize.pipeline import run
from kizami.quantize.plan import Plan
from kizami.quantize.planner import build_plan
from kizami.quantize.run.job_folder import ShardRecord
from kizami.quantize.run.journal import Journal
from kizami.quantize.settings import Method, Policy

examples = settings(derandomize=True, deadline=None, max_examples=100)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)

# ---------------------------------------------------------------- headers, indexes, JSON


SPECS = st.lists(
    st.builds(
        TensorSpec,
        TEXT.filter(lambda name: name != "__metadata__"),
        st.sampled_from([dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0]),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda spec: spec.name,
)


@examples
@given(SPECS, st.data())
def test_a_header_with_one_wrong_byte_is_refused_or_is_what_safetensors_reads_too(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    file = bytearray(encode_header(specs, {"format": "pt"}))
    size = len(file)
    file += bytes(i % 251 for i in range(sum(spec.nbytes for spec in specs)))
    header = check_header(bytes(file))
    assert header is not None
    assert {info.spec for info in header.tensors} == set(specs)
    at, value = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 255))
    file[at] = value
    check_header(bytes(file))  # compares names, dtypes, shapes and bytes


@examples
@given(st.dictionaries(TEXT, TEXT.filter(lambda name: name.isalnum()).map(lambda s: f"{s}.safetensors"), min_size=1))
def test_an_index_that_is_encoded_is_read_back(weight_map: dict[str, str]) -> None:
    assert check_index(encode_index(weight_map, 0)) == weight_map


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@examples
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_json_that_any_writer_may_write_is_read_as_python_reads_it(value: dict[str, Any]) -> None:
    assert check_json(json.dumps(value).encode()) is not None


# ---------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.good_source().save(tmp_path_factory.mktemp("properties") / "src")


IGNORED = [r"re:.*\.experts\.0\..*", r"re:.*\.1\.(gate|up)_proj$", "model.layers.1.mlp.experts.1.down_proj"]
POLICIES = st.builds(
    Policy,
    group_size=st.just(32),
    rest=st.sampled_from(["bf16", "fp8"]),
    mtp=st.sampled_from(["quantize", "keep", "drop"]),
    ignore=st.lists(st.sampled_from(IGNORED), max_size=2, unique=True).map(tuple),
    max_shard_bytes=st.sampled_from([1, 1000, 5000, 20_000, 10**9]),
)


@examples
@given(policy=POLICIES)
def test_a_plan_uses_every_source_tensor_once_and_counts_every_byte(source: Path, policy: Policy) -> None:
    checkpoint = Checkpoint.open(source)
    plan = build_plan(checkpoint, policy, Method())
    used = Counter(step.weight.name for step in plan.steps)
    used.update(step.encoding.scale.name for step in plan.steps if step.encoding)
    assert used == Counter(dict.fromkeys(checkpoint.tensors, 1))
    planned = Counter(spec for step in plan.steps for spec in step.outputs)
    assert set(planned.values()) == {1}
    assert planned == Counter(spec for shard in plan.shards for spec in shard.tensors)
    assert len({spec.name for spec in planned}) == len(planned)
    for shard in plan.shards:
        assert shard.header_nbytes == len(encode_header(shard.tensors, {"format": "pt"}))
        assert len(shard.steps) == 1 or sum(step.nbytes for step in shard.steps) <= policy.max_shard_bytes
    assert plan.output.bytes == sum(spec.nbytes for spec in planned)


def shuffled(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    items = [(key, shuffled(item, rng)) for key, item in value.items()]
    rng.shuffle(items)
    return dict(items)


@settings(examples, max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_keys_and_of_files_does_not_show_in_the_plan(source: Path, seed: int) -> None:
    rng = random.Random(seed)
    expected = build_plan(Checkpoint.open(source), Policy(), Method())
    copy = source.with_name("shuffled")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    rng.shuffle(names)
    for name in names:
        data = (source / name).read_bytes()
        mixed = json.dumps(shuffled(json.loads(data), rng)).encode() if name.endswith(".json") else data
        (copy / name).write_bytes(mixed)
    plan = build_plan(Checkpoint.open(copy), Policy(), Method())
    assert plan.hash == expected.hash
    assert plan.steps == expected.steps
    assert plan.shards == expected.shards


# ---------------------------------------------------------------- arithmetic


WORDS = arrays(np.int32, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.integers(-(2**31), 2**31 - 1))


@examples
@given(WORDS)
def test_words_are_unpacked_and_packed_without_loss(words: np.ndarray) -> None:
    codes = ref.unpack(words)
    assert ((codes >= -8) & (codes <= 7)).all()
    np.testing.assert_array_equal(ref.pack(codes), words)
    np.testing.assert_array_equal(make_cases.pack(codes), words)


WEIGHTS = arrays(np.float32, (2, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True))


@examples
@given(weight=WEIGHTS, method=st.sampled_from([Method("minmax"), Method("signed"), Method("search")]))
def test_what_is_packed_are_the_codes_of_the_scales_beside_them(weight: np.ndarray, method: Method) -> None:
    made = quantize_linear(weight, None, None, 32, method)
    scale = ref.from_bf16(made.scale)
    codes = ref.unpack(made.packed)
    assert np.isfinite(scale).all()
    assert (scale != 0).all()
    if method.name == "minmax":
        expected, scales = ref.minmax(weight, 32)
        np.testing.assert_array_equal(scale, scales)
        np.testing.assert_array_equal(codes, expected)
    else:
        assert ref.is_nearest(weight, codes, scale, 32).all()


ALL_CODES = np.arange(256, dtype=np.uint8).reshape(1, 256)
FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


@settings(examples, max_examples=300)
@given(st.floats(min_value=-0.0, width=32, allow_nan=False, allow_infinity=False))
def test_all_codes_under_any_scale_are_decoded_as_the_oracle_does(value: float) -> None:
    scale = np.full((8, 1), value, np.float32)
    codes = ALL_CODES[:, FINITE]
    expected = ref.to_bf16(ref.dequantize(codes, scale, (1, 256)))
    finite = np.isfinite(ref.from_bf16(expected))
    good = np.ascontiguousarray(codes[:, finite[0]])
    np.testing.assert_array_equal(dequantize_rows(good, scale, (1, 256), 0), expected[:, finite[0]])
    for code in (*codes[~finite][:1], 0x7F, 0xFF):  # too large for BF16, and the two NaN
        spoiled = np.append(good[:, :5], np.uint8(code)).reshape(1, -1)
        with pytest.raises(NonFiniteError) as caught:
            dequantize_rows(spoiled, scale, (1, 256), 7)
        assert (caught.value.row, caught.value.col) == (7, spoiled.shape[1] - 1)


# ---------------------------------------------------------------- the journal


Unfinished = tuple[Path, Checkpoint, Plan, dict[str, bytes]]


@pytest.fixture(scope="module")
def unfinished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    """A run that ended after its second shard, and the files of one that did not."""
    folder = tmp_path_factory.mktemp("journal")
    checkpoint = Checkpoint.open(source)
    plan = build_plan(checkpoint, Policy(max_shard_bytes=8000), Method("minmax"))
    run(plan, checkpoint, folder / "clean", workers=1)
    append = Journal.append

    def append_twice(self: Journal, record: ShardRecord) -> None:
        append(self, record)
        if len(self.done) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", append_twice)
        with pytest.raises(KeyboardInterrupt):
            run(plan, checkpoint, folder / "out", workers=1)
    (folder / "out.partial").rename(folder / "unfinished")
    return folder, checkpoint, plan, mutations.load(folder / "clean")


def resume(unfinished: Unfinished, name: str, data: bytes) -> str | None:
    """Goes on from `name` with these bytes; None if the output is right, else the refusal's code."""
    folder, checkpoint, plan, clean = unfinished
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "out.partial", ignore_errors=True)
    shutil.copytree(folder / "unfinished", folder / "out.partial")
    (folder / "out.partial" / ".kizami" / name).write_bytes(data)
    try:
        run(plan, checkpoint, folder / "out", workers=1)
    except KizamiError as error:
        assert not (folder / "out").exists()
        return error.code
    assert mutations.load(folder / "out") == clean
    return None


@pytest.mark.slow
def test_a_journal_cut_anywhere_is_resumed_or_refused_and_never_gives_other_bytes(
    unfinished: Unfinished,
) -> None:
    data = (unfinished[0] / "unfinished/.kizami/journal.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    assert len(ends) >= 3  # the identity, and two shards
    rng = random.Random(4)
    cuts = {0, 1, *(end + by for end in ends for by in (-1, 0, 1) if end + by <= len(data))}
    cuts |= set(rng.sample(range(len(data)), 25))
    begun = len(b'{"identity":')  # with less nothing tells whose file it is
    for cut in sorted(cuts):
        refusal = "out_exists" if cut < begun else "damaged_journal" if cut < ends[0] else None
        assert resume(unfinished, "journal.jsonl", data[:cut]) == refusal, cut


@pytest.mark.slow
@pytest.mark.parametrize("name", ["journal.jsonl", "rows-00001.jsonl", "rows-00002.jsonl"])
def test_one_wrong_byte_in_the_work_folder_is_refused_or_repaired(unfinished: Unfinished, name: str) -> None:
    data = (unfinished[0] / "unfinished/.kizami" / name).read_bytes()
    rng = random.Random(name)
    codes = Counter[str | None]()
    for at in rng.sample(range(len(data)), 40 if name == "journal.jsonl" else 12):
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << rng.randrange(8)
        codes[resume(unfinished, name, bytes(spoiled))] += 1
    assert codes.keys() <= {None, "damaged_journal", "resume_mismatch"}
    assert codes[None] if name != "journal.jsonl" else len(codes) == 3
