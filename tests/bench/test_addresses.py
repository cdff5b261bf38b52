from __future__ import annotations

import pytest

from astrai_bench.addresses import find_narrow_products

_BODY = """
module {{
  tt.func public @walk(%x_ptr: !tt.ptr<f32>, %n: i32, %stride: i32, %wide: i64, %c: i1) {{
    %c64 = arith.constant 64 : i32 loc(#loc1)
    %c100 = arith.constant 100 : i32 loc(#loc1)
    %c0 = arith.constant 0 : i32 loc(#loc1)
    %c1 = arith.constant 1 : i32 loc(#loc1)
    %pid_x = tt.get_program_id x : i32 loc(#loc1)
    %pid_y = tt.get_program_id y : i32 loc(#loc1)
    %offs = tt.make_range {{end = 128 : i32, start = 0 : i32}} : tensor<128xi32> loc(#loc1)
{lines}
    %ptr = tt.addptr %x_ptr, %offset : !tt.ptr<f32>, {kind} loc(#loc2)
    tt.return loc(#loc)
  }} loc(#loc)
}} loc(#loc)
#loc1 = loc(unknown)
#loc2 = loc("/src/kernels/walk.py":7:11)
#loc3 = loc("row"(#loc2))
"""


def _find(lines: str, kind: str = "i32") -> list[str]:
    return find_narrow_products(_BODY.format(lines=lines, kind=kind))


@pytest.mark.parametrize(
    "lines",
    [
        "%offset = arith.muli %pid_x, %stride : i32 loc(#loc3)",
        "%offset = arith.muli %pid_x, %c64 : i32 loc(#loc3)",
        "%offset = arith.muli %n, %stride : i32 loc(#loc3)",
        "%offset = arith.shli %n, %c1 : i32 loc(#loc3)",
        "%row = arith.muli %n, %c64 : i32 loc(#loc3)\n%offset = arith.addi %row, %c1 : i32 loc(#loc1)",
        "%loaded = tt.load %x_ptr : !tt.ptr<i32> loc(#loc1)\n"
        "%offset = arith.muli %loaded, %c64 : i32 loc(#loc3)",
        "%row = arith.muli %n, %c64 : i32 loc(#loc3)\n"
        "%offset = arith.select %c, %row, %c0 : i1, i32 loc(#loc1)",
        "%end = arith.muli %n, %c64 : i32 loc(#loc3)\n"
        "%offset = scf.if %c -> (i32) {\nscf.yield %end : i32 loc(#loc1)\n} else {\n"
        "scf.yield %c0 : i32 loc(#loc1)\n} loc(#loc1)",
    ],
)
def test_a_product_that_may_overflow_is_named_with_its_line(lines: str) -> None:
    (fault,) = _find(lines)
    assert fault.startswith("walk.py:7: 32-bit product in an address (")


@pytest.mark.parametrize(
    "lines",
    [
        "%offset = arith.muli %pid_y, %c64 : i32 loc(#loc3)",
        "%offset = arith.addi %n, %stride : i32 loc(#loc3)",
        "%least = arith.minsi %n, %c100 : i32 loc(#loc1)\n%most = arith.maxsi %least, %c0 : i32 loc(#loc1)\n"
        "%offset = arith.muli %most, %c64 : i32 loc(#loc3)",
        "%rest = arith.remsi %n, %c100 : i32 loc(#loc1)\n%offset = arith.muli %rest, %c64 : i32 loc(#loc3)",
        "%part = arith.divsi %n, %c64 : i32 loc(#loc1)\n%offset = arith.muli %part, %c64 : i32 loc(#loc3)",
        "%product = arith.muli %n, %stride : i32 loc(#loc3)\n"
        "%row = arith.cmpi slt, %product, %c64 : i32 loc(#loc1)\n"
        "%offset = arith.extui %row : i1 to i32 loc(#loc1)",
        "%tiles = arith.divsi %n, %c64 : i32 loc(#loc1)\n"
        "%offset = scf.for %i = %c0 to %tiles step %c1 iter_args(%sum = %c0) -> (i32)  : i32 {\n"
        "%start = arith.muli %i, %c64 : i32 loc(#loc3)\nscf.yield %start : i32 loc(#loc1)\n} loc(#loc1)",
    ],
)
def test_a_product_that_fits_is_not_a_fault(lines: str) -> None:
    assert _find(lines) == []


def test_widening_before_the_multiply_is_right_and_after_it_is_too_late() -> None:
    before = (
        "%row = arith.extsi %n : i32 to i64 loc(#loc1)\n%offset = arith.muli %row, %wide : i64 loc(#loc3)"
    )
    after = (
        "%row = arith.muli %n, %stride : i32 loc(#loc3)\n%offset = arith.extsi %row : i32 to i64 loc(#loc1)"
    )
    assert _find(before, "i64") == []
    assert _find(after, "i64") == [
        "walk.py:7: 32-bit product in an address (an argument x an argument); "
        "widen a factor to int64 before the multiply"
    ]


def test_a_vector_of_offsets_is_judged_by_its_largest() -> None:
    small = (
        "%wide64 = tt.splat %c64 : i32 -> tensor<128xi32> loc(#loc1)\n"
        "%offset = arith.muli %offs, %wide64 : tensor<128xi32> loc(#loc3)"
    )
    large = small.replace("%c64 :", "%stride :")
    assert _find(small, "tensor<128xi32>") == []
    assert len(_find(large, "tensor<128xi32>")) == 1


def test_a_value_carried_by_a_loop_keeps_the_product_it_was_made_from() -> None:
    lines = (
        "%offset = scf.for %i = %c0 to %n step %c1 iter_args(%sum = %c0) -> (i32)  : i32 {\n"
        "%next = arith.muli %i, %stride : i32 loc(#loc3)\n"
        "%inner = tt.addptr %x_ptr, %sum : !tt.ptr<f32>, i32 loc(#loc1)\n"
        "scf.yield %next : i32 loc(#loc1)\n} loc(#loc1)"
    )
    assert len(_find(lines)) == 1
    while_lines = (
        "%offset = scf.while (%sum = %c0) : (i32) -> i32 {\nscf.condition(%c) %sum : i32 loc(#loc1)\n} do {\n"
        "^bb0(%now: i32 loc(unknown)):\n%next = arith.muli %now, %stride : i32 loc(#loc3)\n"
        "scf.yield %next : i32 loc(#loc1)\n} loc(#loc1)"
    )
    assert len(_find(while_lines)) == 1
