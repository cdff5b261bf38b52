from __future__ import annotations

from astrai_bench.disassembly import count_loads, list_mma_kinds
from astrai_bench.pipeline import Pipeline, find_scalar_dots, measure_pipeline

_RINGS = """
    %k_ring = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable> loc(#loc1)
    %slot_ring = ttg.local_alloc : () -> !ttg.memdesc<3x64xi32, #shared1, #smem, mutable> loc(#loc1)
"""
_COPY_K = """
    %k_slot{n} = ttg.memdesc_index %k_ring[%c0] : !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable> -> !ttg.memdesc<64x128xbf16, #shared, #smem, mutable> loc(#loc1)
    %k_token{n} = ttg.async_copy_global_to_local %k, %k_slot{n} mask %keep : tensor<64x128x!tt.ptr<bf16>, #blocked> -> <64x128xbf16, #shared, #smem, mutable> loc(#loc1)
"""  # noqa: E501
_COPY_SLOT = """
    %s_slot{n} = ttg.memdesc_index %slot_ring[%c0] : !ttg.memdesc<3x64xi32, #shared1, #smem, mutable> -> !ttg.memdesc<64xi32, #shared1, #smem, mutable> loc(#loc1)
    %s_token{n} = ttg.async_copy_global_to_local %s, %s_slot{n} : tensor<64x!tt.ptr<i32>, #blocked> -> <64xi32, #shared1, #smem, mutable> loc(#loc1)
"""  # noqa: E501


def _pipelined(num_ahead: int) -> str:
    lines = ["module {", "tt.func public @walk(%k: !tt.ptr<bf16>, %n: i32) {", _RINGS]
    lines += [_COPY_K.format(n=n) + _COPY_SLOT.format(n=n) for n in range(num_ahead)]
    lines += ["scf.for %i = %c0 to %n step %c1  : i32 {", _COPY_K.format(n=9), _COPY_SLOT.format(n=9)]
    return "\n".join([*lines, "} loc(#loc1)", "tt.return loc(#loc1)", "} loc(#loc1)", "} loc(#loc1)"])


def test_tiles_in_flight_are_the_copies_before_the_loop() -> None:
    tile, slots = 64 * 128 * 2, 64 * 4
    for num_ahead in (0, 1, 2):
        assert measure_pipeline(_pipelined(num_ahead)) == Pipeline(
            num_ahead, num_ahead * (tile + slots), 3 * (tile + slots)
        )


def test_a_kernel_without_asynchronous_copies_has_nothing_in_flight() -> None:
    assert measure_pipeline("module {\n} loc(#loc)") == Pipeline(0, 0, 0)


def test_a_dot_with_a_blocked_layout_is_scalar_and_one_with_an_mma_layout_is_not() -> None:
    dot = (
        "%s = tt.dot %a, %b, %c, inputPrecision = ieee : tensor<16x64xf16, #ttg.dot_op<{opIdx = 0, parent = "
        "#LAYOUT}>> * tensor<64x32xf16, #ttg.dot_op<{opIdx = 1, parent = #LAYOUT}>> -> tensor<16x32xf32>"
        ' loc(#loc1)\n#loc1 = loc("/src/walk.py":3:1)'
    )
    assert find_scalar_dots(dot.replace("LAYOUT", "mma")) == []
    assert find_scalar_dots(dot.replace("LAYOUT", "blocked1")) == [
        "walk.py:3: dot of 16x64 f16 by 64x32 f16 without a matrix instruction"
    ]


def test_loads_are_counted_by_width() -> None:
    ptx = """
    ld.global.v4.b32 { %r7, %r8, %r9, %r10 }, [ %rd74 + 0 ];
    ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
    @%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
    cp.async.cg.shared.global [ %r24 + 0 ], [ %rd7 + 0 ], 0x10, %r25;
    @%p1 cp.async.ca.shared.global [ %r134 + 0 ], [ %rd6 + 0 ], 0x4, %r23;
    cp.async.commit_group;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1], [%rd1, {%r2, %r3}], [%r4];
    st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
    """
    assert count_loads(ptx) == {"tma": 1, "128": 2, "64": 1, "32": 1, "16": 1}


def test_matrix_instructions_are_told_apart() -> None:
    assert list_mma_kinds("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {}") == ("wgmma",)
    assert list_mma_kinds("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {}") == ("mma.sync",)
    assert list_mma_kinds("tcgen05.mma.cta_group::1.kind::f16 [%r1];") == ("tcgen05",)
    assert list_mma_kinds("fma.rn.f32 %f1, %f2, %f3, %f4;") == ()
