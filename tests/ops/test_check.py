"""Every bad argument of the decode ops is an error before launch that names it and the way out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from astrai_triton.ops import attn_decode, attn_paged_decode, check, launch
from astrai_triton.ops.launch import ARCHES


def dense(**changes: Any) -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 1, 4, 16),
        "k": torch.zeros(2, 5, 2, 16),
        "v": torch.zeros(2, 5, 2, 16),
    } | changes


def paged(**changes: Any) -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 4, 16),
        "k_buffer": torch.zeros(9, 2, 16),
        "v_buffer": torch.zeros(9, 2, 16),
        "req_to_token": torch.zeros(3, 600, dtype=torch.int32),
        "req_pool_indices": torch.zeros(2, dtype=torch.int32),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
    } | changes


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch would be a TypeError: the checks come first."""
    monkeypatch.setattr("astrai_triton.ops.split.attend_decode_kernel", None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": torch.zeros(2, 1, 4, 16).double()},
            TypeError,
            "q: wanted one of float16, bfloat16, float32, got",
        ),
        ({"k": torch.zeros(2, 5, 2, 16).half()}, TypeError, "v: wanted the dtype of k, float16, got float32"),
        (
            {"k": torch.zeros(2, 5, 2, 16).half(), "v": torch.zeros(2, 5, 2, 16).half()},
            TypeError,
            "k: wanted the dtype of q, float32, or an fp8 one with a 16-bit q, got float16; cast it first",
        ),
        (
            {"q": torch.zeros(2, 2, 4, 16)},
            ValueError,
            r"q: wanted shape \[B, 1, Hq, D\], got \[2, 2, 4, 16\]",
        ),
        ({"q": torch.zeros(3, 1, 4, 16)}, ValueError, r"k: wanted shape \[3, L, Hkv, D\]"),
        ({"q": torch.zeros(2, 1, 3, 16)}, ValueError, "q: wanted a multiple of 2 kv heads"),
        (
            {"q": torch.zeros(2, 1, 4, 20)},
            ValueError,
            "q: wanted a head_dim that is a multiple of 8 from 16 to",
        ),
        ({"q": torch.zeros(2, 1, 4, 8)}, ValueError, "got 8; pad it with zeros, or use torch_native"),
        ({"q": torch.zeros(2, 1, 4, 264)}, ValueError, "got 264"),
        ({"q": torch.zeros(2, 1, 4, 24)}, ValueError, "k: wanted the head_dim of q, 24, got 16"),
        (
            {"v": torch.zeros(2, 6, 2, 16)},
            ValueError,
            r"v: wanted shape \[2, 5, 2, Dv\], got \[2, 6, 2, 16\]",
        ),
        (
            {"v": torch.zeros(2, 5, 16, 2).transpose(2, 3)},
            ValueError,
            "v: wanted a unit last stride, got strides .*; call .contiguous",
        ),
        (
            {"k": torch.zeros(2, 5, 2, 16, device="meta")},
            ValueError,
            "k: wanted the device of the first tensor",
        ),
        ({"mask": torch.ones(2, 5)}, TypeError, r"mask: wanted bool \(True = keep\), got float32; compare"),
        ({"mask": torch.ones(2, 4) > 0}, ValueError, r"mask: wanted shape \[2, 5\], got \[2, 4\]"),
        (
            {"softmax_scale": float("nan")},
            ValueError,
            "softmax_scale: wanted a finite number or None, got nan",
        ),
        ({"window_size": (-2, 0)}, ValueError, r"window_size: wanted .* got \(-2, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap: wanted a finite number >= 0, got -1.0; 0 turns it off"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: wanted shape \[4\], got \[3\]"),
        ({"sinks": torch.zeros(4).long()}, TypeError, "sinks: wanted one of float16"),
        ({"sinks": torch.zeros(8)[::2]}, ValueError, "sinks: wanted a unit last stride"),
        ({"out": torch.zeros(2, 1, 4, 24)}, ValueError, r"out: wanted shape \[2, 1, 4, 16\]"),
        (
            {"out": torch.zeros(2, 1, 4, 16).half()},
            TypeError,
            "out: wanted float32, got float16; pass another",
        ),
        (
            {"out": torch.zeros(2, 1, 1, 16).expand(2, 1, 4, 16)},
            ValueError,
            "out: wanted elements of their own, got the strides",
        ),
        ({"k_scale": 0.5}, ValueError, "k_scale: wanted None unless K and V are fp8, got 0.5 with float32"),
    ],
)
def test_contiguous_decode_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attn_decode(**dense(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 1, 4, 16)}, ValueError, r"q: wanted shape \[B, Hq, D\]"),
        ({"k_buffer": torch.zeros(1, 9, 2, 16)}, ValueError, r"v_buffer: wanted shape \[1, 9, 2, Dv\]"),
        (
            {"req_to_token": torch.zeros(3, 600)},
            TypeError,
            "req_to_token: wanted int32, got float32; cast it",
        ),
        ({"req_to_token": torch.zeros(600).int()}, ValueError, r"req_to_token: wanted shape \[R, context\]"),
        ({"req_pool_indices": torch.zeros(2).long()}, TypeError, "req_pool_indices: wanted int32, got int64"),
        ({"req_pool_indices": torch.zeros(3).int()}, ValueError, r"req_pool_indices: wanted shape \[2\]"),
        ({"kv_indptr": torch.zeros(2).int()}, ValueError, r"kv_indptr: wanted shape \[3\], got \[2\]"),
        ({"kv_indptr": torch.zeros(6).int()[::2]}, ValueError, "kv_indptr: wanted a unit last stride"),
        ({"new_k": torch.zeros(2, 2, 16)}, ValueError, "new_v: wanted together with its partner, got None"),
        (
            {"new_k": torch.zeros(2, 2, 16), "new_v": torch.zeros(2, 1, 16)},
            ValueError,
            r"new_v: wanted shape \[2, 2, 16\], got \[2, 1, 16\]",
        ),
        (
            {"new_k": torch.zeros(2, 2, 16).half(), "new_v": torch.zeros(2, 2, 16)},
            TypeError,
            "new_k: wanted one of float32, got float16",
        ),
        ({"mask": torch.ones(2, 5) > 0}, ValueError, r"mask: wanted shape \[sum of kv_len\]"),
        ({"max_kv_len": 601}, ValueError, "max_kv_len: wanted 0 to the width of req_to_token, 600, got 601"),
        ({"o_part": torch.zeros(2, 4, 3, 16)}, ValueError, "ml_part: wanted together with its partner"),
        (
            {"o_part": torch.zeros(2, 4, 2, 16), "ml_part": torch.zeros(2, 4, 2, 2)},
            ValueError,
            "o_part: wanted room for 3 splits, got 2; enlarge it or lower max_kv_len",
        ),
        (
            {"o_part": torch.zeros(2, 4, 3, 16), "ml_part": torch.zeros(2, 4, 4, 2)},
            ValueError,
            r"ml_part: wanted shape \[2, 4, 3, 2\]",
        ),
        (
            {"o_part": torch.zeros(2, 4, 3, 32)[..., :16], "ml_part": torch.zeros(2, 4, 3, 2)},
            ValueError,
            "o_part: wanted it contiguous",
        ),
    ],
)
def test_paged_decode_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attn_paged_decode(**paged(**changes))


def test_fp8_is_refused_where_the_architecture_or_the_scale_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fp8 = torch.zeros(2, 5, 2, 16).to(torch.float8_e4m3fn)
    call = dense(q=torch.zeros(2, 1, 4, 16).half(), k=fp8, v=fp8)
    with pytest.raises(ValueError, match=r"v_scale: wanted a finite number > 0, got 0\.0"):
        attn_decode(**call, v_scale=0.0)
    with pytest.raises(ValueError, match=r"k_scale: wanted a finite number > 0, got tensor.*read tensors"):
        attn_decode(**call, k_scale=torch.ones(()))
    monkeypatch.setattr(check, "arch_of", lambda device: ARCHES[80])
    with pytest.raises(ValueError, match="k: wanted an architecture from sm_89 for float8_e4m3fn, got sm_80"):
        attn_decode(**call)
    with pytest.raises(TypeError, match="with a 16-bit q, got float8_e4m3fn"):
        attn_decode(**dense(k=fp8, v=fp8))


def test_a_cpu_without_the_interpreter_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match=r"device: wanted cuda, .* got cpu; .* set TRITON_INTERPRET=1 before"
    ):
        # On a GPU the tests' own tensors would be carried there, and come to no CPU.
        inspect.unwrap(attn_decode)(**dense())
