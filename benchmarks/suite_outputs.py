"""What a conversion left, compared by bytes: from safetensors headers alone, whoever wrote them."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a tensor lie."""

    path: Path
    begin: int
    nbytes: int

    def data(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.nbytes)


def weight_bytes(folder: Path) -> int:
    """Of the safetensors files, headers and holes included."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def tensor_places(folder: Path) -> dict[str, Place]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = Place(path, 8 + length + begin, end - begin)
    return found


def equal_tensors(ours: Path, theirs: Path) -> tuple[int, int]:
    """Tensors with the same bytes, and tensors compared; `weight_shape` (I64 there, I32 here) is left out."""
    a, b = tensor_places(ours), tensor_places(theirs)
    names = [name for name in a.keys() | b.keys() if not name.endswith("weight_shape")]
    both = [name for name in names if name in a and name in b]
    return sum(a[name].data() == b[name].data() for name in both), len(names)
