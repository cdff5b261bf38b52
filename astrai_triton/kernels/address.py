"""Where things lie: keys to slots, slots to rows, and how narrow results are stored."""

import triton
import triton.language as tl

# Fixed when triton is imported: it decides then whether functions are compiled or interpreted.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def find_slots(
    table_row,  # [context] i32, row of the request
    positions,  # [n] i32
    keep,  # [n] i1
    position_stride,
    context,
    num_slots,
):
    """Slots of positions, int32; -1 for what is not to be read.

    Masked: where ``keep`` is false, a position outside the table, a negative slot, a slot beyond the pool.
    """
    keep = keep & (positions >= 0) & (positions < context)
    offs = positions.to(tl.int64) * position_stride
    slots = tl.load(table_row + offs, mask=keep, other=-1)  # [n]
    return tl.where((slots >= 0) & (slots < num_slots), slots, -1)


@triton.jit
def find_table_row(
    req_to_token_ptr,  # [num_reqs, context] i32
    row,  # i32, read from req_pool_indices
    row_stride,
    num_reqs,
):
    """The table row of a request and whether it exists; a row outside the table points at row 0."""
    exists = (row >= 0) & (row < num_reqs)
    return req_to_token_ptr + tl.where(exists, row, 0).to(tl.int64) * row_stride, exists


@triton.jit
def point_rows(
    base,  # pointer to a row 0
    rows,  # [n] slots or positions
    row_stride,
    offs_d,  # [d]
    ALIGN: tl.constexpr,
):
    """Pointers [n, d] to rows of a matrix with a unit last stride.

    ALIGN is what every row start is a multiple of, in bytes: 16 where the caller checked it, else 1.
    """
    starts = tl.multiple_of(base + rows.to(tl.int64)[:, None] * row_stride, [1, ALIGN])
    return starts + offs_d[None, :]


@triton.jit
def round_float8(
    x,  # f32, any shape, within the finite range of DTYPE
    DTYPE: tl.constexpr,
):
    """x rounded to a value of an fp8 type, still f32; for the interpreter, which rounds to it wrongly."""
    mantissa: tl.constexpr = 2 if DTYPE == tl.float8e5 else 3
    least: tl.constexpr = -14 if DTYPE == tl.float8e5 else -6
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    step = tl.exp2((tl.maximum(exponent, least) - mantissa).to(tl.float32))
    # Adding 1.5 * 2^23 leaves no bits for fractions: float32 itself rounds, to nearest even.
    return (x / step + 12582912.0 - 12582912.0) * step


@triton.jit
def narrow(
    x,  # f32, any shape
    DTYPE: tl.constexpr,
):
    """x in DTYPE, rounded to nearest even; for an fp8 type x is within its finite range.

    The interpreter truncates float32 to bfloat16 and loses carries on the way to fp8, so there x is rounded
    before.
    """
    if _IS_INTERPRETED:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            # -65536 clears the lower half; what is left is a bfloat16.
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            # A NaN stays what it is: the carry could turn it into a number.
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        elif DTYPE.primitive_bitwidth == 8:
            x = round_float8(x, DTYPE)
    return x.to(DTYPE)
