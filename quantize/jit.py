"""`kernel`: numba's njit without the GIL, compiled code kept in a per-user folder, or not kept where nothing is writable.

numba alone writes beside the module (a repository or site-packages), raises at import time when no place is
writable, and judges a cached kernel by its own file only: an edit of a kernel *called* by it goes unseen. So the
folder is ours, and its name has a hash of every kernel's source.
"""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

F = TypeVar("F", bound=Callable[..., Any])

_SOURCES = ("jit.py", "rows.py", "vectors.py", "scales.py", "kernels.py", "survey.py")


class _Cache(FunctionCache):  # type: ignore[misc]
    """A cache may always miss: a damaged entry or a full disk costs a compilation, never the run."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError):
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            self.disable()


def _source_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _root() -> Path | None:
    if numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR: the user's word on where numba's files go
        return Path(numba.config.CACHE_DIR)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME and no entry in the password file
        return None


def cache_folder() -> Path | None:
    """The folder of this version's compiled kernels, created; None if no such folder can be written."""
    root = _root()
    if root is None or not root.is_absolute():
        return None
    try:
        folder = root / "kizami" / f"numba-{_source_hash()}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


_FOLDER = cache_folder()


def kernel(function: F) -> F:
    """Decorate a kernel. No fastmath and no parallel: bytes and figures must not depend on CPU or threads."""
    dispatcher = numba.njit(nogil=True)(function)
    if _FOLDER is not None and not numba.config.DISABLE_JIT:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_FOLDER)  # read once, by the locator that _Cache picks
        try:
            dispatcher._cache = _Cache(function)
        finally:
            numba.config.CACHE_DIR = before
    return cast(F, dispatcher)
