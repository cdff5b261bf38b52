"""Calls of prefill attention and what the oracle says of them; shared by its tests."""

from __future__ import annotations

import attrs
import torch

import oracle
import strategies
from astrai_triton.ops.prefill import attn_paged_prefill, attn_prefill
from strategies import DenseCase, Heads, PackedCase, Tensors, assert_close


def fit_heads(heads: Heads) -> Heads:
    """Head dims that the kernels have, and few heads."""
    return attrs.evolve(
        heads,
        head_dim=max(heads.head_dim, 24),
        value_dim=max(heads.value_dim, 16),
        kv_heads=min(heads.kv_heads, 2),
    )


def run_dense(
    case: DenseCase, rows: tuple[torch.Tensor, ...], **changes: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, written over NaN, and lse."""
    q, k, v, mask, sinks = rows
    arguments = attrs.asdict(case.options) | {
        "mask": mask,
        "sinks": sinks,
        "out": torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype),
        "return_lse": True,
    }
    return attn_prefill(q, k, v, **(arguments | changes))


def check_dense(case: DenseCase, **changes: object) -> None:
    rows = strategies.build_dense(case)
    q, k, v, mask, sinks = rows
    want, want_lse = oracle.attend_dense(q, k, v, case.options, attn_mask=mask, sinks=sinks)
    out, lse = run_dense(case, rows, **changes)
    assert_close(out, want)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def write_new(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Pools ``[slots, Hkv, ...]`` of layer 1 with the rows of the step in them."""
    cache = tensors.cache
    slots = cache.out_cache_loc.tolist()
    return (
        oracle.write_rows(cache.k_buffer[1], tensors.k, slots),
        oracle.write_rows(cache.v_buffer[1], tensors.v, slots),
    )


def run_paged(case: PackedCase, tensors: Tensors, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, written over NaN, and lse."""
    cache, q = tensors.cache, tensors.q
    k_buffer, v_buffer = write_new(tensors)
    arguments = attrs.asdict(case.options) | {
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
        "req_to_token": cache.req_to_token,
        "req_pool_indices": cache.req_pool_indices,
        "kv_indptr": cache.kv_indptr,
        "qo_indptr": cache.qo_indptr,
        "q_tile_to_batch": cache.q_tile_to_batch,
        "q_tile_to_index": cache.q_tile_to_index,
        "mask": tensors.attn_mask,
        "sinks": tensors.sinks,
        "out": torch.full((*q.shape[:-1], v_buffer.shape[-1]), torch.nan, dtype=q.dtype),
        "return_lse": True,
    }
    return attn_paged_prefill(q, **(arguments | changes))


def expect_paged(case: PackedCase, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    cache = tensors.cache
    return oracle.attend_packed(
        tensors.q,
        *write_new(tensors),
        cache.req_to_token,
        cache.req_pool_indices.tolist(),
        case.q_lens,
        case.kv_lens,
        case.options,
        attn_mask=tensors.attn_mask,
        sinks=tensors.sinks,
    )


def check_paged(case: PackedCase, **changes: object) -> None:
    tensors = strategies.build_packed(case)
    want, want_lse = expect_paged(case, tensors)
    out, lse = run_paged(case, tensors, **changes)
    assert_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def dense_case(q_len: int, kv_len: int, **changes: object) -> DenseCase:
    plain = DenseCase(
        heads=Heads(dtype=torch.float32, head_dim=16, value_dim=16, kv_heads=1, group=2),
        batch=1,
        q_len=q_len,
        kv_len=kv_len,
        mask_dim=0,
        has_sinks=False,
        options=oracle.Options(is_causal=True),
        seed=0,
    )
    return attrs.evolve(plain, **changes)
