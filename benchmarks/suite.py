"""Every timing of `kizami convert` that its README claims, in one command: JSON in FILE, Markdown on stdout.

    python benchmarks/suite.py --out results.json [--quick] [--peer PYTHON] [--rounds 3] [--only SECTION]

Sections: size of the source, workers, group size, method, dtype of the source, shard size against memory, and
llm-compressor with either observer, whose pins need an environment of its own: `--peer` is its interpreter. Each figure
is one of a whole process, start and imports included, with the source in the page cache and the kernels compiled; cases
of a section take turns, and figures are medians. memcpy and the disk are measured before each turn. Needs 20 GB of disk
in WORK, most of it for a shard of 16 GB; what does not fit is left out and named. `--quick` is a rehearsal on a few MB.
Exit code 1 if a program failed, 2 for a bad option.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import this_machine
from suite_figures import Found, as_json, marginal_bytes_per_cpu_second, table, target_json, target_table, targets
from suite_plan import FULL, NAMES, PEER_NAMES, QUICK, Section, Source, sections, unique_sources, why_left_out
from suite_run import Processes, run_section

SCHEMA = "kizami.benchmark/1"
PEER_VERSIONS = """
import importlib.metadata, json, llmcompressor
print(json.dumps({name: importlib.metadata.version(name) for name in ("llmcompressor", "compressed-tensors", "torch")}))
"""


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON; written anew per section")
    parser.add_argument("--quick", action="store_true", help="a few MB and one round: whether it works, not how fast")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with llm-compressor")
    parser.add_argument("--rounds", type=int, help="turns per section (default 3, with --quick 1)")
    parser.add_argument("--peer-rounds", type=int, default=1, help="of llm-compressor, half a minute each (default 1)")
    parser.add_argument("--only", action="append", choices=NAMES, help="this section alone; repeatable")
    parser.add_argument("--work", type=Path, help="folder for a temporary folder (default: the system's)")
    args = parser.parse_args(words)
    args.rounds = args.rounds or (1 if args.quick else 3)
    if args.rounds < 1 or args.peer_rounds < 1:
        parser.error("--rounds and --peer-rounds are at least 1")
    if not args.out.absolute().parent.is_dir():
        parser.error("--out: no such folder")
    if args.only and not args.peer and (alone := [name for name in args.only if name in PEER_NAMES]):
        parser.error(f"--only {alone[0]}: --peer PYTHON is missing")
    return args


def peer_versions(python: str) -> dict[str, str]:
    """SystemExit where llm-compressor cannot be imported: better now than behind all other sections."""
    try:
        done = subprocess.run([python, "-I", "-c", PEER_VERSIONS], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"--peer: no llm-compressor there: {error.__class__.__name__}", file=sys.stderr)
        raise SystemExit(2) from None
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def fitting(section: Section, work: Path) -> tuple[Section, list[dict[str, str]]]:
    """The section without the cases that there is no room for, and why."""
    free, memory = shutil.disk_usage(work).free, this_machine.memory_bytes()
    whys = {case: why_left_out(case, free, memory) for case in section.cases}
    left = [{"section": section.name, "case": case.label, "why": why} for case, why in whys.items() if why]
    cases = tuple(case for case, why in whys.items() if not why)
    return replace(section, cases=cases, same_bytes=None if left else section.same_bytes), left


def result_json(
    args: argparse.Namespace, machine: dict[str, Any], found: list[Found], left: list[dict[str, str]], seconds: float
) -> dict[str, Any]:
    size = next((one.measured for one in found if one.section.name == "size"), [])
    marginal = marginal_bytes_per_cpu_second(size[0], size[-1]) if len(size) > 1 else None
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "quick": args.quick,
        "rounds": args.rounds,
        "machine": machine,
        "sections": [as_json(one) for one in found],
        "size_marginal_bytes_per_cpu_second": marginal,
        "targets": [] if args.quick else [target_json(one) for one in targets(found)],
        "left_out": left,
        "seconds": seconds,
    }


def show(result: dict[str, Any], found: list[Found]) -> str:
    machine = result["machine"]
    load = " to ".join(f"{x:.1f}" for x in machine["load"])
    parts = [
        f"{machine['cores']} cores of {machine['cpu']}, {', '.join(machine['simd'])}, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, load average {load}; Python {machine['python']}, "
        f"NumPy {machine['numpy']}, numba {machine['numba']}, kizami {machine['kizami']} at {machine['commit']}; "
        f"{result['date']}, {result['rounds']} rounds, {result['seconds']:.0f} s.",
        *map(table, found),
    ]
    if result["size_marginal_bytes_per_cpu_second"]:
        rate = result["size_marginal_bytes_per_cpu_second"] / 1e9
        parts.append(f"From the smallest size to the largest: {rate:.2f} GB/s per core, the start not counted.")
    parts.append("Too small to judge targets by." if result["quick"] else target_table(targets(found)))
    parts += [f"Left out: {one['section']}, {one['case']}: {one['why']}." for one in result["left_out"]]
    return "\n\n".join(parts)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    begin = time.monotonic()
    machine = this_machine.describe() | {"load": [os.getloadavg()[0]]}
    machine["peer"] = peer_versions(args.peer) if args.peer else None
    sources = QUICK if args.quick else FULL
    planned = sections(sources, machine["cores"], has_peer=bool(args.peer), peer_rounds=args.peer_rounds)
    planned = [one for one in planned if not args.only or one.name in args.only]
    peers = () if args.peer else PEER_NAMES
    left = [{"section": name, "case": "llm-compressor", "why": "no --peer PYTHON was given"} for name in peers]
    found: list[Found] = []

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="kizami-suite-", dir=args.work) as folder:
        tiny = {"fp8": sources.small if args.quick else Source(1, 1), "bf16": Source(1, 1, dtype="bf16")}
        processes = Processes(Path(folder), args.peer, tiny, (8 if args.quick else 256) << 20)
        while planned:
            section, missing = fitting(planned.pop(0), processes.work)
            left += missing
            if section.cases:
                found.append(run_section(section, args.rounds, processes, say))
            processes.clear()
            processes.forget(unique_sources(planned))
            machine["load"] = [machine["load"][0], os.getloadavg()[0]]
            result = result_json(args, machine, found, left, time.monotonic() - begin)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(show(result, found))
    return 1 if any(row.error for one in found for row in one.rows) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the temporary folder goes, too
    sys.exit(main())
