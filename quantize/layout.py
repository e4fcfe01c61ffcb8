"""Cuts the steps into output shards: the same cut for the same plan, whatever the machine."""

from collections.abc import Sequence

from kizami.formats.errors import KizamiError
from kizami.formats.header import encode_header
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import PT_METADATA, aligned_order
from kizami.quantize.plan import Shard, Step

MAX_FILES = 99_999  # their numbers have five digits


def cut_into_shards(steps: Sequence[Step], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Greedy, in source order. A module's tensors stay together; a module larger than the limit gets its own shard."""
    groups: list[list[Step]] = []
    size = 0
    for step in steps:
        if not step.outputs:
            continue
        nbytes = step.nbytes
        if not groups or (size and nbytes and size + nbytes > max_shard_bytes):  # no file of empty tensors
            groups.append([])
            size = 0
        groups[-1].append(step)
        size += nbytes
    if len(groups) > MAX_FILES:
        raise KizamiError(
            f"the output would have {len(groups):,} files, expected at most {MAX_FILES:,}",
            code="too_many_files",
            hint="use a larger --max-shard-size",
        )
    return tuple(_shard(number, len(groups), group) for number, group in enumerate(groups, 1))


def _shard(number: int, of: int, steps: list[Step]) -> Shard:
    tensors = aligned_order([step.outputs for step in steps])
    due = {spec.name: position for position, spec in enumerate(tensors)}
    in_order = sorted(steps, key=lambda step: due[step.outputs[0].name])
    return Shard(number, shard_name(number, of), tuple(in_order), tensors, header_nbytes(tensors))


def shard_name(number: int, of: int) -> str:
    """The Hub's form (huggingface_hub, `split_state_dict_into_shards_factory`), leading zeros always."""
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def header_nbytes(tensors: Sequence[TensorSpec]) -> int:
    return len(encode_header(tensors, PT_METADATA))
