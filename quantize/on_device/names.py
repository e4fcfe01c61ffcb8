"""How `--device` is spelled. Imports nothing: the command line asks before anything is loaded."""

import re

CPU = "cpu"
_SPELLED = re.compile(r"cuda(?::(\d{1,4}(?:,\d{1,4})*))?", re.ASCII)


def numbers_of(device: str) -> tuple[int, ...] | None:
    """Of `cuda:0,1` (0, 1); of `cuda` (), which means all; None of `cpu`. ValueError for anything else."""
    if device == CPU:
        return None
    match = _SPELLED.fullmatch(device)
    if match is None:
        raise ValueError(f"{device!r} is not cpu, cuda, cuda:N or cuda:N,N")
    numbers = tuple(int(word) for word in (match[1] or "").split(",") if word)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{device!r} names a device twice")
    return numbers
