"""The modules of a checkpoint with their tensors: what is really there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kizami.formats.engines.served import Described
from kizami.formats.families import Family, Place

Form = Literal["packed", "fp8", "plain", "qweight", "int8", "other", "none"]

FORM_WORDS: Mapping[Form, str] = {
    "packed": "packed integers (weight_packed)",
    "fp8": "FP8",
    "plain": "a plain float weight",
    "qweight": "GPTQ or AWQ (qweight)",
    "int8": "I8",
    "other": "a form that was not modelled",
    "none": "no weight",
}
FLOATS = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True)
class Part:
    """A module: its tensors by the last component of their names. `form` says how its weight is stored."""

    name: str
    place: Place
    leaves: Mapping[str, Described]
    form: Form

    def shape(self, bits: int = 4) -> tuple[int, int] | None:
        """(rows, columns) of the weight; `bits` of a packed one."""
        if self.form == "packed":
            rows_cols = self.leaves["weight_packed"].shape
            return (rows_cols[0], rows_cols[1] * 32 // bits) if len(rows_cols) == 2 else None
        if self.form == "qweight":  # GPTQ packs rows of the transposed weight: [K/8, N]; AWQ [K, N/8]
            return None
        weight = self.leaves.get("weight")
        return (weight.shape[0], weight.shape[1]) if weight is not None and len(weight.shape) == 2 else None


def find_parts(tensors: Mapping[str, Described], family: Family) -> dict[str, Part]:
    leaves: dict[str, dict[str, Described]] = {}
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        leaves.setdefault(module, {})[leaf] = info
    return {name: Part(name, family.place(name), found, _form(found)) for name, found in leaves.items()}


def _form(leaves: Mapping[str, Described]) -> Form:
    packed, weight = leaves.get("weight_packed"), leaves.get("weight")
    if packed is not None:
        return "packed" if packed.dtype == "I32" else "other"  # NVFP4 and MXFP4 pack into U8
    if "qweight" in leaves:
        return "qweight"
    if weight is None:
        return "none"
    if weight.dtype == "F8_E4M3":
        return "fp8"
    if weight.dtype in FLOATS:
        return "plain"
    return "int8" if weight.dtype == "I8" else "other"
