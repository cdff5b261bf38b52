"""What ``attention()`` accepts, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from astrai_triton.backend import attention
from strategies import assert_close, build_packed, expected_packed, packed_case


def dense_arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 3, 4, 8, generator=generator),
        "k": torch.randn(2, 5, 2, 8, generator=generator),
        "v": torch.randn(2, 5, 2, 8, generator=generator),
    }
    return {**arguments, **changes}


def packed_arguments(**changes: Any) -> dict[str, Any]:
    tensors = build_packed(packed_case((1, 3), (4, 7)))
    arguments: dict[str, Any] = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "kv_cache": tensors.cache}
    return {**arguments, **changes}


def rows(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": rows(2, 3, 4, 8).double()},
            TypeError,
            "q: wanted float16, bfloat16 or float32, got torch.float64",
        ),
        ({"q": rows(2, 3, 4, 8).int()}, TypeError, "q: wanted float16"),
        ({"k": rows(2, 5, 2, 8).half()}, TypeError, "k, v: wanted the dtype of q, torch.float32"),
        ({"v": rows(2, 5, 2, 8, device="meta")}, ValueError, "k, v: wanted the device of q, cpu"),
        ({"q": rows(4, 8)}, ValueError, r"q, k, v: wanted \[B, L, heads, head_dim\]"),
        ({"k": rows(5, 2, 8)}, ValueError, "q, k, v: wanted"),
        ({"v": rows(2, 4, 2, 8)}, ValueError, r"v: wanted the shape of k \(2, 5, 2, 8\) up to head_dim"),
        ({"q": rows(2, 3, 4, 16)}, ValueError, "k: wanted the head_dim of q, 16, got 8"),
        ({"q": rows(2, 3, 5, 8)}, ValueError, "q: wanted a multiple of 2 kv heads, got 5 heads"),
        ({"q": rows(3, 3, 4, 8)}, ValueError, "k: wanted the batch of q, 3, got 2"),
        (
            {"q": rows(2, 3, 8, 4).transpose(2, 3)},
            ValueError,
            r"q: wanted a unit last stride.*contiguous\(\)",
        ),
        ({"v": rows(2, 5, 2, 16)[..., ::2]}, ValueError, "v: wanted a unit last stride"),
        ({"fwd": "decode"}, ValueError, "fwd: wanted None or 'dense' without kv_cache, got 'decode'"),
        ({"attn_mask": rows(2, 5)}, TypeError, "attn_mask: wanted bool"),
        (
            {"attn_mask": rows(2, 3).bool()},
            ValueError,
            r"attn_mask: wanted shape \(2, 5\) or \(2, 3, 5\), got \(2, 3\)",
        ),
        ({"attn_mask": rows(2, 5, device="meta").bool()}, ValueError, "attn_mask: wanted the device of q"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: wanted a finite number"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size: wanted \(left, right\)"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size: wanted"),
        ({"softcap": -1.0}, ValueError, "softcap: wanted a finite number >= 0"),
        ({"softcap": float("inf")}, ValueError, "softcap: wanted"),
        ({"sinks": rows(2)}, ValueError, r"sinks: wanted shape \(4,\)"),
        ({"sinks": rows(4).int()}, TypeError, "sinks: wanted a floating dtype"),
        ({"sinks": rows(4, device="meta")}, ValueError, "sinks: wanted the device of q"),
    ],
)
def test_a_bad_dense_argument_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**dense_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": rows(1, 4, 6, 16), "k": rows(1, 4, 2, 16), "v": rows(1, 4, 2, 16)},
            ValueError,
            r"q: wanted \[tokens",
        ),
        ({"q": rows(5, 6, 16)}, ValueError, "q, k, v: wanted the 4 rows of kv_cache.q_lens, got 5 and 4"),
        (
            {"k": rows(4, 3, 16), "v": rows(4, 3, 16)},
            ValueError,
            r"k: wanted \[Hkv, D\] of its buffer, \(2, 16\)",
        ),
        ({"v": rows(4, 2, 8)}, ValueError, r"v: wanted \[Hkv, D\] of its buffer"),
        ({"layer_id": 2}, ValueError, "layer_id: wanted 0 to 1, got 2"),
        ({"layer_id": -1}, ValueError, "layer_id: wanted 0 to 1, got -1"),
        ({"fwd": "decode"}, ValueError, r"fwd: 'decode' wants one row per request, got q_lens \(1, 3\)"),
        ({"fwd": "dense"}, ValueError, "fwd: wanted None, 'decode' or 'prefill' with kv_cache, got 'dense'"),
        ({"q": rows(4, 6, 16, requires_grad=True)}, ValueError, "wanted tensors without gradients"),
        ({"attn_mask": rows(24).bool()}, ValueError, r"attn_mask: wanted shape \(25,\)"),
    ],
)
def test_a_bad_packed_argument_is_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attention(**packed_arguments(**changes))


def test_packed_rows_of_another_dtype_than_the_cache_are_refused() -> None:
    arguments = packed_arguments()
    halves = {name: arguments[name].half() for name in ("q", "k", "v")}
    with pytest.raises(
        TypeError, match=r"k: wanted the dtype of its buffer, torch.float32, got torch.float16"
    ):
        attention(**{**arguments, **halves})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": (4, 7, 9)}, "kv_lens: wanted one for each of the 2 requests, got 3"),
        ({"q_lens": (1, 3, 0)}, r"req_pool_indices: wanted shape \(3,\) to fit q_lens"),
        ({"seq_lens": rows(3).int()}, r"seq_lens: wanted shape \(2,\)"),
        ({"out_cache_loc": rows(3).int()}, r"out_cache_loc: wanted shape \(4,\)"),
        ({"kv_indptr": rows(2).int()}, r"kv_indptr: wanted shape \(3,\)"),
        ({"q_lens": (5, -1)}, "kv_cache: wanted lengths >= 0"),
        (
            {"max_len": 6},
            r"max_len: wanted 7 \(the longest kv_len\) to 10 \(the width of req_to_token\), got 6",
        ),
        ({"max_len": 11}, "max_len: wanted 7"),
        ({"kv_lens": (4, 700), "max_len": 700}, "max_len: wanted 700 .* to 10 .*, got 700"),
        ({"req_to_token": rows(10).int()}, r"req_to_token: wanted \[num_reqs, max_ctx_len\]"),
        ({"v_buffer": rows(2, 5, 2, 16)}, "kv_cache: wanted k_buffer and v_buffer"),
    ],
)
def test_a_kv_cache_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = packed_arguments()
    broken = attrs.evolve(arguments["kv_cache"], **changes)
    with pytest.raises(ValueError, match=message):
        attention(**{**arguments, "kv_cache": broken})


def test_one_row_per_request_is_decode_and_sees_all_keys_without_being_told() -> None:
    case = packed_case((1, 1), (4, 7))
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    for options in ({}, {"fwd": "decode"}, {"fwd": "prefill"}, {"is_causal": True}):
        assert_close(attention(tensors.q, tensors.k, tensors.v, tensors.cache, 1, **options), want)


def test_a_ragged_mask_applies_in_both_packed_forms() -> None:
    for q_lens in ((1, 1), (3, 2)):
        case = packed_case(q_lens, (4, 7), has_mask=True)
        tensors = build_packed(case)
        got = attention(
            tensors.q, tensors.k, tensors.v, tensors.cache, 1, attn_mask=tensors.attn_mask, is_causal=True
        )
        assert_close(got, expected_packed(case, tensors))


def test_a_size_one_head_dim_needs_no_unit_stride() -> None:
    one = torch.randn(1, 2, 2, 1).expand(1, 2, 2, 1).as_strided((1, 2, 2, 1), (4, 2, 1, 7))
    assert attention(one, one, one).shape == (1, 2, 2, 1)


def test_layers_of_a_cache_do_not_touch_each_other() -> None:
    case = packed_case((1, 1), (4, 7))
    tensors = build_packed(case)
    before = tensors.cache.k_buffer[0].clone()
    attention(tensors.q, tensors.k, tensors.v, tensors.cache, 1)
    torch.testing.assert_close(tensors.cache.k_buffer[0], before, rtol=0, atol=0, equal_nan=True)
