"""A model of a disk: what is on it after each call, and what a power cut leaves of that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_calls import SOURCE, Point


@dataclass
class _File:
    now: bytearray = field(default_factory=bytearray)
    kept: bytes = b""  # as of its last fsync


@dataclass
class _Dir:
    now: dict[str, "_File | _Dir"] = field(default_factory=dict)
    kept: dict[str, "_File | _Dir"] = field(default_factory=dict)


Tree = dict[str, bytes | None]  # relative name -> content; None for a folder
CUTS = {
    "names and contents that were not fsynced are lost": (True, b""),
    "names survive, contents that were not fsynced are lost": (False, b""),
    "names survive, contents that were not fsynced are zeros": (False, b"\0"),
}


class Disk:
    """What POSIX promises of the bench's folder after each call, and nothing more: a file's bytes last from the fsync
    of that file, and a name's being there, gone or another's from the fsync of its folder."""

    def __init__(self) -> None:
        self.root = _Dir()
        self._open: dict[int, _File | _Dir] = {}

    def apply(self, point: Point, call: tuple[Any, ...]) -> None:
        """Follows a call: its arguments and, last, its result."""
        if isinstance(call[-1], OSError):
            return
        match point.call:
            case "create":
                folder, name = self._place(point.target)
                self._open[call[-1]] = folder.now.setdefault(name, _File())
            case "open":
                if isinstance(call[-1], int) and not point.target.startswith(SOURCE):
                    self._open[call[-1]] = self._find(point.target)
            case "write":
                file = self._open[call[0]]
                assert isinstance(file, _File)
                file.now += bytes(call[1])[: call[-1]]
            case "truncate":
                file = self._find(point.target)
                assert isinstance(file, _File)
                del file.now[call[1] :]
            case "fsync":
                node = self._open[call[0]]
                if isinstance(node, _File):
                    node.kept = bytes(node.now)
                else:
                    node.kept = dict(node.now)
            case "close":
                self._open.pop(call[0], None)
            case "mkdir":
                folder, name = self._place(point.target)
                folder.now[name] = _Dir()
            case "unlink" | "rmdir":
                folder, name = self._place(point.target)
                del folder.now[name]
            case "replace" | "rename":
                before, after = point.target.split(" to ")
                folder, name = self._place(before)
                node = folder.now.pop(name)
                folder, name = self._place(after)
                folder.now[name] = node

    def _find(self, target: str) -> _File | _Dir:
        node: _File | _Dir = self.root
        for name in [] if target == "." else target.split("/"):
            assert isinstance(node, _Dir)
            node = node.now[name]
        return node

    def _place(self, target: str) -> tuple[_Dir, str]:
        above, _, name = target.rpartition("/")
        folder = self._find(above or ".")
        assert isinstance(folder, _Dir)
        return folder, name

    def now(self) -> Tree:
        """What every process sees, and what a SIGKILL leaves."""
        return _tree(self.root, names_lost=False, content=lambda file: bytes(file.now))

    def after_power_cut(self, kind: str) -> Tree:
        names_lost, fill = CUTS[kind]

        def content(file: _File) -> bytes:
            return file.kept + fill * (len(file.now) - len(file.kept))

        return _tree(self.root, names_lost, content)


def _tree(folder: _Dir, names_lost: bool, content: Callable[[_File], bytes], prefix: str = "") -> Tree:
    tree: Tree = {}
    for name, node in (folder.kept if names_lost else folder.now).items():
        if isinstance(node, _Dir):
            tree[prefix + name] = None
            tree |= _tree(node, names_lost, content, f"{prefix}{name}/")
        else:
            tree[prefix + name] = content(node)
    return tree


def read_tree(folder: Path, *names: str) -> Tree:
    """The folders `names` in `folder`, with all that is in them."""
    tree: Tree = {}
    for name in names:
        top = folder / name
        if top.is_dir():
            tree[name] = None
            for path in top.rglob("*"):
                inside = path.relative_to(folder).as_posix()
                tree[inside] = None if path.is_dir() else path.read_bytes()
    return tree


def write_tree(folder: Path, tree: Tree) -> None:
    for name, data in sorted(tree.items()):
        path = folder / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)


def below(tree: Tree, name: str) -> Tree:
    return {key.removeprefix(f"{name}/"): data for key, data in tree.items() if key.startswith(f"{name}/")}
