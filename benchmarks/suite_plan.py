"""What `suite.py` measures: sources, cases and sections, for this many cores. Arithmetic only; nothing runs here."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Program = Literal["kizami", "llm-compressor"]
GB = 1e9
VOCAB, Q_LORA, KV_ROWS = 1024, 1536, 576  # of synthetic_checkpoint.py


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of synthetic_checkpoint.py. sparse: headers over holes, whose bytes are all zero."""

    layers: int
    experts: int = 4
    layers_per_file: int = 1
    dtype: Literal["fp8", "bf16"] = "fp8"
    sparse: bool = False
    hidden: int = 7168
    intermediate: int = 2048

    @property
    def nbytes(self) -> int:
        """Of its weights, to a part in a thousand: block scales, norms and headers are not counted."""
        linears = 3 * (self.experts + 1) * self.intermediate + Q_LORA + KV_ROWS
        width = 1 if self.dtype == "fp8" else 2
        return self.hidden * (self.layers * linears * width + 2 * VOCAB * 2)

    @property
    def files(self) -> int:
        return -(-self.layers // self.layers_per_file)

    @property
    def options(self) -> list[str]:
        """Of synthetic_checkpoint.py."""
        names = ("layers", "experts", "layers_per_file", "dtype", "hidden", "intermediate")
        words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        return words + ["--sparse"] * self.sparse


@dataclass(frozen=True, slots=True)
class Case:
    """One process that is measured. method: kizami's; of llm-compressor "minmax" or "mse", its observers. most_rounds:
    of cases whose figures do not vary, or that take minutes."""

    label: str
    source: Source
    method: str = "minmax"
    group_size: int = 32
    workers: int = 1
    program: Program = "kizami"
    most_rounds: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Cases that take turns and are compared with the first of them. same_bytes: (i, j), cases whose outputs should be
    equal."""

    name: str
    title: str
    cases: tuple[Case, ...]
    same_bytes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    small: Source
    middle: Source
    large: Source
    bf16: Source
    one_file: Source
    holes: tuple[Source, ...]


FULL = Sources(
    small=Source(1),
    middle=Source(4),
    large=Source(17),
    bf16=Source(4, dtype="bf16"),  # as many weights as `middle`, so twice its bytes
    one_file=Source(4, layers_per_file=4),
    holes=(Source(17, layers_per_file=17, sparse=True), Source(68, layers_per_file=68, sparse=True)),
)
QUICK = Sources(
    small=Source(1, hidden=512, intermediate=256),
    middle=Source(2, hidden=512, intermediate=256),
    large=Source(4, hidden=512, intermediate=256),
    bf16=Source(2, dtype="bf16", hidden=512, intermediate=256),
    one_file=Source(2, layers_per_file=2, hidden=512, intermediate=256),
    holes=(Source(16, layers_per_file=16, sparse=True, hidden=512, intermediate=256),),
)
NAMES = ("size", "workers", "group-size", "method", "dtype", "shards", "peer", "peer-mse")
PEER_NAMES = NAMES[-2:]


def worker_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all of them."""
    return sorted({cores, *(1 << i for i in range(cores.bit_length()) if 1 << i <= cores)})


def size_words(nbytes: int) -> str:
    return f"{nbytes / GB:.2g} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.2g} MB"


def file_words(source: Source) -> str:
    count = "one file" if source.files == 1 else f"{source.files} files"
    return f"{size_words(source.nbytes)} in {count}{' (holes)' if source.sparse else ''}"


def sections(sources: Sources, cores: int, *, has_peer: bool, peer_rounds: int = 1) -> list[Section]:
    """In the order of NAMES; without the last two where there is no peer."""
    middle = sources.middle
    spread = middle if cores <= 4 else sources.large  # 1 GB on many cores is over before they are all at work
    by_size = [Case(size_words(s.nbytes), s) for s in (sources.small, middle, sources.large)]
    by_workers = [Case(f"{n} worker{'s' * (n > 1)}", spread, "search", workers=n) for n in worker_counts(cores)]
    by_group = [Case(f"groups of {g}", middle, "search", g) for g in (32, 64, 128)]
    by_method = [Case(f"`{name}`", middle, name) for name in ("minmax", "signed", "search")]
    by_dtype = [Case(s.dtype.upper(), s, "search") for s in (middle, sources.bf16)]
    by_file = [Case(file_words(s), s) for s in (middle, sources.one_file)]
    by_file += [Case(file_words(s), s, most_rounds=1) for s in sources.holes]
    peer = [
        Case("kizami `minmax`", middle, workers=cores),
        Case("kizami `search`", middle, "search", workers=cores),
        Case("llm-compressor", middle, workers=cores, program="llm-compressor", most_rounds=peer_rounds),
    ]
    found = [
        Section("size", "Size of the source (`minmax`, g32, one worker)", tuple(by_size)),
        Section("workers", "Workers (`search`, g32)", tuple(by_workers)),
        Section("group-size", "Group size (`search`, one worker)", tuple(by_group)),
        Section("method", "Method (g32, one worker)", tuple(by_method)),
        Section("dtype", "Dtype of the source, as many weights (`search`, g32, one worker)", tuple(by_dtype)),
        Section("shards", "Memory against shard size (`minmax`, g32, one worker)", tuple(by_file)),
    ]
    if has_peer:
        searching = [peer[1], replace(peer[2], label="llm-compressor, MSE observer", method="mse", most_rounds=1)]
        found += [
            Section("peer", f"llm-compressor (g32, {cores} workers)", tuple(peer), same_bytes=(0, 2)),
            Section("peer-mse", f"Searched scales (g32, {cores} workers)", tuple(searching)),
        ]
    return found


def why_left_out(case: Case, free_disk: int, memory: int) -> str | None:
    """None where there is room for source and output, and for the source in the page cache. Bytes."""
    nbytes = case.source.nbytes
    on_disk = 0 if case.source.sparse else nbytes
    if (needed := on_disk + nbytes) > free_disk:  # no output is larger than its source
        return f"{size_words(needed)} of disk needed, {size_words(free_disk)} free"
    if on_disk > memory // 2:
        return f"{size_words(on_disk)} would not stay in the page cache of {size_words(memory)} of memory"
    return None


def total_rounds(case: Case, rounds: int) -> int:
    return rounds if case.most_rounds is None else min(rounds, case.most_rounds)


def unique_sources(some: Iterable[Section]) -> set[Source]:
    return {case.source for section in some for case in section.cases}
