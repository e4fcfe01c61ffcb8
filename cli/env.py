"""`kizami env`: versions for a bug report."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kizami.cli import options as o
from kizami.cli.command import Command
from kizami.cli.output import Ui

BASE = ("kizami", "numpy", "numba", "llvmlite", "safetensors", "typer", "rich", "huggingface_hub", "pyyaml")
OPTIONAL = ("torch", "transformers", "accelerate", "pyarrow", "compressed-tensors", "llmcompressor")


def env(quiet: o.Quiet = False, verbose: o.Verbose = False, json: o.Json = False, debug: o.Debug = False) -> None:
    """Show versions, processor and settings, for a bug report."""
    ui = Ui(quiet=quiet, verbose=verbose, json=json)
    body = env_body()
    if json:
        ui.emit("env", body)
        return
    ui.pairs([
        *((name, found or "not installed") for name, found in body["packages"].items()),
        ("python", body["python"]),
        ("system", body["system"]),
        ("processor", body["processor"]),
        ("cores", f"{body['cores']} available"),
        ("kernel cache", body["kernel_cache"]),
        *((name, value) for name, value in body["variables"].items()),
    ])  # fmt: skip
    ui.result(f"kizami {body['packages']['kizami']}")


def env_body() -> dict[str, Any]:
    from kizami.quantize.threads import available_cores

    return {
        "packages": {name: _version(name) for name in (*BASE, *OPTIONAL)},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": available_cores(),
        "kernel_cache": _kernel_cache(),
        # Never the token: only variables whose value is a setting.
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("KIZAMI_") or name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "NUMBA_NUM_THREADS")
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _kernel_cache() -> str:
    """Where compiled kernels are kept; a broken numba is what a bug report has to show, not a reason to fail."""
    try:
        from kizami.quantize.kernels.jit import cache_folder
    except (ImportError, ValueError, RuntimeError) as e:  # the last two: variables that numba refuses
        return f"numba cannot be imported: {e}"
    return str(cache_folder() or "no folder can be written: kernels are compiled in every run")


def _processor() -> str:
    """The model's name where the system tells it, else the architecture."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return f"{value.strip()} ({platform.machine()})"
    return platform.machine()


COMMAND = Command("env", env, ("kizami env", "kizami env --json"))
