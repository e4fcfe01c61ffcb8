"""Which page-integrity mode sees which fault, and whether any of them ever aborts a request with nothing wrong.

    python benchmarks/page_faults.py [--steps N] [--faults N] [--seed S] [--json FILE]

A simulated engine (page_simulator.py) gets one fault of one kind (page_injections.py) in each of N runs of 140 steps,
once per mode (page_guards.py) with the same seed; a ledger that the modes do not see knows whether a wrong byte was
read. Then all modes together watch N steps without a fault, on four pools, with generations that wrap at 2^32.

    injected   runs in which the fault was put in
    harmful    of these, runs in which without any check a request reads a wrong byte
    before     of the harmful: noticed, and no request read a wrong byte
    late       noticed, but a wrong byte was read first; every request that read one was aborted in the end
    missed     a request that read a wrong byte was never aborted
    early      not harmful without a check, noticed all the same
    false      requests aborted with nothing wrong: all bytes right, all pages theirs, nobody else writing to them
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from page_guards import MODES, Checks
from page_injections import KINDS, Kind
from page_simulator import World
from page_traffic import Load

WARM, LENGTH = 50, 140  # steps until the fault, and in all
STRETCH = 25_000
LOADS = (Load(), Load(page=4, width=24, pages=160), Load(page=16, width=6, pages=44), Load(families=40, remote=0.8))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `finished`: requests that came to their end after the fault."""

    injected: bool
    victims: int
    unnoticed: int  # victims that were never aborted
    aborted: int
    refused: int
    false: int
    finished: int

    @property
    def noticed(self) -> bool:
        return self.aborted + self.refused > 0


@dataclass(slots=True)
class Count:
    """A cell of the table."""

    injected: int = 0
    harmful: int = 0
    before: int = 0
    late: int = 0
    missed: int = 0
    early: int = 0
    false: int = 0
    aborted: int = 0
    refused: int = 0
    victims: int = 0
    stopped: int = 0  # runs in which no request came to its end after the fault

    def add(self, run: Outcome, unchecked: Outcome) -> None:
        harmful = unchecked.victims > 0 or run.victims > 0
        self.injected += run.injected
        self.harmful += harmful
        self.before += harmful and run.victims == 0 and run.noticed
        self.late += run.victims > 0 and run.unnoticed == 0
        self.missed += run.unnoticed > 0
        self.early += not harmful and run.noticed
        self.false += run.false
        self.aborted += run.aborted
        self.refused += run.refused
        self.victims += run.victims
        self.stopped += run.finished == 0


def run(kind: Kind, mode: str, seed: int, load: Load = LOADS[0]) -> Outcome:
    """140 steps with one fault of this kind from step 50 on, as soon as there is a place for it."""
    world = World(load, Checks(load, mode), seed)
    injected, finished = False, 0
    for step in range(LENGTH):
        world.begin()
        if step >= WARM and not injected and kind.when == "before check":
            injected = kind.inject(world)
        world.check()
        if step >= WARM and not injected and kind.when == "after check":
            injected = kind.inject(world)
        world.finish()
        if not injected:
            finished = world.tally.events["finished"]
    tally = world.tally
    return Outcome(
        injected, len(tally.victims), len(tally.victims.keys() - tally.aborted.keys()), len(tally.aborted),
        len(tally.refused), len(tally.false), tally.events["finished"] - finished,
    )  # fmt: skip


def table(kinds: tuple[Kind, ...], modes: tuple[str, ...], faults: int, seed: int) -> dict[str, dict[str, Count]]:
    """kind -> mode -> counts of `faults` runs."""
    counts = {kind.name: {mode: Count() for mode in modes} for kind in kinds}
    for kind in kinds:
        for i in range(faults):
            unchecked = run(kind, "none", seed + i)
            for mode in modes:
                counts[kind.name][mode].add(unchecked if mode == "none" else run(kind, mode, seed + i), unchecked)
    return counts


def without_faults(steps: int, seed: int, mode: str = MODES[-1]) -> dict[str, Any]:
    """Aborts, findings and wrong reads in steps without a fault: none is right.

    In stretches, each with a pool, a seed and generations of its own; these begin so far below 2^32 that they wrap.
    """
    started = time.perf_counter()
    totals: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for i, begin in enumerate(range(0, steps, STRETCH)):
        load = LOADS[i % len(LOADS)]
        guard = Checks(load, mode, first_generation=2**32 - 2 * (1 + i % 20))
        world = World(load, guard, seed + i)
        for _ in range(min(STRETCH, steps - begin)):
            world.step()
        wrapped = (guard.tags.current[1:] >= 0).sum()
        found = {name: n for name, n in guard.tags.stats.items() if name != "none"}
        totals += Counter(
            aborts=len(world.tally.aborted), refused=len(world.tally.refused), findings=sum(found.values()),
            wrong_reads=len(world.tally.victims), pages=load.pages - 1, pages_wrapped=int(wrapped),
        )  # fmt: skip
        events += world.tally.events
    names = ("aborts", "refused", "findings", "wrong_reads", "pages", "pages_wrapped")
    result = {"steps": steps, "mode": mode, "seed": seed} | {name: totals[name] for name in names}
    return result | {"events": dict(events), "seconds": round(time.perf_counter() - started, 1)}


def markdown(counts: dict[str, dict[str, Count]]) -> str:
    """A row per kind, a column per mode: before / late / missed of the harmful."""
    modes = [mode for mode in next(iter(counts.values())) if mode != "none"]
    lines = ["| fault | injected | harmful unchecked | " + " | ".join(modes) + " |", "|---" * (len(modes) + 3) + "|"]
    for kind in KINDS:
        if kind.name in counts:
            row = counts[kind.name]
            cells = [f"{row[m].before} / {row[m].late} / {row[m].missed}" for m in modes]
            unchecked = row["none"]
            lines.append(f"| {kind.name} | {unchecked.injected} | {unchecked.harmful} | " + " | ".join(cells) + " |")
    false = [f"{sum(row[m].false for row in counts.values())}" for m in modes]
    lines.append("| requests aborted with nothing wrong | | | " + " | ".join(false) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="without faults")
    parser.add_argument("--faults", type=int, default=40, help="runs per kind and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = table(KINDS, MODES, args.faults, args.seed) if args.faults else {}
    if counts:
        print(markdown(counts), flush=True)
    quiet = without_faults(args.steps, args.seed) if args.steps else {}
    if quiet:
        print(json.dumps(quiet, indent=2))
    if args.json:
        kinds = {kind.name: {"public": kind.public, "role": kind.role} for kind in KINDS}
        cells = {kind: {mode: asdict(count) for mode, count in row.items()} for kind, row in counts.items()}
        result = {"schema": "kizami.bench.page-faults/1", "kinds": kinds, "faults": cells, "without faults": quiet}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    bad = sum(count.false for row in counts.values() for count in row.values())
    bad += sum(quiet.get(what, 0) for what in ("aborts", "refused", "findings", "wrong_reads"))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
