"""The torch backend over the KV cache, against the float64 oracle."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import strategies
from astrai_triton.backend import TorchNativeBackend, attention
from astrai_triton.backend.base import Forward
from strategies import (
    Heads,
    PackedCase,
    Tensors,
    assert_close,
    build_packed,
    expected_packed,
    make_cache,
    make_call,
    packed_case,
)

NAN = float("nan")
INF = float("inf")

# What makes the host wait for a device, or a result whose shape the device decides.
DEVICE_READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "item", "is_nonzero"}


def run(
    case: PackedCase, tensors: Tensors, *, may_read: bool | None = None, fwd: Forward | None = None
) -> torch.Tensor:
    """The backend's own output, on a fresh plan."""
    if fwd is None:
        fwd = "decode" if set(case.q_lens) <= {1} else "prefill"
    return TorchNativeBackend(may_read).forward(make_call(case, tensors, fwd=fwd))


def check_case(case: PackedCase, *, may_read: bool | None = None, fwd: Forward | None = None) -> None:
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    assert_close(run(case, tensors, may_read=may_read, fwd=fwd), want)


class OpRecorder(TorchDispatchMode):
    """Names of the aten ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@settings(max_examples=80, deadline=None)
@given(strategies.packed_cases(is_decode=True), st.booleans())
def test_decode_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    check_case(case, may_read=may_read, fwd="decode")


@settings(max_examples=80, deadline=None)
@given(strategies.packed_cases(is_decode=False), st.booleans())
def test_ragged_prefill_agrees_with_the_oracle(case: PackedCase, may_read: bool) -> None:
    check_case(case, may_read=may_read, fwd="prefill")


@settings(max_examples=40, deadline=None)
@given(strategies.packed_cases(is_decode=False), st.booleans())
def test_new_rows_land_in_their_slots_and_nothing_else_changes(case: PackedCase, may_read: bool) -> None:
    tensors = build_packed(case)
    cache = tensors.cache
    slots = cache.out_cache_loc.tolist()
    want_k = torch.stack((cache.k_buffer[0], oracle.write_rows(cache.k_buffer[1], tensors.k, slots)))
    want_v = torch.stack((cache.v_buffer[0], oracle.write_rows(cache.v_buffer[1], tensors.v, slots)))
    run(case, tensors, may_read=may_read, fwd="prefill")
    torch.testing.assert_close(cache.k_buffer, want_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.v_buffer, want_v, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_requests_without_keys_give_zero_and_disturb_nobody(fwd: Forward, may_read: bool) -> None:
    case = packed_case((1, 1, 1, 1), (5, 0, 17, 0))
    tensors = build_packed(case)
    got = run(case, tensors, may_read=may_read, fwd=fwd)
    assert_close(got, expected_packed(case, tensors))
    assert torch.equal(got[1], torch.zeros(6, 16))
    assert torch.equal(got[3], torch.zeros(6, 16))


@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_an_empty_batch_is_legal(fwd: Forward, may_read: bool) -> None:
    case = packed_case((), ())
    assert run(case, build_packed(case), may_read=may_read, fwd=fwd).shape == (0, 6, 16)


@pytest.mark.parametrize("may_read", [True, False])
def test_requests_without_rows_in_a_ragged_batch_are_skipped(may_read: bool) -> None:
    check_case(packed_case((0, 3, 0, 2, 0), (4, 3, 0, 9, 7)), may_read=may_read)
    check_case(packed_case((0, 0), (4, 0)), may_read=may_read)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (2, 3), (3, 2), (5, 2), (5, 64), (64, 5)])
@pytest.mark.parametrize("may_read", [True, False])
def test_causal_is_aligned_to_the_bottom_right(q_len: int, kv_len: int, may_read: bool) -> None:
    check_case(packed_case((q_len, q_len), (kv_len, kv_len)), may_read=may_read, fwd="prefill")


@pytest.mark.parametrize("window_size", [(0, 0), (3, 0), (15, -1), (16, 0), (100, 0), (4, 2)])
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_window_covers_exactly_its_inclusive_range(window_size: tuple[int, int], is_decode: bool) -> None:
    q_lens = (1, 1, 1) if is_decode else (1, 20, 7)
    options = oracle.Options(is_causal=is_decode, window_size=window_size)
    check_case(packed_case(q_lens, (3, 40, 17), options=options))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32])
def test_every_group_size_shares_its_kv_head(group: int) -> None:
    heads = Heads(dtype=torch.float32, head_dim=8, value_dim=8, kv_heads=2, group=group)
    check_case(packed_case((1, 1), (5, 9), heads=heads))
    check_case(packed_case((2, 2, 3), (5, 5, 3), heads=heads))


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_every_head_dim_works(head_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(dtype=dtype, head_dim=head_dim, value_dim=head_dim, kv_heads=1, group=2)
    check_case(packed_case((1, 1), (5, 9), heads=heads))
    check_case(packed_case((2, 3), (5, 3), heads=heads))


def referenced_slots(case: PackedCase, tensors: Tensors) -> torch.Tensor:
    """bool ``[size]``: slots that some row of this step sees."""
    cache = tensors.cache
    seen = torch.zeros(cache.k_buffer.shape[1], dtype=torch.bool)
    for row, q_len, kv_len in zip(cache.req_pool_indices.tolist(), case.q_lens, case.kv_lens, strict=True):
        for i in range(q_len):
            slots = cache.req_to_token[row, oracle.visible_keys(i, q_len, kv_len, case.options)].long()
            seen[slots[slots >= 0]] = True
    return seen


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("holes", [0.0, 0.4])
@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize("is_decode", [True, False])
def test_what_no_row_sees_may_hold_anything(
    is_decode: bool, may_read: bool, holes: float, window: int, softcap: float
) -> None:
    options = oracle.Options(is_causal=True, window_size=(window, -1), softcap=softcap)
    q_lens = (1, 1, 1) if is_decode else (4, 1, 9)
    case = packed_case(q_lens, (23, 1, 9), options=options, holes=holes)
    results = []
    for poison in (0.0, NAN, INF, -INF):
        tensors = build_packed(case)
        hidden = ~referenced_slots(case, tensors)
        tensors.cache.k_buffer[:, hidden] = poison
        tensors.cache.v_buffer[:, hidden] = poison
        results.append(run(case, tensors, may_read=may_read))
    assert results[0].isfinite().all()
    for poisoned in results[1:]:
        assert torch.equal(poisoned, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_bits_of_a_decoding_request_do_not_depend_on_its_batch_mates(
    dtype: torch.dtype, window: int, softcap: float
) -> None:
    heads = Heads(dtype=dtype, head_dim=64, value_dim=64, kv_heads=3, group=3)
    options = oracle.Options(is_causal=True, window_size=(window, 0), softcap=softcap)
    for kv_len in (1, 7, 100, 255, 300, 600):
        case = packed_case(
            (1,) * 4, (kv_len, 3, kv_len + 90, 900), heads=heads, options=options, page_size=16
        )
        together = build_packed(case)
        cache = together.cache
        alone = make_cache(
            cache.k_buffer.clone(),
            cache.v_buffer.clone(),
            cache.req_to_token,
            cache.req_pool_indices[:1].tolist(),
            (1,),
            (kv_len,),
            cache.out_cache_loc[:1].tolist(),
            q_heads=heads.q_heads,
        )
        solo = attrs.evolve(together, q=together.q[:1], k=together.k[:1], v=together.v[:1], cache=alone)
        assert torch.equal(run(case, solo), run(case, together)[:1])


def test_decode_asks_no_device_for_a_value() -> None:
    """Meta tensors have no values: whatever needs one raises. Every option, holes and masks included."""
    for options in (oracle.Options(), oracle.Options(window_size=(4, 0), softcap=2.0)):
        for has_mask in (False, True):
            case = packed_case((1, 1, 1), (5, 0, 17), options=options, has_mask=has_mask, has_sinks=has_mask)
            tensors = build_packed(case)
            tensor_fields = {
                field.name: value.to("meta") if isinstance(value, torch.Tensor) else value
                for field in attrs.fields(type(tensors.cache))
                for value in [getattr(tensors.cache, field.name)]
            }
            out = attention(
                tensors.q.to("meta"),
                tensors.k.to("meta"),
                tensors.v.to("meta"),
                attrs.evolve(tensors.cache, **tensor_fields),
                attn_mask=None if tensors.attn_mask is None else tensors.attn_mask.to("meta"),
                sinks=None if tensors.sinks is None else tensors.sinks.to("meta"),
                fwd="decode",
                window_size=options.window_size,
                softcap=options.softcap,
            )
            assert out.shape == (3, 6, 16)


@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_without_leave_to_read_no_op_waits_for_a_value(fwd: Forward) -> None:
    case = packed_case((1, 1), (5, 17), holes=0.3)
    tensors = build_packed(case)
    with OpRecorder() as recorder:
        run(case, tensors, may_read=False, fwd=fwd)
    assert "index_copy_" in recorder.names
    assert not DEVICE_READS & set(recorder.names)
    with OpRecorder() as recorder:
        run(case, tensors, may_read=True, fwd=fwd)
    assert DEVICE_READS & set(recorder.names), "the recorder does not see reads"


def test_decode_runs_the_same_ops_whatever_the_batch() -> None:
    names = []
    for batch in (2, 16):
        case = packed_case((1,) * batch, tuple(range(5, 5 + batch)))
        tensors = build_packed(case)
        with OpRecorder() as recorder:
            run(case, tensors)
        names.append(recorder.names)
    assert names[0] == names[1]


def test_later_layers_of_a_step_only_write_gather_and_attend() -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    backend = TorchNativeBackend()
    backend.forward(make_call(case, tensors, fwd="decode", layer_id=0))
    with OpRecorder() as recorder:
        backend.forward(make_call(case, tensors, fwd="decode", layer_id=1))
    assert recorder.names.count("index_copy_") == 2
    assert recorder.names.count("index_select") == 2
    assert not {"index", "arange", "masked_fill", "where"} & set(recorder.names)


def test_prefill_attends_to_neighbours_of_equal_shape_at_once() -> None:
    def num_gathers(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> int:
        case = packed_case(q_lens, kv_lens)
        tensors = build_packed(case)
        with OpRecorder() as recorder:
            run(case, tensors)
        return recorder.names.count("index_select")

    assert num_gathers((3,) * 8, (9,) * 8) == num_gathers((3,), (9,)) == 2


def test_what_was_worked_out_for_a_step_does_not_keep_its_kv_cache_alive() -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    backend = TorchNativeBackend()
    for fwd in ("decode", "prefill"):
        backend.forward(make_call(case, tensors, fwd=fwd))
    cache = weakref.ref(tensors.cache)
    del tensors
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("may_read", [True, False])
def test_rows_with_a_negative_slot_are_not_written(may_read: bool) -> None:
    for loc in ([-1, 3, -1, 1], [2, 0, 1, -7], [-1, -1, -1, -1]):
        case = packed_case((4,), (4,))
        tensors = build_packed(case)
        cache = attrs.evolve(tensors.cache, out_cache_loc=torch.tensor(loc, dtype=torch.int32))
        want = oracle.write_rows(cache.k_buffer[1], tensors.k, loc)
        run(case, attrs.evolve(tensors, cache=cache), may_read=may_read)
        torch.testing.assert_close(cache.k_buffer[1], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_slots_and_rows_out_of_range_are_errors_where_they_can_be_seen(fwd: Forward) -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    cache = tensors.cache
    size = cache.k_buffer.shape[1]
    table = cache.req_to_token.clone()
    table[cache.req_pool_indices[0].item(), 2] = size
    bad = {
        "req_to_token": table,
        "out_cache_loc": torch.tensor([0, size], dtype=torch.int32),
        "req_pool_indices": torch.tensor([0, 99], dtype=torch.int32),
    }
    for field, value in bad.items():
        with pytest.raises(ValueError, match=f"{field}: wanted"):
            run(
                case,
                attrs.evolve(tensors, cache=attrs.evolve(cache, **{field: value})),
                may_read=True,
                fwd=fwd,
            )


@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_slots_and_rows_out_of_range_are_masked_where_they_cannot_be_seen(fwd: Forward) -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    cache = tensors.cache
    size = cache.k_buffer.shape[1]
    row = cache.req_pool_indices[0].item()
    beyond, masked = cache.req_to_token.clone(), cache.req_to_token.clone()
    beyond[row, 2], masked[row, 2] = size, -1
    results = [
        run(
            case,
            attrs.evolve(tensors, cache=attrs.evolve(cache, req_to_token=table)),
            may_read=False,
            fwd=fwd,
        )
        for table in (beyond, masked)
    ]
    assert torch.equal(results[0], results[1])
    no_row = attrs.evolve(cache, req_pool_indices=torch.tensor([99, -1], dtype=torch.int32))
    assert torch.equal(
        run(case, attrs.evolve(tensors, cache=no_row), may_read=False, fwd=fwd), torch.zeros(2, 6, 16)
    )


@pytest.mark.parametrize("is_decode", [True, False])
def test_inputs_may_be_slices_of_one_fused_projection(is_decode: bool) -> None:
    case = packed_case((1, 1, 1) if is_decode else (2, 2, 5), (5, 5, 17))
    tensors = build_packed(case)
    fused = torch.cat((tensors.q, tensors.k, tensors.v), dim=1).flatten(1).unflatten(1, (10, 16))
    q, k, v = fused.split((6, 2, 2), dim=1)
    head_major = tensors.q.transpose(0, 1).contiguous().transpose(0, 1)
    want = expected_packed(case, tensors)
    assert_close(run(case, attrs.evolve(tensors, q=q, k=k, v=v)), want)
    assert_close(run(case, attrs.evolve(tensors, q=head_major)), want)


@pytest.mark.parametrize("is_decode", [True, False])
def test_index_tensors_may_be_strided(is_decode: bool) -> None:
    case = packed_case((1, 1, 1) if is_decode else (2, 2, 5), (5, 5, 17))
    tensors = build_packed(case)
    strided = {}
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "kv_indptr", "qo_indptr"):
        strided[name] = getattr(tensors.cache, name).repeat_interleave(2)[::2]
    strided["req_to_token"] = tensors.cache.req_to_token.repeat_interleave(2, dim=1)[:, ::2]
    want = expected_packed(case, tensors)
    assert_close(run(case, attrs.evolve(tensors, cache=attrs.evolve(tensors.cache, **strided))), want)


def test_slots_past_two_to_the_31_elements_are_reached(tmp_path: Path) -> None:
    """A sparse file stands in for a pool of 4 GiB; only the pages that are touched exist."""
    stride, size = 1 << 27, 18
    files = [tmp_path / "k", tmp_path / "v"]
    buffers = []
    for file in files:
        elements = torch.from_file(str(file), shared=True, size=stride * (size - 1) + 8, dtype=torch.float16)
        buffers.append(elements.as_strided((1, size, 1, 8), (0, stride, 8, 1)))
    table = torch.tensor([[17, 16, 15, 0]], dtype=torch.int32)
    small = torch.randn(2, 1, size, 1, 8, generator=torch.Generator().manual_seed(0)).half()
    for buffer, values in zip(buffers, small, strict=True):
        buffer[:] = values
    q, k, v = torch.randn(3, 1, 2, 8, generator=torch.Generator().manual_seed(1)).half()
    outs = []
    for k_buffer, v_buffer in (buffers, small):
        cache = make_cache(k_buffer, v_buffer, table, (0,), (1,), (4,), (0,), q_heads=2)
        outs.append(attention(q, k[:, :1], v[:, :1], cache, 0))
    for file in files:
        file.unlink()
    assert torch.equal(outs[0], outs[1])
