"""Dense attention against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import oracle
import strategies
from astrai_triton.backend import attention, dense
from astrai_triton.backend.dense import attend_dense
from strategies import DenseCase, Heads, assert_close, build_dense

INF = float("inf")


def plain_case(q_len: int, kv_len: int, **changes: object) -> DenseCase:
    fields = {
        "heads": Heads(dtype=torch.float32, head_dim=16, value_dim=16, kv_heads=2, group=3),
        "batch": 2,
        "q_len": q_len,
        "kv_len": kv_len,
        "mask_dim": 0,
        "has_sinks": False,
        "options": oracle.Options(),
        "seed": 0,
    }
    return DenseCase(**{**fields, **changes})  # type: ignore[arg-type]


def keywords(options: oracle.Options) -> dict[str, object]:
    return {
        "is_causal": options.is_causal,
        "softmax_scale": options.softmax_scale,
        "window_size": options.window_size,
        "softcap": options.softcap,
    }


def check_case(case: DenseCase) -> None:
    q, k, v, mask, sinks = build_dense(case)
    want, want_lse = oracle.attend_dense(q, k, v, case.options, attn_mask=mask, sinks=sinks)
    assert_close(attention(q, k, v, attn_mask=mask, sinks=sinks, **keywords(case.options)), want)
    out, lse = attend_dense(q, k, v, attn_mask=mask, sinks=sinks, return_lse=True, **keywords(case.options))
    assert_close(out, want)
    assert lse.dtype == torch.float32
    assert_close(lse, want_lse)


@settings(max_examples=80, deadline=None)
@given(strategies.dense_cases())
def test_dense_attention_and_its_lse_agree_with_the_oracle(case: DenseCase) -> None:
    check_case(case)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (2, 3), (3, 2), (5, 2), (5, 64), (64, 5)])
@pytest.mark.parametrize("batch", [1, 2])
def test_causal_is_aligned_to_the_bottom_right(q_len: int, kv_len: int, batch: int) -> None:
    check_case(plain_case(q_len, kv_len, batch=batch, options=oracle.Options(is_causal=True)))


def test_causal_rows_before_the_first_key_give_zero_and_minus_infinity() -> None:
    q, k, v, _, _ = build_dense(plain_case(5, 2))
    out, lse = attend_dense(q, k, v, is_causal=True, return_lse=True)
    assert torch.equal(attention(q, k, v, is_causal=True)[:, :3], torch.zeros(2, 3, 6, 16))
    assert torch.equal(out[:, :3], torch.zeros(2, 3, 6, 16))
    assert (lse[:, :3] == -INF).all()
    assert lse[:, 3:].isfinite().all()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("q_len", [1, 4])
def test_every_group_size_shares_its_kv_head(group: int, batch: int, q_len: int) -> None:
    heads = Heads(dtype=torch.float32, head_dim=8, value_dim=8, kv_heads=2, group=group)
    for options in (oracle.Options(), oracle.Options(is_causal=True), oracle.Options(window_size=(1, 1))):
        check_case(plain_case(q_len, 4, heads=heads, batch=batch, options=options))
        check_case(plain_case(q_len, 4, heads=heads, batch=batch, options=options, mask_dim=2))


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_every_head_dim_works(head_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype, head_dim=head_dim, value_dim=head_dim, kv_heads=1, group=2)
    check_case(plain_case(3, 7, heads=heads, options=oracle.Options(is_causal=True)))


def test_v_may_have_another_head_dim() -> None:
    heads = Heads(dtype=torch.float32, head_dim=24, value_dim=40, kv_heads=2, group=2)
    for batch in (1, 2):
        check_case(plain_case(4, 4, heads=heads, batch=batch, options=oracle.Options(is_causal=True)))


@pytest.mark.parametrize("mask_dim", [2, 3])
def test_mask_and_causal_both_apply(mask_dim: int) -> None:
    for seed in range(5):
        check_case(plain_case(6, 6, mask_dim=mask_dim, options=oracle.Options(is_causal=True), seed=seed))


def test_a_row_whose_mask_hides_everything_gives_zero_and_minus_infinity() -> None:
    q, k, v, _, _ = build_dense(plain_case(4, 5))
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0, 2] = False
    out, lse = attend_dense(q, k, v, attn_mask=mask, return_lse=True)
    for got in (attention(q, k, v, attn_mask=mask), out):
        assert torch.equal(got[0, 2], torch.zeros(6, 16))
        assert got[0, 1].abs().sum() > 0
    assert (lse[0, 2] == -INF).all()


def test_a_sink_alone_is_the_lse_of_a_row_without_keys() -> None:
    q, k, v, _, _ = build_dense(plain_case(2, 0))
    sinks = torch.arange(6.0)
    out, lse = attend_dense(q, k, v, sinks=sinks, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 2, 6, 16))
    assert torch.equal(lse, sinks.expand(2, 2, 6))


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_keys_hidden_from_every_row_may_hold_anything(poison: float, softcap: float) -> None:
    q, k, v, _, _ = build_dense(plain_case(3, 8))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 5:] = mask[1, 2] = False
    window = {"window_size": (2, -1), "is_causal": True}
    clean = attention(q, k, v, attn_mask=mask, softcap=softcap)
    clean_window = attention(q, k, v, softcap=softcap, **window)
    bad_k, bad_v = k.clone(), v.clone()
    for tensor in (bad_k, bad_v):
        tensor[0, 5:] = tensor[1, 2] = poison
    assert torch.equal(attention(q, bad_k, bad_v, attn_mask=mask, softcap=softcap), clean)
    bad_k, bad_v = k.clone(), v.clone()
    # 3 rows at positions 5 to 7 see back to key 3.
    for tensor in (bad_k, bad_v):
        tensor[:, :3] = poison
    assert torch.equal(attention(q, bad_k, bad_v, softcap=softcap, **window), clean_window)


@pytest.mark.parametrize(
    ("is_causal", "window_size"),
    [(True, (333, -1)), (False, (333, 0)), (False, (333, 20)), (False, (-1, 7)), (False, (0, 0))],
)
def test_a_long_window_covers_exactly_its_inclusive_range(
    is_causal: bool, window_size: tuple[int, int]
) -> None:
    heads = Heads(dtype=torch.float32, head_dim=8, value_dim=8, kv_heads=1, group=1)
    options = oracle.Options(is_causal=is_causal, window_size=window_size)
    check_case(plain_case(300, 4096, heads=heads, batch=1, options=options))


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask_dim", [0, 2, 3])
def test_empty_shapes_are_legal(batch: int, q_len: int, kv_len: int, is_causal: bool, mask_dim: int) -> None:
    case = plain_case(
        q_len, kv_len, batch=batch, mask_dim=mask_dim, options=oracle.Options(is_causal=is_causal)
    )
    check_case(case)


def test_two_halves_merged_by_their_lse_are_the_whole() -> None:
    q, k, v, _, _ = build_dense(plain_case(3, 10))
    whole, lse = attend_dense(q, k, v, return_lse=True)
    out_a, lse_a = attend_dense(q, k[:, :4], v[:, :4], return_lse=True)
    out_b, lse_b = attend_dense(q, k[:, 4:], v[:, 4:], return_lse=True)
    merged = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
    assert_close(merged, whole)
    assert_close(torch.logaddexp(lse_a, lse_b), lse)


def test_slices_of_a_fused_projection_and_transposed_views_are_taken_as_they_are() -> None:
    fused = torch.randn(2, 5, (6 + 2 + 2) * 16, generator=torch.Generator().manual_seed(1))
    q, k, v = fused.unflatten(-1, (10, 16)).split((6, 2, 2), dim=2)
    options = oracle.Options(is_causal=True)
    for batch in (1, 2):
        rows = (q[:batch], k[:batch], v[:batch])
        assert_close(attention(*rows, is_causal=True), oracle.attend_dense(*rows, options)[0])
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert_close(attention(*head_major, is_causal=True), oracle.attend_dense(q, k, v, options)[0])
    every_other = [t.repeat_interleave(2, dim=1)[:, ::2] for t in (q, k, v)]
    assert_close(attention(*every_other, is_causal=True), oracle.attend_dense(q, k, v, options)[0])


def test_the_float32_path_gives_the_same_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, mask, sinks = build_dense(plain_case(7, 9, mask_dim=3, has_sinks=True))
    options = {"attn_mask": mask, "sinks": sinks, "is_causal": True, "return_lse": True}
    whole, whole_lse = attend_dense(q, k, v, **options)
    monkeypatch.setattr(dense, "SCORE_BUDGET", 2 * 6 * 9 * 2)
    out, lse = attend_dense(q, k, v, **options)
    assert_close(out, whole)
    assert_close(lse, whole_lse)


@pytest.mark.parametrize(
    "options",
    [
        oracle.Options(),
        oracle.Options(is_causal=True),
        oracle.Options(is_causal=True, softcap=2.0),
        oracle.Options(window_size=(2, 1)),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mask_dim", [0, 3])
def test_gradients_agree_with_the_oracle(options: oracle.Options, batch: int, mask_dim: int) -> None:
    q, k, v, mask, _ = build_dense(plain_case(5, 5, batch=batch, mask_dim=mask_dim, options=options))
    if mask is not None:
        mask[0, 1] = False
    weight = torch.randn(batch, 5, 6, 16, generator=torch.Generator().manual_seed(3))
    mine = [t.clone().requires_grad_() for t in (q, k, v)]
    (attention(*mine, attn_mask=mask, **keywords(options)) * weight).sum().backward()
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    (oracle.attend_dense(*theirs, options, attn_mask=mask)[0] * weight).sum().backward()
    for got, want in zip(mine, theirs, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert_close(got.grad, want.grad)
