"""The machine a benchmark ran on, in words that hold no path and no name of it."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIMD = ("avx2", "avx512f", "sha_ni", "asimd", "sve")  # of a /proc/cpuinfo's flags, what kernels and hashes live on


def cpu() -> dict[str, Any]:
    """Name, MHz and SIMD sets of the first core, as far as the system tells; how many cores this process may use."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    flags = first.get("flags", first.get("Features", "")).split()
    return {
        "cpu": first.get("model name") or platform.processor() or platform.machine(),
        "mhz": float(first["cpu MHz"]) if "cpu MHz" in first else None,
        "simd": [name for name in SIMD if name in flags],
        "cores": len(os.sched_getaffinity(0)),
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the checkout that this file lies in, with `+` where tracked files differ from it; None without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None


def describe() -> dict[str, Any]:
    return cpu() | {
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "kizami": version("kizami"),
        "commit": commit(),
    }
