"""Triton's textual IR (TTIR, TTGIR) as a graph of values: enough of MLIR's syntax to follow data flow."""

from __future__ import annotations

import re

import attrs

_NAME = r"%[\w.$-]+(?:#\d+)?"
_LINE = re.compile(
    r"^(?:(?P<results>%[\w.$-]+(?::\d+)?(?:, %[\w.$-]+(?::\d+)?)*) = )?"
    r"\"?(?P<op>[a-z_]\w*\.[\w.]+)\"?(?P<rest>.*)$"
)
_LOC_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_ITER_ARG = re.compile(rf"(%[\w.$-]+) = ({_NAME})")
_TYPED_NAME = re.compile(r"(%[\w.$-]+): ([^\s,{)]+)")
_FOR = re.compile(rf"^\s*(?:unsigned )?(%[\w.$-]+) = ({_NAME}) to ({_NAME}) step ({_NAME})")


@attrs.define(eq=False)
class Value:
    """One result of one operation, or an argument of a block.

    An operation without results has one value too, so that stores and copies are in the graph.
    """

    op: str
    """``arith.muli``; ``arg`` for a function's argument, ``loop.index``, ``loop.carried`` and ``merge`` for
    what loops and branches hand on: a carried or merged value has every value it may stand for as operand."""
    type: str
    operands: list[Value]
    text: str
    """The line after the operation's name, without its location."""
    line: str
    """``file.py:12``, or ``?``."""
    loops: tuple[int, ...]
    """Numbers of the loops around it, outermost first."""

    @property
    def int_bits(self) -> int | None:
        """Width of its integer elements; ``None`` when they are not integers. ``index`` counts as 64."""
        element = self.type.removeprefix("tensor<").split(",")[0].rstrip(">").rpartition("x")[2]
        if element == "index":
            return 64
        match = re.fullmatch(r"i(\d+)", element)
        return int(match[1]) if match else None


@attrs.define
class _Region:
    kind: str
    results: list[Value] = attrs.field(factory=list)
    carried: list[Value] = attrs.field(factory=list)


def parse_module(text: str) -> list[Value]:
    """Read the functions of a module.

    Args:
        text: what Triton's compiler keeps as ``asm["ttir"]`` or ``asm["ttgir"]``.

    Returns:
        Every value, in the order of the text.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        aliases = filter(None, map(_LOC_ALIAS.match, self._lines))
        self._places = {match[1]: match[2] for match in aliases}
        self._names: dict[str, Value] = {}
        self._regions: list[_Region] = []
        self._loops: list[int] = []
        self._values: list[Value] = []
        self._num_loops = 0

    def parse(self) -> list[Value]:
        for raw in self._lines:
            line, place = self._split_place(raw.strip())
            if line.startswith("}"):
                self._close(line)
            elif line.startswith("^"):
                self._open_block(line)
            elif (match := _LINE.match(line)) and not raw.startswith("#"):
                self._read(match["results"] or "", match["op"], match["rest"], place)
        return self._values

    def _split_place(self, line: str) -> tuple[str, str]:
        head, found, tail = line.rpartition(" loc(")
        if not found or head.startswith("#") or line.endswith(("{", ":")):
            return line, "?"
        return head, self._find_place(tail.removesuffix(")"))

    def _find_place(self, place: str) -> str:
        for _ in range(16):
            if match := re.match(r'"([^"]+)":(\d+)', place):
                return f"{match[1].rpartition('/')[2]}:{match[2]}"
            alias = re.search(r"#loc\d*", place)
            if alias is None or alias[0] not in self._places:
                return "?"
            place = self._places[alias[0]]
        return "?"

    def _add(self, op: str, kind: str, operands: list[Value], text: str = "", place: str = "?") -> Value:
        value = Value(op, kind, operands, text, place, tuple(self._loops))
        self._values.append(value)
        return value

    def _find(self, text: str) -> list[Value]:
        """The operands in a text; one that nothing defined keeps its place among them."""
        names = re.findall(_NAME, text)
        return [self._names.get(name) or Value("unknown", "", [], "", "?", ()) for name in names]

    def _read(self, results: str, op: str, rest: str, place: str) -> None:
        if op == "tt.func":
            for name, kind in _TYPED_NAME.findall(rest):
                self._names[name] = self._add("arg", kind, [])
            self._regions.append(_Region("func"))
        elif op in ("scf.for", "scf.while"):
            self._open_loop(results, op, rest, place)
        elif op == "scf.if":
            kinds = _split_types(rest.partition(" -> ")[2])
            merged = [self._add("merge", kind, [], place=place) for kind in kinds]
            self._bind(results, merged)
            self._regions.append(_Region("if", merged))
        elif op in ("scf.yield", "scf.condition"):
            self._hand_on(op, rest)
        elif rest.endswith("{"):
            # An operation with a region of its own, tt.reduce for one; its type follows the region.
            value = self._add(op, "", self._find(rest), rest, place)
            self._bind(results, [value])
            self._regions.append(_Region("other", [value]))
        else:
            self._read_plain(results, op, rest, place)

    def _read_plain(self, results: str, op: str, rest: str, place: str) -> None:
        body, _, types = rest.rpartition(" : ")
        kind = _result_type(op, types)
        values = [
            self._add(op, kind, self._find(body or rest), rest, place)
            for _ in range(max(1, _count_results(results)))
        ]
        self._bind(results, values)

    def _open_loop(self, results: str, op: str, rest: str, place: str) -> None:
        head, _, tail = rest.partition(" iter_args(") if op == "scf.for" else ("", "", rest)
        pairs = _ITER_ARG.findall(tail.partition(")")[0]) if tail else []
        kinds = _split_types(tail.rpartition(" -> ")[2].partition("  : ")[0])
        firsts = [self._find(init)[:1] for _, init in pairs]
        outs = [self._add("merge", kind, list(first), place=place) for kind, first in _pad(kinds, firsts)]
        self._num_loops += 1
        bounds = _FOR.match(head or rest)
        self._loops.append(self._num_loops)
        if bounds:
            match = re.search(r": (\w+) \{$", rest)
            index_type = match[1] if match else "index"
            operands = self._find(" ".join(bounds.groups()[1:]))
            self._names[bounds[1]] = self._add("loop.index", index_type, operands, place=place)
        carried = [
            self._add("loop.carried", kind, list(first), place=place) for kind, first in _pad(kinds, firsts)
        ]
        for (name, _), value in zip(pairs, carried, strict=False):
            self._names[name] = value
        self._bind(results, outs)
        self._regions.append(_Region(op.removeprefix("scf."), outs, carried))

    def _open_block(self, line: str) -> None:
        region = self._regions[-1]
        for idx, (name, kind) in enumerate(_TYPED_NAME.findall(line)):
            stands_for = region.results[idx].operands if region.kind == "do" else []
            self._names[name] = self._add("merge", kind, list(stands_for))

    def _hand_on(self, op: str, rest: str) -> None:
        region = self._regions[-1]
        values = self._find(rest.rpartition(" : ")[0])
        if op == "scf.condition":
            values = values[1:]
        targets = [region.carried] if region.kind == "do" else [region.results]
        if region.kind == "for":
            targets.append(region.carried)
        for target in targets:
            for into, value in zip(target, values, strict=False):
                into.operands.append(value)

    def _close(self, line: str) -> None:
        region = self._regions.pop() if self._regions else _Region("module")
        if line.startswith("} else"):
            self._regions.append(region)
        elif line.startswith("} do"):
            self._regions.append(_Region("do", region.results, region.carried))
        elif region.kind in ("for", "do"):
            self._loops.pop()
        elif region.kind == "other":
            kinds = _split_types(line.rpartition(" -> ")[2])
            region.results[0].type = kinds[0] if kinds else ""

    def _bind(self, results: str, values: list[Value]) -> None:
        names: list[str] = []
        for item in filter(None, results.split(", ")):
            name, _, count = item.partition(":")
            names.extend([name] if not count else [f"{name}#{idx}" for idx in range(int(count))])
        # A multi-result operation is one entry in the text; its type was read once.
        for idx, name in enumerate(names):
            self._names[name] = values[min(idx, len(values) - 1)]


def _count_results(results: str) -> int:
    return sum(int(item.partition(":")[2] or 1) for item in filter(None, results.split(", ")))


def _pad(kinds: list[str], firsts: list[list[Value]]) -> list[tuple[str, list[Value]]]:
    """One pair per carried value, also where the types could not be read."""
    return [(kinds[idx] if idx < len(kinds) else "", first) for idx, first in enumerate(firsts)]


def _split_types(text: str) -> list[str]:
    """``(i32, tensor<4xi32, #a>)`` -> ``["i32", "tensor<4xi32, #a>"]``."""
    text = text.strip().removesuffix("{").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<({[") - (char in ">)}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _result_type(op: str, types: str) -> str:
    for arrow in (" -> ", " to "):
        if arrow in types:
            return types.rpartition(arrow)[2].strip()
    parts = _split_types(types)
    if not parts:
        return ""
    if op == "arith.cmpi":
        return re.sub(r"i\d+(?=[>,]|$)", "i1", parts[0])
    if op == "tt.load":
        return re.sub(r"!tt\.ptr<([^>]*)>", r"\1", parts[0])
    return parts[-1] if op == "arith.select" else parts[0]
