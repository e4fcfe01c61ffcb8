"""Named sets of lm-eval tasks, asked of two servers; lm-eval asks and scores, kizami joins the answers by question."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kizami.calibration.evaluation.api_key import api_key
from kizami.formats.errors import KizamiError, printable
from kizami.formats.hidden import without_secret

# Tasks of lm-eval 0.4.13. Knowledge hardly sees what INT4 costs; the others are what people ask about.
BATTERIES: Mapping[str, tuple[str, ...]] = {
    "knowledge": ("gsm8k", "mmlu", "arc_challenge"),
    "coding": ("humaneval", "mbpp"),
    "long-context": ("niah_single_1", "niah_single_2", "niah_single_3"),
    "instructions": ("ifeval",),
}
RUNS_CODE = frozenset({"humaneval", "mbpp"})  # lm-eval executes what the model wrote
INSTALL = "pip install 'lm-eval[api]', in this environment"


@dataclass(frozen=True, slots=True)
class Battery:
    """tasks: lm-eval's names. tokenizer: a folder or Hub id, which tasks that score given answers need. limit:
    questions of each task, None for all. runs_code: whether code that the model wrote may be executed here. folder: of
    tasks that are not lm-eval's own."""

    tasks: tuple[str, ...]
    tokenizer: str | None = None
    limit: int | None = None
    runs_code: bool = False
    concurrency: int = 8
    seed: int = 0
    folder: Path | None = None


def tasks_of(batteries: Sequence[str], tasks: Sequence[str]) -> tuple[str, ...]:
    """KizamiError "bad_option" for a battery that is not there, or a name that is no task's."""
    for name in batteries:
        if name not in BATTERIES:
            known = ", ".join(BATTERIES)
            raise KizamiError(f"--battery {printable(name, 40)}; expected one of {known}", code="bad_option")
    named = [task for name in batteries for task in BATTERIES[name]] + list(tasks)
    for task in named:
        if not task or task.startswith("-") or "," in task:
            raise KizamiError(f"--task {printable(task, 60)} is no name of a task", code="bad_option")
    return tuple(dict.fromkeys(named))


def command(url: str, model: str, battery: Battery, out: Path) -> list[str]:
    """lm-eval's own command line. KizamiError "bad_option" for what it could not be told."""
    for value in (url, model, battery.tokenizer or ""):
        if set(value) & set(",= \n"):  # lm-eval splits its arguments there, and names come from servers
            shown = printable(without_secret(value, api_key()), 100)
            raise KizamiError(f"{shown} has a comma, = or space in it", code="bad_option")
    arguments = {
        "model": model,
        "base_url": f"{url.rstrip('/')}/completions",
        "num_concurrent": str(battery.concurrency),
        "tokenized_requests": "False",
        **({"tokenizer": battery.tokenizer} if battery.tokenizer else {}),
    }
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    words += ["--tasks", ",".join(battery.tasks), "--gen_kwargs", "temperature=0", "--seed", str(battery.seed)]
    words += ["--log_samples", "--output_path", str(out)]
    words += ["--limit", str(battery.limit)] if battery.limit is not None else []
    words += ["--include_path", str(battery.folder)] if battery.folder is not None else []
    return words + (["--confirm_run_unsafe_code"] if battery.runs_code else [])


def run(url: str, model: str, battery: Battery, out: Path) -> None:
    """Leaves the samples in `out`. KizamiError "missing_package", "runs_code", "lm_eval_failed"."""
    if importlib.util.find_spec("lm_eval") is None:
        raise KizamiError("lm_eval is not installed", code="missing_package", hint=INSTALL)
    if (risky := RUNS_CODE & set(battery.tasks)) and not battery.runs_code:
        raise KizamiError(
            f"{', '.join(sorted(risky))} executes code that the model wrote, on this machine",
            code="runs_code",
            hint="in a container that may break, add --run-generated-code",
        )
    words = command(url, model, battery, out)
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
        said, by_hand = (without_secret(text, api_key()) for text in (last[0], " ".join(words)))
        raise KizamiError(
            f"lm-eval ended with {done.returncode}: {printable(said, 300)}",
            code="lm_eval_failed",
            hint="run it by hand: " + printable(by_hand, 600),
        )
