"""Kill `kizami convert` at random moments, run the same command again, and compare every byte with a clean run.

    python benchmarks/kill_rounds.py WORK

By default 200 rounds on a synthetic source of 340 MB in 16 shards, made in WORK. Each round starts a real process,
ends it with SIGKILL (in every fifth round SIGTERM), in every third round kills the resuming process too, and then lets
the command finish. The moments come from `--seed`: half of them are spread evenly over the clean run's duration, a
quarter falls behind a random shard, and a quarter into the finish. Exit code 1 if a byte differs, OUT was ever there
and not whole, or a process ended otherwise than it should.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from synthetic_checkpoint import write_checkpoint

JOURNAL = ".kizami"
LIMIT = 300.0  # seconds that one process may take; more is a hang
PHASES = ("start", "before the first shard", "between shards", "finish", "tidying", "after the end")


def hashes(folder: Path) -> dict[str, str]:
    """File below `folder` -> SHA-256, without the journal's folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(f"{JOURNAL}/"):
            with open(path, "rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@dataclass
class Bench:
    source: Path
    out: Path
    options: list[str]

    @property
    def partial(self) -> Path:
        return self.out.with_name(f"{self.out.name}.partial")

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kizami.cli", "convert", str(self.source), str(self.out), *self.options]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def convert(self) -> tuple[int, str]:
        with self.start() as process:
            return self.end(process)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            _, said = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return -1000, f"still running after {LIMIT:.0f} s"
        return process.returncode, said

    def clear(self) -> None:
        for folder in (self.out, self.partial):
            shutil.rmtree(folder, ignore_errors=True)

    def recorded(self) -> int:
        """Shards in the journal; -1 without a journal."""
        try:
            return (self.partial / JOURNAL / "journal.jsonl").read_bytes().count(b"\n") - 1
        except OSError:
            return -1

    def phase(self, shards: int) -> str:
        """What a run that was killed leaves."""
        if self.out.exists():
            return "tidying" if (self.out / JOURNAL).exists() else "after the end"
        done = self.recorded()
        if done < 0:
            return "start"
        return "before the first shard" if done == 0 else "between shards" if done < shards else "finish"


@dataclass
class Clean:
    files: dict[str, str]
    shards: int
    seconds: float  # of the whole process
    finish: float  # from the last shard's line in the journal to the end
    shard: float  # from one line in the journal to the next


def clean_run(bench: Bench) -> Clean:
    """The second of two runs is timed: the first one may have compiled the kernels."""
    for _ in range(2):
        bench.clear()
        began = first = last = time.monotonic()
        seen = -1
        with bench.start() as process:
            while process.poll() is None:
                if (now := bench.recorded()) > seen:
                    seen, last = now, time.monotonic()
                    first = last if seen < 1 else first
                time.sleep(0.001)
            code, said = bench.end(process)
        ended = time.monotonic()
        if code != 0:
            raise SystemExit(f"the clean run ended with {code}: {said}")
    shards = len(json.loads((bench.out / "kizami.json").read_bytes())["shards"])
    return Clean(hashes(bench.out), shards, ended - began, ended - last, (last - first) / shards)


def interrupt(bench: Bench, clean: Clean, number: int, moment: float, after: int) -> tuple[str, str | None]:
    """Runs the command and sends it signal `number` at `moment` (0 to 1) of the run; or, if `after` shards are awaited
    first, of what one shard, or the finish, takes. Returns the phase and what was wrong, if anything."""
    span = clean.finish if after == clean.shards else clean.shard if after else clean.seconds
    with bench.start() as process:
        while after and process.poll() is None and bench.recorded() < after and not bench.out.exists():
            time.sleep(0.0005)
        try:
            process.wait(span * moment)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        code, said = bench.end(process)
    phase = bench.phase(clean.shards)
    if bench.out.exists() and hashes(bench.out) != clean.files:
        return phase, "OUT is there and not whole"
    allowed = {0, -signal.SIGKILL if number == signal.SIGKILL else 143}
    if phase == "start" and number == signal.SIGTERM:
        allowed.add(-signal.SIGTERM)  # the interpreter's own start
    return phase, None if code in allowed else f"signal {number} gave exit code {code}: {said.strip()}"


def play(bench: Bench, clean: Clean, rng: random.Random, at: int, moment: float) -> tuple[list[str], list[str]]:
    """One round: phases of its kills, and what was wrong."""
    bench.clear()
    number = signal.SIGTERM if at % 5 == 4 else signal.SIGKILL
    after = {2: rng.randint(1, clean.shards - 1), 3: clean.shards}.get(at % 4, 0)
    kills = [(number, moment, after)]
    kills += [(signal.SIGKILL, rng.random(), 0)] * (at % 3 == 1)
    phases, wrong = [], []
    for number, when, behind in kills:
        phase, problem = interrupt(bench, clean, number, when, behind)
        phases.append(phase)
        wrong += [problem] if problem else []
        if phase == "after the end":
            break
    if phases[-1] != "after the end":
        code, said = bench.convert()
        wrong += [f"the same command gave {code}: {said.strip()}"] if code != 0 else []
    if bench.partial.exists() or (bench.out / JOURNAL).exists():
        wrong.append("something is left over")
    now = hashes(bench.out)
    wrong += [f"differs: {name}" for name in sorted(now.keys() | clean.files) if now.get(name) != clean.files.get(name)]
    return phases, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path, help="a folder for source and outputs; 1.3 GB by default")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, help="another checkpoint (default: made in WORK)")
    parser.add_argument("--max-shard-size", default="40MB", help="of the output (default 40MB: 16 shards)")
    parser.add_argument("--workers", default="2")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    source = args.source or args.work / "fp8"
    if not source.exists():
        write_checkpoint(source, layers=3, experts=1)
    before = hashes(source)
    bench = Bench(source, args.work / "out", ["--max-shard-size", args.max_shard_size, "--workers", args.workers])
    clean = clean_run(bench)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"source {size / 1e6:.0f} MB, {clean.shards} shards, clean run {clean.seconds:.2f} s", flush=True)
    rng = random.Random(args.seed)
    moments = [(i + rng.random()) / args.rounds for i in range(args.rounds)]
    rng.shuffle(moments)
    seen: Counter[str] = Counter()
    failed = 0
    for at, moment in enumerate(moments):
        phases, wrong = play(bench, clean, rng, at, moment)
        seen.update(phases)
        failed += bool(wrong)
        for problem in wrong:
            print(f"round {at}, {' then '.join(phases)}: {problem}", flush=True)
    if hashes(source) != before:
        failed += 1
        print("the source has changed")
    bench.clear()
    counts = ", ".join(f"{phase} {seen[phase]}" for phase in PHASES if seen[phase])
    print(f"{args.rounds} rounds, {sum(seen.values())} kills ({counts}): {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
