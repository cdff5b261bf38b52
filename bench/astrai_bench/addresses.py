"""Which products of a kernel's addresses may overflow, read from its TTIR.

The rule. Walk back from the offset of every ``tt.addptr`` through integer arithmetic, casts, shape changes,
loops and branches, up to what was loaded or compared. A product (``arith.muli``, ``arith.shli``) found on the
way and narrower than 64 bits is a fault, unless its range fits into its type. Ranges are intervals:

- a constant and ``tl.arange`` are what they are; a program id is below 2**31 on axis x, else below 2**16;
- an argument, a loaded value and a value carried by a loop may be anything their type holds;
- a minimum, a quotient, a remainder and a mask by a constant bound what goes through them, and so do the
  bounds of a loop for its index;
- a sum never wraps. Positions and lengths are 32-bit and non-negative by contract, so only products can leave
  the range; and a narrowing cast says that the value fits.

So ``slot * stride``, ``pid_b * stride`` and ``tile * BLOCK`` with a loaded ``tile`` need 64 bits before the
multiply, while ``tl.arange(0, 128) * 64`` and the ``BLOCK * i`` of ``for i in range(cdiv(n, BLOCK))`` do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from astrai_bench.ir import Value, parse_module

Interval = tuple[int, int]

_MAX_DEPTH = 200
_STOPS = frozenset(
    {
        "tt.load",
        "arith.cmpi",
        "arith.cmpf",
        "tt.get_program_id",
        "tt.get_num_programs",
        "arith.constant",
        "arg",
    }
)
_PASSES = frozenset(
    {
        "arith.extsi", "arith.extui", "arith.index_cast", "tt.splat", "tt.broadcast", "tt.expand_dims",
        "tt.reshape", "tt.trans", "tt.unsplat", "tt.join", "tt.cat", "merge",
    }
)  # fmt: skip


def find_narrow_products(ttir: str) -> list[str]:
    """Products in addresses that are not 64-bit and may overflow; see the rule above.

    Args:
        ttir: the kernel after Triton's front end, with locations.

    Returns:
        One sentence per product, in the order of the source; empty for a kernel that keeps the rule.
    """
    bounds = _Bounds()
    faults = {}
    for value in parse_module(ttir):
        if value.op != "tt.addptr":
            continue
        for product in _walk_back(value.operands[1]):
            bits = product.int_bits
            if bits is None or bits >= 64 or product.op not in ("arith.muli", "arith.shli"):
                continue
            low, high = bounds.product(product)
            if not (-(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1)):
                factors = " x ".join(_describe(operand) for operand in product.operands)
                faults[product.line, factors] = (
                    f"{product.line}: {bits}-bit product in an address ({factors}); "
                    "widen a factor to int64 before the multiply"
                )
    return [faults[key] for key in sorted(faults, key=_place_order)]


def _place_order(key: tuple[str, str]) -> tuple[str, int, str]:
    file, _, line = key[0].partition(":")
    return file, int(line or 0), key[1]


def _walk_back(start: Value) -> Iterator[Value]:
    """``start`` and every integer it is computed from."""
    seen, pending = set(), [start]
    while pending:
        value = pending.pop()
        if id(value) in seen or value.int_bits is None:
            continue
        seen.add(id(value))
        yield value
        if value.op in _STOPS:
            continue
        operands = value.operands
        # The condition of a select does not become part of the address.
        pending.extend(operands[1:] if value.op == "arith.select" else operands)


def _describe(value: Value) -> str:
    """A factor in the words of the source."""
    while value.op in _PASSES and len(value.operands) == 1:
        value = value.operands[0]
    names = {
        "arg": "an argument",
        "tt.load": "a loaded value",
        "tt.get_program_id": "a program id",
        "tt.get_num_programs": "the number of programs",
        "tt.make_range": "tl.arange",
        "loop.index": "a loop index",
        "loop.carried": "a value carried by a loop",
        "arith.constant": "a constant",
        "arith.muli": "a product",
        "arith.addi": "a sum",
        "arith.subi": "a difference",
        "arith.divsi": "a quotient",
        "arith.remsi": "a remainder",
        "arith.select": "a choice",
        "arith.maxsi": "a maximum",
        "arith.minsi": "a minimum",
        "merge": "a value from a loop or branch",
    }
    return names.get(value.op, value.op)


class _Bounds:
    """Intervals of integer values, each computed once."""

    def __init__(self) -> None:
        self._known: dict[int, Interval] = {}

    def of(self, value: Value, depth: int = 0) -> Interval:
        if id(value) in self._known:
            return self._known[id(value)]
        whole = _whole_range(value.int_bits or 64)
        # A cycle through a loop meets the whole range here, which is what a carried value may be.
        self._known[id(value)] = whole
        if depth < _MAX_DEPTH:
            low, high = self._compute(value, whole, depth + 1)
            self._known[id(value)] = max(low, whole[0]), min(high, whole[1])
        return self._known[id(value)]

    def product(self, value: Value, depth: int = 0) -> Interval:
        """Of the exact product, whatever its type."""
        (low_a, high_a), (low_b, high_b) = (self.of(operand, depth) for operand in value.operands[:2])
        if value.op == "arith.shli":
            low_b, high_b = (2 ** min(max(bound, 0), 64) for bound in (low_b, high_b))
        corners = [a * b for a in (low_a, high_a) for b in (low_b, high_b)]
        return min(corners), max(corners)

    def _compute(self, value: Value, whole: Interval, depth: int) -> Interval:
        op = value.op.removeprefix("arith.")
        if op == "constant":
            return _read_constant(value.text) or whole
        if op == "tt.make_range":
            start, end = _read_field(value.text, "start"), _read_field(value.text, "end")
            return start, end - 1
        if op in ("tt.get_program_id", "tt.get_num_programs"):
            return 0, 2**31 - 1 if value.text.strip().startswith("x") else 65535
        if value.op in _PASSES and value.operands:
            return _join(self.of(operand, depth) for operand in value.operands)
        if op in ("muli", "shli"):
            return self.product(value, depth)
        if op == "select":
            return _join(self.of(operand, depth) for operand in value.operands[1:])
        if op == "loop.index" and len(value.operands) == 3:
            first, last = (self.of(operand, depth) for operand in value.operands[:2])
            return first[0], max(first[0], last[1] - 1)
        if len(value.operands) != 2:
            return whole
        left, right = (self.of(operand, depth) for operand in value.operands)
        return _combine(op, left, right) or whole


def _combine(op: str, left: Interval, right: Interval) -> Interval | None:
    if op == "addi":
        return left[0] + right[0], left[1] + right[1]
    if op == "subi":
        return left[0] - right[1], left[1] - right[0]
    if op in ("minsi", "minui"):
        return min(left[0], right[0]), min(left[1], right[1])
    if op in ("maxsi", "maxui"):
        return max(left[0], right[0]), max(left[1], right[1])
    if op == "andi" and right[0] == right[1] >= 0:
        return 0, right[1]
    if op in ("divsi", "divui"):
        if right[0] < 1:
            most = max(abs(left[0]), abs(left[1]))
            return -most, most
        return min(0, left[0] // right[0]), max(0, left[1] // right[0])
    if op in ("remsi", "remui"):
        most = max(abs(right[0]), abs(right[1])) - 1
        return (0 if left[0] >= 0 else -most), most
    if op in ("shrsi", "shrui") and right[0] >= 0 and left[0] >= 0:
        return 0, left[1] >> right[0]
    return None


def _join(intervals: Iterable[Interval]) -> Interval:
    lows, highs = zip(*intervals, strict=True)
    return min(lows), max(highs)


def _whole_range(bits: int) -> Interval:
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _read_constant(text: str) -> Interval | None:
    body = text.rpartition(" : ")[0].strip().removeprefix("dense<").rstrip(">")
    if text.strip() in ("true", "false"):
        return (0, 1)
    return (int(body), int(body)) if body.lstrip("-").isdigit() else None


def _read_field(text: str, name: str) -> int:
    return int(text.partition(f"{name} = ")[2].partition(" ")[0])
