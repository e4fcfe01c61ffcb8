"""The plan: one action and one reason per tensor, every output byte counted, before any weight is read."""

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import ScaledWeight
from kizami.formats.families import Place
from kizami.formats.packed_source import PackedWeight
from kizami.formats.run_log import canonical
from kizami.formats.tensors import TensorInfo, TensorSpec
from kizami.quantize.settings import Method, Policy

OutputForm = Literal["int4", "fp8", "none"]
Action = Literal["quantize", "repack", "to_fp8", "keep_fp8", "dequantize", "copy", "drop", "kv_scale"]
OUTPUT_FORMS: dict[Action, OutputForm] = {
    "quantize": "int4",  # rounded to INT4
    "repack": "int4",  # INT4 in the source: the same codes and scales, in the output's layout
    "to_fp8": "fp8",  # rounded to FP8 blocks
    "keep_fp8": "fp8",
}
PLAN_FORMAT = 2  # part of the hash: raise it whenever the same inputs would give other bytes


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one source tensor (a weight together with its scale), or a tensor that no source has: a KV scale,
    of which `weight` has name, dtype and shape only."""

    module: str  # the tensor's name without ".weight" or ".weight_packed"
    action: Action
    reason: str
    place: Place
    weight: TensorInfo  # of an INT4 source: its weight_packed
    encoding: ScaledWeight | PackedWeight | None  # how the source holds an FP8 or INT4 weight; None for anything else
    outputs: tuple[TensorSpec, ...]  # none for "drop"
    values: tuple[float, ...] = ()  # of "kv_scale": what is written, exact in float32

    @property
    def form(self) -> OutputForm:
        return OUTPUT_FORMS.get(self.action, "none")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, not of the words that hold them."""
        return (
            (self.encoding.rows, self.encoding.cols) if isinstance(self.encoding, PackedWeight) else self.weight.shape
        )

    @property
    def is_linear(self) -> bool:
        """Whether this is the 2-D weight of a module: what an engine may have a quantized form for."""
        return len(self.shape) == 2 and self.weight.name != self.module

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        if self.action == "kv_scale":
            return ()
        match self.encoding:
            case ScaledWeight():
                return self.weight, self.encoding.scale
            case PackedWeight():
                return self.encoding.tensors
            case None:
                return (self.weight,)

    @property
    def nbytes(self) -> int:
        return sum([spec.nbytes for spec in self.outputs])  # a list: asked of every step, and generators take longer

    @property
    def source_nbytes(self) -> int:
        return sum([info.nbytes for info in self.sources])

    @property
    def weights(self) -> int:
        """Numbers of the source that this is made of."""
        return prod(self.shape) if self.sources else 0


@dataclass(frozen=True, slots=True)
class KvMerge:
    """What plan, manifest and card keep of --kv-scales.

    document: the scales in kizami's own JSON. forced: why they would have been refused without --force-kv-scales, None
    where they were not. tensors: how many are written, none for a cache that engines store without a scale.
    """

    document: dict[str, Any]
    statement: str
    forced: str | None
    tensors: int

    @property
    def sha256(self) -> str:
        """Of the values, however their file spells them."""
        return hashlib.sha256(canonical(self.document).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its steps in the order they are computed, its tensors in the order they lie on disk."""

    number: int  # from 1
    file: str
    steps: tuple[Step, ...]
    tensors: tuple[TensorSpec, ...]
    header_nbytes: int

    @property
    def data_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def file_nbytes(self) -> int:
        return self.header_nbytes + self.data_nbytes


@dataclass(frozen=True, slots=True)
class Output:
    """Exact totals of what a convert writes. bytes: tensor data, the index's total_size; file_bytes: with headers."""

    bytes: int
    file_bytes: int
    tensors: int
    shards: int


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know; equal hashes mean equal tensors."""

    policy: Policy
    method: Method
    family: str
    dialect: str
    steps: tuple[Step, ...]  # in source order, dropped ones included
    shards: tuple[Shard, ...]
    quantization_config: dict[str, Any]
    config: dict[str, Any]  # the output's config.json
    source: dict[str, Any]  # identity: name, bytes and header hash of every file, hash of the config
    warnings: tuple[str, ...] = field(default=())
    calibration: dict[str, Any] | None = None  # what manifest and card tell of the statistics; method.stats pins them
    kv_scales: KvMerge | None = None  # of --kv-scales; their tensors are steps, where they have any

    @cached_property
    def output(self) -> Output:
        return Output(
            bytes=sum(shard.data_nbytes for shard in self.shards),
            file_bytes=sum(shard.file_nbytes for shard in self.shards),
            tensors=sum(len(shard.tensors) for shard in self.shards),
            shards=len(self.shards),
        )

    @cached_property
    def source_bytes(self) -> int:
        return int(self.source["bytes"])

    @cached_property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(step.action for step in self.steps).items()))

    @cached_property
    def packed(self) -> list[Step]:
        return [step for step in self.steps if step.form == "int4"]

    @cached_property
    def packed_shapes(self) -> dict[tuple[str, int, int], str]:
        """(part, N, K) -> the first packed module that has them."""
        shapes: dict[tuple[str, int, int], str] = {}
        for step in self.packed:
            rows, cols = step.shape
            shapes.setdefault((step.place.part, rows, cols), step.module)
        return shapes

    @cached_property
    def bits_per_weight(self) -> float:
        """Stored bits per source weight over the whole output (scales and shapes included)."""
        return 8 * self.output.bytes / max(1, sum(step.weights for step in self.steps if step.action != "drop"))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what decides the bytes: format, settings, source identity, every action. No times, no paths."""
        digest = hashlib.sha256(canonical(self.identity).encode())
        for step in self.steps:
            written = [(spec.name, spec.dtype, spec.shape) for spec in step.outputs]
            digest.update(f"{step.module}\0{step.action}\0{written}\n".encode())
        digest.update(canonical(self.config).encode())
        return digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the run it resumes."""
        return {
            "plan_format": PLAN_FORMAT,
            "policy": asdict(self.policy),
            "method": {key: value for key, value in asdict(self.method).items() if key != "stats" or value is not None},
            "source": self.source,
            **({} if self.kv_scales is None else {"kv_scales": self.kv_scales.sha256}),
        }


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Names, sizes and header hashes of the files and the hash of the config. Sizes and headers pin every tensor's
    name, dtype, shape and place; the data itself is compared by `verify --against`."""
    return {
        "bytes": sum(info.nbytes for head in checkpoint.headers.values() for info in head.tensors),
        "tensors": sum(len(head.tensors) for head in checkpoint.headers.values()),
        "config_sha256": hashlib.sha256(canonical(checkpoint.config).encode()).hexdigest(),
        "files": {
            name: {"bytes": head.file_size, "header_sha256": head.sha256} for name, head in checkpoint.headers.items()
        },
    }
