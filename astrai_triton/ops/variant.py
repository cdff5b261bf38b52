"""The types and constants of a compilation, as Triton's launcher finds them in the arguments of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Set
from typing import Any

import torch
import triton.language as tl

from astrai_triton.ops.launch import TRITON_TYPES, KernelConfig, Variant

# Pointers whose type does not depend on the call, in whichever kernel they occur.
_POINTER_TYPES = {
    "req_to_token_ptr": "*i32",
    "req_pool_indices_ptr": "*i32",
    "kv_indptr_ptr": "*i32",
    "qo_indptr_ptr": "*i32",
    "q_tile_to_batch_ptr": "*i32",
    "q_tile_to_index_ptr": "*i32",
    "out_cache_loc_ptr": "*i32",
    "mask_indptr_ptr": "*i64",
    "mask_ptr": "*u1",
    "freqs_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "lse_a_ptr": "*fp32",
    "lse_b_ptr": "*fp32",
    "o_part_ptr": "*fp32",
    "ml_part_ptr": "*fp32",
}
_SCALAR_TYPES = {tl.int32: "i32", tl.int64: "i64", tl.float32: "fp32"}


def name_flags(place: str, flags: Mapping[str, bool], sinks: torch.dtype | None) -> str:
    """``place`` and the flags that are on, joined to a part of a variant's name."""
    words = [place, *(word for word, is_on in flags.items() if is_on)]
    if sinks is not None:
        words.append("sinks" if sinks == torch.float32 else f"sinks_{TRITON_TYPES[sinks]}")
    return "_".join(words)


def name_dtypes(q_dtype: torch.dtype, kv_dtype: torch.dtype, align: int) -> str:
    """The end of a variant's name: its types, and whether its rows are aligned."""
    words = [TRITON_TYPES[q_dtype]]
    if kv_dtype != q_dtype:
        words.append(TRITON_TYPES[kv_dtype])
    if align < 16:
        words.append("unaligned")
    return "_".join(words)


def describe_variant(
    name: str,
    kernel: Any,
    constexprs: Mapping[str, Any],
    config: KernelConfig,
    *,
    pointers: Mapping[str, torch.dtype | None],
    absent: Set[str] = frozenset(),
    uses_dot: bool = False,
    tile: Mapping[str, int],
) -> Variant:
    """One compilation of ``kernel``.

    Args:
        name: of the variant.
        kernel: a ``triton.jit`` function whose numbers are annotated; one without annotation is an int32.
        constexprs: its compile-time arguments.
        config: its tile.
        pointers: element types that depend on the call, by argument; None where the argument is None.
        absent: other pointers that are None.
        uses_dot: see ``Variant``.
        tile: see ``Variant``.

    Raises:
        KeyError: a pointer of the kernel has no type.
    """
    signature, fixed = {}, {}
    absent = absent | {param for param, dtype in pointers.items() if dtype is None}
    for param, annotation in _annotations(kernel).items():
        if param in constexprs or param in absent:
            signature[param], fixed[param] = "constexpr", constexprs.get(param)
        elif (dtype := pointers.get(param)) is not None:
            signature[param] = f"*{TRITON_TYPES[dtype]}"
        elif param.endswith("_ptr"):
            signature[param] = _POINTER_TYPES[param]
        else:
            signature[param] = _SCALAR_TYPES.get(annotation, "i32")
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=fixed,
        divisible=(),
        config=config,
        uses_dot=uses_dot,
        tile=tile,
    )


@functools.cache
def _annotations(kernel: Any) -> dict[str, Any]:
    return {name: param.annotation for name, param in inspect.signature(kernel.fn).parameters.items()}
