"""What `--engine llmcompressor` needs of the machine, told before anything heavy is imported or read."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from kizami.formats.errors import KizamiError

EngineMethod = Literal["gptq", "awq"]

PINNED = "0.14.0.1"  # the engine calls modules of it that are no public interface: pyproject.toml pins the same
PACKAGES = ("compressed-tensors", "llmcompressor", "torch", "transformers")
INSTALL = "pip install 'kizami[llmcompressor]' in an environment of its own"

Shape = tuple[int, int]


def versions() -> tuple[tuple[str, str], ...]:
    """(package, version) of all that decides what the engine answers. KizamiError "missing_package"."""
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            raise KizamiError(
                f"--engine llmcompressor needs {package}, which is not installed", code="missing_package", hint=INSTALL
            ) from None
    ours = dict(found)["llmcompressor"]
    if ours != PINNED:
        raise KizamiError(
            f"--engine llmcompressor needs llmcompressor {PINNED}; {ours} is installed",
            code="missing_package",
            hint=INSTALL,
        )
    return tuple(found)


def needed_memory(
    method: EngineMethod, weights: int, targets: Mapping[str, Shape], layers: Mapping[str, int | None], tokens: int
) -> int:
    """A lower bound, in bytes. weights: of the whole model; targets: [N, K] of each module to be packed, and the layer
    that it is in; tokens: in the calibration set.

    The model in BF16. GPTQ holds the float32 Hessians [K, K] of a layer's modules at once, gate and up each their own
    (modifiers/gptq/base.py), and a handful of matrices while it solves one. AWQ holds, for every expert of a layer, the
    input of its down_proj for all tokens (modifiers/transform/awq/base.py: every expert sees every token).
    """
    at_once: dict[int | None, int] = {}
    largest = 0
    for module, (rows, columns) in targets.items():
        if method == "gptq":
            held = 4 * columns * columns
            largest = max(largest, 4 * (4 * columns * columns + 3 * rows * columns))
        else:
            held = 2 * tokens * columns if module.endswith("down_proj") else 0
        layer = layers[module]
        at_once[layer] = at_once.get(layer, 0) + held
    hidden = max((columns for _, columns in targets.values()), default=0)
    return 2 * weights + max(at_once.values(), default=0) + largest + 2 * 2 * tokens * hidden


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: what the kernel calls available, and the container's limit if there is
    one (cgroup v2). None where neither is told."""
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError, IndexError):
        pass  # no such files: another system, or another container
    return min(found, default=None)


def load_engine() -> Any:
    """`run_engine` of llmcompressor_engine. llm-compressor logs to stdout while it is imported, and stdout is data."""
    with redirect_stdout(StringIO()):
        from kizami.calibration.llmcompressor.engine import run_engine
    return run_engine


def check_memory(needed: int) -> None:
    """KizamiError "out_of_memory", with the numbers."""
    available = available_memory()
    if available is not None and needed > available:
        raise KizamiError(
            f"--engine llmcompressor holds the whole model in memory: {needed:,} bytes are needed at least, "
            f"{available:,} are available",
            code="out_of_memory",
            hint="kizami's own methods need no more than one tensor at a time: leave --engine out",
        )
