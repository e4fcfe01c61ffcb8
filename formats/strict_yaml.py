"""Small YAML files from anyone: mappings, lists, strings, numbers, booleans, null, and nothing that grows.

PyYAML's parser with a builder of our own. No tags, so no Python objects; no merge keys (`<<` copies, and copies of
copies double at each level); aliases are shared, not copied, and few; nesting is bounded, and so is the size: the
parser takes a second for 200 kB.
"""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from kizami.formats.errors import KizamiError, printable
from kizami.formats.files import io_error, open_regular

MAX_BYTES = 256 << 10
MAX_DEPTH = 24
MAX_ALIASES = 100  # yaml.dump writes them where a recipe was built from one list used twice

_INT = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?[0-9]{0,30}(?:\.[0-9]{0,30})?(?:[eE][-+]?[0-9]{1,3})?", re.ASCII)
_TAG = "tag:yaml.org,2002:"
_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}  # YAML 1.1, as PyYAML


class _Loader(yaml.SafeLoader):
    depth = aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise _at(event, f"more than {MAX_ALIASES} aliases (*name)")
        elif getattr(event, "tag", None) is not None:
            raise _at(event, f"the tag {event.tag}; expected plain values")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _at(event, f"more than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: Path, file: str) -> object:
    """The one document in the regular file at `path` (`file` in errors). KizamiError "bad_yaml", with the line."""
    fd = open_regular(path, file)
    try:
        with open(fd, "rb", closefd=False) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as e:
        raise io_error("cannot read", e, file) from e
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES:
        raise KizamiError(f"more than {MAX_BYTES} bytes", code="bad_yaml", file=file)
    try:
        return parse_yaml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise KizamiError(f"byte {e.start} is not UTF-8", code="bad_yaml", file=file) from None
    except yaml.YAMLError as e:
        raise KizamiError(f"cannot be read as YAML: {_told(e)}", code="bad_yaml", file=file) from None


def parse_yaml(text: str) -> object:
    """The one document in `text`; None for an empty one. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _value(node, {})
    finally:
        loader.dispose()


def _value(node: yaml.Node, made: dict[int, object]) -> object:
    """made: values by the node's id; _IN_WORK for what contains itself."""
    if id(node) in made:
        if made[id(node)] is _IN_WORK:
            raise _at(node, "a value that contains itself")
        return made[id(node)]
    made[id(node)] = _IN_WORK
    value: object
    if isinstance(node, yaml.MappingNode):
        value = _mapping(node, made)
    elif isinstance(node, yaml.SequenceNode):
        value = [_value(item, made) for item in node.value]
    else:
        value = _scalar(node)
    made[id(node)] = value
    return value


_IN_WORK = object()


def _mapping(node: yaml.MappingNode, made: dict[int, object]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, item in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _at(key, "a key that is a list or a mapping; expected a word")
        if key.tag == _TAG + "merge":
            raise _at(key, "a merge key (<<); write the values out")
        if key.value in result:
            raise _at(key, f"the key {printable(key.value, 80)} a second time")
        result[key.value] = _value(item, made)
    return result


def _scalar(node: yaml.Node) -> object:
    text: str = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return _BOOLS[text.lower()]
    if kind == "int" and _INT.fullmatch(text):  # octal, sexagesimal and the like stay text
        return int(text)
    if kind == "float" and _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        return float(text)
    return text


def _at(place: Any, what: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=place.start_mark)


def _told(e: yaml.YAMLError) -> str:
    mark = getattr(e, "problem_mark", None)
    problem = printable(str(getattr(e, "problem", None) or getattr(e, "reason", None) or "it is damaged"), 200)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
