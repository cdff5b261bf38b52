"""Where settings come from: a YAML file with its line numbers, the environment. Knows no option by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 20
ENV_PREFIX = "ASTRAI_"
# The container scripts' own section: every source may carry it, no option lives there.
FOREIGN_SECTION = "runtime"
_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))


class ConfigError(ValueError):
    """A configuration cannot be used; the text is one line: place, key, wanted, got."""


@attrs.frozen
class Unusable:
    """A YAML value of a form no option takes."""

    form: str
    """How an error names it, e.g. ``a mapping``."""


@attrs.frozen
class Given:
    """One value somebody wrote down."""

    section: str
    key: str
    value: Any
    """None, bool, int, float, str, a list of those, or an ``Unusable``; raw text from the environment."""
    origin: str
    """Place an error names: ``serve.yaml:3``, ``ASTRAI_SERVER__PORT`` or ``--port``."""


@attrs.frozen
class Section:
    """One top-level entry of a file."""

    name: str
    origin: str
    entries: tuple[Given, ...] | None
    """None where the body is not a mapping; an empty body is an empty section."""
    value: Any = None
    """The body where it is not a mapping."""


def describe_value(value: Any) -> str:
    """Name a value in an error, in YAML's spelling, on one line of at most about 80 characters."""
    if isinstance(value, Unusable):
        return value.form
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    # Python limits the digits of an integer's repr, and nobody would read them.
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe_value(item) for item in value[:3]) + (", ...]" if value[3:] else "]")
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_scalar(text: str) -> Any:
    """Read one YAML value from text outside a file (an environment variable, a flag).

    Returns:
        As ``Given.value``.

    Raises:
        ConfigError: the text is not YAML; names neither option nor origin, which the caller knows.
    """
    node = _compose(text, None)
    return None if node is None else _build(node)


def read_file(path: Path) -> list[Section]:
    """Read a YAML configuration, keeping line numbers.

    Args:
        path: UTF-8 file of at most 1 MiB.

    Returns:
        Every section but ``runtime`` in the order of the file; names are not checked against any options.

    Raises:
        ConfigError: unreadable file, broken YAML, or a key that is not text or occurs twice.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: wanted a configuration of at most {MAX_FILE_BYTES} bytes, got {size}")
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: wanted UTF-8 text, got byte {byte:#04x} at {error.start}") from error
    root = _compose(text, path)
    if root is None or _is_null(root):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{_place(path, root)}: wanted sections such as 'server:', got {describe_value(_build(root))}"
        )
    sections = []
    for name, place, body in _walk_mapping(root, path):
        if name == FOREIGN_SECTION:
            continue
        if isinstance(body, yaml.MappingNode):
            entries = tuple(
                Given(name, key, _build(node), origin) for key, origin, node in _walk_mapping(body, path)
            )
            sections.append(Section(name, place, entries))
        else:
            sections.append(Section(name, place, () if _is_null(body) else None, _build(body)))
    return sections


def read_environment(environ: Mapping[str, str]) -> list[Given]:
    """Pick ``ASTRAI_<SECTION>__<KEY>`` variables; values stay raw text.

    Variables without the double underscore (``ASTRAI_HOME``) are not settings and are left alone.
    """
    given = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        section, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
        if section != FOREIGN_SECTION:
            given.append(Given(section, key, environ[name], name))
    return given


def _compose(text: str, path: Path | None) -> yaml.Node | None:
    try:
        _require_shallow(text, path)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "broken"
        place = "" if path is None else f"{path}:{mark.line + 1}: " if mark else f"{path}: "
        raise ConfigError(f"{place}not valid YAML: {problem}") from error


def _require_shallow(text: str, path: Path | None) -> None:
    """Composing is recursive, parsing is not: count the nesting before it can exhaust the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            place = "" if path is None else f"{path}:{line}: "
            raise ConfigError(f"{place}wanted YAML nested at most {MAX_DEPTH} deep")


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.tag == "tag:yaml.org,2002:null")


def _walk_mapping(mapping: yaml.MappingNode, path: Path) -> Iterator[tuple[str, str, yaml.Node]]:
    """Yield (key, place, value node); a key that occurs twice or is not text raises."""
    places: dict[str, str] = {}
    for key_node, value_node in mapping.value:
        place = _place(path, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{place}: wanted a name before the colon, got a nested value")
        key = key_node.value
        if key in places:
            raise ConfigError(
                f"{place}: {describe_value(key)} occurs twice, first at {places[key]}; remove one"
            )
        places[key] = place
        yield key, place, value_node


def _build(node: yaml.Node) -> Any:
    """Turn a node into a plain value: scalars and lists of scalars only, so aliases cannot expand."""
    if isinstance(node, yaml.SequenceNode):
        return [
            _build_scalar(item) if isinstance(item, yaml.ScalarNode) else Unusable("a nested value")
            for item in node.value
        ]
    if isinstance(node, yaml.ScalarNode):
        return _build_scalar(node)
    return Unusable("a mapping")


def _build_scalar(node: yaml.ScalarNode) -> Any:
    if node.tag not in _SCALAR_TAGS:
        return Unusable(
            f"{describe_value(node.value)} read as {node.tag.rpartition(':')[2]}; put it in quotes"
        )
    try:
        # An explicit tag such as "!!int x" reaches constructors that fail in many ways.
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError):
        return Unusable(f"{describe_value(node.value)} tagged as {node.tag.rpartition(':')[2]}")
