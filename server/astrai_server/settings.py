"""The settings themselves: one frozen tree, every option with its kind, its default and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs

from astrai_server.option import Choice, Flag, Integer, Kind, Number, Text, TextList
from astrai_server.source import ConfigError

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
    cpu_kernels: bool | None = _option(
        None,
        Flag(nullable=True),
        "Run a model on the CPU through the C++ kernels built for this machine; null does where they can be "
        "built, after the first start in the background.",
    )
    quantize: Literal["none", "int8", "int4"] = _option(
        "none",
        Choice(values=("none", "int8", "int4")),
        "Hold the weights of a model on the CPU in 8 or 4 bits: faster, less exact; needs the CPU kernels.",
    )
    cuda_graphs: bool | None = _option(
        None,
        Flag(nullable=True),
        "Capture decode steps as CUDA graphs at the start; null does on a GPU with the triton backend.",
    )
    trace_file: str | None = _option(
        None,
        Text(form="a path", nullable=True),
        "File that every step is recorded in, prompts included, for astrai replay; null records nothing.",
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
    isolate: bool = _option(False, Flag(), "Reuse it only between requests with the same API key.")


@attrs.frozen(kw_only=True)
class LimitSettings:
    """What bounds a request, and the server as a whole."""

    max_queue: int = _option(
        256, Integer(low=1, high=10**6), "Requests that may wait; the next one is told to retry later."
    )
    max_requests_per_key: int | None = _option(
        None,
        Integer(low=1, high=10**6, nullable=True),
        "Requests of one API key at a time, running or waiting; null is no limit.",
    )
    policy: Literal["budget", "fcfs"] = _option(
        "budget",
        Choice(values=("budget", "fcfs")),
        "How prompts share a step: budget moves all of them on evenly, fcfs the oldest first.",
    )
    max_overtaken: int = _option(
        32,
        Integer(low=0, high=10**6),
        "Starts of other requests that the one waiting longest lets pass; 0 is strictly in order of arrival.",
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

    keys_file: str | None = _option(
        None,
        Text(form="a path", nullable=True),
        "File of API keys, one a line, as 'name: key' or the key alone; null asks for no key, unless "
        "ASTRAI_API_KEYS holds some.",
    )
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
    tool_format: Literal["auto", "hermes", "json"] = _option(
        "auto",
        Choice(values=("auto", "hermes", "json")),
        "How the model writes calls of tools: hermes is <tool_call>, json a bare object; auto asks its "
        "chat template.",
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
    debug: bool = _option(
        False, Flag(), "Serve /debug/prefix, which shows pieces of what other clients have sent."
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


class ConflictError(ConfigError):
    """Settings that are fine alone contradict each other; ``names`` are theirs, the one to change first."""

    def __init__(self, names: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{names[0]}: {problem}")
        self.names = names


def _refuse_conflicts(settings: Settings) -> None:
    cache, limits, batch = settings.cache, settings.limits, settings.server.max_batch_size
    if settings.server.quantize != "none" and settings.server.cpu_kernels is False:
        raise ConflictError(
            ("server.quantize", "server.cpu_kernels"),
            f"wanted none without the CPU kernels, got {settings.server.quantize}; set server.cpu_kernels to "
            "null",
        )
    if cache.n_tokens is not None and cache.mode == "contiguous":
        raise ConflictError(
            ("cache.n_tokens", "cache.mode"),
            "contiguous mode always holds max_batch_size * max_seq_len tokens; "
            "set cache.n_tokens to null or cache.mode to paged",
        )
    if cache.n_tokens is not None and cache.n_tokens % cache.page_size:
        below = cache.n_tokens // cache.page_size * cache.page_size
        nearest = " or ".join(str(n) for n in (below, below + cache.page_size) if n)
        raise ConflictError(
            ("cache.n_tokens", "cache.page_size"),
            f"wanted a multiple of cache.page_size={cache.page_size}, got {cache.n_tokens}; "
            f"nearest: {nearest}",
        )
    if limits.max_step_tokens < batch:
        raise ConflictError(
            ("limits.max_step_tokens", "server.max_batch_size"),
            f"wanted at least server.max_batch_size={batch}, so that every running request "
            f"advances in a step, got {limits.max_step_tokens}",
        )
    if cache.mode == "paged" and limits.max_step_tokens < cache.page_size:
        raise ConflictError(
            ("limits.max_step_tokens", "cache.page_size"),
            f"wanted at least cache.page_size={cache.page_size}, so that a step can fill a page, "
            f"got {limits.max_step_tokens}",
        )
