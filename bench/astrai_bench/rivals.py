"""Kernels of other packages, where they are installed: flash-attn and flashinfer."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from astrai_bench.cases import Case
from astrai_bench.inputs import DenseInputs, Inputs, PagedInputs

_FLASH_PAGE = 256
_WORKSPACE_BYTES = 128 << 20


def _why_not_package(package: str, install: str, case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed; pip install {install}"
    if device.type != "cuda":
        return f"{package} needs a GPU, got {device}"
    if case.dtype == "float32":
        return f"{package} needs float16 or bfloat16, got float32"
    if case.op == "rotary":
        return f"{package} is compared for attention only"
    return None


def why_not_flash_attn(case: Case, device: torch.device) -> str | None:
    """Why flash-attn cannot run ``case``; None when it can."""
    reason = _why_not_package("flash_attn", "flash-attn", case, device)
    if reason is None and case.is_paged and case.page % _FLASH_PAGE:
        return f"flash_attn needs pages of a multiple of {_FLASH_PAGE} tokens, got {case.page}"
    return reason


def prepare_flash_attn(case: Case, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The call of flash-attn; decode over a pool appends the new K and V itself."""
    module: Any = importlib.import_module("flash_attn")
    if isinstance(inputs, DenseInputs):
        return functools.partial(
            module.flash_attn_func, inputs.q, inputs.k, inputs.v, causal=not case.is_decode
        )
    assert isinstance(inputs, PagedInputs)
    k_pages, v_pages = _view_pages(case, inputs)
    cache = inputs.cache
    # Entries past the last page are never read, but must be page numbers.
    block_table = (cache.req_to_token[:, :: case.page] // case.page).clamp(min=0).contiguous()
    if not case.is_decode:
        return functools.partial(
            module.flash_attn_varlen_func,
            inputs.q,
            k_pages,
            v_pages,
            cache.qo_indptr,
            cache.kv_indptr,
            max(case.q_lens),
            max(case.kv_lens),
            causal=True,
            block_table=block_table,
        )
    attend = functools.partial(
        module.flash_attn_with_kvcache,
        inputs.q[:, None],
        k_pages,
        v_pages,
        k=inputs.k[:, None],
        v=inputs.v[:, None],
        cache_seqlens=cache.seq_lens - 1,
        block_table=block_table,
        causal=True,
    )
    return lambda: attend().squeeze(1)


def why_not_flashinfer(case: Case, device: torch.device) -> str | None:
    """Why flashinfer cannot run ``case``; None when it can."""
    reason = _why_not_package("flashinfer", "flashinfer-python", case, device)
    if reason is None and not case.is_paged and case.batch > 1:
        return f"flashinfer takes dense K and V of one request only, got {case.batch}; see paged-{case.op}"
    return reason


def prepare_flashinfer(case: Case, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The call of flashinfer, planned once; decode over a pool appends the new K and V first."""
    module = importlib.import_module("flashinfer")
    if isinstance(inputs, PagedInputs):
        return _prepare_flashinfer_pool(module, case, inputs)
    assert isinstance(inputs, DenseInputs)
    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    if case.is_decode:
        return lambda: module.single_decode_with_kv_cache(q[0], k, v, kv_layout="NHD")[None, None]
    return lambda: module.single_prefill_with_kv_cache(q, k, v, causal=True, kv_layout="NHD")[None]


def _prepare_flashinfer_pool(
    module: ModuleType, case: Case, inputs: PagedInputs
) -> Callable[[], torch.Tensor]:
    api: Any = module
    cache, device = inputs.cache, inputs.q.device
    pages = _view_pages(case, inputs)
    counts = [-(-kv_len // case.page) for kv_len in case.kv_lens]
    first_slots = cache.req_to_token[:, :: case.page]
    indices = torch.cat([first_slots[b, :count] // case.page for b, count in enumerate(counts)])
    indptr = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    last = torch.tensor(
        [(kv_len - 1) % case.page + 1 for kv_len in case.kv_lens], dtype=torch.int32, device=device
    )
    workspace = _make_workspace(str(device))
    heads = (case.q_heads, case.kv_heads, case.head_dim, case.page)
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.q.dtype}
    if not case.is_decode:
        prefill = api.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        prefill.plan(cache.qo_indptr, indptr, indices, last, *heads, causal=True, **dtypes)
        return functools.partial(prefill.run, inputs.q, pages)
    decode = api.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=case.q_heads >= 4 * case.kv_heads
    )
    decode.plan(indptr, indices, last, *heads, **dtypes)
    requests = torch.arange(case.batch, dtype=torch.int32, device=device)
    positions = cache.seq_lens - 1

    def attend() -> torch.Tensor:
        api.append_paged_kv_cache(
            inputs.k, inputs.v, requests, positions, pages, indices, indptr, last, kv_layout="NHD"
        )
        out: torch.Tensor = decode.run(inputs.q, pages)
        return out

    return attend


@functools.cache
def _make_workspace(device: str) -> torch.Tensor:
    """Scratch that the calls of one stream share."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _view_pages(case: Case, inputs: PagedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[pages, page, Hkv, D]``."""
    cache = inputs.cache
    shape = (-1, case.page, case.kv_heads, case.head_dim)
    return cache.k_buffer[0].view(shape), cache.v_buffer[0].view(shape)
