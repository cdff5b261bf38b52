"""What a step works out once, without waiting for a device, and what is left for each layer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from astrai_triton.backend import TorchNativeBackend, attention
from astrai_triton.backend.base import Forward
from astrai_triton.backend.plan import StepPlan, padded_width
from strategies import (
    assert_close,
    build_packed,
    expected_packed,
    make_call,
    packed_case,
    run_native,
)

# What makes the host wait for a device, or a result whose shape the device decides.
DEVICE_READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "item", "is_nonzero"}


def test_decode_reads_whole_vectors_and_past_256_keys_whole_blocks() -> None:
    widths = {0: 0, 1: 16, 16: 16, 17: 32, 256: 256, 257: 512, 512: 512, 513: 768}
    assert {num_keys: padded_width(num_keys) for num_keys in widths} == widths


def test_the_same_reads_serve_every_layer() -> None:
    plan = StepPlan(build_packed(packed_case((1, 1), (5, 17))).cache, True)
    assert plan.decode_reads(-1) is plan.decode_reads(-1)
    assert plan.decode_reads(3) is not plan.decode_reads(-1)
    assert plan.prefill_reads(True, (-1, -1)) is plan.prefill_reads(True, (-1, -1))


def test_a_window_shortens_what_is_read() -> None:
    plan = StepPlan(build_packed(packed_case((1, 1), (100, 300))).cache, True)
    assert plan.decode_reads(-1).width == 512
    assert plan.decode_reads(15).width == 16
    assert [reads.width for reads in plan.prefill_reads(True, (15, 0))] == [16, 16]


def test_masked_positions_read_the_first_slot_that_is_wanted() -> None:
    tensors = build_packed(packed_case((1, 1), (3, 17)))
    reads = StepPlan(tensors.cache, True).decode_reads(-1)
    table = tensors.cache.req_to_token[tensors.cache.req_pool_indices[0]]
    assert reads.slots[:4].tolist() == [*table[:3].tolist(), table[0].item()]
    assert set(reads.slots[3:32].tolist()) == {table[0].item()}


def test_every_slot_to_read_exists_even_where_no_key_is_visible() -> None:
    case = packed_case((1, 1), (4, 7), holes=1.0)
    tensors = build_packed(case)
    for may_read in (True, False):
        plan = StepPlan(tensors.cache, may_read)
        for reads in (plan.decode_reads(-1), *plan.prefill_reads(True, (-1, -1))):
            assert ((reads.slots >= 0) & (reads.slots < tensors.cache.k_buffer.shape[1])).all()
            assert reads.visible.empty is not None
            assert torch.all(reads.visible.empty)


class OpRecorder(TorchDispatchMode):
    """Names of the aten ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
        run_native(case, tensors, may_read=False, fwd=fwd)
    assert "index_copy_" in recorder.names
    assert not DEVICE_READS & set(recorder.names)
    with OpRecorder() as recorder:
        run_native(case, tensors, may_read=True, fwd=fwd)
    assert DEVICE_READS & set(recorder.names), "the recorder does not see reads"


def test_decode_runs_the_same_ops_whatever_the_batch() -> None:
    names = []
    for batch in (2, 16):
        case = packed_case((1,) * batch, tuple(range(5, 5 + batch)))
        tensors = build_packed(case)
        with OpRecorder() as recorder:
            run_native(case, tensors)
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
            run_native(case, tensors)
        return recorder.names.count("index_select")

    assert num_gathers((3,) * 8, (9,) * 8) == num_gathers((3,), (9,)) == 2


def test_layers_of_a_step_may_run_in_and_out_of_inference_mode() -> None:
    case = packed_case((1, 1), (5, 17))
    tensors = build_packed(case)
    want = expected_packed(case, tensors)
    for fwd in ("decode", "prefill"):
        backend = TorchNativeBackend()
        with torch.inference_mode():
            backend.forward(make_call(case, tensors, fwd=fwd, layer_id=0))
        assert_close(backend.forward(make_call(case, tensors, fwd=fwd)), want)
        with torch.inference_mode():
            assert_close(backend.forward(make_call(case, tensors, fwd=fwd)), want)


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
