"""Tensors of a case, several sets of them, so that a bench does not measure the cache."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import attrs
import torch

from astrai_bench.cases import Case
from astrai_triton.kvcache import KVCache
from astrai_triton.schedule import build_indptr, build_q_tiles, decode_chunk, num_decode_splits

_MAX_SETS = 64


@attrs.frozen(eq=False, kw_only=True)
class DenseInputs:
    """q ``[B, Lq, Hq, D]``, k and v ``[B, L, Hkv, D]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@attrs.frozen(eq=False, kw_only=True)
class PagedInputs:
    """q ``[T, Hq, D]`` over a pool of one layer; k and v ``[T, Hkv, D]`` belong to the same rows.

    In decode they are not in the pool yet, and NaN stands in their place. In prefill they are.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache


@attrs.frozen(eq=False, kw_only=True)
class RotaryInputs:
    """q ``[T, Hq, D]`` and k ``[T, Hkv, D]``, rotated in place or not; freqs_cis ``[T, D/2, 2]`` float32."""

    q: torch.Tensor
    k: torch.Tensor
    freqs_cis: torch.Tensor


Inputs: TypeAlias = DenseInputs | PagedInputs | RotaryInputs


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Normally distributed tensors of ``case``; the same seed gives the same tensors on the same device."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    if case.op == "rotary":
        return RotaryInputs(
            q=draw(case.num_tokens, case.q_heads, case.head_dim),
            k=draw(case.num_tokens, case.kv_heads, case.head_dim),
            freqs_cis=_build_freqs_cis(case).to(device),
        )
    if case.is_paged:
        q = draw(case.num_tokens, case.q_heads, case.head_dim)
        k, v = (draw(case.num_tokens, case.kv_heads, case.head_dim) for _ in range(2))
        cache = _build_cache(case, device, generator)
        if not case.is_decode:
            store_new(PagedInputs(q=q, k=k, v=v, cache=cache))
        return PagedInputs(q=q, k=k, v=v, cache=cache)
    kv_shape = (case.batch, case.kv_lens[0], case.kv_heads, case.head_dim)
    return DenseInputs(
        q=draw(case.batch, case.q_lens[0], case.q_heads, case.head_dim), k=draw(*kv_shape), v=draw(*kv_shape)
    )


def store_new(inputs: PagedInputs) -> None:
    """Put the new K and V into the pool, in place."""
    slots = inputs.cache.out_cache_loc.long()
    inputs.cache.k_buffer[0, slots] = inputs.k
    inputs.cache.v_buffer[0, slots] = inputs.v


def _build_freqs_cis(case: Case) -> torch.Tensor:
    pairs = torch.arange(0, case.head_dim // 2 * 2, 2, dtype=torch.float64) / case.head_dim
    positions = torch.cat([torch.arange(q_len, dtype=torch.float64) for q_len in case.q_lens])
    angles = positions[:, None] * 10000.0**-pairs
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def _build_cache(case: Case, device: torch.device, generator: torch.Generator) -> KVCache:
    """A pool whose pages lie in random order. The page that belongs to nobody is NaN."""
    page, context = case.page, max(case.kv_lens)
    pages_each = [-(-kv_len // page) for kv_len in case.kv_lens]
    num_pages = sum(pages_each)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(generator.initial_seed()))
    table = torch.full((case.batch, -(-context // page) * page), -1, dtype=torch.int32)
    starts = build_indptr(pages_each)
    for b, count in enumerate(pages_each):
        pages = order[starts[b] : starts[b] + count]
        slots = pages[:, None] * page + torch.arange(page)
        table[b, : count * page] = slots.flatten().to(torch.int32)
    writes = [
        int(table[b, position])
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True))
        for position in range(kv_len - q_len, kv_len)
    ]
    shape = (1, (num_pages + 1) * page, case.kv_heads, case.head_dim)
    dtype: torch.dtype = getattr(torch, case.dtype)
    buffers = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2)]
    for buffer in buffers:
        buffer[:, num_pages * page :] = torch.nan
        buffer[:, writes] = torch.nan
    return _bind_cache(case, buffers[0], buffers[1], table[:, :context].contiguous(), writes)


def _bind_cache(
    case: Case, k_buffer: torch.Tensor, v_buffer: torch.Tensor, table: torch.Tensor, writes: list[int]
) -> KVCache:
    device = k_buffer.device
    q_tile_to_batch, q_tile_to_index = build_q_tiles(case.q_lens)
    chunk = decode_chunk(case.q_heads, case.kv_heads, case.itemsize)
    splits = num_decode_splits(max(case.kv_lens), chunk)
    parts = (case.batch, case.q_heads, splits)

    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    return KVCache(
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        req_to_token=table.to(device),
        req_pool_indices=torch.arange(case.batch, dtype=torch.int32, device=device),
        seq_lens=ints(case.kv_lens),
        out_cache_loc=ints(writes),
        max_len=max(case.kv_lens),
        kv_indptr=ints(build_indptr(case.kv_lens)),
        qo_indptr=ints(build_indptr(case.q_lens)),
        q_tile_to_batch=ints(q_tile_to_batch),
        q_tile_to_index=ints(q_tile_to_index),
        decode_o_part=torch.empty(*parts, case.head_dim, device=device),
        decode_ml_part=torch.empty(*parts, 2, device=device),
        decode_out=torch.empty(case.batch, case.q_heads, case.head_dim, dtype=k_buffer.dtype, device=device),
        q_lens=case.q_lens,
        kv_lens=case.kv_lens,
    )


def copy_inputs(inputs: Inputs) -> Inputs:
    """The same values in memory of their own."""
    if isinstance(inputs, PagedInputs):
        return attrs.evolve(_clone(inputs), cache=_clone(inputs.cache))
    if isinstance(inputs, DenseInputs):
        return _clone(inputs)
    return _clone(inputs)


_Tensors = TypeVar("_Tensors", DenseInputs, PagedInputs, RotaryInputs, KVCache)


def _clone(tensors: _Tensors) -> _Tensors:
    fields = attrs.asdict(tensors, recurse=False)
    changes: dict[str, Any] = {
        name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)
    }
    return attrs.evolve(tensors, **changes)


def count_operand_bytes(inputs: Inputs) -> int:
    """Bytes of one set that a call reads."""
    tensors = [inputs.q, inputs.k, inputs.v] if not isinstance(inputs, RotaryInputs) else [inputs.q, inputs.k]
    if isinstance(inputs, PagedInputs):
        tensors += [inputs.cache.k_buffer, inputs.cache.v_buffer]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def choose_num_sets(bytes_each: int, cache_bytes: int, free_bytes: int) -> int:
    """Sets to rotate through: before one comes round again, twice the cache has been read.

    Args:
        bytes_each: bytes of one set.
        cache_bytes: the largest cache of the device.
        free_bytes: free memory; at most half of it is used.

    Returns:
        1 to 64. Where that is not enough the inputs stay in the cache; see ``leaves_cache``.
    """
    wanted = 1 + -(-2 * cache_bytes // max(1, bytes_each))
    room = free_bytes // 2 // max(1, bytes_each)
    return max(1, min(wanted, room, _MAX_SETS))


def leaves_cache(num_sets: int, bytes_each: int, cache_bytes: int) -> bool:
    """Whether a set has left the cache when its turn comes again."""
    return (num_sets - 1) * bytes_each >= cache_bytes
