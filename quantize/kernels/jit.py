"""`kernel`: numba's njit without the GIL, compiled code kept in a per-user folder, or not kept where none is writable.
A filled folder that cannot be written to, as in a container image, is used as it is.

numba alone writes beside the module (a repository or site-packages), raises at import time when no place is
writable, and judges a cached kernel by its own file only: an edit of a kernel *called* by it goes unseen. So the
folder is ours, and its name has a hash of every kernel's source.
"""

import hashlib
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator

config: Any = numba.config
F = TypeVar("F", bound=Callable[..., Any])

_DAMAGE = (  # what unpickling a cut or overwritten file raises
    OSError, EOFError, pickle.UnpicklingError, ValueError, LookupError, AttributeError, ImportError, TypeError,
    MemoryError,
)  # fmt: skip


class _Files(IndexDataCacheFile):
    """numba numbers its files from 1, so that two processes that start cold can each name a different kernel in one
    index and leave the other's code behind it. Here the name is the key's hash, and code is there before the index.
    """

    def save(self, key: Any, data: Any) -> None:
        name = self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:15], 16))
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})

    def load(self, key: Any) -> Any:
        try:
            base: Any = super()
            return base.load(key)
        except _DAMAGE:
            return None

    def _load_index(self) -> dict[Any, str]:
        try:
            base: Any = super()
            return cast(dict[Any, str], base._load_index())
        except _DAMAGE:
            return {}


class _Place(UserProvidedCacheLocator):
    """Our folder, and no other place if it cannot be written to."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Place":
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        assert _FOLDER is not None
        return str(_FOLDER / self.get_suitable_cache_subpath(self._py_file))


class _Kept(CompileResultCacheImpl):
    _locator_classes = [_Place]  # noqa: RUF012 — numba's own form


class _Cache(FunctionCache):
    """A cache may always miss: a damaged entry or a full disk costs a compilation, never the run."""

    _impl_class = _Kept

    def __init__(self, function: Callable[..., Any]) -> None:
        base: Any = super()
        base.__init__(function)
        self._cache_file = _Files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        base: Any = super()
        with suppress(OSError):
            base.save_overload(sig, data)


def _source_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _root() -> Path | None:
    if config.CACHE_DIR:  # NUMBA_CACHE_DIR: the user's word on where numba's files go
        return Path(config.CACHE_DIR)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME and no entry in the password file
        return None


_NAME = re.compile("numba-[0-9a-f]{16}")
UNUSED_SECONDS = 90 * 86400


def cache_folder() -> Path | None:
    """The folder of this version's compiled kernels, created; None if there is none that can be written or is filled.
    A new one takes the place of those of other versions that were not used for 90 days."""
    root = _root()
    if root is None or not root.is_absolute():
        return None
    folder = root / "kizami" / f"numba-{_source_hash()}"
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            os.utime(folder)  # when it was last used
    except OSError:
        return folder if is_filled(folder) else None
    if is_new:
        _remove_unused(folder.parent)
    return folder


def is_filled(folder: Path) -> bool:
    """Whether compiled kernels are there."""
    with suppress(OSError):  # of a folder that may not be read
        return next(folder.rglob("*.nbi"), None) is not None
    return False


def _remove_unused(parent: Path) -> None:
    with suppress(OSError):  # of another user, or removed at this moment
        for folder in parent.iterdir():
            if _NAME.fullmatch(folder.name) and folder.lstat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)  # which follows no link


_FOLDER = cache_folder()


def kernel(function: F) -> F:
    """Decorate a kernel. No fastmath and no parallel: bytes and figures must not depend on CPU or threads."""
    dispatcher: Any = numba.njit(nogil=True)(function)
    if _FOLDER is not None and not config.DISABLE_JIT:
        dispatcher._cache = _Cache(function)
    return cast(F, dispatcher)


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether the folder has compiled code of this kernel, for some arguments: one form of each is what runs use."""
    cache: Any = getattr(function, "_cache", None)
    return isinstance(cache, _Cache) and Path(cache._cache_file._index_path).is_file()
