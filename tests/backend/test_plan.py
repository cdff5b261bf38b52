"""How wide decode reads, and what is worked out once per step."""

from __future__ import annotations

import torch

from astrai_triton.backend.plan import StepPlan, padded_width
from strategies import build_packed, packed_case


def test_decode_reads_whole_vectors_and_past_256_keys_whole_blocks() -> None:
    assert [padded_width(n) for n in (0, 1, 16, 17, 256, 257, 512, 513)] == [
        0,
        16,
        16,
        32,
        256,
        512,
        512,
        768,
    ]


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
