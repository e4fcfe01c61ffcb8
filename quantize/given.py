"""Codes and scales that an engine outside of kizami has chosen (`--engine`): a file beside the journal holds them, and
the run takes them from there instead of choosing its own.

The file is one unit: it is made before the first shard, and a run that is killed after that finds it whole. Shards that
were made from another one are made anew.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kizami.formats.errors import KizamiError
from kizami.formats.files import file_sha256, open_regular, read_exactly
from kizami.formats.header import read_header
from kizami.formats.int4_layout import packed_specs
from kizami.formats.run_log import FOLDER, canonical, read_own
from kizami.formats.strict_json import dump_json, parse_json_object
from kizami.formats.tensors import TensorSpec
from kizami.formats.writer import WrittenShard, write_file_durably
from kizami.quantize.calibrated.statistics import Chosen
from kizami.quantize.plan import Plan, Step
from kizami.quantize.run.job_folder import is_regular
from kizami.quantize.run.journal import Journal
from kizami.quantize.settings import GIVEN, Method

CODES, RECORD = "given.safetensors", "given.json"
NOT_IN_MODEL = "the engine's model has no MTP layer"
DTYPES = {"I32": np.int32, "BF16": np.uint16}

Make = Callable[[Path], WrittenShard]


def is_given(method: Method, step: Step) -> bool:
    """Whether the step's codes and scales are the engine's. transformers' models have no MTP layers: `search` packs
    them."""
    return method.name in GIVEN and step.action == "quantize" and not step.place.in_mtp


def own_method(method: Method, step: Step) -> Method:
    """What really chose the step's scales and codes."""
    if method.name not in GIVEN or is_given(method, step):
        return method
    return replace(method, name="search", stats=None)


def chosen_instead(method: Method, step: Step) -> Chosen | None:
    """What the report's row tells of a step that the engine does not see."""
    return Chosen("search", None, NOT_IN_MODEL) if own_method(method, step) is not method else None


def given_steps(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if is_given(plan.method, step)]


def given_specs(step: Step, group_size: int) -> tuple[TensorSpec, TensorSpec]:
    """weight_packed I32 [N, K/8] and weight_scale BF16 [N, K/g], whatever the layout of the output."""
    packed, _, scale = packed_specs(step.module, step.shape[0], step.shape[1], group_size)
    return packed, scale


def given_bytes(plan: Plan) -> int:
    """What the file takes on the disk, its header not counted."""
    return sum(spec.nbytes for step in given_steps(plan) for spec in given_specs(step, plan.policy.group_size))


def engine_facts(
    tokens_sha256: str, tokens: int, data: list[str], libraries: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What plan, manifest and card tell of an engine's run, as `calibrated.facts_of` does of STATS. settings: what else
    decides its answer."""
    facts = {"tokens_sha256": tokens_sha256, "tokens": tokens, "data": data, "libraries": dict(libraries)}
    digest = hashlib.sha256(canonical(facts | {"settings": settings}).encode())
    return {"sha256": digest.hexdigest(), **facts}


def kept_bytes(partial: Path) -> int:
    """What of that is there from an earlier run."""
    path = partial / FOLDER / CODES
    return path.lstat().st_size if path.is_file() else 0


def prepare(journal: Journal, make: Make) -> bool:
    """Lets `make` write the file unless an earlier run of the same job has; True if it was made now. Then no shard that
    the journal knows was made from it, and all are forgotten."""
    folder = journal.partial / FOLDER
    if _is_whole(folder):
        return False
    written = make(folder / CODES)
    record = {"file": written.file, "bytes": written.nbytes, "sha256": written.sha256}
    write_file_durably(folder / RECORD, dump_json(record))
    for number in list(journal.done):
        journal.forget(number)
    return True


def _is_whole(folder: Path) -> bool:
    """By its hash: a resume builds on bytes, not on names."""
    if (data := read_own(folder / RECORD)) is None:
        return False
    try:
        record = parse_json_object(data, RECORD, what="record")
        whole = is_regular(folder / CODES) and file_sha256(folder / CODES, CODES) == record.get("sha256")
    except (OSError, KizamiError):
        return False
    return whole


class Given:
    """The opened file. Safe to use from threads; a context manager that closes it. KizamiError "bad_given" where it is
    not that of the plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        path = folder / CODES
        infos = {info.name: info for info in read_header(path, CODES).tensors}
        self._group_size = plan.policy.group_size
        specs = [spec for step in given_steps(plan) for spec in given_specs(step, self._group_size)]
        if {name: info.spec for name, info in infos.items()} != {spec.name: spec for spec in specs}:
            raise _bad(f"has {len(infos)} tensors that are not the {len(specs)} of the plan")
        self._infos, self._fd = infos, open_regular(path, CODES)

    def __enter__(self) -> "Given":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read(self, step: Step) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
        """packed int32 [N, K/8] and scale, BF16 bits [N, K/g]; scales are finite and not zero."""
        packed, scale = (self._array(spec) for spec in given_specs(step, self._group_size))
        unusable = ((scale & 0x7FFF) == 0) | ((scale & 0x7F80) == 0x7F80)
        if unusable.any():
            i, j = (int(x) for x in np.argwhere(unusable)[0])
            raise _bad(f"scale of group {j} of row {i} is zero or not finite", step.module)
        return packed, scale

    def _array(self, spec: TensorSpec) -> NDArray[Any]:
        info = self._infos[spec.name]
        data = read_exactly(self._fd, info.begin, info.nbytes, CODES)
        return np.frombuffer(data, DTYPES[spec.dtype]).reshape(spec.shape)


def _bad(message: str, tensor: str | None = None) -> KizamiError:
    return KizamiError(
        message, code="bad_given", file=f"{FOLDER}/{CODES}", tensor=tensor, hint="start over with --restart"
    )
