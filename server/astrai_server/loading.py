"""From settings to a running engine: files, tokenizer, weights, KV pool."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal, Protocol

import attrs
import torch

from astrai_server.capacity import MIB, PoolPlan, plan_pool
from astrai_server.config import ConfigError, Settings
from astrai_server.cpu import KernelBuild, choose_kernels, pack_model
from astrai_server.device import Placement, free_bytes, place_model
from astrai_server.packed import describe_packed, keep_packed, take_packed
from astrai_triton import checkpoint
from astrai_triton.backend import backend_reasons, current_backend
from astrai_triton.checkpoint import Checkpoint
from astrai_triton.checkpoint.resolve import home
from astrai_triton.cpu import CpuDecoder
from astrai_triton.engine import InferenceEngine
from astrai_triton.engine.graphs import why_no_graphs
from astrai_triton.engine.trace import StepTrace
from astrai_triton.errors import UnsupportedCallError
from astrai_triton.model import Decoder
from astrai_triton.tokenizer import Tokenizer


class Audience(Protocol):
    """Who is told how the loading goes."""

    def say(self, line: str) -> None:
        """Hear one line of text."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Hear how far a phase is, in bytes."""


@attrs.frozen
class LoadedModel:
    """A model in memory, ready for an engine."""

    name: str
    decoder: Decoder | CpuDecoder
    tokenizer: Tokenizer
    placement: Placement
    awaits_kernels: bool = False
    """Whether the CPU kernels would run it, were they built."""


Missing = Literal["build", "background", "leave"]
"""What becomes of CPU kernels that are not built yet: they are built first and packed weights are kept; they
are built beside the running engine; or they are left."""


def load_model(settings: Settings, audience: Audience, *, missing: Missing = "leave") -> LoadedModel:
    """Fetch the model's files if need be and load them. Says what the model is, how its weights are held, and
    on a CPU what computes.

    Args:
        settings: ``server`` counts.
        audience: is told how it goes.
        missing: see ``Missing``.

    Raises:
        As ``load_engine``.
    """
    _require_backend()
    placement = place_model(settings.server)
    if settings.server.cuda_graphs and (reason := why_no_graphs(placement.device)):
        raise ConfigError(f"server.cuda_graphs: wanted null or false here, got true; {reason}")
    model_files = open_model(settings.server.param_path, audience)
    config = model_files.config
    audience.say(
        f"model    {model_files.name}: {config.arch}, {config.n_layers} layers, "
        f"context {config.max_seq_len} tokens"
    )
    # Before the weights: a broken tokenizer should not cost the wait.
    tokenizer = model_files.tokenizer
    model, awaits_kernels = _load_weights(settings, model_files, placement, audience, missing)
    return LoadedModel(model_files.name, model, tokenizer, placement, awaits_kernels)


def load_engine(settings: Settings, audience: Audience, *, missing: Missing = "leave") -> InferenceEngine:
    """Load the model and start an engine.

    Says the lines of ``load_model``, how large the KV pool is, for which batches decode steps were captured,
    and where steps are recorded.

    Args:
        settings: ``server``, ``cache``, ``limits`` and ``api.model_name`` count.
        audience: is told how it goes.
        missing: see ``Missing``.

    Raises:
        ConfigError: the settings do not fit this model or this machine.
        CheckpointError, TokenizerError, ChatTemplateError: the model's files cannot be used.
        BackendError: ``ASTR_BACKEND`` names an attention backend that is not there.
    """
    _require_place_for_trace(settings.server.trace_file)
    model = load_model(settings, audience, missing=missing)
    item_size, device = model.placement.dtype.itemsize, model.placement.device
    plan = plan_pool(settings, model.decoder.config, item_size, free_bytes(device))
    audience.say(f"KV pool  {describe_pool(plan, settings)}")
    engine = InferenceEngine(
        model.decoder,
        model.tokenizer,
        max_batch_size=settings.server.max_batch_size,
        max_seq_len=plan.max_seq_len,
        page_size=settings.cache.page_size,
        n_tokens=plan.n_tokens if plan.is_paged else None,
        prefix_cache=settings.cache.prefix_cache,
        max_step_tokens=settings.limits.max_step_tokens,
        max_queue=settings.limits.max_queue,
        policy=settings.limits.policy,
        max_overtaken=settings.limits.max_overtaken,
        observer=_open_trace(settings.server.trace_file, audience),
        model_name=settings.api.model_name or model.name,
        cuda_graphs=settings.server.cuda_graphs,
    )
    if engine.graph_sizes:
        audience.say(f"graphs   decode steps of up to {', '.join(map(str, engine.graph_sizes))} requests")
    if model.awaits_kernels:
        _await_kernels(engine, model, audience, missing)
    return engine


def _await_kernels(engine: InferenceEngine, model: LoadedModel, audience: Audience, missing: Missing) -> None:
    if missing == "background" and isinstance(model.decoder, Decoder):
        audience.say("kernels  torch, until the CPU kernels are built, which begins now in the background")
        KernelBuild(engine, model.decoder)
    else:
        audience.say("kernels  torch; astrai warmup builds the CPU kernels once, and answers come faster")


def open_model(param_path: str, audience: Audience) -> Checkpoint:
    """Bring the model's files here and read everything but the weights.

    Raises:
        CheckpointError: no such model, it cannot be fetched, or its files cannot be used.
    """
    path = checkpoint.resolve(param_path, progress=audience.progress)
    # A file's own name may carry its quantisation; who asked by name should see that name.
    name = None if os.path.exists(Path(param_path).expanduser()) else param_path
    return checkpoint.open_checkpoint(path, name=name)


def find_local(param_path: str) -> Path | None:
    """The model's files if they are on this machine; fetches nothing.

    Args:
        param_path: as in the settings.

    Returns:
        What ``checkpoint.resolve`` would return, or None where it would have to fetch or to refuse.
    """
    path = Path(param_path).expanduser()
    if os.path.exists(path):
        return path
    if param_path.lower() in (name.lower() for name in checkpoint.known_models()):
        fetched = (home() / "models").glob(f"{checkpoint.DEFAULT_MODEL}*.gguf")
        return next(iter(sorted(fetched)), None)
    # Slow to import, and not needed for the default model.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(param_path, local_files_only=True))
    except (OSError, ValueError):
        # Not in the hub's cache, or no name of a repository.
        return None


def describe_placement(placement: Placement) -> str:
    """Type, device and threads on one line."""
    where = str(placement.device)
    if placement.device.type == "cuda":
        where = f"{torch.cuda.get_device_name(placement.device)} ({where})"
    elif placement.device.type == "cpu":
        where = f"cpu with {torch.get_num_threads()} threads"
    return f"{placement.dtype_name} on {where}" + (f" ({placement.reason})" if placement.reason else "")


def describe_pool(plan: PoolPlan, settings: Settings) -> str:
    """Sizes of the pool on one line."""
    size = f"{plan.n_tokens} tokens, {plan.num_mib:.0f} MiB ({plan.reason})"
    if not plan.is_paged:
        return f"{size}, contiguous, context {plan.max_seq_len}"
    shares = settings.cache.prefix_cache and settings.cache.page_size > 1
    prefixes = "prefix cache on" if shares else "no prefix cache"
    return f"{size}, pages of {settings.cache.page_size}, {prefixes}, context {plan.max_seq_len}"


def _require_backend() -> None:
    """A backend that was asked for and is not there would fail every request."""
    choice = current_backend()
    reason = None if choice is None else backend_reasons()[choice.value]
    if choice is not None and reason is not None:
        raise UnsupportedCallError(choice.value, reason)


def _load_decoder(model_files: Checkpoint, placement: Placement, audience: Audience) -> Decoder:
    decoder = Decoder(model_files.config, dtype=placement.dtype, device=placement.device)
    decoder.load_weights(model_files.tensors(audience.progress))
    return decoder


def _load_weights(
    settings: Settings, files: Checkpoint, placement: Placement, audience: Audience, missing: Missing
) -> tuple[Decoder | CpuDecoder, bool]:
    """The model, and whether CPU kernels would run it, were they built."""
    server = settings.server
    choice = choose_kernels(server, placement.device, placement.dtype, files.config)
    is_packed = choice.when == "now" or (choice.when == "later" and missing == "build")
    key = describe_packed(server, files, placement, audience.say) if is_packed else None
    kept = None if key is None else take_packed(key, audience.say)
    if kept is not None:
        audience.say(f"kernels  CPU kernels for {kept.isa}; {describe_placement(placement)}")
        return kept, False
    started = time.perf_counter()
    decoder = _load_decoder(files, placement, audience)
    audience.say(
        f"weights  {files.num_tensors} tensors, {files.num_bytes / MIB:.0f} MiB loaded in "
        f"{time.perf_counter() - started:.1f} s; {describe_placement(placement)}"
    )
    if not is_packed:
        if choice.when == "never" and placement.device.type == "cpu":
            audience.say(f"kernels  torch: {choice.reason}")
        return decoder, choice.when == "later"
    model, line = pack_model(server, decoder)
    audience.say(f"kernels  {line}")
    if key is not None and missing == "build" and isinstance(model, CpuDecoder):
        keep_packed(key, model, audience.say)
    return model, False


def _require_place_for_trace(trace_file: str | None) -> None:
    """What is wrong with the path should not cost the wait for the model."""
    if trace_file is None:
        return
    path = Path(trace_file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        found = "a directory" if path.is_dir() else f"no directory {path.parent}"
        raise ConfigError(f"server.trace_file: wanted a file in a directory that exists, got {found}")


def _open_trace(trace_file: str | None, audience: Audience) -> StepTrace | None:
    """Begin a trace. The one of the run before is kept beside it: it may be what somebody is after."""
    if trace_file is None:
        return None
    path = Path(trace_file).expanduser()
    try:
        if path.exists() and path.stat().st_size:
            path.replace(path.with_name(f"{path.name}.1"))
        # Prompts are nobody else's business.
        file = open(  # noqa: SIM115 - the engine closes it
            path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)
        )
    except OSError as error:
        raise ConfigError(f"server.trace_file: cannot write {path}: {error.strerror}") from error
    audience.say(
        f"WARNING  every step is recorded in {path}, with the prompts in it: keep it like a secret; "
        "it grows without end, and steps take longer"
    )
    return StepTrace(file)
