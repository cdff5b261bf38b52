"""How the settings come about: flags over environment over file over defaults, checked once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from astrai_server.option import Kind
from astrai_server.settings import (
    SECTIONS,
    ApiSettings,
    CacheSettings,
    ConflictError,
    LimitSettings,
    ServerSettings,
    Settings,
)
from astrai_server.source import (
    FOREIGN_SECTION,
    ConfigError,
    Given,
    describe_value,
    read_environment,
    read_file,
)

__all__ = [
    "ApiSettings",
    "CacheSettings",
    "ConfigError",
    "LimitSettings",
    "Option",
    "Resolved",
    "ServerSettings",
    "Settings",
    "list_options",
    "resolve_settings",
]
_FULL_NAMES = frozenset({"cache.mode", "cache.isolate", "api.debug"})


@attrs.frozen
class Option:
    """One setting as the command line and the documentation see it."""

    section: str
    key: str
    kind: Kind
    default: Any
    doc: str
    """One sentence."""
    has_flag: bool

    @property
    def name(self) -> str:
        """``section.key``."""
        return f"{self.section}.{self.key}"

    @property
    def flag(self) -> str:
        """Long flag; a key that would mean nothing alone, or something else, carries its section."""
        stem = self.name.replace(".", "-") if self.name in _FULL_NAMES else self.key
        return f"--{stem.replace('_', '-')}"


@attrs.frozen
class Resolved:
    """Settings with where each value came from."""

    settings: Settings
    origins: Mapping[str, str]
    """``section.key`` -> ``default``, ``serve.yaml:3``, ``ASTRAI_SERVER__PORT`` or ``--port``."""

    def value(self, name: str) -> Any:
        """Value of ``section.key``."""
        section, key = name.split(".")
        return getattr(getattr(self.settings, section), key)

    def locate(self, text: str) -> str:
        """Put an option's place before a later error that begins with the option's name."""
        origin = self.origins.get(text.partition(":")[0], "default")
        return text if origin == "default" else f"{origin}: {text}"


def list_options() -> tuple[Option, ...]:
    """Every option, in the order of the documentation."""
    return tuple(
        Option(name, field.name, default=field.default, **field.metadata)
        for name, section in SECTIONS.items()
        for field in attrs.fields(section)
    )


def resolve_settings(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge all sources: flags over environment over file over defaults.

    Args:
        file: YAML configuration, or None for no file.
        env: environment variables; ``ASTRAI_<SECTION>__<KEY>`` are settings, values are YAML.
        flags: ``section.key`` -> value, for flags that were given; already of the option's type.

    Raises:
        ConfigError: unreadable file, unknown name (with the nearest known one), value of a wrong type or
            range, values that contradict each other. The text starts with file and line, variable or flag.
    """
    options = {option.name: option for option in list_options()}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(options, "default")
    for given in _collect(options, file, env or {}, flags or {}):
        name = f"{given.section}.{given.key}"
        problem = options[name].kind.check(given.value)
        if problem:
            raise ConfigError(f"{given.origin}: {name}: {problem}")
        values[name], origins[name] = given.value, given.origin
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in values.items():
        sections[options[name].section][options[name].key] = value
    try:
        settings = Settings(
            server=ServerSettings(**sections["server"]),
            cache=CacheSettings(**sections["cache"]),
            limits=LimitSettings(**sections["limits"]),
            api=ApiSettings(**sections["api"]),
        )
    except ConflictError as error:
        place = next(origins[name] for name in error.names if origins[name] != "default")
        raise ConfigError(f"{place}: {error}") from None
    return Resolved(settings, MappingProxyType(origins))


def _collect(
    options: Mapping[str, Option], file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]
) -> Iterator[Given]:
    """Yield what was given, weakest source first; an unknown name raises."""
    for section in read_file(file) if file is not None else ():
        if section.name not in SECTIONS:
            raise ConfigError(f"{section.origin}: {_unknown_section(section.name, options)}")
        if section.entries is None:
            got = describe_value(section.value)
            raise ConfigError(f"{section.origin}: {section.name}: wanted keys and values below it, got {got}")
        for given in section.entries:
            _require_known(given, options)
            yield given
    for given in read_environment(env):
        if given.section not in SECTIONS:
            raise ConfigError(f"{given.origin}: {_unknown_section(given.section, options)}")
        option = _require_known(given, options)
        try:
            value = option.kind.parse(given.value)
        except ConfigError as error:
            raise ConfigError(
                f"{given.origin}: {option.name}: wanted {option.kind.wanted}; {error}"
            ) from None
        yield attrs.evolve(given, value=value)
    for name, value in flags.items():
        section_name, _, key = name.partition(".")
        yield Given(section_name, key, value, options[name].flag)


def _require_known(given: Given, options: Mapping[str, Option]) -> Option:
    option = options.get(f"{given.section}.{given.key}")
    if option is None:
        raise ConfigError(f"{given.origin}: {_unknown_key(given, options)}")
    return option


def _unknown_section(name: str, options: Mapping[str, Option]) -> str:
    home = _find_home(name, options)
    if home:
        return f"{describe_value(name)} is not a section; it belongs under '{home}:'"
    return f"unknown section {describe_value(name)}; {_suggest(name, [*SECTIONS, FOREIGN_SECTION])}"


def _unknown_key(given: Given, options: Mapping[str, Option]) -> str:
    text = f"unknown key {describe_value(given.key)} in section '{given.section}'"
    siblings = [option.key for option in options.values() if option.section == given.section]
    home = _find_home(given.key, options)
    if home and home != given.section:
        return f"{text}; it belongs under '{home}:'"
    return f"{text}; {_suggest(given.key, siblings)}"


def _find_home(key: str, options: Mapping[str, Option]) -> str | None:
    """Section of the key of that name, dashes forgiven."""
    return next((o.section for o in options.values() if o.key == key.replace("-", "_")), None)


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:100].lower().replace("-", "_"), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
