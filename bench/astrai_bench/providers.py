"""The implementations a bench compares, each with the reason it cannot run a case here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from astrai_bench.cases import PROVIDERS, Case
from astrai_bench.inputs import DenseInputs, Inputs, PagedInputs, RotaryInputs
from astrai_bench.rivals import (
    prepare_flash_attn,
    prepare_flashinfer,
    why_not_flash_attn,
    why_not_flashinfer,
)
from astrai_triton.backend import TorchNativeBackend, apply_rotary_emb
from astrai_triton.backend.base import AttentionCall

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Call: TypeAlias = Callable[[], Result]
_WhyNot: TypeAlias = Callable[[Case, torch.device], str | None]
_Prepare: TypeAlias = Callable[[Case, Inputs], Call]


@attrs.frozen(kw_only=True)
class Provider:
    """One implementation."""

    name: str
    why_not: _WhyNot
    """Why it cannot run a case on a device; None when it can."""
    prepare: _Prepare | None
    """Everything that is done once per set of inputs; gives the call that is timed. None: never runs."""
    capturable: bool
    """Whether a CUDA graph may hold the call."""


def list_providers() -> tuple[Provider, ...]:
    """All of them, in the order of ``PROVIDERS``."""
    return tuple(_make_provider(name) for name in PROVIDERS)


def _make_provider(name: str) -> Provider:
    entries: dict[str, tuple[_WhyNot, _Prepare | None, bool]] = {
        "triton": (_why_not_triton, _prepare_triton, True),
        "cuda_ref": (_why_not_cuda_ref, _prepare_cuda_ref, True),
        "torch_sdpa": (_why_not_sdpa, _prepare_sdpa, True),
        "flex_attention": (_why_not_flex, _prepare_flex, False),
        "torch_native": (_why_not_native, _prepare_native, False),
        "flash_attn": (why_not_flash_attn, prepare_flash_attn, True),
        "flashinfer": (why_not_flashinfer, prepare_flashinfer, False),
    }
    why_not, prepare, capturable = entries[name]
    return Provider(name=name, why_not=why_not, prepare=prepare, capturable=capturable)


def is_interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter: slow, so never comparable with anything."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_not_triton(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if device.type == "cuda" and is_interpreting():
        return "TRITON_INTERPRET=1 is set, so the kernels would not run on the GPU; unset it"
    if device.type == "cuda" or is_interpreting():
        return None
    return f"needs a GPU, got {device}; TRITON_INTERPRET=1 runs the kernels in Triton's interpreter"


def _prepare_triton(case: Case, inputs: Inputs) -> Call:
    # Importing the kernels decides between compiler and interpreter, so only once they are wanted.
    from astrai_triton import ops

    return _prepare_ops(ops, case, inputs)


def _prepare_ops(ops: ModuleType, case: Case, inputs: Inputs) -> Call:
    """The call of ``ops``: of ``astrai_triton``, or of ``cuda_ref``, which has the same."""
    if isinstance(inputs, RotaryInputs):

        def rotate() -> Result:
            ops.rotary_qk_(inputs.q, inputs.k, inputs.freqs_cis, pairing="adjacent")
            return inputs.q, inputs.k

        return rotate
    out = torch.full_like(inputs.q, torch.nan)
    if isinstance(inputs, DenseInputs):
        if case.is_decode:
            return functools.partial(ops.attn_decode, inputs.q, inputs.k, inputs.v, out=out)
        return functools.partial(ops.attn_prefill, inputs.q, inputs.k, inputs.v, is_causal=True, out=out)
    cache = inputs.cache
    pools = (cache.k_buffer[0], cache.v_buffer[0])
    tables = (cache.req_to_token, cache.req_pool_indices, cache.kv_indptr)
    if case.is_decode:
        return functools.partial(
            ops.attn_paged_decode,
            inputs.q,
            *pools,
            *tables,
            new_k=inputs.k,
            new_v=inputs.v,
            out=out,
            o_part=cache.decode_o_part,
            ml_part=cache.decode_ml_part,
            max_kv_len=cache.max_len,
        )
    tiles = (cache.qo_indptr, cache.q_tile_to_batch, cache.q_tile_to_index)
    return functools.partial(
        ops.attn_paged_prefill, inputs.q, *pools, *tables, *tiles, is_causal=True, out=out
    )


def _why_not_cuda_ref(case: Case, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "on a CPU the CUDA reference simulates every thread of a GPU; its time says nothing"
    from cuda_ref import why_not

    return why_not("cuda")


def _prepare_cuda_ref(case: Case, inputs: Inputs) -> Call:
    from cuda_ref import ops

    return _prepare_ops(ops, case, inputs)


def _why_not_dense_only(name: str, case: Case) -> str | None:
    if case.op == "rotary":
        return f"{name} has no rotary embedding"
    if case.is_paged:
        return f"{name} reads dense K and V only; torch_native gathers them first"
    return None


def _why_not_sdpa(case: Case, device: torch.device) -> str | None:
    return _why_not_dense_only("scaled_dot_product_attention", case)


def _prepare_sdpa(case: Case, inputs: Inputs) -> Call:
    assert isinstance(inputs, DenseInputs)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    q_len, kv_len = case.q_lens[0], case.kv_lens[0]
    mask = None
    if 1 < q_len < kv_len:
        # is_causal of torch is top-left aligned.
        rows = torch.arange(kv_len - q_len, kv_len, device=q.device)
        mask = torch.arange(kv_len, device=q.device) <= rows[:, None]
    attend = functools.partial(
        scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=1 < q_len == kv_len,
        enable_gqa=case.q_heads != case.kv_heads,
    )
    return lambda: attend().transpose(1, 2)


def _why_not_flex(case: Case, device: torch.device) -> str | None:
    reason = _why_not_dense_only("flex_attention", case)
    if reason is None and device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return "torch.compile needs a C++ compiler on a CPU, and there is no g++; install one or set CXX"
    return reason


@functools.cache
def _compile_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _make_block_mask(q_len: int, kv_len: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    first = kv_len - q_len

    def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key <= row + first

    return create_block_mask(sees, None, None, q_len, kv_len, device=device)


def _prepare_flex(case: Case, inputs: Inputs) -> Call:
    assert isinstance(inputs, DenseInputs)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    q_len, kv_len = case.q_lens[0], case.kv_lens[0]
    block_mask = None if q_len == 1 else _make_block_mask(q_len, kv_len, str(q.device))
    attend = functools.partial(
        _compile_flex(), q, k, v, block_mask=block_mask, enable_gqa=case.q_heads != case.kv_heads
    )
    return lambda: attend().transpose(1, 2)


def _why_not_native(case: Case, device: torch.device) -> str | None:
    if case.op in ("decode", "prefill"):
        return "over dense K and V it is scaled_dot_product_attention; see torch_sdpa"
    return None


def _prepare_native(case: Case, inputs: Inputs) -> Call:
    if isinstance(inputs, RotaryInputs):
        rotate = functools.partial(apply_rotary_emb, freqs_cis=inputs.freqs_cis, pairing="adjacent")
        return lambda: (rotate(inputs.q), rotate(inputs.k))
    assert isinstance(inputs, PagedInputs)
    call = AttentionCall(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        kv_cache=inputs.cache,
        layer_id=0,
        attn_mask=None,
        is_causal=True,
        fwd="decode" if case.is_decode else "prefill",
        softmax_scale=None,
        window_size=(-1, -1),
        softcap=0.0,
        sinks=None,
    )
    # The plan of a step is made in the first call and serves all layers of a model, so it is not timed.
    return functools.partial(TorchNativeBackend().forward, call)
