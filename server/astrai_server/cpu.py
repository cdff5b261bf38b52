"""Which form a model on a CPU runs in: torch, or the CPU kernels, from the start or once they are built."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal

import attrs
import torch

from astrai_server.config import ConfigError, ServerSettings
from astrai_triton.backend import current_backend
from astrai_triton.cpu import ISAS, BuildError, CpuDecoder, build, is_built, why_not_build, why_not_config
from astrai_triton.cpu.isa import cpu_flags, list_isas
from astrai_triton.cpu.rows import find_row_kernels
from astrai_triton.errors import AstraiError

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine
    from astrai_triton.model import Decoder, ModelConfig

logger = logging.getLogger("astrai.server")

STOP_S = 5.0
"""Time a build gets to end its compiler when nobody wants it any more."""


@attrs.frozen
class KernelChoice:
    """Whether a model runs through the CPU kernels."""

    when: Literal["now", "later", "never"]
    """"later": they are not built yet, and nobody is to wait for that."""
    reason: str = ""
    """Why never."""


def choose_kernels(
    server: ServerSettings, device: torch.device, dtype: torch.dtype, config: ModelConfig
) -> KernelChoice:
    """Decide for a model, from the settings, the machine and what is built already. Builds nothing.

    Args:
        server: ``cpu_kernels``, ``quantize`` and ``trace_file`` count.
        device, dtype: where and in which type the model runs.
        config: of the model.

    Raises:
        ConfigError: the settings want the kernels, and they cannot be had.
    """
    reason = _why_never(server, device, dtype, config)
    if reason is not None:
        if server.quantize != "none":
            raise ConfigError(f"server.quantize: wanted none here, got {server.quantize}; {reason}")
        if server.cpu_kernels:
            raise ConfigError(f"server.cpu_kernels: wanted null or false here, got true; {reason}")
        return KernelChoice("never", reason)
    # Whoever asks for 8 bits shall not get answers of 16 first, and a trace is of one model.
    is_wanted = server.cpu_kernels or server.quantize != "none" or server.trace_file is not None
    return KernelChoice("now" if is_wanted or is_built() else "later")


def pack_model(server: ServerSettings, decoder: Decoder) -> tuple[Decoder | CpuDecoder, str]:
    """The form in which the model runs from the start, and one line about it; builds the kernels if need be.

    Args:
        server: as for ``choose_kernels``, which has said "now".
        decoder: loaded; not to be used any more when another form is returned.

    Raises:
        ConfigError: the settings want the kernels, and they do not build.
    """
    started = time.perf_counter()
    try:
        model = CpuDecoder(decoder, quantize=server.quantize, release=True)
    except BuildError as error:
        if server.quantize != "none":
            raise ConfigError(f"server.quantize: {error}") from error
        if server.cpu_kernels:
            raise ConfigError(f"server.cpu_kernels: {error}") from error
        return decoder, f"torch: {error}"
    held = "" if server.quantize == "none" else f", weights as {server.quantize}"
    return model, f"CPU kernels for {model.isa}{held}, packed in {time.perf_counter() - started:.1f} s"


def prefers_bfloat16(server: ServerSettings) -> bool:
    """Whether the CPU kernels would run here and multiply bfloat16 faster than float32."""
    if server.cpu_kernels is False or current_backend() is not None:
        return False
    fast = ISAS[: ISAS.index("avx512_bf16") + 1]
    return why_not_build() is None and list_isas(cpu_flags())[0] in fast


def describe_kernels() -> str:
    """Whether this machine has the CPU kernels, for people."""
    reason = why_not_build()
    if reason is not None:
        return f"not available: {reason}"
    state = "built" if is_built() else "not built yet; astrai warmup does it, or the first astrai serve"
    return f"{list_isas(cpu_flags())[0]}, {state}"


class KernelBuild:
    """Builds the CPU kernels beside a running engine, then lets it go on with them.

    It ends with the engine: what it has started does not outlive that.

    Args:
        engine: runs on ``decoder``.
        decoder: loaded, on the CPU.
    """

    def __init__(self, engine: InferenceEngine, decoder: Decoder) -> None:
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(weakref.ref(engine), decoder), name="astrai-kernel-build", daemon=True
        )
        # Also at the end of the interpreter.
        weakref.finalize(engine, _stop, self._cancelled, self._thread)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, one way or the other."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, engine: weakref.ref[InferenceEngine], decoder: Decoder) -> None:
        started = time.perf_counter()
        try:
            build(cancelled=self._cancelled)
            if self._cancelled.is_set():
                return
            # Rows were sampled without them so far.
            find_row_kernels.cache_clear()
            # A copy: steps use the other one until they are told.
            model = CpuDecoder(decoder)
            running = engine()
            if running is not None:
                running.replace_model(model).result()
                logger.info(
                    "steps run in the CPU kernels from now on; building them took %.0f s",
                    time.perf_counter() - started,
                )
        except (AstraiError, MemoryError) as error:
            if not self._cancelled.is_set():
                logger.warning("steps stay with torch: %s", error)


def _stop(cancelled: threading.Event, thread: threading.Thread) -> None:
    cancelled.set()
    if thread is not threading.current_thread():
        thread.join(STOP_S)


def _why_never(
    server: ServerSettings, device: torch.device, dtype: torch.dtype, config: ModelConfig
) -> str | None:
    if device.type != "cpu":
        return f"the CPU kernels need the model on the CPU, it is on {device}"
    if server.cpu_kernels is False:
        return "server.cpu_kernels is false"
    backend = current_backend()
    if backend is not None:
        return (
            f"the attention backend {backend.value} was chosen by name, and they have attention of their own"
        )
    return why_not_config(config, dtype=dtype, quantize=server.quantize)
