"""What the ops launch: facts about architectures, and the shapes of tiles as pure functions of the call.

Nothing here searches at run time. A configuration that a search found carries its date and machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter; fixed when triton was imported."""

TRITON_TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
"""Element types as a Triton signature spells them."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

FP_FUSION = True
"""Products and sums of attention contract; said aloud, since the default differs between Triton versions."""

MAX_GRID_SIDE = 65535
"""Most programs of a grid in its second and third dimension."""

# Triton's names of the types that a dot may run in.
_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@attrs.frozen(kw_only=True)
class Arch:
    """What the launch choices need to know about one architecture."""

    name: str
    """As compilers spell it, "sm_90"."""
    capability: int
    """Major * 10 + minor."""
    num_sms: int
    """Multiprocessors of its usual data-centre card, or of the device at hand."""
    shared_bytes: int
    """Most shared memory one CTA may have."""
    sm_shared_bytes: int
    """Shared memory of one multiprocessor; each resident CTA takes 1 KB beyond its own."""
    max_sm_threads: int
    """Most resident threads of a multiprocessor."""
    max_sm_ctas: int
    """Most resident CTAs of a multiprocessor."""
    has_wgmma: bool
    """Warp-group MMA (Hopper)."""
    has_fp8: bool
    """Converts e4m3 in hardware; below, Triton refuses it."""
    sm_registers: int = 65536
    """32-bit registers of one multiprocessor."""


def _arch(
    capability: int, num_sms: int, shared_kb: int, sm_shared_kb: int, threads: int, ctas: int
) -> tuple[int, Arch]:
    arch = Arch(
        name=f"sm_{capability}",
        capability=capability,
        num_sms=num_sms,
        shared_bytes=shared_kb * 1024,
        sm_shared_bytes=sm_shared_kb * 1024,
        max_sm_threads=threads,
        max_sm_ctas=ctas,
        has_wgmma=capability == 90,
        has_fp8=capability >= 89,
    )
    return capability, arch


# CUDA C++ programming guide, table of technical specifications per compute capability.
ARCHES: Mapping[int, Arch] = dict(
    (
        _arch(80, 108, 163, 164, 2048, 32),
        _arch(86, 84, 99, 100, 1536, 16),
        _arch(89, 142, 99, 100, 1536, 24),
        _arch(90, 132, 227, 228, 2048, 32),
        _arch(100, 148, 227, 228, 2048, 32),
        _arch(120, 188, 99, 100, 1536, 24),
    )
)
"""Capability -> facts. A device between two of them has those of the lower one."""


@attrs.frozen(kw_only=True)
class KernelConfig:
    """Tile and pipeline of one launch."""

    block_m: int
    """Rows of the tile: q rows, or tokens."""
    block_n: int
    """Columns of the tile: keys, or partial states."""
    num_warps: int
    num_stages: int
    """Software pipeline: num_stages - 1 tiles of K and V are on their way while one is computed."""


@attrs.frozen(kw_only=True, eq=False)
class Variant:
    """One compilation of a kernel, described completely."""

    name: str
    kernel: Any
    """The ``triton.jit`` function."""
    signature: Mapping[str, str]
    """Argument -> Triton type, in the kernel's order; "constexpr" for what ``constexprs`` fixes."""
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]
    """Arguments whose value (of an integer) or address (of a pointer) is a multiple of 16."""
    config: KernelConfig
    uses_dot: bool
    """Whether its products must be matrix instructions; float32 ones are not."""
    tile: Mapping[str, int]
    """Quantities for bytes and FLOPs of one tile."""


def arch_of(device: torch.device) -> Arch:
    """Facts about a device. Under the interpreter a CPU stands in for sm_90.

    Raises:
        RuntimeError: the kernels cannot run there.
    """
    if device.type == "cuda":
        # An index is part of the key, else "cuda" would stay what it was at the first call.
        return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu" and IS_INTERPRETED:
        return ARCHES[90]
    raise RuntimeError(
        f"device: wanted cuda, or cpu under Triton's interpreter, got {device.type}; move the tensors to a "
        "GPU, or set TRITON_INTERPRET=1 before triton is imported"
    )


@functools.cache
def _cuda_arch(index: int) -> Arch:
    major, minor = torch.cuda.get_device_capability(index)
    known = [capability for capability in ARCHES if capability <= major * 10 + minor]
    if not known:
        raise RuntimeError(
            f"device: wanted compute capability 8.0 or newer, got {major}.{minor}; use torch_native attention"
        )
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    return attrs.evolve(ARCHES[max(known)], num_sms=num_sms)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type products run in: that of q, but float32 in the interpreter, whose bfloat16 dot is wrong."""
    return tl.float32 if IS_INTERPRETED else _DOT_TYPES[dtype]


def pad_block(size: int, least: int = 16) -> int:
    """The power of two that holds ``size``; at least 16, the smallest side of a matrix product."""
    return max(least, 1 << (size - 1).bit_length())


def launch_options(config: KernelConfig) -> dict[str, Any]:
    """What a launch of attention says to the compiler besides the kernel's own arguments."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": FP_FUSION,
    }


def row_alignment(*tensors: torch.Tensor | None) -> int:
    """Bytes that every row start of the tensors is a multiple of: 16, or 1 when one of them is not.

    One answer for all of them keeps the set of compiled variants small. A dimension of size 1 has no say.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        itemsize = tensor.element_size()
        if tensor.data_ptr() % 16:
            return 1
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size > 1 and stride * itemsize % 16:
                return 1
    return 16


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the device of a tensor current: a launch goes to the current device's current stream."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
