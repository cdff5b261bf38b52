"""Hypothesis strategies for attention calls, and the builders that turn a drawn case into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

import oracle
from astrai_triton.backend import AttentionCall, TorchNativeBackend
from astrai_triton.backend.base import Forward
from astrai_triton.kvcache import KVCache
from astrai_triton.schedule import build_indptr, build_q_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(kw_only=True)
class Heads:
    """Dtype and head shapes of a call."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    kv_heads: int
    group: int

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


@attrs.frozen(kw_only=True)
class DenseCase:
    """A dense call; ``mask_dim`` is 0 (no mask), 2 or 3."""

    heads: Heads
    batch: int
    q_len: int
    kv_len: int
    mask_dim: int
    has_sinks: bool
    options: oracle.Options
    seed: int


@attrs.frozen(kw_only=True)
class PackedCase:
    """A call over the cache. ``holes`` is the share of table entries that are -1, new rows included."""

    heads: Heads
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int
    holes: float
    has_mask: bool
    has_sinks: bool
    options: oracle.Options
    seed: int


@attrs.frozen(eq=False, kw_only=True)
class Tensors:
    """What a packed case consists of."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    attn_mask: torch.Tensor | None
    sinks: torch.Tensor | None


def heads(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[Heads]:
    """Small heads of every kind: groups 1 to 8, value_dim mostly head_dim."""
    dims = st.sampled_from((8, 16, 40, 64))
    return st.tuples(dims, st.one_of(st.none(), st.none(), dims)).flatmap(
        lambda dim: st.builds(
            Heads,
            dtype=st.sampled_from(dtypes),
            head_dim=st.just(dim[0]),
            value_dim=st.just(dim[1] or dim[0]),
            kv_heads=st.integers(1, 3),
            group=st.sampled_from((1, 2, 3, 5, 8)),
        )
    )


def options(is_causal: st.SearchStrategy[bool]) -> st.SearchStrategy[oracle.Options]:
    """Scale, window and softcap, each mostly off."""
    side = st.one_of(st.just(-1), st.integers(0, 12))
    return st.builds(
        oracle.Options,
        is_causal=is_causal,
        softmax_scale=st.sampled_from((None, None, 0.3)),
        window_size=st.one_of(st.just((-1, -1)), st.tuples(side, side)),
        softcap=st.sampled_from((0.0, 0.0, 2.5)),
    )


def dense_cases(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[DenseCase]:
    """Dense calls, lengths from 0."""
    return st.builds(
        DenseCase,
        heads=heads(dtypes),
        batch=st.integers(0, 3),
        q_len=st.integers(0, 9),
        kv_len=st.integers(0, 20),
        mask_dim=st.sampled_from((0, 2, 3)),
        has_sinks=st.sampled_from((False, False, True)),
        options=options(st.booleans()),
        seed=st.integers(0, 2**16),
    )


def packed_cases(
    *, is_decode: bool, dtypes: Sequence[torch.dtype] = DTYPES, max_prefix: int = 40
) -> st.SearchStrategy[PackedCase]:
    """Calls over the cache; prefill has q_lens and prefixes from 0, decode one row a request.

    A request may have fewer keys than rows (then some rows stand before the first key).
    """
    row = st.just(1) if is_decode else st.integers(0, 9)
    shape = st.tuples(row, st.integers(-2, max_prefix)).map(lambda s: (s[0], max(s[0] + s[1], 0)))
    return st.lists(shape, max_size=4).flatmap(
        lambda shapes: st.builds(
            PackedCase,
            heads=heads(dtypes),
            q_lens=st.just(tuple(q_len for q_len, _ in shapes)),
            kv_lens=st.just(tuple(kv_len for _, kv_len in shapes)),
            page_size=st.sampled_from((1, 4, 16)),
            holes=st.sampled_from((0.0, 0.0, 0.3, 1.0)),
            has_mask=st.sampled_from((False, False, True)),
            has_sinks=st.sampled_from((False, False, True)),
            options=options(st.just(True) if is_decode else st.booleans()),
            seed=st.integers(0, 2**16),
        )
    )


def random_tensor(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal, drawn in float32 so that every dtype gets the same numbers."""
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def build_dense(
    case: DenseCase,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q, k, v, mask and sinks of a dense case."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.heads
    q = random_tensor(generator, (case.batch, case.q_len, heads.q_heads, heads.head_dim), heads.dtype)
    k = random_tensor(generator, (case.batch, case.kv_len, heads.kv_heads, heads.head_dim), heads.dtype)
    v = random_tensor(generator, (case.batch, case.kv_len, heads.kv_heads, heads.value_dim), heads.dtype)
    shape = (case.batch, case.kv_len) if case.mask_dim == 2 else (case.batch, case.q_len, case.kv_len)
    mask = torch.rand(shape, generator=generator) < 0.7 if case.mask_dim else None
    sinks = torch.randn(heads.q_heads, generator=generator) if case.has_sinks else None
    return q, k, v, mask, sinks


def build_packed(case: PackedCase, *, n_layers: int = 2) -> Tensors:
    """Tensors of a packed case: random pages, old K/V in place, everything unused NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, batch = case.heads, len(case.q_lens)
    context = max(case.kv_lens, default=0) + 3
    table, size = random_table(generator, case.kv_lens, context, case.page_size, case.holes)
    rows = torch.randperm(batch + 2, generator=generator)[:batch]
    req_to_token = torch.full((batch + 2, context), -1, dtype=torch.int32)
    req_to_token[rows] = table
    k_buffer = torch.full((n_layers, size, heads.kv_heads, heads.head_dim), torch.nan, dtype=heads.dtype)
    v_buffer = torch.full((n_layers, size, heads.kv_heads, heads.value_dim), torch.nan, dtype=heads.dtype)
    written: list[int] = []
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        used = table[b, :kv_len][table[b, :kv_len] >= 0].long()
        for buffer in (k_buffer, v_buffer):
            buffer[:, used] = random_tensor(generator, (n_layers, len(used), *buffer.shape[2:]), heads.dtype)
        positions = range(kv_len - q_len, kv_len)
        written += [int(table[b, position]) if position >= 0 else -1 for position in positions]
    tokens = sum(case.q_lens)
    num_scores = sum(q_len * kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True))
    return Tensors(
        q=random_tensor(generator, (tokens, heads.q_heads, heads.head_dim), heads.dtype),
        k=random_tensor(generator, (tokens, heads.kv_heads, heads.head_dim), heads.dtype),
        v=random_tensor(generator, (tokens, heads.kv_heads, heads.value_dim), heads.dtype),
        cache=make_cache(
            k_buffer,
            v_buffer,
            req_to_token,
            rows.tolist(),
            case.q_lens,
            case.kv_lens,
            written,
            q_heads=heads.q_heads,
        ),
        attn_mask=torch.rand(num_scores, generator=generator) < 0.7 if case.has_mask else None,
        sinks=torch.randn(heads.q_heads, generator=generator) if case.has_sinks else None,
    )


def packed_case(q_lens: Sequence[int], kv_lens: Sequence[int], **changes: Any) -> PackedCase:
    """A plain case of those lengths: float32, 3 query heads on each of 2 KV heads of 16, page 4, causal."""
    plain = PackedCase(
        heads=Heads(dtype=torch.float32, head_dim=16, value_dim=16, kv_heads=2, group=3),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        page_size=4,
        holes=0.0,
        has_mask=False,
        has_sinks=False,
        options=oracle.Options(is_causal=True),
        seed=0,
    )
    return attrs.evolve(plain, **changes)


def make_call(case: PackedCase, tensors: Tensors, *, fwd: Forward, layer_id: int = 1) -> AttentionCall:
    """The call of a packed case, for a backend's own entry points."""
    options = case.options
    return AttentionCall(
        q=tensors.q,
        k=tensors.k,
        v=tensors.v,
        kv_cache=tensors.cache,
        layer_id=layer_id,
        attn_mask=tensors.attn_mask,
        is_causal=options.is_causal,
        fwd=fwd,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=options.softcap,
        sinks=tensors.sinks,
    )


def expected_packed(case: PackedCase, tensors: Tensors, *, layer_id: int = 1) -> torch.Tensor:
    """What the oracle gives for a packed case, float64 ``[T, Hq, Dv]``."""
    cache = tensors.cache
    slots = cache.out_cache_loc.tolist()
    out, _ = oracle.attend_packed(
        tensors.q,
        oracle.write_rows(cache.k_buffer[layer_id], tensors.k, slots),
        oracle.write_rows(cache.v_buffer[layer_id], tensors.v, slots),
        cache.req_to_token,
        cache.req_pool_indices.tolist(),
        case.q_lens,
        case.kv_lens,
        case.options,
        attn_mask=tensors.attn_mask,
        sinks=tensors.sinks,
    )
    return out


def run_native(
    case: PackedCase, tensors: Tensors, *, may_read: bool | None = None, fwd: Forward | None = None
) -> torch.Tensor:
    """The backend's own output, on a fresh plan."""
    if fwd is None:
        fwd = "decode" if set(case.q_lens) <= {1} else "prefill"
    return TorchNativeBackend(may_read).forward(make_call(case, tensors, fwd=fwd))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within what the dtype of ``got`` can hold.

    1e-5 for float32; a few units of the last place for the others, since torch rounds the softmax weights to
    them too.
    """
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def random_table(
    generator: torch.Generator, kv_lens: Sequence[int], context: int, page_size: int, holes: float
) -> tuple[torch.Tensor, int]:
    """``[B, context]`` int32 slots in random pages, a share of them -1; and the size of their pool."""
    pages_each = -(-context // page_size)
    num_pages = len(kv_lens) * pages_each + 2
    pages = torch.randperm(num_pages, generator=generator)[: len(kv_lens) * pages_each]
    slots = pages.view(len(kv_lens), pages_each, 1) * page_size + torch.arange(page_size)
    table = slots.view(len(kv_lens), pages_each * page_size)[:, :context].to(torch.int32)
    gone = torch.rand(table.shape, generator=generator) < holes
    return table.masked_fill(gone, -1), num_pages * page_size


def make_cache(
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: Sequence[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    out_cache_loc: Sequence[int],
    *,
    q_heads: int,
) -> KVCache:
    """A KVCache over given buffers; the scratch is NaN."""
    q_tile_to_batch, q_tile_to_index = build_q_tiles(q_lens)
    batch, value_dim = len(q_lens), v_buffer.shape[-1]
    device = k_buffer.device

    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    return KVCache(
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        req_to_token=req_to_token,
        req_pool_indices=ints(list(rows)),
        seq_lens=ints(list(kv_lens)),
        out_cache_loc=ints(list(out_cache_loc)),
        max_len=max(kv_lens, default=0),
        kv_indptr=ints(build_indptr(kv_lens)),
        qo_indptr=ints(build_indptr(q_lens)),
        q_tile_to_batch=ints(q_tile_to_batch),
        q_tile_to_index=ints(q_tile_to_index),
        decode_o_part=torch.full((batch, q_heads, 4, value_dim), torch.nan, device=device),
        decode_ml_part=torch.full((batch, q_heads, 4, 2), torch.nan, device=device),
        decode_out=torch.full((batch, q_heads, value_dim), torch.nan, dtype=k_buffer.dtype, device=device),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
    )
