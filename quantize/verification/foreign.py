"""An INT4 checkpoint that kizami did not write, such as Kimi's own: what its files say, held against each other.

There is no manifest, so there are no hashes, no report and no totals to hold it to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kizami.formats.checkpoint import Checkpoint
from kizami.formats.dialects import Dialect, find_encoded_weights
from kizami.formats.errors import KizamiError
from kizami.formats.families import Role, find_family
from kizami.formats.packed_source import check_weight_shape
from kizami.formats.reader import TensorReader
from kizami.quantize.manifest import MANIFEST
from kizami.quantize.threads import thread_map
from kizami.quantize.verification.files import Problem
from kizami.quantize.verification.structure import rules_of
from kizami.quantize.verification.tensors import scale_faults

NEVER_ASKED = (Role.EMBEDDING, Role.HEAD, Role.ROUTER, Role.NORM, Role.VISION)
NOTE = f"there is no {MANIFEST}: hashes cannot be checked, and damage that leaves the structure whole goes unseen"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A checkpoint with INT4 weights in pack-quantized form, whoever wrote it."""

    checkpoint: Checkpoint
    dialect: Dialect

    @staticmethod
    def open(folder: Path) -> "Foreign | None":
        """None where there are no such weights. KizamiError where the files do not fit each other."""
        checkpoint = Checkpoint.open(folder)
        dialect = find_encoded_weights(checkpoint.config, checkpoint.tensors)
        return Foreign(checkpoint, dialect) if dialect.packed else None

    def problems(self, workers: int) -> list[Problem]:
        return [*self._shapes(), *self._scales(workers), *self._rules()]

    def _shapes(self) -> Iterator[Problem]:
        """That every weight has its tensors, and that their dtypes and shapes fit, is known from the headers."""
        with TensorReader(self.checkpoint) as reader:
            for weight in self.dialect.packed.values():
                if weight.shape_tensor is None:
                    continue
                values = reader.read(weight.shape_tensor).view({"I32": "<i4", "I64": "<i8"}[weight.shape_tensor.dtype])
                try:
                    check_weight_shape(values.tolist(), weight)
                except KizamiError as e:
                    yield Problem(e.code, e.message, e.file, e.tensor)

    def _scales(self, workers: int) -> Iterator[Problem]:
        scales = [weight.scale for weight in self.dialect.packed.values()]
        with TensorReader(self.checkpoint) as reader:
            found = thread_map(workers, lambda info, _: scale_faults(reader.read(info), info.dtype), scales)
            for info, (fault, _) in zip(scales, found, strict=True):
                if fault is not None:
                    yield Problem("bad_scale", fault, info.file, info.name)

    def _rules(self) -> Iterator[Problem]:
        """Not of what engines never ask about: Kimi's own list leaves out the router, `language_model.lm_head` and the
        vision tower, which are plain weights to them (serving engines' models/deepseek_v2.py, kimi_k25.py)."""
        family, _ = find_family(self.checkpoint.config, self.checkpoint.tensors)
        rules = rules_of(self.checkpoint.config)
        forms = dict.fromkeys(self.dialect.packed, "int4") | dict.fromkeys(self.dialect.weights, "fp8")
        for info in self.checkpoint.tensors.values():
            if info.name.endswith(".weight") and len(info.shape) == 2:
                forms.setdefault(info.name.removesuffix(".weight"), "none")
        for module, form in forms.items():
            if family.place(module).role not in NEVER_ASKED and (said := rules(module)) != form:
                yield Problem("config_rules", f"is {form}, but the config's rules say {said}", "config.json", module)
