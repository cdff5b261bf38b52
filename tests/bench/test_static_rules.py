"""The rules of ``astrai bench static --check`` on made-up reports: what passes, and what each refuses."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from astrai_bench.static import KernelReport
from astrai_bench.static_rules import FAULT_KINDS, find_faults
from astrai_triton.ops.launch import ARCHES, KernelConfig, Variant

SCALAR_DOT = (
    "%s = tt.dot %a, %b, %c : tensor<16x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #blocked}>> * "
    "tensor<64x32xbf16, #ttg.dot_op<{opIdx = 1, parent = #blocked}>> -> tensor<16x32xf32>"
)
NARROW_PRODUCT = """tt.func public @f(%x: !tt.ptr<f32>, %s: i32, %n: i32) {
%o = arith.muli %s, %n : i32
%p = tt.addptr %x, %o : !tt.ptr<f32>, i32
}"""


def _variant(
    *,
    block_m: int = 16,
    group: int | None = 4,
    kind: str = "*bf16",
    kv_itemsize: int = 2,
    uses_dot: bool = True,
) -> Variant:
    return Variant(
        name="made_up",
        kernel=None,
        signature={"q_ptr": kind, "k_ptr": kind},
        constexprs={} if group is None else {"GROUP": group},
        divisible=(),
        config=KernelConfig(block_m=block_m, block_n=64, num_warps=4, num_stages=3),
        uses_dot=uses_dot,
        tile={"kv_itemsize": kv_itemsize},
    )


DECODE = KernelReport(
    variant="made_up",
    arch="sm_90",
    triton="3.9.0",
    registers=88,
    shared_bytes=70 * 1024,
    num_warps=4,
    num_stages=3,
    resident_ctas=3,
    limit="shared",
    tiles_in_flight=2,
    bytes_in_flight=192 * 1024,
    mma=("mma.sync",),
)
PREFILL = attrs.evolve(
    DECODE, num_warps=8, registers=204, resident_ctas=1, bytes_in_flight=64 * 1024, mma=("wgmma",)
)


def _kinds(
    report: KernelReport, variant: Variant, capability: int = 90, ttgir: str = "", ttir: str = ""
) -> list[str]:
    faults = find_faults(report, variant, ARCHES[capability], {"ttgir": ttgir, "ttir": ttir})
    kinds = [fault.kind for fault in faults]
    assert set(kinds) <= set(FAULT_KINDS)
    return kinds


def test_decode_and_prefill_that_keep_every_rule_pass() -> None:
    assert _kinds(DECODE, _variant()) == []
    assert _kinds(PREFILL, _variant(block_m=128, group=None)) == []


@pytest.mark.parametrize("capability", sorted(ARCHES))
@pytest.mark.parametrize("spill_bytes", [4, 472])
def test_a_spill_is_refused_on_every_architecture(capability: int, spill_bytes: int) -> None:
    spilling = {"registers": 255, "spill_bytes": spill_bytes}
    small = {"shared_bytes": 48 * 1024}
    for report, variant in ((DECODE, _variant()), (PREFILL, _variant(block_m=128, group=None))):
        assert _kinds(attrs.evolve(report, **spilling, **small), variant, capability) == ["spill"]
        assert _kinds(attrs.evolve(report, **small), variant, capability) == []


@pytest.mark.parametrize(("capability", "most_kb"), [(80, 163), (89, 99), (90, 227), (120, 99)])
def test_a_cta_may_have_all_the_shared_memory_there_is_and_no_more(capability: int, most_kb: int) -> None:
    fits = attrs.evolve(DECODE, shared_bytes=most_kb * 1024)
    assert _kinds(fits, _variant(), capability) == []
    assert _kinds(attrs.evolve(fits, shared_bytes=most_kb * 1024 + 1), _variant(), capability) == ["shared"]


@pytest.mark.parametrize("mma", [("mma.sync",), ()])
@pytest.mark.parametrize("block_m", [64, 128])
def test_tiles_of_64_rows_without_wgmma_are_refused_on_hopper(mma: tuple[str, ...], block_m: int) -> None:
    report, variant = attrs.evolve(PREFILL, mma=mma), _variant(block_m=block_m, group=None)
    assert _kinds(report, variant) == ["mma"]


def test_mma_sync_will_do_for_few_rows_and_where_there_is_no_wgmma() -> None:
    report = attrs.evolve(PREFILL, mma=("mma.sync",))
    assert _kinds(report, _variant(block_m=32, group=None)) == []
    assert _kinds(report, _variant(block_m=128, group=None), 80) == []


def test_a_scalar_product_of_16_bit_tiles_is_refused_once() -> None:
    assert _kinds(attrs.evolve(DECODE, mma=()), _variant(), ttgir=SCALAR_DOT) == ["mma"]
    assert _kinds(DECODE, _variant(), ttgir=SCALAR_DOT) == ["mma"]


def test_float32_needs_no_matrix_instruction() -> None:
    report = attrs.evolve(DECODE, mma=())
    assert _kinds(report, _variant(kind="*fp32", kv_itemsize=4, uses_dot=False), ttgir=SCALAR_DOT) == []


def test_a_pipeline_shorter_than_its_stages_is_refused() -> None:
    report = attrs.evolve(PREFILL, tiles_in_flight=1)
    assert _kinds(report, _variant(block_m=128, group=None)) == ["pipeline"]
    assert _kinds(attrs.evolve(report, num_stages=2), _variant(block_m=128, group=None)) == []


@pytest.mark.parametrize("capability", sorted(ARCHES))
def test_decode_with_one_tile_in_flight_is_refused_even_if_it_asks_for_no_more(capability: int) -> None:
    report = attrs.evolve(DECODE, num_stages=2, tiles_in_flight=1, shared_bytes=48 * 1024)
    assert _kinds(report, _variant(), capability) == ["flight"]


@pytest.mark.parametrize(
    ("kind", "kv_itemsize", "uses_dot"), [("*bf16", 2, True), ("*fp8e5", 1, True), ("*fp32", 4, False)]
)
def test_decode_on_hopper_needs_32_kb_in_flight_at_its_occupancy(
    kind: str, kv_itemsize: int, uses_dot: bool
) -> None:
    variant = _variant(kind=kind, kv_itemsize=kv_itemsize, uses_dot=uses_dot)
    enough = attrs.evolve(DECODE, resident_ctas=1, bytes_in_flight=32 * 1024)
    assert _kinds(enough, variant) == []
    assert _kinds(attrs.evolve(enough, bytes_in_flight=32 * 1024 - 1), variant) == ["flight"]


def test_bytes_in_flight_are_asked_for_on_hopper_alone() -> None:
    report = attrs.evolve(DECODE, bytes_in_flight=16 * 1024)
    assert _kinds(report, _variant(), 80) == []


# 790 TFLOP/s over 4.3 TB/s: 184 operations a byte, and a group does 2 per element of K and V.
@pytest.mark.parametrize(
    ("group", "kv_itemsize", "wanted"),
    [(128, 2, ["flight"]), (184, 2, []), (91, 1, ["flight"]), (92, 1, [])],
)
def test_a_group_that_computes_longer_than_it_loads_needs_fewer_bytes_in_flight(
    group: int, kv_itemsize: int, wanted: list[str]
) -> None:
    report = attrs.evolve(DECODE, bytes_in_flight=24 * 1024, mma=("wgmma",))
    assert _kinds(report, _variant(block_m=64, group=group, kv_itemsize=kv_itemsize)) == wanted


def test_what_is_no_decode_needs_no_bytes_in_flight() -> None:
    report = attrs.evolve(DECODE, tiles_in_flight=0, bytes_in_flight=0, num_stages=1, mma=())
    assert _kinds(report, attrs.evolve(_variant(group=None, uses_dot=False), tile={})) == []


def test_a_narrow_address_product_is_refused() -> None:
    assert _kinds(DECODE, _variant(), ttir=NARROW_PRODUCT) == ["address"]


def test_a_fault_says_what_was_measured_and_what_was_wanted() -> None:
    poor: dict[str, Any] = {"tiles_in_flight": 1, "bytes_in_flight": 16384, "spill_bytes": 8}
    faults = find_faults(attrs.evolve(DECODE, **poor), _variant(), ARCHES[90], {"ttgir": "", "ttir": ""})
    assert [(fault.kind, fault.text) for fault in faults] == [
        ("spill", "8 bytes of registers per thread spill to local memory"),
        (
            "pipeline",
            "1 tiles in flight, wanted stages - 1 = 2; carry the next tile's addresses through the loop",
        ),
        ("flight", "1 tiles in flight, wanted 2 where memory is the bound; raise num_stages"),
        (
            "flight",
            "16384 bytes in flight on a multiprocessor with 3 CTAs (shared), wanted 32768; "
            "raise num_stages or block_n",
        ),
    ]
