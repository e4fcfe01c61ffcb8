"""kizami against llm-compressor's model-free path, on the same files in the same run.

    python benchmarks/synthetic_checkpoint.py /tmp/bench/fp8
    python benchmarks/against_llmcompressor.py /tmp/bench/fp8 /tmp/bench/out --peer-python /path/to/venv/bin/python

Each measurement is a process of its own, imports included; kizami runs as users run it (all metrics, hashes, fsyncs).
Programs take turns, so that a slow minute of the machine hits all of them. Figures are medians. Before the first turn
each program converts a tiny checkpoint once, so that numba's disk cache and the page cache of torch are warm.
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from synthetic_checkpoint import write_checkpoint

KIZAMI = "import sys; from kizami.cli.app import main; sys.argv[0] = 'kizami'; main()"
# Every FP8 linear is named for the dequantiser (else it fails), the experts alone for the scheme: kizami's default.
PEER = r"""
import sys
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from llmcompressor import model_free_ptq

weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=int(sys.argv[3]))
experts = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
scheme = QuantizationScheme(targets=[experts], weights=weights, format="pack-quantized")
model_free_ptq(
    sys.argv[1], sys.argv[2], config=QuantizationConfig(config_groups={"group_0": scheme}, ignore=[]), device="cpu",
    converter=FP8BlockDequantizer(targets=[r"re:.*_proj(_with_mqa)?$"]),
)
"""
MEMCPY = """
import time, numpy
source = numpy.ones(1 << 28, numpy.uint8); target = numpy.zeros_like(source); best = 1e9
for _ in range(7):
    start = time.perf_counter(); numpy.copyto(target, source); best = min(best, time.perf_counter() - start)
print(source.nbytes / best)
"""


@dataclass(frozen=True)
class Run:
    """What one process cost: seconds, seconds of all its threads, peak resident bytes."""

    wall: float
    cpu: float
    peak: int


def measure(command: list[str], threads: int, log: Path) -> Run:
    """Run `command` to its end; rusage comes from wait4, so it is this child's alone."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "KIZAMI_WORKERS": str(threads)}
    os.sync()
    start = perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    wall = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {' '.join(command)}\n{log.read_text(errors='replace')[-3000:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def commands(peer_python: Path | None, group_size: int, workers: int) -> dict[str, list[str]]:
    """Program name -> command; SRC and OUT stand for the folders."""
    ours = [
        sys.executable,
        "-c",
        KIZAMI,
        "convert",
        "SRC",
        "OUT",
        "--group-size",
        str(group_size),
        "--workers",
        str(workers),
    ]
    found = {f"kizami {method}": [*ours, "--method", method] for method in ("minmax", "search")}
    if peer_python:
        found["llm-compressor"] = [str(peer_python), "-c", PEER, "SRC", "OUT", str(group_size)]
    return found


def run_program(name: str, command: list[str], source: Path, work: Path, threads: int) -> Run:
    out = work / name.replace(" ", "-")
    for folder in (out, out.with_name(out.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)
    places = {"SRC": str(source), "OUT": str(out)}
    return measure([places.get(word, word) for word in command], threads, work / f"{out.name}.log")


def tensor_places(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """Tensor -> file, first byte, length, from every safetensors header of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (path, 8 + length + begin, end - begin)
    return found


def equal_tensors(ours: Path, theirs: Path) -> tuple[int, int]:
    """Tensors with the same bytes, and tensors compared; `weight_shape` (I64 there, I32 here) is left out."""
    a, b = tensor_places(ours), tensor_places(theirs)
    names = [name for name in a.keys() | b.keys() if not name.endswith("weight_shape")]

    def data(place: tuple[Path, int, int] | None) -> bytes | None:
        if place is None:
            return None
        with place[0].open("rb") as file:
            file.seek(place[1])
            return file.read(place[2])

    return sum(data(a.get(name)) == data(b.get(name)) for name in names), len(names)


def sqnr_by_tensor(out: Path) -> dict[str, float]:
    rows = map(json.loads, (out / "kizami-report.jsonl").read_text().splitlines())
    return {row["name"]: row["sqnr_db"] for row in rows if row.get("sqnr_db") is not None}


def summarise(runs: dict[str, list[Run]], fp8_bytes: int, memcpy: float, work: Path) -> dict[str, Any]:
    """Medians and the ratios that kizami claims."""
    median = {
        name: Run(
            statistics.median(run.wall for run in of),
            statistics.median(run.cpu for run in of),
            int(statistics.median(run.peak for run in of)),
        )
        for name, of in runs.items()
    }
    peer = median.get("llm-compressor")
    programs: dict[str, dict[str, float]] = {}
    for name, run in median.items():
        speed = fp8_bytes / run.cpu
        programs[name] = asdict(run) | {"fp8_bytes_per_cpu_second": speed, "fraction_of_memcpy": speed / memcpy}
        if peer:
            programs[name] |= {
                "wall_ratio": peer.wall / run.wall, "cpu_ratio": peer.cpu / run.cpu, "peak_ratio": peer.peak / run.peak,
            }  # fmt: skip
    result: dict[str, Any] = {"fp8_bytes": fp8_bytes, "memcpy_bytes_per_second": memcpy, "programs": programs}
    minmax, search = sqnr_by_tensor(work / "kizami-minmax"), sqnr_by_tensor(work / "kizami-search")
    result["search_gain_db"] = statistics.mean(search[name] - minmax[name] for name in minmax)
    if peer:
        result["equal_tensors"], result["compared_tensors"] = equal_tensors(
            work / "kizami-minmax", work / "llm-compressor"
        )
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['fp8_bytes'] / 1e9:.3f} GB of FP8; memcpy {result['memcpy_bytes_per_second'] / 1e9:.1f} GB/s")
    print(" " * 16 + "   wall s    CPU s  peak MB  GB/s/core  of memcpy   peer's wall     CPU    peak")
    for name, row in result["programs"].items():
        ratios = "".join(f"{row[key]:7.1f}x" for key in ("wall_ratio", "cpu_ratio", "peak_ratio") if key in row)
        print(
            f"{name:16}{row['wall']:9.2f}{row['cpu']:9.2f}{row['peak'] / 1e6:9.0f}"
            f"{row['fp8_bytes_per_cpu_second'] / 1e9:11.3f}{row['fraction_of_memcpy']:11.1%}{ratios}"
        )
    print(f"search over minmax: {result['search_gain_db']:+.2f} dB SQNR, mean over the packed tensors")
    if "compared_tensors" in result:
        print(f"minmax and llm-compressor: {result['equal_tensors']} of {result['compared_tensors']} tensors bit-equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="FP8 checkpoint made by synthetic_checkpoint.py")
    parser.add_argument("work", type=Path, help="folder for the outputs (three times the INT4 size)")
    parser.add_argument(
        "--peer-python", type=Path, help="interpreter of an environment with llmcompressor; without: kizami only"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer-runs", type=int, default=1, help="the peer takes about a minute per run (default 1)")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1, help="threads of kizami and of torch in the peer (default 1)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    programs = commands(args.peer_python, args.group_size, args.workers)
    write_checkpoint(args.work / "tiny", layers=1, experts=1)
    for name, command in programs.items():
        run_program(name, command, args.work / "tiny", args.work, args.workers)
    for path in args.source.glob("*.safetensors"):
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
    memcpy = float(subprocess.run([sys.executable, "-c", MEMCPY], capture_output=True, check=True).stdout)
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    for turn in range(max(args.runs, args.peer_runs)):
        for name, command in programs.items():
            if turn < (args.peer_runs if name == "llm-compressor" else args.runs):
                runs[name].append(run_program(name, command, args.source, args.work, args.workers))
    source = tensor_places(args.source)
    fp8_bytes = sum(nbytes for name, (_, _, nbytes) in source.items() if f"{name}_scale_inv" in source)
    result = summarise(runs, fp8_bytes, memcpy, args.work)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
