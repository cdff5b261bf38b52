"""K and V that rotary writes into the cache: when it does, with which bits, and what attention leaves."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from astrai_triton.backend import (
    AttentionBackend,
    TorchNativeBackend,
    TritonBackend,
    apply_rotary_emb,
    attention,
    attn_backend,
)
from astrai_triton.backend import rotary as rotary_module
from astrai_triton.backend.base import Forward
from astrai_triton.backend.rotary import append_rotated_
from astrai_triton.kvcache import KVCache
from strategies import Heads, Tensors, assert_close, build_packed, expected_packed, make_call, packed_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRINGS = ["adjacent", "half"]
PREFILL = packed_case((5, 0, 1, 9), (5, 4, 20, 30), holes=0.2)
DECODE = packed_case((1, 1), (37, 5))


def move(tensors: Tensors) -> Tensors:
    """Onto the device that runs the kernels here."""

    def moved(value: Any) -> Any:
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    cache = KVCache(
        **{field.name: moved(getattr(tensors.cache, field.name)) for field in attrs.fields(KVCache)}
    )
    q, k, v = (moved(rows) for rows in (tensors.q, tensors.k, tensors.v))
    return attrs.evolve(tensors, q=q, k=k, v=v, cache=cache)


def make_table(tokens: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.randn(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(5))
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


def join(tensors: Tensors) -> torch.Tensor:
    """q and k as the heads of one tensor."""
    return torch.cat((tensors.q, tensors.k), dim=1)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# Who writes


class Recorded:
    """Stands for the module of the ops; counts its calls and runs none."""

    MAX_HEAD_DIM = 1024

    def __init__(self) -> None:
        self.calls = 0

    def rotary_append_(self, *args: Any, **options: Any) -> None:
        self.calls += 1


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """As on a GPU: the rotary kernel takes everything it is asked for, whatever backend is chosen."""
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    recorded = Recorded()
    monkeypatch.setattr(rotary_module, "_is_fused", lambda x, freqs_cis: True)
    monkeypatch.setattr(rotary_module, "_load_ops", lambda: recorded)
    return recorded


def append(tensors: Tensors, cache: KVCache | None) -> bool:
    table = make_table(tensors.q.shape[0], 16)
    return append_rotated_(join(tensors), tensors.v, table, cache, 1, tensors.q.shape[1])


def test_a_prefill_is_written_by_rotary_where_triton_is_chosen_or_comes_first(op: Recorded) -> None:
    tensors = build_packed(PREFILL)
    assert append(tensors, tensors.cache)
    with attn_backend("triton"):
        assert append(tensors, tensors.cache)
    assert op.calls == 2


@pytest.mark.parametrize("chosen", ["torch_native", "flash"])
def test_another_backend_writes_for_itself(op: Recorded, chosen: str) -> None:
    tensors = build_packed(PREFILL)
    with attn_backend(chosen):
        assert not append(tensors, tensors.cache)
    assert op.calls == 0


def test_decode_is_left_to_the_attention_kernel_and_without_a_cache_there_is_nothing_to_write(
    op: Recorded,
) -> None:
    tensors = build_packed(DECODE)
    assert not append(tensors, tensors.cache)
    assert not append(tensors, None)
    assert op.calls == 0


def test_what_the_rotary_kernel_does_not_take_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    tensors = build_packed(PREFILL)
    qk, table = join(tensors), make_table(tensors.q.shape[0], 16).cpu()
    before, had = qk.clone(), tensors.cache.k_buffer.clone()
    # On a CPU it runs only where the backend triton is asked for.
    assert not append_rotated_(qk, tensors.v, table, tensors.cache, 1, 6)
    strided = table.mT.contiguous().mT
    with attn_backend("triton"):
        assert not append_rotated_(qk, tensors.v, strided, tensors.cache, 1, 6)
    assert torch.equal(qk, before)
    assert_same(tensors.cache.k_buffer, had)


# What is written


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bits_are_those_of_rotary_and_a_write(pairing: Any, rotary_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype, head_dim=16, value_dim=24, kv_heads=2, group=3)
    case = attrs.evolve(PREFILL, heads=heads)
    ours, theirs = move(build_packed(case)), move(build_packed(case))
    table, qk = make_table(ours.q.shape[0], rotary_dim), join(ours)
    with attn_backend("triton"):
        turned = apply_rotary_emb(qk, table, pairing=pairing)
        assert append_rotated_(qk, ours.v, table, ours.cache, 1, 6, pairing=pairing)
        q, k = qk[:, :6], qk[:, 6:]
        got = attention(q, k, ours.v, ours.cache, 1, is_causal=True, is_stored=True)
        want = attention(turned[:, :6], turned[:, 6:], theirs.v, theirs.cache, 1, is_causal=True)
    assert torch.equal(q, turned[:, :6])
    assert torch.equal(k, ours.k)
    assert torch.equal(got, want)
    assert_same(ours.cache.k_buffer, theirs.cache.k_buffer)
    assert_same(ours.cache.v_buffer, theirs.cache.v_buffer)


# What attention leaves alone


@pytest.mark.parametrize("backend", [TritonBackend(), TorchNativeBackend()], ids=lambda b: b.name.value)
@pytest.mark.parametrize(("fwd", "case"), [("decode", DECODE), ("prefill", PREFILL)])
def test_stored_rows_are_attended_to_and_not_written_again(
    backend: AttentionBackend, fwd: Forward, case: Any
) -> None:
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    tensors = move(tensors)
    call = make_call(case, tensors, fwd=fwd)
    slots = tensors.cache.out_cache_loc.long()
    for layer, rows in zip(call.layer, (call.k, call.v), strict=True):
        layer[slots[slots >= 0]] = rows[slots >= 0]
    before = [layer.clone() for layer in call.layer]
    nothing = torch.full_like(call.k, torch.nan)
    out = backend.forward(attrs.evolve(call, k=nothing, v=nothing, is_stored=True))
    assert_close(out.cpu(), want)
    for layer, had in zip(call.layer, before, strict=True):
        assert_same(layer, had)


def test_nothing_is_stored_without_a_cache() -> None:
    rows = torch.zeros(1, 2, 2, 16)
    with pytest.raises(ValueError, match="is_stored: wanted False without kv_cache, got True; pass kv_cache"):
        attention(rows, rows, rows, is_stored=True)
