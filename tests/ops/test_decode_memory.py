"""What decode attention reads and writes: poison, strides, slots out of range, far addresses, variants."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import oracle
import strategies
from astrai_triton.ops import attn_decode, attn_paged_decode, launch_decode, split
from astrai_triton.ops.launch import KernelConfig
from strategies import DTYPES, Heads, assert_close, packed_case


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def small_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 16 keys."""
    monkeypatch.setattr(launch_decode, "decode_chunk", lambda q_heads, kv_heads, itemsize: 16)
    config = KernelConfig(block_m=16, block_n=16, num_warps=4, num_stages=3)
    monkeypatch.setattr(split, "decode_config", lambda *shape: config)


def run(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("q", "k_buffer", "v_buffer", "req_to_token", "req_pool_indices", "kv_indptr")
    tensors = [arguments.pop(name) for name in names]
    return attn_paged_decode(*tensors, return_lse=True, **arguments)


@pytest.mark.usefixtures("small_chunk")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nothing_that_is_not_seen_changes_a_bit(dtype: torch.dtype, poison: float) -> None:
    """Unused slots, keys outside the window and behind the mask, scratch and the old ``out``; one by one."""
    generator = torch.Generator().manual_seed(3)
    kv_lens, window = (37, 0, 20), 25
    q = torch.randn(3, 4, 24, generator=generator).to(dtype)
    table = torch.randperm(120, generator=generator)[:117].view(3, 39).to(torch.int32)
    table[0, 30] = -1
    mask = torch.rand(57, generator=generator) < 0.8
    mask[36] = mask[56] = True
    seen = torch.zeros(120, dtype=torch.bool)
    for b, start in ((0, 0), (2, 37)):
        for key in range(max(0, kv_lens[b] - 1 - window), kv_lens[b] - 1):
            if table[b, key] >= 0 and mask[start + key]:
                seen[table[b, key]] = True
    base = torch.randn(2, 120, 2, 24, generator=generator).to(dtype)
    new = torch.randn(2, 3, 2, 24, generator=generator).to(dtype)

    def attend(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        k_buffer, v_buffer = base.masked_fill(~seen[None, :, None, None], fill).unbind(0)
        return run(
            q=q,
            k_buffer=k_buffer.clone(),
            v_buffer=v_buffer.clone(),
            req_to_token=table,
            req_pool_indices=ints(0, 1, 2),
            kv_indptr=ints(0, 37, 37, 57),
            new_k=new[0],
            new_v=new[1],
            mask=mask,
            window_size=(window, -1),
            out=torch.full((3, 4, 24), fill, dtype=dtype),
            o_part=torch.full((3, 4, 3, 24), fill),
            ml_part=torch.full((3, 4, 3, 2), fill),
        )

    clean, clean_lse = attend(0.0)
    out, lse = attend(poison)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    assert torch.isfinite(out).all()
    assert torch.equal(out[1], torch.zeros(4, 24, dtype=dtype))
    assert torch.all(lse[1] == -torch.inf)


def test_masked_keys_of_contiguous_kv_may_be_poison() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, size, 2, 16, generator=generator) for size in (1, 9, 9))
    mask = torch.rand(2, 9, generator=generator) < 0.5
    poisoned = [tensor.masked_fill(~mask[..., None, None], torch.nan) for tensor in (k, v)]
    out = attn_decode(q, *poisoned, mask=mask, window_size=(6, 0))
    options = oracle.Options(window_size=(6, 0))
    assert_close(out, oracle.attend_dense(q, k, v, options, attn_mask=mask)[0])


def test_slots_rows_and_lengths_out_of_range_are_masked_and_never_read() -> None:
    """A slot at and beyond the pool, a table that is too short, rows of the table that do not exist."""
    q = torch.ones(4, 1, 16)
    pool = torch.arange(4.0)[:, None, None].expand(4, 1, 16).contiguous()
    table = ints(1, 4, 2**31 - 1, 3, -5, 2).view(2, 3)
    out, lse = run(
        q=q,
        k_buffer=torch.zeros(4, 1, 16),
        v_buffer=pool,
        req_to_token=table,
        req_pool_indices=ints(0, 1, 2, -1),
        kv_indptr=ints(0, 3, 8, 10, 12),
    )
    assert out[:, 0, 0].tolist() == [1.0, 2.5, 0.0, 0.0]
    assert lse[2:, 0].tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("slot", [-1, 4, 2**31 - 1])
def test_a_new_row_without_a_slot_is_neither_stored_nor_seen(slot: int) -> None:
    k_buffer, v_buffer = torch.full((2, 4, 1, 16), 2.0).unbind(0)
    out, _ = run(
        q=torch.ones(1, 1, 16),
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        req_to_token=ints(1, slot)[None],
        req_pool_indices=ints(0),
        kv_indptr=ints(0, 2),
        new_k=torch.full((1, 1, 16), 9.0),
        new_v=torch.full((1, 1, 16), 9.0),
    )
    assert torch.all(out == 2)
    assert torch.all(k_buffer == 2)
    assert torch.all(v_buffer == 2)


def test_any_strides_work() -> None:
    """q, new_k and new_v out of one fused tensor, transposed pools, a table by columns, a strided out."""
    heads = Heads(dtype=torch.float16, head_dim=24, value_dim=24, kv_heads=2, group=2)
    case = packed_case([1, 1], [20, 7], heads=heads, has_mask=True)
    tensors = strategies.build_packed(case)
    cache = tensors.cache
    fused = torch.cat((tensors.q, tensors.k, tensors.v), dim=1)
    pools = [
        buffer[1].transpose(0, 1).contiguous().transpose(0, 1) for buffer in (cache.k_buffer, cache.v_buffer)
    ]
    out = torch.full((4, 2, 30), torch.nan, dtype=torch.float16).transpose(0, 1)[..., 3:27]
    assert tensors.attn_mask is not None
    run(
        q=fused[:, :4],
        k_buffer=pools[0],
        v_buffer=pools[1],
        req_to_token=cache.req_to_token.t().contiguous().t(),
        req_pool_indices=cache.req_pool_indices,
        kv_indptr=cache.kv_indptr,
        new_k=fused[:, 4:6],
        new_v=fused[:, 6:],
        mask=tensors.attn_mask.repeat_interleave(2)[::2],
        out=out,
    )
    assert_close(out, strategies.expected_packed(case, tensors))


def test_strides_of_contiguous_kv_and_its_mask() -> None:
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 3, 2, 11, 16, generator=generator).transpose(2, 3).unbind(0)
    q = torch.randn(3, 1, 2, 40, generator=generator)[..., 8:24]
    mask = (torch.rand(11, 3, generator=generator) < 0.6).t()
    want, _ = oracle.attend_dense(q, k, v, oracle.Options(), attn_mask=mask)
    assert_close(attn_decode(q, k, v, mask=mask), want)


def test_offsets_beyond_two_to_the_31st_element_are_right() -> None:
    """Of these 8 GB only the pages of the few rows that are touched exist."""
    stride = 2**30 + 8
    pools = [
        torch.empty(2 * stride + 16, dtype=torch.float16).as_strided((3, 1, 16), (stride, 16, 1))
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(6)
    for pool in pools:
        pool.copy_(torch.randn(3, 1, 16, generator=generator))
    new_k, new_v = torch.randn(2, 1, 1, 16, generator=generator).to(torch.float16).unbind(0)
    q = torch.randn(1, 2, 16, generator=generator).to(torch.float16)
    table = ints(1, 0, 2)[None]
    out, _ = run(
        q=q,
        k_buffer=pools[0],
        v_buffer=pools[1],
        req_to_token=table,
        req_pool_indices=ints(0),
        kv_indptr=ints(0, 3),
        new_k=new_k,
        new_v=new_v,
    )
    assert torch.equal(pools[0][2], new_k[0])
    assert torch.equal(pools[1][2], new_v[0])
    keys, values = (pool[table[0]][None] for pool in pools)
    assert_close(out, oracle.attend_dense(q[:, None], keys, values, oracle.Options())[0][:, 0])


def test_given_scratch_and_out_are_used_and_nothing_else_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = packed_case([1], [600])
    tensors = strategies.build_packed(case)
    cache = tensors.cache
    monkeypatch.setattr(torch, "empty", None)
    out = attn_paged_decode(
        tensors.q,
        cache.k_buffer[1],
        cache.v_buffer[1],
        cache.req_to_token,
        cache.req_pool_indices,
        cache.kv_indptr,
        new_k=tensors.k,
        new_v=tensors.v,
        out=cache.decode_out,
        o_part=cache.decode_o_part,
        ml_part=cache.decode_ml_part,
    )
    assert out is cache.decode_out
    assert torch.isfinite(cache.decode_o_part[:, :, :3]).all()
    assert torch.isnan(cache.decode_o_part[:, :, 3:]).all()


@attrs.frozen
class Recorder:
    """Stands for a kernel and notes what would make Triton compile another variant."""

    variants: set[tuple[object, ...]] = attrs.field(factory=set)

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *values: object, **named: object) -> None:
        key = []
        for value in (*values, *named.values()):
            if isinstance(value, torch.Tensor):
                key.append(value.dtype)
            elif isinstance(value, float):
                key.append("float")
            else:
                key.append(None if value is None else "int")
        upper = sorted((name, str(value)) for name, value in named.items() if name.isupper())
        self.variants.add((*key, *upper))


def test_lengths_batches_and_strides_share_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, merge = Recorder(), Recorder()
    monkeypatch.setattr(split, "attend_decode_kernel", kernel)
    monkeypatch.setattr(split, "merge_splits_kernel", merge)
    generator = torch.Generator().manual_seed(7)
    for _ in range(200):
        batch, context, slots, rows = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(4))
        pool = torch.zeros(slots, 2, 3, 32)
        attn_paged_decode(
            torch.zeros(batch, 6, 64)[..., :32],
            pool[:, 0, :2],
            pool[:, 1, :2],
            torch.zeros(rows, 400 + context, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32),
            torch.zeros(batch + 1, dtype=torch.int32),
            window_size=(int(torch.randint(-1, 50, (), generator=generator)) * 20 + 400, -1),
            softmax_scale=float(torch.rand((), generator=generator)),
        )
    assert len(kernel.variants) == 1
    assert len(merge.variants) == 1
