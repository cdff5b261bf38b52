"""Decode attention of the kernels against the float64 oracle: contiguous, paged, split and merged."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton.ops import attn_decode, attn_paged_decode, launch_decode, split
from astrai_triton.ops.launch import KernelConfig
from strategies import DTYPES, Heads, PackedCase, Tensors, assert_close, packed_case

# The interpreter takes about 0.1 s a program, whatever its size.
few_examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def fit_heads(case: PackedCase | strategies.DenseCase) -> PackedCase | strategies.DenseCase:
    """Head dims that the kernels have: 24 for 8."""
    heads = case.heads
    fitted = attrs.evolve(
        heads,
        head_dim=max(heads.head_dim, 24),
        value_dim=max(heads.value_dim, 16),
        kv_heads=min(heads.kv_heads, 2),
    )
    return attrs.evolve(case, heads=fitted)


def run_paged(
    case: PackedCase, tensors: Tensors, **changes: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse and both pools after the call; ``tensors`` stay as they are."""
    cache, options = tensors.cache, case.options
    k_buffer, v_buffer = cache.k_buffer[1].clone(), cache.v_buffer[1].clone()
    arguments: dict[str, object] = {
        "new_k": tensors.k,
        "new_v": tensors.v,
        "mask": tensors.attn_mask,
        "softmax_scale": options.softmax_scale,
        "window_size": options.window_size,
        "softcap": options.softcap,
        "sinks": tensors.sinks,
        "out": cache.decode_out,
        "max_kv_len": cache.max_len,
        "return_lse": True,
    }
    out, lse = attn_paged_decode(
        tensors.q,
        k_buffer,
        v_buffer,
        cache.req_to_token,
        cache.req_pool_indices,
        cache.kv_indptr,
        **(arguments | changes),
    )
    return out.clone(), lse, k_buffer, v_buffer


def expect_paged(case: PackedCase, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    cache = tensors.cache
    slots = cache.out_cache_loc.tolist()
    return oracle.attend_packed(
        tensors.q,
        oracle.write_rows(cache.k_buffer[1], tensors.k, slots),
        oracle.write_rows(cache.v_buffer[1], tensors.v, slots),
        cache.req_to_token,
        cache.req_pool_indices.tolist(),
        case.q_lens,
        case.kv_lens,
        case.options,
        attn_mask=tensors.attn_mask,
        sinks=tensors.sinks,
    )


def check_paged(case: PackedCase, **changes: object) -> None:
    """Output, lse and what was stored, against the oracle."""
    tensors = strategies.build_packed(case)
    out, lse, k_buffer, v_buffer = run_paged(case, tensors, **changes)
    want, want_lse = expect_paged(case, tensors)
    assert_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)
    slots = tensors.cache.out_cache_loc.tolist()
    for got, pool, rows in (
        (k_buffer, tensors.cache.k_buffer[1], tensors.k),
        (v_buffer, tensors.cache.v_buffer[1], tensors.v),
    ):
        assert torch.equal(got.nan_to_num(7.0), oracle.write_rows(pool, rows, slots).nan_to_num(7.0))


@pytest.fixture
def small_chunk(monkeypatch: pytest.MonkeyPatch) -> int:
    """Splits of 16 keys, so that a few hundred keys make many of them."""
    monkeypatch.setattr(launch_decode, "decode_chunk", lambda q_heads, kv_heads, itemsize: 16)
    config = KernelConfig(block_m=16, block_n=16, num_warps=4, num_stages=3)
    monkeypatch.setattr(split, "decode_config", lambda *shape: config)
    return 16


@few_examples
@given(strategies.packed_cases(is_decode=True, max_prefix=80).map(fit_heads))
def test_paged_decode_is_the_oracle_and_stores_the_new_rows(case: PackedCase) -> None:
    check_paged(case)


@few_examples
@given(strategies.dense_cases().map(fit_heads))
def test_contiguous_decode_is_the_oracle(case: strategies.DenseCase) -> None:
    case = attrs.evolve(case, q_len=1, kv_len=4 * case.kv_len, mask_dim=min(case.mask_dim, 2))
    q, k, v, mask, sinks = strategies.build_dense(case)
    options = case.options
    out, lse = attn_decode(
        q,
        k,
        v,
        mask=mask,
        softmax_scale=options.softmax_scale,
        window_size=options.window_size,
        softcap=options.softcap,
        sinks=sinks,
        return_lse=True,
    )
    want, want_lse = oracle.attend_dense(q, k, v, options, attn_mask=mask, sinks=sinks)
    assert_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_splits_merge_to_the_oracle(dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype, head_dim=64, value_dim=40, kv_heads=1, group=4)
    options = oracle.Options(is_causal=True, softcap=2.5)
    check_paged(packed_case((1, 1), (600, 3), heads=heads, holes=0.1, has_sinks=True, options=options))


@pytest.mark.usefixtures("small_chunk")
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    kv_lens=st.lists(st.integers(0, 70), min_size=1, max_size=2),
    window=st.sampled_from((-1, -1, 0, 5, 16, 33)),
    softcap=st.sampled_from((0.0, 2.5)),
    has_sinks=st.booleans(),
    has_mask=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_many_splits_are_the_oracle(
    kv_lens: list[int], window: int, softcap: float, has_sinks: bool, has_mask: bool, seed: int
) -> None:
    """Empty splits, windows that begin in a later split, and sinks that count once."""
    options = oracle.Options(is_causal=True, window_size=(window, -1), softcap=softcap)
    case = packed_case(
        [1] * len(kv_lens),
        kv_lens,
        options=options,
        has_sinks=has_sinks,
        has_mask=has_mask,
        holes=0.1,
        seed=seed,
    )
    check_paged(case, max_kv_len=None)


@pytest.mark.usefixtures("small_chunk")
@pytest.mark.parametrize("kv_len", [1, 16, 17, 33, 300])
def test_any_number_of_splits_gives_what_one_gives(kv_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = packed_case([1], [kv_len])
    tensors = strategies.build_packed(case)
    many, many_lse, *_ = run_paged(case, tensors)
    monkeypatch.setattr(launch_decode, "decode_chunk", lambda q_heads, kv_heads, itemsize: 512)
    one, one_lse, *_ = run_paged(case, tensors)
    torch.testing.assert_close(many, one, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(many_lse, one_lse, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("small_chunk")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_request_do_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Alone a short request ends in the kernel of its split, among long ones it goes through the merge."""
    heads = Heads(dtype=dtype, head_dim=40, value_dim=24, kv_heads=2, group=3)
    case = packed_case([1] * 4, [9, 40, 0, 16], heads=heads, has_sinks=True)
    tensors = strategies.build_packed(case)
    together, together_lse, *_ = run_paged(case, tensors)
    for b, kv_len in enumerate(case.kv_lens):
        cache = attrs.evolve(
            tensors.cache,
            req_pool_indices=tensors.cache.req_pool_indices[b : b + 1],
            kv_indptr=torch.tensor([0, kv_len], dtype=torch.int32),
            decode_out=tensors.cache.decode_out[b : b + 1],
            max_len=kv_len,
        )
        rows = slice(b, b + 1)
        single = attrs.evolve(tensors, q=tensors.q[rows], k=tensors.k[rows], v=tensors.v[rows], cache=cache)
        alone, alone_lse, *_ = run_paged(case, single)
        assert torch.equal(alone[0], together[b])
        assert torch.equal(alone_lse[0], together_lse[b])


@pytest.mark.parametrize("head_dim", [16, 40, 72, 80, 96, 112, 128, 160, 192, 256])
def test_every_head_dim_is_right_and_writes_nothing_beside_its_rows(head_dim: int) -> None:
    heads = Heads(dtype=torch.float16, head_dim=head_dim, value_dim=272 - head_dim, kv_heads=1, group=2)
    case = packed_case([1], [21], heads=heads)
    tensors = strategies.build_packed(case)
    frame = torch.full((1, 2, heads.value_dim + 16), 7.0, dtype=torch.float16)
    out, *_ = run_paged(case, tensors, out=frame[..., 8:-8])
    assert_close(out, expect_paged(case, tensors)[0])
    assert torch.all(frame[..., :8] == 7)
    assert torch.all(frame[..., -8:] == 7)


@pytest.mark.parametrize("group", [1, 2, 5, 7, 12, 16, 32, 80])
def test_every_group_of_query_heads_is_right(group: int) -> None:
    """16 heads are a tile; 17 to 64 pad to a larger one; more take several tiles, of which one stores."""
    heads = Heads(dtype=torch.float32, head_dim=16, value_dim=16, kv_heads=2, group=group)
    check_paged(packed_case([1], [18], heads=heads))


def test_without_new_rows_every_key_comes_from_the_pool() -> None:
    case = packed_case([1, 1], [70, 9], has_sinks=True)
    tensors = strategies.build_packed(case)
    cache, slots = tensors.cache, tensors.cache.out_cache_loc.tolist()
    written = attrs.evolve(
        cache,
        k_buffer=torch.stack([oracle.write_rows(layer, tensors.k, slots) for layer in cache.k_buffer]),
        v_buffer=torch.stack([oracle.write_rows(layer, tensors.v, slots) for layer in cache.v_buffer]),
    )
    out, *_ = run_paged(case, attrs.evolve(tensors, cache=written), new_k=None, new_v=None)
    assert_close(out, expect_paged(case, tensors)[0])


def test_a_batch_of_none_and_requests_without_keys_are_legal() -> None:
    check_paged(packed_case([], []))
    check_paged(packed_case([1] * 4, [5, 0, 17, 0]))
    empty = torch.zeros(2, 0, 1, 16)
    out, lse = attn_decode(torch.ones(2, 1, 3, 16), empty, empty, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 1, 3, 16))
    assert torch.all(lse == -torch.inf)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_keys_and_values_are_scaled_back(kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 32, generator=generator).to(torch.float16)
    pool = torch.randn(8, 2, 32, generator=generator).to(kv_dtype)
    new = torch.randn(1, 2, 32, generator=generator).to(torch.float16)
    new[0, 0, 0] = 3e4  # beyond the largest e4m3 at this scale: held at the largest, not turned into NaN
    k_buffer, v_buffer = pool.clone(), pool.flip(0).contiguous()
    table = torch.tensor([[3, 1, 6, 0, 5]], dtype=torch.int32)
    out = attn_paged_decode(
        q,
        k_buffer,
        v_buffer,
        table,
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        new_k=new,
        new_v=new,
        k_scale=0.5,
        v_scale=2.0,
    )
    largest = torch.finfo(kv_dtype).max
    for buffer, scale in ((k_buffer, 0.5), (v_buffer, 2.0)):
        stored = (new.float() / scale).clamp(-largest, largest).to(kv_dtype)
        assert torch.equal(buffer[5].float(), stored[0].float())
    keys, values = k_buffer[table[0]].double() * 0.5, v_buffer[table[0]].double() * 2.0
    want, _ = oracle.attend_dense(q[:, None], keys[None], values[None], oracle.Options())
    assert_close(out, want[:, 0])
