"""The Triton backend: what it refuses, when it is chosen, and that it computes what torch_native does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import strategies
from astrai_triton import ops
from astrai_triton.backend import (
    ATTN_BACKEND,
    FlashAttnBackend,
    TorchNativeBackend,
    TritonBackend,
    attention,
    attn_backend,
    fused,
)
from astrai_triton.backend.base import AttentionCall, Forward
from astrai_triton.backend.selection import select
from astrai_triton.errors import UnsupportedCallError
from carried import carry
from strategies import (
    DenseCase,
    Heads,
    PackedCase,
    Tensors,
    assert_close,
    build_dense,
    build_packed,
    expected_packed,
    make_call,
    packed_case,
)

ROOT = Path(__file__).parents[2]
HEADS = Heads(dtype=torch.float32, head_dim=16, value_dim=16, kv_heads=2, group=3)


@pytest.fixture(scope="module", autouse=True)
def compiled_where_a_gpu_is() -> Iterator[None]:
    """Where a GPU is, the kernels are compiled, and the ops carry the CPU tensors of these tests there."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            for name in ops.__all__:
                if callable(getattr(ops, name)):
                    patch.setattr(ops, name, carry(getattr(ops, name), torch.device("cuda")))
        yield


class Described:
    """Stands for a tensor where only its description is looked at."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device(device)
        self.requires_grad = False


def described(
    *,
    head_dim: int = 64,
    value_dim: int = 64,
    device: str = "cuda:0",
    sinks: Any = None,
    fwd: Forward = "dense",
) -> AttentionCall:
    q: Any = Described(1, 2, 4, head_dim, device=device)
    k: Any = Described(1, 2, 2, head_dim, device=device)
    v: Any = Described(1, 2, 2, value_dim, device=device)
    return AttentionCall(q, k, v, None, 0, None, False, fwd, None, (-1, -1), 0.0, sinks)


# What it refuses


def test_without_the_package_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert "pip install triton" in str(TritonBackend().unavailable())


@pytest.mark.parametrize(
    ("interpreted", "has_gpu", "available"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_it_wants_a_gpu_or_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, has_gpu: bool, available: bool
) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    reason = TritonBackend().unavailable()
    assert (reason is None) is available
    if reason is not None:
        assert "TRITON_INTERPRET=1" in reason


@pytest.mark.parametrize("name", [None, "astrai_triton.ops.launch"])
def test_the_interpreter_counts_from_before_the_import(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.delitem(sys.modules, "astrai_triton.ops.launch", raising=False)
    if name is not None:
        module: Any = type(sys)(name)
        module.IS_INTERPRETED = False
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fused.is_interpreted() is (name is None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 16, "value_dim": 256}, None),
        ({"head_dim": 8}, "head_dim of 16 to 256 in steps of 8, got 8"),
        ({"head_dim": 264}, "got 264"),
        ({"head_dim": 60}, "got 60"),
        ({"value_dim": 8}, "got 8"),
        ({"device": "cpu"}, "need CUDA tensors, got cpu"),
        ({"device": "meta"}, "need CUDA tensors, got meta"),
        ({"sinks": torch.zeros(4)}, None),
        ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks in float16, bfloat16 or float32"),
    ],
)
def test_why_not_names_what_the_kernels_cannot_do(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    monkeypatch.setattr(fused, "_why_not_device", lambda device: None)
    got = TritonBackend().why_not(described(**changes))
    assert got is None if reason is None else got is not None and reason in got


def test_the_interpreter_runs_on_memory_it_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: True)
    assert TritonBackend().why_not(described(device="cpu")) is None
    assert "needs CPU or CUDA tensors, got meta" in str(TritonBackend().why_not(described(device="meta")))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    reason = TritonBackend().why_not(described(device="cuda:7"))
    assert reason is not None
    assert "compute capability 8.0 or later, T4 has 7.5" in reason


def test_gradients_are_refused_and_no_grad_runs() -> None:
    q = torch.randn(1, 2, 2, 16, requires_grad=True)
    call = AttentionCall(q, q, q, None, 0, None, False, "dense", None, (-1, -1), 0.0, None)
    assert "have no backward" in str(TritonBackend().why_not(call))
    with torch.no_grad():
        assert "have no backward" not in str(TritonBackend().why_not(call))


# When it is chosen


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No explicit choice, and every backend can run on this machine."""
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: None)
    monkeypatch.setattr(FlashAttnBackend, "unavailable", lambda self: None)
    monkeypatch.setattr(fused, "_why_not_device", lambda device: None)
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)


@pytest.mark.usefixtures("automatic")
def test_on_a_gpu_it_comes_first() -> None:
    assert select(described()).name is ATTN_BACKEND.TRITON


@pytest.mark.usefixtures("automatic")
def test_what_it_cannot_run_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(described(head_dim=8, value_dim=8)).name is ATTN_BACKEND.FLASH
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: "no triton")
    assert select(described()).name is ATTN_BACKEND.FLASH
    monkeypatch.setattr(FlashAttnBackend, "unavailable", lambda self: "no flash")
    assert select(described()).name is ATTN_BACKEND.TORCH_NATIVE


@pytest.mark.usefixtures("automatic")
def test_on_a_cpu_the_interpreter_is_only_chosen_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: True)
    call = described(device="cpu")
    assert select(call).name is ATTN_BACKEND.TORCH_NATIVE
    with attn_backend("triton"):
        assert select(call).name is ATTN_BACKEND.TRITON
    monkeypatch.setenv("ASTR_BACKEND", "triton")
    assert select(call).name is ATTN_BACKEND.TRITON


def test_an_explicit_choice_that_cannot_run_raises_its_reason() -> None:
    rows = torch.randn(1, 2, 2, 12)
    with attn_backend("triton"), pytest.raises(UnsupportedCallError, match="got 12"):
        attention(rows, rows, rows)


PROBE = """
import json, sys
import torch
from astrai_triton.backend import attention, backend_reasons
before = "triton" in sys.modules
reason = backend_reasons()["triton"]
attention(*[torch.randn(1, 2, 2, 16)] * 3)
print(json.dumps([before, "astrai_triton.ops" in sys.modules, reason]))
"""


def test_neither_the_import_nor_automatic_attention_on_a_cpu_loads_the_kernels() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    before, after, _ = json.loads(probe.stdout)
    assert not before
    assert not after


# What it computes


def compare(case: PackedCase, fwd: Forward) -> None:
    """Output and cache contents of both backends, and of the oracle."""
    ours, theirs = build_packed(case), build_packed(case)
    want = expected_packed(case, ours)
    out = TritonBackend().forward(make_call(case, ours, fwd=fwd))
    assert_close(out, want)
    assert_close(out, TorchNativeBackend().forward(make_call(case, theirs, fwd=fwd)))
    for buffer in ("k_buffer", "v_buffer"):
        torch.testing.assert_close(
            getattr(ours.cache, buffer), getattr(theirs.cache, buffer), rtol=0, atol=0, equal_nan=True
        )


PACKED = {
    "plain": {},
    "one token pages": {"page_size": 1},
    "negative slots": {"holes": 0.4},
    "nothing but negative slots": {"holes": 1.0},
    "mask": {"has_mask": True},
    "sinks": {"has_sinks": True},
    "window": {"options": oracle.Options(is_causal=True, window_size=(4, 0))},
    "softcap and scale": {"options": oracle.Options(is_causal=True, softcap=2.5, softmax_scale=0.3)},
    "float16": {"heads": attrs.evolve(HEADS, dtype=torch.float16)},
    "bfloat16": {"heads": attrs.evolve(HEADS, dtype=torch.bfloat16)},
    "other head dims": {"heads": attrs.evolve(HEADS, head_dim=40, value_dim=24, kv_heads=1, group=5)},
    "everything": {
        "holes": 0.2,
        "has_mask": True,
        "has_sinks": True,
        "options": oracle.Options(is_causal=True, window_size=(9, 3), softcap=2.5),
    },
}


@pytest.mark.parametrize("changes", PACKED.values(), ids=PACKED)
def test_decode_is_what_torch_native_computes(changes: dict[str, Any]) -> None:
    compare(packed_case((1, 1, 1, 1), (1, 37, 0, 12), **changes), "decode")


@pytest.mark.parametrize("changes", PACKED.values(), ids=PACKED)
def test_ragged_prefill_is_what_torch_native_computes(changes: dict[str, Any]) -> None:
    compare(packed_case((5, 0, 1, 9, 3), (5, 4, 20, 30, 1), **changes), "prefill")


def test_prefill_without_causality_sees_everything() -> None:
    case = packed_case((3, 2), (9, 7), options=oracle.Options(is_causal=False, window_size=(5, 1)))
    compare(case, "prefill")


def test_decode_over_several_splits_is_what_torch_native_computes() -> None:
    compare(packed_case((1, 1), (700, 257)), "decode")


def test_a_step_without_requests_is_legal() -> None:
    compare(packed_case((), ()), "decode")
    compare(packed_case((), ()), "prefill")
    compare(packed_case((0, 0), (3, 0)), "prefill")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans().flatmap(lambda is_decode: strategies.packed_cases(is_decode=is_decode)), st.booleans())
def test_any_packed_call_is_what_the_oracle_computes(case: PackedCase, may_read: bool) -> None:
    dims = {8: 16}
    heads = attrs.evolve(
        case.heads,
        head_dim=dims.get(case.heads.head_dim, case.heads.head_dim),
        value_dim=dims.get(case.heads.value_dim, case.heads.value_dim),
    )
    case = attrs.evolve(case, heads=heads)
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    fwd: Forward = "decode" if set(case.q_lens) == {1} and case.options.is_causal else "prefill"
    assert_close(TritonBackend(may_read).forward(make_call(case, tensors, fwd=fwd)), want)


DENSE = {
    "plain": {},
    "not causal": {"options": oracle.Options()},
    "keys masked": {"mask_dim": 2},
    "scores masked": {"mask_dim": 3},
    "sinks": {"has_sinks": True},
    "window": {"options": oracle.Options(is_causal=True, window_size=(3, 1))},
    "softcap and scale": {"options": oracle.Options(softcap=2.5, softmax_scale=0.3)},
    "more rows than keys": {"kv_len": 4},
    "no keys": {"kv_len": 0},
    "no rows": {"q_len": 0},
    "no batch": {"batch": 0},
    "bfloat16": {"heads": attrs.evolve(HEADS, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("q_len", [1, 7])
@pytest.mark.parametrize("changes", DENSE.values(), ids=DENSE)
def test_dense_attention_is_what_torch_native_computes(changes: dict[str, Any], q_len: int) -> None:
    fields: dict[str, Any] = {
        "heads": HEADS,
        "batch": 2,
        "q_len": q_len,
        "kv_len": 9,
        "mask_dim": 0,
        "has_sinks": False,
        "options": oracle.Options(is_causal=True),
        "seed": 0,
    }
    case = DenseCase(**(fields | changes))
    q, k, v, mask, sinks = build_dense(case)
    options = case.options
    call = AttentionCall(
        q, k, v, None, 0, mask, options.is_causal, "dense", options.softmax_scale, options.window_size,
        options.softcap, sinks,
    )  # fmt: skip
    out = TritonBackend().forward(call)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert_close(out, TorchNativeBackend().forward(call))


def test_decode_answers_in_the_cache_s_own_tensor_and_asks_nothing_of_the_scratch() -> None:
    case = packed_case((1, 1), (5, 9))
    tensors: Tensors = build_packed(case)
    out = TritonBackend().forward(make_call(case, tensors, fwd="decode"))
    assert out.data_ptr() == tensors.cache.decode_out.data_ptr()
    assert out.isfinite().all()


def test_rows_without_keys_write_nothing_and_give_zero() -> None:
    """What pads a captured decode step: a length of 0 in front of a row that is in use."""
    case = packed_case((1, 1), (6, 0))
    tensors = build_packed(case)
    cache = attrs.evolve(tensors.cache, req_pool_indices=tensors.cache.req_pool_indices[:1].repeat(2))
    before = cache.k_buffer.clone()
    call = attrs.evolve(make_call(case, tensors, fwd="decode", layer_id=0), kv_cache=cache)
    out = TritonBackend().forward(call)
    assert (out[1] == 0).all()
    changed = (cache.k_buffer[0] != before[0]) & ~(cache.k_buffer[0].isnan() & before[0].isnan())
    assert changed.any(dim=2).any(dim=1).nonzero().flatten().tolist() == cache.out_cache_loc[:1].tolist()


def test_the_bits_of_a_decode_row_do_not_depend_on_how_long_the_others_are() -> None:
    """A captured step covers the longest context there may be, an eager one the longest at hand."""
    tensors = build_packed(packed_case((1, 1), (37, 700)))
    call = make_call(packed_case((1, 1), (37, 700)), tensors, fwd="decode")
    together = TritonBackend().forward(call).clone()
    short = packed_case((1,), (37,))
    cache = strategies.make_cache(
        tensors.cache.k_buffer,
        tensors.cache.v_buffer,
        tensors.cache.req_to_token,
        tensors.cache.req_pool_indices[:1].tolist(),
        short.q_lens,
        short.kv_lens,
        tensors.cache.out_cache_loc[:1].tolist(),
        q_heads=6,
    )
    alone = attrs.evolve(call, q=call.q[:1], k=call.k[:1], v=call.v[:1], kv_cache=cache)
    assert torch.equal(TritonBackend().forward(alone), together[:1])
