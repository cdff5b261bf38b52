"""The flash-attn backend against a stand-in module that computes in float64 what flash_attn documents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton.backend import FlashAttnBackend
from astrai_triton.backend.base import AttentionCall, Forward
from strategies import Heads, PackedCase, assert_close, build_packed, expected_packed, make_call, packed_case


def options_of(
    softmax_scale: Any, causal: bool, window_size: Sequence[int], softcap: float
) -> oracle.Options:
    left, right = window_size
    return oracle.Options(
        is_causal=causal, softmax_scale=softmax_scale, window_size=(left, right), softcap=softcap
    )


def fake_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    assert k.isfinite().all()
    return oracle.attend_dense(q, k, v, options_of(softmax_scale, causal, window_size, softcap))[0].to(
        q.dtype
    )


def fake_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> torch.Tensor:
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_k[-1]) == k.shape[0]
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs = [
        fake_func(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)[0]
        for q0, q1, k0, k1 in zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False)
    ]
    return torch.cat(outs)


def fake_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor, **options: Any
) -> torch.Tensor:
    assert cache_seqlens.dtype == torch.int32
    outs = []
    for b, num_keys in enumerate(cache_seqlens.tolist()):
        keys, values = k_cache[b : b + 1, :num_keys], v_cache[b : b + 1, :num_keys]
        out = fake_func(q[b : b + 1], keys, values, **options)
        outs.append(out if num_keys else out + torch.nan)
    return torch.cat(outs)


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flash_attn")
    module.flash_attn_func = fake_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = fake_varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = fake_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


def without_features(case: PackedCase) -> PackedCase:
    """The case without what ``why_not`` refuses."""
    heads = attrs.evolve(case.heads, value_dim=case.heads.head_dim)
    return attrs.evolve(case, heads=heads, has_mask=False, has_sinks=False)


@settings(max_examples=40, deadline=None)
@given(strategies.packed_cases(is_decode=True), st.booleans())
def test_decode_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    case = without_features(case)
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        tensors = build_packed(case)
        want = expected_packed(case, tensors)
        assert_close(FlashAttnBackend(may_read).forward(make_call(case, tensors, fwd="decode")), want)


@settings(max_examples=40, deadline=None)
@given(strategies.packed_cases(is_decode=False), st.booleans())
def test_ragged_prefill_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    case = attrs.evolve(without_features(case), holes=0.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        tensors = build_packed(case)
        want = expected_packed(case, tensors)
        assert_close(FlashAttnBackend(may_read).forward(make_call(case, tensors, fwd="prefill")), want)


@pytest.mark.parametrize("window_size", [(-1, -1), (2, -1), (2, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 9), (9, 3), (0, 3), (3, 0)])
def test_dense_agrees_with_the_oracle(
    fake_module: ModuleType, q_len: int, kv_len: int, is_causal: bool, window_size: tuple[int, int]
) -> None:
    q, k = torch.randn(2, q_len, 4, 8), torch.randn(2, kv_len, 2, 8)
    options = oracle.Options(is_causal=is_causal, window_size=window_size, softcap=3.0, softmax_scale=0.5)
    call = AttentionCall(q, k, k, None, 0, None, is_causal, "dense", 0.5, window_size, 3.0, None)
    assert_close(FlashAttnBackend().forward(call), oracle.attend_dense(q, k, k, options)[0])


def test_keys_before_the_window_are_not_handed_over(fake_module: ModuleType) -> None:
    k = torch.randn(1, 9, 2, 8)
    k[:, :4] = torch.nan
    call = AttentionCall(
        torch.randn(1, 3, 4, 8), k, k, None, 0, None, True, "dense", None, (2, -1), 0.0, None
    )
    assert FlashAttnBackend().forward(call).isfinite().all()


class OnCuda:
    """Stands for a CUDA tensor where only its description is looked at."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device(device)


def described(
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda:0",
    head_dim: int = 64,
    value_dim: int = 64,
    **rest: Any,
) -> AttentionCall:
    q: Any = OnCuda(1, 2, 4, head_dim, dtype=dtype, device=device)
    k: Any = OnCuda(1, 2, 2, head_dim, dtype=dtype, device=device)
    v: Any = OnCuda(1, 2, 2, value_dim, dtype=dtype, device=device)
    plain: dict[str, Any] = {"attn_mask": None, "sinks": None, **rest}
    return AttentionCall(
        q, k, v, None, 0, plain["attn_mask"], False, "dense", None, (-1, -1), 0.0, plain["sinks"]
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 256, "value_dim": 256}, None),
        ({"device": "cpu"}, "needs CUDA tensors, got cpu"),
        ({"dtype": torch.float32}, "needs float16 or bfloat16, got torch.float32"),
        ({"head_dim": 264, "value_dim": 264}, "head_dim up to 256 in steps of 8, got 264"),
        ({"head_dim": 60, "value_dim": 60}, "head_dim up to 256 in steps of 8, got 60"),
        ({"value_dim": 32}, "needs v with the head_dim of k, 64, got 32"),
        ({"attn_mask": torch.ones(1, 2, dtype=torch.bool)}, "takes no attn_mask"),
        ({"sinks": torch.zeros(4)}, "takes no sinks"),
    ],
)
def test_why_not_names_what_flash_attn_cannot_do(changes: dict[str, Any], reason: str | None) -> None:
    got = FlashAttnBackend().why_not(described(**changes))
    assert got is None if reason is None else got is not None and reason in got


@pytest.mark.parametrize(
    ("fwd", "holes", "refused"), [("prefill", 0.3, True), ("prefill", 0.0, False), ("decode", 0.3, False)]
)
def test_masked_tokens_are_refused_in_prefill_only(fwd: Forward, holes: float, refused: bool) -> None:
    heads = Heads(dtype=torch.bfloat16, head_dim=16, value_dim=16, kv_heads=2, group=3)
    case = packed_case((1, 1), (20, 17), heads=heads, holes=holes)
    tensors = build_packed(case)
    call = make_call(case, tensors, fwd=fwd)
    placed: Any = OnCuda(*tensors.q.shape)
    reason = FlashAttnBackend().why_not(attrs.evolve(call, q=placed))
    assert (reason is not None) is refused
    if reason is not None:
        assert "negative slots" in reason


def test_a_missing_package_is_the_reason_and_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    backend = FlashAttnBackend()
    reason = backend.unavailable()
    assert reason is not None
    assert "pip install flash-attn" in reason
    install(monkeypatch)
    assert backend.unavailable() == reason
    assert FlashAttnBackend().unavailable() is None


def test_running_without_the_package_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    q = torch.randn(1, 2, 2, 8)
    call = AttentionCall(q, q, q, None, 0, None, False, "dense", None, (-1, -1), 0.0, None)
    with pytest.raises(ImportError, match="pip install flash-attn"):
        FlashAttnBackend().forward(call)
