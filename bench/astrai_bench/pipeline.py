"""What one turn of a kernel's main loop moves and computes, and how many turns ahead it loads."""

from __future__ import annotations

import re
from math import prod

import attrs

from astrai_bench.ir import Value, parse_module

_COPIES = ("ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local")
_OPERAND = re.compile(r"tensor<(\d+)x(\d+)x(\w+)")
_TILE = re.compile(r"(?:tensor|memdesc)?<((?:\d+x)+)(!tt\.ptr<)?(\w+)")
_BITS = {"f8E4M3FN": 8, "f8E5M2": 8, "f8E4M3FNUZ": 8, "f8E5M2FNUZ": 8, "bf16": 16, "index": 64}


@attrs.frozen
class LoopWork:
    """One turn of the loop that does most; of the whole kernel, when it has no loop."""

    load_bytes: int
    """Loaded from global memory, masked lanes included."""
    flops: int
    """Of the matrix products, padding included."""


@attrs.frozen
class Pipeline:
    """Loads that are under way before a turn of the loop begins."""

    tiles: int
    """Turns that every 2-d tile is loaded ahead into shared memory; 0 without asynchronous loads."""
    bytes: int
    """All that is loaded ahead, per CTA."""
    ring_bytes: int
    """Shared memory of the buffers that these loads go round in; never less than ``bytes``."""


@attrs.frozen
class _Ring:
    depth: int
    tile_bytes: int
    is_tile: bool
    ahead: int
    loop: tuple[int, ...]


def measure_loop(ttir: str) -> LoopWork:
    """Bytes and FLOPs of one turn of the busiest loop.

    Args:
        ttir: the kernel after Triton's front end.
    """
    work: dict[tuple[int, ...], list[int]] = {}
    for value in parse_module(ttir):
        sums = work.setdefault(value.loops, [0, 0])
        if value.op == "tt.load":
            _, num_bytes = _measure_tile(value.text.rpartition(" : ")[2])
            sums[0] += num_bytes
        elif value.op == "tt.dot":
            left, right = re.findall(r"tensor<(\d+)x(\d+)x", value.text.rpartition(" : ")[2])[:2]
            sums[1] += 2 * int(left[0]) * int(left[1]) * int(right[1])
    load_bytes, flops = max(work.values(), key=lambda sums: (sums[1], sums[0]), default=(0, 0))
    return LoopWork(load_bytes, flops)


def measure_pipeline(ttgir: str) -> Pipeline:
    """Loads in flight, from the copies that come before the loop and the buffers they fill.

    A copy of turn i + n runs while turn i is computed; so n copies per buffer stand before the loop, and that
    buffer has room for at least n tiles.

    Args:
        ttgir: the kernel after Triton's pipeliner.
    """
    rings = [ring for ring in _find_rings(parse_module(ttgir)) if ring.loop]
    by_loop: dict[tuple[int, ...], list[_Ring]] = {}
    for ring in rings:
        by_loop.setdefault(ring.loop, []).append(ring)
    best = max(by_loop.values(), key=lambda group: sum(_ahead_bytes(ring) for ring in group), default=[])
    tiles = min((min(ring.ahead, ring.depth) for ring in best if ring.is_tile), default=0)
    return Pipeline(
        tiles,
        sum(_ahead_bytes(ring) for ring in best),
        sum(ring.depth * ring.tile_bytes for ring in best),
    )


def find_scalar_dots(ttgir: str) -> list[str]:
    """Products of tiles that no matrix instruction computes.

    Args:
        ttgir: the kernel after Triton chose layouts.

    Returns:
        One sentence per product, in the order of the source.
    """
    faults = {}
    for value in parse_module(ttgir):
        types = value.text.rpartition(" : ")[2]
        if value.op != "tt.dot" or "parent = #blocked" not in types:
            continue
        operands = [f"{rows}x{columns} {element}" for rows, columns, element in _OPERAND.findall(types)[:2]]
        shape = " by ".join(operands)
        faults[value.line, shape] = f"{value.line}: dot of {shape} without a matrix instruction"
    return list(faults.values())


def _ahead_bytes(ring: _Ring) -> int:
    return min(ring.ahead, ring.depth) * ring.tile_bytes


def _find_rings(values: list[Value]) -> list[_Ring]:
    copies: dict[int, list[Value]] = {}
    allocs: dict[int, Value] = {}
    for value in values:
        if value.op not in _COPIES:
            continue
        for alloc in _find_allocs(value):
            allocs[id(alloc)] = alloc
            copies.setdefault(id(alloc), []).append(value)
    return [_describe_ring(allocs[key], group) for key, group in copies.items()]


def _find_allocs(copy: Value) -> list[Value]:
    """The buffers a copy may write, through whatever picks the slot."""
    found, seen, pending = [], set(), list(copy.operands)
    while pending:
        value = pending.pop()
        if id(value) in seen or "memdesc" not in value.type:
            continue
        seen.add(id(value))
        if value.op == "ttg.local_alloc":
            found.append(value)
        pending.extend(value.operands)
    return found


def _describe_ring(alloc: Value, copies: list[Value]) -> _Ring:
    shape, num_bytes = _measure_tile(alloc.type)
    loop = max((copy.loops for copy in copies), key=len)
    ahead = sum(len(copy.loops) < len(loop) for copy in copies)
    return _Ring(shape[0], num_bytes // max(1, shape[0]), len(shape) > 2, ahead, loop)


def _measure_tile(kind: str) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of a tensor of pointers, a tensor or a buffer; a scalar has no shape."""
    match = _TILE.search(kind)
    if match is None:
        return (), _element_bits(kind.removeprefix("!tt.ptr<").rstrip(">")) // 8
    shape = tuple(int(size) for size in match[1].split("x") if size)
    return shape, prod(shape) * _element_bits(match[3]) // 8


def _element_bits(element: str) -> int:
    if element in _BITS:
        return _BITS[element]
    match = re.search(r"(\d+)$", element)
    return int(match[1]) if match else 0
