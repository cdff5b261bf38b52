"""Every setting of the server: one frozen tree, built once from flags, environment, file and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs

from astrai_server.option import Choice, Flag, Integer, Kind, Number, Text, TextList
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

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def _option(default: Any, kind: Kind, doc: str, *, has_flag: bool = True) -> Any:
    def validate(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        problem = kind.check(value)
        if problem:
            raise ConfigError(f"{attribute.name}: {problem}")

    return attrs.field(
        default=default,
        validator=validate,
        converter=lambda value: tuple(value) if isinstance(value, list) else value,
        metadata={"kind": kind, "doc": doc, "has_flag": has_flag},
    )


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Where the server listens and what it runs."""

    host: str = _option(
        "127.0.0.1",
        Text(form="a host name or an address", pattern=r"[^\s\x00-\x1f/]+"),
        "Address to listen on; 0.0.0.0 opens the server to the network.",
    )
    port: int = _option(8000, Integer(low=0, high=65535), "Port to listen on; 0 takes a free one.")
    device: str = _option(
        "auto",
        Text(form="auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|cuda(:\d{1,3})?"),
        "Where the model runs; auto takes the first GPU if there is one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto",
        Choice(values=("auto", "float32", "bfloat16", "float16")),
        "Type of weights and KV; auto is bfloat16 on a GPU and the faster of float32 and bfloat16 on a CPU.",
    )
    max_batch_size: int = _option(16, Integer(low=1, high=4096), "Requests that run at the same time.")
    max_seq_len: int | None = _option(
        None,
        Integer(low=2, high=2**24, nullable=True),
        "Tokens of prompt and answer together; null is the model's own context, at most 32768.",
    )
    param_path: str = _option(
        DEFAULT_MODEL, Text(form="a model"), "Model: a known name, a directory, a .gguf file or org/name."
    )
    threads: int | None = _option(
        None, Integer(low=1, high=1024, nullable=True), "CPU threads of the model; null is torch's choice."
    )
    cuda_graphs: bool | None = _option(
        None,
        Flag(nullable=True),
        "Capture decode steps as CUDA graphs at the start; null does on a GPU with the triton backend.",
    )


@attrs.frozen(kw_only=True)
class CacheSettings:
    """How keys and values of past tokens are kept."""

    mode: Literal["paged", "contiguous"] = _option(
        "paged",
        Choice(values=("paged", "contiguous")),
        "paged shares one pool and caches prefixes; contiguous reserves max_seq_len tokens per request.",
    )
    page_size: int = _option(
        16, Integer(low=1, high=1024), "Tokens in a page; 1 turns prefix caching off (paged mode)."
    )
    n_tokens: int | None = _option(
        None,
        Integer(low=1, high=2**31 - 1, nullable=True),
        "Tokens the pool holds, a multiple of page_size; null is computed from the limits and the memory.",
    )
    prefix_cache: bool = _option(
        True, Flag(), "Reuse the KV of prompts that begin alike (paged mode, page_size above 1)."
    )


@attrs.frozen(kw_only=True)
class LimitSettings:
    """What bounds a request, and the server as a whole."""

    max_queue: int = _option(
        256, Integer(low=1, high=10**6), "Requests that may wait; the next one is told to retry later."
    )
    max_step_tokens: int = _option(
        512, Integer(low=1, high=2**20), "Tokens in one forward pass; at least max_batch_size and page_size."
    )
    max_body_bytes: int = _option(4 << 20, Integer(low=1024, high=2**31), "Size of a request body.")
    header_timeout_s: float = _option(10.0, Number(low=0.1), "Seconds a client may take over its headers.")
    body_timeout_s: float = _option(30.0, Number(low=0.1), "Seconds a client may take over its body.")
    write_timeout_s: float = _option(
        60.0, Number(low=0.1), "Seconds a client may leave a stream unread before it is cut off."
    )
    request_timeout_s: float | None = _option(
        None, Number(low=0.1, nullable=True), "Seconds a request may take in all; null is no limit."
    )
    drain_timeout_s: float = _option(
        30.0, Number(low=0.0), "Seconds that running answers get to finish after SIGTERM."
    )


@attrs.frozen(kw_only=True)
class ApiSettings:
    """How the HTTP API looks to its clients."""

    model_name: str | None = _option(
        None,
        Text(form="a name", nullable=True),
        "Name of the model in the API; null is the model's own name.",
    )
    usage_frame: Literal["compat", "openai", "seed"] = _option(
        "compat",
        Choice(values=("compat", "openai", "seed")),
        "Form of the last frame of an OpenAI stream that carries the usage.",
    )
    validation_status: Literal[422, 400] = _option(
        422, Choice(values=(422, 400)), "HTTP status of a request whose fields are wrong."
    )
    cors_origins: tuple[str, ...] = _option(
        (),
        TextList(form="a list of origins such as https://example.org"),
        "Web origins that may call the API from a browser; empty is none.",
        has_flag=False,
    )


@attrs.frozen(kw_only=True)
class Settings:
    """All sections.

    Raises:
        ConfigError: settings that are fine alone contradict each other; a section raises for its own values.
    """

    server: ServerSettings = attrs.field(factory=ServerSettings)
    cache: CacheSettings = attrs.field(factory=CacheSettings)
    limits: LimitSettings = attrs.field(factory=LimitSettings)
    api: ApiSettings = attrs.field(factory=ApiSettings)

    def __attrs_post_init__(self) -> None:
        _refuse_conflicts(self)


SECTIONS: Mapping[str, type[attrs.AttrsInstance]] = MappingProxyType(
    {"server": ServerSettings, "cache": CacheSettings, "limits": LimitSettings, "api": ApiSettings}
)


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
        """Long flag; ``mode`` alone would mean nothing, so it carries its section."""
        stem = "cache-mode" if self.name == "cache.mode" else self.key.replace("_", "-")
        return f"--{stem}"


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
    except _ConflictError as error:
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


class _ConflictError(ConfigError):
    """Settings that are fine alone contradict each other; ``names`` are theirs, the one to change first."""

    def __init__(self, names: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{names[0]}: {problem}")
        self.names = names


def _refuse_conflicts(settings: Settings) -> None:
    cache, limits, batch = settings.cache, settings.limits, settings.server.max_batch_size
    if cache.n_tokens is not None and cache.mode == "contiguous":
        raise _ConflictError(
            ("cache.n_tokens", "cache.mode"),
            "contiguous mode always holds max_batch_size * max_seq_len tokens; "
            "set cache.n_tokens to null or cache.mode to paged",
        )
    if cache.n_tokens is not None and cache.n_tokens % cache.page_size:
        below = cache.n_tokens // cache.page_size * cache.page_size
        nearest = " or ".join(str(n) for n in (below, below + cache.page_size) if n)
        raise _ConflictError(
            ("cache.n_tokens", "cache.page_size"),
            f"wanted a multiple of cache.page_size={cache.page_size}, got {cache.n_tokens}; "
            f"nearest: {nearest}",
        )
    if limits.max_step_tokens < batch:
        raise _ConflictError(
            ("limits.max_step_tokens", "server.max_batch_size"),
            f"wanted at least server.max_batch_size={batch}, so that every running request "
            f"advances in a step, got {limits.max_step_tokens}",
        )
    if cache.mode == "paged" and limits.max_step_tokens < cache.page_size:
        raise _ConflictError(
            ("limits.max_step_tokens", "cache.page_size"),
            f"wanted at least cache.page_size={cache.page_size}, so that a step can fill a page, "
            f"got {limits.max_step_tokens}",
        )
