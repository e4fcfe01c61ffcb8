r"""What each method costs a model: perplexity, KL divergence to the FP8 source and top-1 agreement, with intervals.

    python benchmarks/calibrated_methods.py smollm2-moe-fp8 results --heldout texts/heldout.txt \
        --methods minmax search weighted gptq --group-sizes 32 64 128 --stats smollm2.stats

`kizami convert` writes every variant; its tensors go into the model that the FP8 source was decoded into, in float32.
A method may carry a clip allowance: search@0.5, weighted@none. llmcompressor:gptq is `convert --engine llmcompressor`.
results.json keeps the figures of every window, so that a run may be stopped, repeated and extended; results.md is made
from it. All intervals are 95 % bootstrap intervals over windows, and differences are paired: window by window.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_memory
import numpy as np
import torch
import transformers


@dataclass(frozen=True, slots=True)
class Variant:
    """`name` as the command line spells it, and a group size."""

    name: str
    group_size: int

    @property
    def options(self) -> list[str]:
        engine, _, method = self.name.rpartition(":")
        method, _, allowance = method.partition("@")
        options = ["--method", method, "--group-size", str(self.group_size)]
        return (
            options + (["--engine", engine] if engine else []) + (["--clip-allowance", allowance] if allowance else [])
        )

    @property
    def needs_stats(self) -> bool:
        return self.name.startswith(("weighted", "gptq"))


def convert(source: Path, out: Path, variant: Variant, stats: Path | None, more: list[str], python: str) -> float:
    """Seconds it took."""
    command = [python, "-m", "kizami.cli", "convert", source, out, *variant.options, "--quiet", "--workers", "1", *more]
    if variant.needs_stats:
        if stats is None:
            raise SystemExit(f"{variant.name} needs --stats, a folder that `kizami calibrate` wrote")
        command += ["--stats", stats]
    started = time.monotonic()
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in command], check=True, env=one_thread, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def settings(args: argparse.Namespace, tokens: torch.Tensor) -> dict[str, Any]:
    """What results of one file have in common."""
    return {
        "source": args.source.name,
        "source_index_sha256": _sha256((args.source / "model.safetensors.index.json").read_bytes()),
        "heldout": args.heldout.name,
        "windows": list(tokens.shape),
        "tokens_sha256": _sha256(tokens.numpy().tobytes()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def scores_to_row(scores: in_memory.Scores) -> dict[str, list[float]]:
    return {name: [round(x, 9) for x in getattr(scores, name).tolist()] for name in ("nll", "kl", "agree")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Adds what is missing to results.json, row by row."""
    file = args.results.with_suffix(".json")
    tokens = in_memory.windows(args.source, args.heldout, args.windows, args.length)
    common = settings(args, tokens)
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": common, "rows": {}}
    if results["settings"] != common:
        raise SystemExit(f"{file} is of other settings: {results['settings']}, now {common}")
    wanted = [Variant(name, g) for g in args.group_sizes for name in args.methods]
    missing = [v for v in wanted if f"{v.name} g{v.group_size}" not in results["rows"]]
    if not missing:
        return results
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        model = in_memory.load(args.source)
        reference = in_memory.Reference(model, tokens, Path(scratch))
        results["reference"] = scores_to_row(reference.scores)
        for variant in missing:
            out = Path(scratch) / "int4"
            took = convert(args.source, out, variant, args.stats, args.convert_options, args.python)
            in_memory.fill(model, in_memory.Folder(out))
            scores = reference.compare(model)
            row = {"method": variant.name, "group_size": variant.group_size, "convert_seconds": round(took, 1)}
            results["rows"][f"{variant.name} g{variant.group_size}"] = row | scores_to_row(scores)
            file.write_text(json.dumps(results))
            shutil.rmtree(out)
            print(f"{variant.name} g{variant.group_size}: KL {scores.kl.mean():.5f}, {took:.1f} s", file=sys.stderr)
    return results


def table(results: dict[str, Any], baseline: str, names: list[str] | None = None) -> str:
    """Markdown: one row per variant; differences to the baseline and to the row above, of the same group size."""
    ref = np.array(results["reference"]["nll"])
    count, length = results["settings"]["windows"]
    lines = [
        f"{results['settings']['source']}, {count} x {length} tokens of {results['settings']['heldout']}; "
        f"perplexity of FP8 {_perplexity(ref)}",
        "",
        f"| group | method | perplexity, ratio to FP8 | KL to FP8, nats | KL minus `{baseline}`'s "
        "| KL minus the row above's | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in results["rows"].values() if names is None or row["method"] in names]
    order = {name: i for i, name in enumerate(names or dict.fromkeys(row["method"] for row in rows))}
    for size in sorted({row["group_size"] for row in rows}):
        of_size = sorted((r for r in rows if r["group_size"] == size), key=lambda r: order[r["method"]])
        base = next((r for r in of_size if r["method"] == baseline), None)
        for row, above in zip(of_size, [None, *of_size[:-1]], strict=True):
            ratio = in_memory.interval(np.array(row["nll"]) - ref)
            cells = [
                f"g{size}",
                f"`{row['method']}`",
                f"{_perplexity(np.array(row['nll']))}, x {np.exp(ratio.mean):.3f} [{np.exp(ratio.low):.3f}, "
                f"{np.exp(ratio.high):.3f}]",
                _spread(in_memory.interval(np.array(row["kl"]))),
                _difference(row, base),
                _difference(row, above),
                f"{np.mean(row['agree']):.2%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _perplexity(nll: np.ndarray) -> str:
    return f"{np.exp(nll.mean()):.2f}"


def _spread(found: in_memory.Interval, sign: str = "") -> str:
    return f"{found.mean:{sign}.5f} [{found.low:{sign}.5f}, {found.high:{sign}.5f}]"


def _difference(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None or other is row:
        return ""
    found = in_memory.interval(np.array(row["kl"]) - np.array(other["kl"]))
    percent = f"{found.mean / np.mean(other['kl']):+.1%} "
    return f"{percent}{_spread(found, '+')}" + ("" if found.outside_zero else " (not shown)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the FP8 checkpoint")
    parser.add_argument("results", type=Path, help="where .json and .md go, without the ending")
    parser.add_argument("--heldout", type=Path, required=True, help="text that was not calibrated on")
    parser.add_argument("--methods", nargs="+", default=["minmax", "search"])
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--stats", type=Path, help="what `kizami calibrate` wrote")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--baseline", default="search")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has kizami for `convert`")
    parser.add_argument("--convert-options", nargs=argparse.REMAINDER, default=[], help="the rest goes to `convert`")
    parser.add_argument("--scratch", type=Path, help="a folder for one output and the log-probabilities of FP8")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results = measure(args)
    text = table(results, args.baseline)
    args.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
