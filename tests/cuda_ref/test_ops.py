"""The attention ops of cuda_ref on the host against the float64 oracle: values, what is read and written."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings

import oracle
from cuda_ref import ops
from strategies import (
    DenseCase,
    Heads,
    PackedCase,
    Tensors,
    assert_close,
    build_dense,
    build_packed,
    dense_cases,
    expected_packed,
    packed_case,
    packed_cases,
)

pytestmark = pytest.mark.usefixtures("host")

VARIANTS = ["scalar", "mma"]
DIMS = (16, 40, 64)


def fit_heads(heads: Heads, variant: str) -> Heads:
    """Head dims that the kernels have, and a dtype that the variant has."""
    dtype = heads.dtype
    if variant == "mma" and dtype == torch.float32:
        dtype = torch.bfloat16
    return attrs.evolve(
        heads, dtype=dtype, head_dim=max(heads.head_dim, 16), value_dim=max(heads.value_dim, 16)
    )


def options_of(options: oracle.Options) -> dict[str, Any]:
    """Of decode, whose row is the last position: nothing is causal."""
    return {
        "softmax_scale": options.softmax_scale,
        "window_size": options.window_size,
        "softcap": options.softcap,
    }


def assert_lse(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Products of 16-bit numbers are exact in float32, so the lse is that of float32 arithmetic."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def run_decode(tensors: Tensors, options: oracle.Options, **more: Any) -> Any:
    cache = tensors.cache
    return ops.attn_paged_decode(
        tensors.q,
        cache.k_buffer[1],
        cache.v_buffer[1],
        cache.req_to_token,
        cache.req_pool_indices,
        cache.kv_indptr,
        mask=tensors.attn_mask,
        sinks=tensors.sinks,
        **options_of(options),
        **more,
    )


def run_prefill(tensors: Tensors, options: oracle.Options, **more: Any) -> Any:
    cache = tensors.cache
    for layer, rows in ((cache.k_buffer[1], tensors.k), (cache.v_buffer[1], tensors.v)):
        layer.copy_(oracle.write_rows(layer, rows, cache.out_cache_loc.tolist()))
    return ops.attn_paged_prefill(
        tensors.q,
        cache.k_buffer[1],
        cache.v_buffer[1],
        cache.req_to_token,
        cache.req_pool_indices,
        cache.kv_indptr,
        cache.qo_indptr,
        cache.q_tile_to_batch,
        cache.q_tile_to_index,
        mask=tensors.attn_mask,
        sinks=tensors.sinks,
        is_causal=options.is_causal,
        **options_of(options),
        **more,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20, deadline=None)
@given(case=dense_cases())
def test_dense_prefill_agrees_with_the_oracle(variant: Any, case: DenseCase) -> None:
    case = attrs.evolve(case, heads=fit_heads(case.heads, variant))
    q, k, v, mask, sinks = build_dense(case)
    options = case.options
    out, lse = ops.attn_prefill(
        q, k, v, mask=mask, sinks=sinks, is_causal=options.is_causal, return_lse=True, variant=variant,
        **options_of(options),
    )  # fmt: skip
    want, want_lse = oracle.attend_dense(q, k, v, options, attn_mask=mask, sinks=sinks)
    assert_close(out, want)
    assert_lse(lse, want_lse, q.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20, deadline=None)
@given(case=dense_cases())
def test_dense_decode_agrees_with_the_oracle(variant: Any, case: DenseCase) -> None:
    case = attrs.evolve(
        case, heads=fit_heads(case.heads, variant), q_len=1, mask_dim=2 if case.mask_dim else 0
    )
    q, k, v, mask, sinks = build_dense(case)
    out, lse = ops.attn_decode(
        q, k, v, mask=mask, sinks=sinks, return_lse=True, variant=variant, **options_of(case.options)
    )
    want, want_lse = oracle.attend_dense(q, k, v, case.options, attn_mask=mask, sinks=sinks)
    assert_close(out, want)
    assert_lse(lse, want_lse, q.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20, deadline=None)
@given(case=packed_cases(is_decode=True))
def test_paged_decode_appends_and_agrees_with_the_oracle(variant: Any, case: PackedCase) -> None:
    case = attrs.evolve(case, heads=fit_heads(case.heads, variant))
    tensors = build_packed(case)
    want, cache = expected_packed(case, tensors), tensors.cache
    slots = cache.out_cache_loc.tolist()
    k_want = oracle.write_rows(cache.k_buffer[1], tensors.k, slots)
    v_want = oracle.write_rows(cache.v_buffer[1], tensors.v, slots)
    out = torch.full_like(cache.decode_out, torch.nan)
    got = run_decode(tensors, case.options, new_k=tensors.k, new_v=tensors.v, out=out, variant=variant)
    assert got is out
    assert_close(out, want)
    torch.testing.assert_close(cache.k_buffer[1], k_want, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(cache.v_buffer[1], v_want, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20, deadline=None)
@given(case=packed_cases(is_decode=False))
def test_paged_prefill_agrees_with_the_oracle(variant: Any, case: PackedCase) -> None:
    case = attrs.evolve(case, heads=fit_heads(case.heads, variant))
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    out = run_prefill(tensors, case.options, variant=variant)
    assert_close(out, want)


def long_case(kv_lens: tuple[int, ...], dtype: torch.dtype, **changes: Any) -> PackedCase:
    """Decode over lengths that take several splits."""
    heads = Heads(dtype=dtype, head_dim=16, value_dim=24, kv_heads=1, group=2)
    return packed_case((1,) * len(kv_lens), kv_lens, heads=heads, **changes)


@pytest.mark.parametrize(
    ("dtype", "variant"), [(torch.float32, "scalar"), (torch.float16, "mma"), (torch.bfloat16, "scalar")]
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"has_sinks": True}, {"options": oracle.Options(is_causal=True, window_size=(70, 0), softcap=2.0)}],
    ids=["plain", "sinks", "window"],
)
def test_many_splits_give_what_one_gives(dtype: torch.dtype, variant: Any, changes: dict[str, Any]) -> None:
    case = long_case((700, 3, 0, 257), dtype, **changes)
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    new = {"new_k": tensors.k, "new_v": tensors.v}
    # What the caller's scratch holds is nobody's business; room for more splits than there are is no harm.
    o_part, ml_part = torch.full((4, 2, 9, 24), torch.nan), torch.full((4, 2, 9, 2), torch.nan)
    got = run_decode(tensors, case.options, variant=variant, o_part=o_part, ml_part=ml_part, **new)
    assert_close(got, want)
    assert o_part.isfinite().any()
    assert_close(run_decode(tensors, case.options, variant=variant, **new), want)


def test_scratch_that_does_not_hold_the_splits_says_how_many_there_are() -> None:
    tensors = build_packed(long_case((700,), torch.float32))
    with pytest.raises(
        ValueError, match=r"o_part: wanted room for 3 splits, got 2; enlarge it or lower max_kv_len"
    ):
        run_decode(
            tensors, oracle.Options(), o_part=torch.zeros(1, 2, 2, 24), ml_part=torch.zeros(1, 2, 2, 2)
        )
    with pytest.raises(ValueError, match="ml_part: wanted together with its partner, got None"):
        run_decode(tensors, oracle.Options(), o_part=torch.zeros(1, 2, 3, 24))


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_from_max_kv_len_on_are_not_attended_to(variant: Any) -> None:
    case = long_case((5, 40), torch.bfloat16)
    tensors, cut = build_packed(case), build_packed(case)
    cut.cache.k_buffer[1, cut.cache.req_to_token[cut.cache.req_pool_indices[1].long(), 17:40].long()] = (
        torch.nan
    )
    assert torch.equal(
        run_decode(cut, case.options, max_kv_len=17, variant=variant),
        run_decode(tensors, case.options, max_kv_len=17, variant=variant),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_referenced_may_hold_anything(variant: Any, poison: float) -> None:
    options = oracle.Options(is_causal=True, window_size=(6, 0))
    heads = Heads(dtype=torch.float16, head_dim=40, value_dim=16, kv_heads=2, group=3)
    case = packed_case((3, 1, 9), (20, 9, 9), heads=heads, holes=0.2, has_mask=True, options=options)
    outs = []
    for filling in (0.0, poison):
        tensors = build_packed(case)
        cache = tensors.cache
        seen = seen_slots(case, tensors)
        for buffer in (cache.k_buffer[1], cache.v_buffer[1]):
            buffer[[slot for slot in range(len(buffer)) if slot not in seen]] = filling
        for rows in (tensors.k, tensors.v):
            rows[[slot not in seen for slot in cache.out_cache_loc.tolist()]] = filling
        outs.append(run_prefill(tensors, options, variant=variant))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def seen_slots(case: PackedCase, tensors: Tensors) -> set[int]:
    """Slots that some row of the batch attends to."""
    cache, seen, score = tensors.cache, set(), 0
    for row, q_len, kv_len in zip(cache.req_pool_indices.tolist(), case.q_lens, case.kv_lens, strict=True):
        for i in range(q_len):
            for key in oracle.visible_keys(i, q_len, kv_len, case.options):
                if tensors.attn_mask is None or tensors.attn_mask[score + i * kv_len + key]:
                    seen.add(int(cache.req_to_token[row, key]))
        score += q_len * kv_len
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_decode", [True, False])
def test_slots_rows_and_positions_out_of_range_are_masked(variant: Any, is_decode: bool) -> None:
    """Never read: on the host a read beyond the pool or the table would be an error."""
    heads = Heads(dtype=torch.bfloat16, head_dim=16, value_dim=16, kv_heads=2, group=2)
    q_lens = (1, 1, 1, 1) if is_decode else (2, 1, 3, 1)
    case = packed_case(q_lens, (9, 6, 5, 4), heads=heads)
    tensors, masked = build_packed(case), build_packed(case)
    size = tensors.cache.k_buffer.shape[1]
    first, second, third, fourth = tensors.cache.req_pool_indices.tolist()
    for table, wrong in ((tensors.cache.req_to_token, size), (masked.cache.req_to_token, -1)):
        table[first, 2:4] = wrong
        table[second, 0] = wrong if wrong < 0 else 2**31 - 1
    # Requests without a row see nothing; nor do positions beyond the table.
    tensors.cache.req_pool_indices[2:] = torch.tensor([-1, len(tensors.cache.req_to_token)])
    masked.cache.req_to_token[[third, fourth]] = -1
    narrow = attrs.evolve(
        tensors, cache=attrs.evolve(tensors.cache, req_to_token=tensors.cache.req_to_token[:, :8])
    )
    masked.cache.req_to_token[:, 8:] = -1
    if is_decode:
        got, want = (run_decode(these, case.options, variant=variant) for these in (narrow, masked))
    else:
        got, want = (run_prefill(these, case.options, variant=variant) for these in (narrow, masked))
    assert torch.equal(got, want)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_transposes_and_a_strided_out_are_what_they_look_like(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Heads in front, as a transposed view has them, and rows that start 8 bytes into a longer one.
    fused = torch.randn(2, 8, 5, 4 + 16 + 16 + 4, generator=generator).to(dtype)
    q = fused[:, :4, :, 4:20].transpose(1, 2)
    k, v = fused[:, 4:6, :, 20:36].transpose(1, 2), fused[:, 6:8, :, 4:20].transpose(1, 2)
    mask = (torch.rand(5, 5, 2, generator=generator) < 0.7).permute(2, 0, 1)
    canvas = torch.full((2, 5, 4, 20), torch.nan, dtype=dtype)
    out = canvas[..., 2:18]
    options = oracle.Options(is_causal=True)
    assert ops.attn_prefill(q, k, v, mask=mask, is_causal=True, out=out) is out
    assert_close(out, oracle.attend_dense(q, k, v, options, attn_mask=mask)[0])
    assert canvas[..., :2].isnan().all()
    assert canvas[..., 18:].isnan().all()
    row = ops.attn_decode(q[:, -1:], k, v, mask=mask[:, -1])
    assert_close(row, oracle.attend_dense(q[:, -1:], k, v, options, attn_mask=mask[:, -1])[0])


def test_strided_tables_indptr_and_masks_of_decode() -> None:
    case = packed_case((1, 1, 1), (9, 0, 5), has_mask=True)
    tensors = build_packed(case)
    cache = tensors.cache
    want = run_decode(tensors, case.options)
    assert tensors.attn_mask is not None
    mask = torch.stack((tensors.attn_mask, ~tensors.attn_mask), dim=1).flatten()[::2]
    table = cache.req_to_token.repeat_interleave(2, dim=1)[:, ::2].t().contiguous().t()
    moved = attrs.evolve(tensors, attn_mask=mask, cache=attrs.evolve(cache, req_to_token=table))
    assert torch.equal(run_decode(moved, case.options), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_may_be_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, heads, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(8, generator=generator).to(dtype)
    for given_sinks in (sinks[:4], torch.stack((sinks[:4], sinks[4:]))[0]):
        out = ops.attn_prefill(q, k, v, sinks=given_sinks)
        assert_close(out, oracle.attend_dense(q, k, v, oracle.Options(), sinks=sinks[:4])[0])


def test_dimensions_of_size_one_may_have_any_stride() -> None:
    rows = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    # One request, one key and one KV head, whose strides lead nowhere and would be no multiple of 16 bytes.
    q = rows[:1].as_strided((1, 1, 2, 16), (3, 5, 16, 1))
    k = rows[1:2].as_strided((1, 1, 1, 16), (3, 5, 7, 1))
    for variant in ("auto", "mma", "scalar"):
        for attend in (ops.attn_decode, ops.attn_prefill):
            assert_close(attend(q, k, k, variant=variant), k.expand(1, 1, 2, 16))


def test_auto_takes_the_tensor_cores_where_every_row_is_aligned(host: ModuleType) -> None:
    rows = torch.randn(1, 3, 2, 24, generator=torch.Generator().manual_seed(0))
    half = rows.half()
    calls = {
        "mma": half[..., :16],
        "scalar": half[..., 4:20],
        "float32": rows[..., :16],
    }
    ran = {}
    for name, x in calls.items():
        ran[name] = [ops.attn_prefill(x, x, x, variant=variant) for variant in ("auto", "scalar")]
        assert torch.equal(*ran[name]) is (name != "mma")
    assert torch.equal(ran["mma"][0], ops.attn_prefill(*[calls["mma"]] * 3, variant="mma"))
    assert host.has_mma


def test_a_variant_that_cannot_do_the_call_is_an_error() -> None:
    rows = torch.zeros(1, 1, 2, 24)
    with pytest.raises(
        ValueError, match="dtype: wanted float16 or bfloat16 for the variant mma, got float32"
    ):
        ops.attn_decode(rows, rows, rows, variant="mma")
    unaligned = rows.half()[..., 4:20]
    for attend in (ops.attn_decode, ops.attn_prefill):
        with pytest.raises(ValueError, match=r"wanted .* 16 bytes for the variant mma.*use .*scalar"):
            attend(unaligned, unaligned, unaligned, variant="mma")
    unknown: Any = "tensor"
    with pytest.raises(ValueError, match="variant: wanted 'auto', 'scalar' or 'mma', got 'tensor'"):
        ops.attn_decode(rows, rows, rows, variant=unknown)


@pytest.mark.parametrize("is_decode", [True, False])
def test_an_access_outside_the_tensors_of_a_call_is_an_error(host: ModuleType, is_decode: bool) -> None:
    """What the ops cannot check without reading a device, the checking runtime sees."""
    case = packed_case((1, 1), (5, 6), has_mask=True)
    tensors = build_packed(case)
    assert tensors.attn_mask is not None
    short = attrs.evolve(tensors, attn_mask=tensors.attn_mask[:-1])
    run = run_decode if is_decode else run_prefill
    with pytest.raises(host.CheckError, match=r"global.*out.of.bounds") as caught:
        run(short, case.options)
    assert isinstance(caught.value, RuntimeError)
    assert "attn_" in str(caught.value)
    # The next call is not affected.
    assert run(tensors, case.options).isfinite().all()
