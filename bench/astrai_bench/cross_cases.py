"""Calls that every implementation must agree on: a grid of hard ones, and any number of random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import attrs
import numpy as np

_T = TypeVar("_T")

CrossOp = Literal[
    "attn_decode",
    "attn_prefill",
    "attn_paged_decode",
    "attn_paged_prefill",
    "rotary_emb",
    "rotary_qk_",
    "rotary_append_",
    "merge_states",
]
CROSS_OPS: tuple[CrossOp, ...] = (
    "attn_decode",
    "attn_prefill",
    "attn_paged_decode",
    "attn_paged_prefill",
    "rotary_emb",
    "rotary_qk_",
    "rotary_append_",
    "merge_states",
)
Layout = Literal["contiguous", "padded", "transposed", "odd"]
Pairing = Literal["adjacent", "half"]


@attrs.frozen(kw_only=True)
class CrossCase:
    """One call, without its tensors.

    Dense operations have one length for all requests; rotary and merge_states have ``q_lens`` rows and no
    ``kv_lens`` that mean anything.
    """

    op: CrossOp
    dtype: str = "float32"
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    q_lens: tuple[int, ...] = (1,)
    """Rows of each request; 1 in decode."""
    kv_lens: tuple[int, ...] = (1,)
    """Keys of each request, its rows included where there are as many."""
    mask_dim: int = 0
    """0: no mask; 2: one per key; 3: one per row and key. Over a pool the mask is ragged."""
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    has_sinks: bool = False
    has_lse: bool = True
    appends: bool = True
    """Paged decode: the last key comes with the call and is stored by it."""
    holes: float = 0.0
    """Share of the positions of a table whose slot is negative."""
    layout: Layout = "contiguous"
    """Of heads in memory. "padded": gaps that keep 16-byte alignment; "transposed": heads before rows; "odd":
    gaps that do not keep it."""
    rotary_dim: int = 0
    pairing: Pairing = "adjacent"
    seed: int = 0

    @property
    def is_attention(self) -> bool:
        """Whether it has keys."""
        return self.op.startswith("attn_")

    @property
    def is_paged(self) -> bool:
        """Whether K and V lie in a pool."""
        return self.op.startswith("attn_paged_")

    @property
    def is_decode(self) -> bool:
        """Whether every request has one row, which sees no further key to the right."""
        return self.op in ("attn_decode", "attn_paged_decode")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


def describe_cross_case(case: CrossCase) -> str:
    """What sets the case apart, on one line."""
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[case.dtype]
    dims = f"{case.head_dim}" if case.value_dim == case.head_dim else f"{case.head_dim}/{case.value_dim}"
    parts = [short, f"{case.q_heads}/{case.kv_heads}x{dims}"]
    if case.is_attention:
        parts.append(_describe_lens(case))
        parts += [
            text
            for is_on, text in (
                (case.is_causal, "causal"),
                (case.window != (-1, -1), f"window {case.window[0]},{case.window[1]}"),
                (case.mask_dim > 0, f"mask{case.mask_dim}d"),
                (case.softcap > 0, f"cap {case.softcap:g}"),
                (case.softmax_scale is not None, f"scale {case.softmax_scale}"),
                (case.has_sinks, "sinks"),
                (not case.has_lse, "no lse"),
                (case.op == "attn_paged_decode" and not case.appends, "no append"),
            )
            if is_on
        ]
    else:
        parts.append(f"{sum(case.q_lens)} rows")
        if case.op != "merge_states":
            parts.append(f"{case.pairing} {case.rotary_dim}")
    if case.holes > 0:
        parts.append(f"holes {case.holes:g}")
    if case.layout != "contiguous":
        parts.append(case.layout)
    return " ".join(parts)


def _describe_lens(case: CrossCase) -> str:
    pairs = zip(case.q_lens, case.kv_lens, strict=True)
    if case.is_decode:
        return "L" + ",".join(str(kv_len) for _, kv_len in pairs)
    return "L" + ",".join(f"{q_len}:{kv_len}" for q_len, kv_len in pairs)


def list_cross_cases() -> list[CrossCase]:
    """The grid: every operation in every dtype, and each hard input at least once in one it can break."""
    return [
        *_decode_cases(),
        *_prefill_cases(),
        *_paged_decode_cases(),
        *_paged_prefill_cases(),
        *_row_cases(),
    ]


_DTYPES = ("float32", "float16", "bfloat16")
_WITH_VALUES = (*CROSS_OPS[:4], "rotary_append_")


def _decode_cases() -> Iterator[CrossCase]:
    for dtype in _DTYPES:
        yield CrossCase(op="attn_decode", dtype=dtype, kv_lens=(17, 17), q_lens=(1, 1))
    base = CrossCase(op="attn_decode", dtype="bfloat16", kv_lens=(21,), seed=1)
    yield attrs.evolve(base, head_dim=80, value_dim=80, q_heads=5, kv_heads=1, layout="padded")
    yield attrs.evolve(base, head_dim=64, value_dim=40, mask_dim=2, has_sinks=True)
    yield attrs.evolve(base, dtype="float16", kv_lens=(40,), window=(12, -1), softcap=3.0, softmax_scale=0.3)
    # Three splits, and a window that leaves the first with nothing.
    yield attrs.evolve(base, dtype="float16", q_heads=2, kv_heads=1, kv_lens=(600,))
    yield attrs.evolve(base, q_heads=2, kv_heads=1, kv_lens=(523,), window=(200, 0), has_sinks=True)
    yield attrs.evolve(base, dtype="float32", q_heads=12, kv_heads=1, layout="transposed")
    yield attrs.evolve(base, layout="odd", head_dim=72, value_dim=72, has_lse=False)
    yield attrs.evolve(base, dtype="float32", kv_lens=(0, 0), q_lens=(1, 1))
    yield attrs.evolve(base, head_dim=256, value_dim=256, kv_heads=1, q_heads=2)


def _prefill_cases() -> Iterator[CrossCase]:
    for dtype in _DTYPES:
        yield CrossCase(op="attn_prefill", dtype=dtype, q_lens=(19,), kv_lens=(33,), is_causal=True)
    base = CrossCase(op="attn_prefill", dtype="bfloat16", q_lens=(9, 9), kv_lens=(21, 21), seed=2)
    yield attrs.evolve(base, q_lens=(5, 5), kv_lens=(2, 2), is_causal=True, dtype="float32")
    yield attrs.evolve(base, head_dim=80, value_dim=80, layout="padded", is_causal=True)
    yield attrs.evolve(base, head_dim=64, value_dim=96, mask_dim=3, is_causal=True)
    yield attrs.evolve(base, dtype="float16", mask_dim=2, softcap=2.5, has_sinks=True)
    yield attrs.evolve(base, dtype="float16", q_lens=(70,), kv_lens=(140,), window=(33, 7))
    yield attrs.evolve(base, q_heads=7, kv_heads=1, is_causal=True, window=(5, -1), softmax_scale=0.5)
    yield attrs.evolve(base, dtype="float32", layout="transposed", mask_dim=3)
    yield attrs.evolve(base, layout="odd", head_dim=40, value_dim=40, has_lse=False)
    yield attrs.evolve(base, dtype="float16", head_dim=192, value_dim=128, q_heads=2, kv_heads=1)
    yield attrs.evolve(base, dtype="float32", q_lens=(0,), kv_lens=(5,))
    yield attrs.evolve(base, q_lens=(4,), kv_lens=(0,), has_sinks=True)


def _paged_decode_cases() -> Iterator[CrossCase]:
    for dtype in _DTYPES:
        yield CrossCase(op="attn_paged_decode", dtype=dtype, q_lens=(1,) * 3, kv_lens=(5, 0, 17))
    base = CrossCase(op="attn_paged_decode", dtype="bfloat16", q_lens=(1, 1), kv_lens=(23, 9), seed=3)
    yield attrs.evolve(base, head_dim=80, value_dim=80, layout="padded", q_heads=6)
    yield attrs.evolve(base, head_dim=32, value_dim=64, holes=0.4, has_sinks=True)
    yield attrs.evolve(base, dtype="float16", mask_dim=2, window=(11, -1), softcap=4.0)
    yield attrs.evolve(base, dtype="float32", appends=False, holes=0.3, layout="odd")
    yield attrs.evolve(base, dtype="float16", q_heads=2, kv_heads=1, kv_lens=(530, 3), holes=0.1)
    yield attrs.evolve(base, q_heads=16, kv_heads=1, layout="transposed", has_lse=False)
    yield attrs.evolve(base, dtype="float32", holes=1.0)
    yield attrs.evolve(base, q_lens=(), kv_lens=())


def _paged_prefill_cases() -> Iterator[CrossCase]:
    base = CrossCase(op="attn_paged_prefill", q_lens=(3, 0, 7), kv_lens=(5, 4, 7), is_causal=True, seed=4)
    for dtype in _DTYPES:
        yield attrs.evolve(base, dtype=dtype)
    base = attrs.evolve(base, dtype="bfloat16", q_lens=(6, 11), kv_lens=(30, 11))
    yield attrs.evolve(base, head_dim=80, value_dim=80, layout="padded")
    yield attrs.evolve(base, head_dim=96, value_dim=64, holes=0.3, has_sinks=True)
    yield attrs.evolve(base, dtype="float16", mask_dim=3, softcap=3.0)
    yield attrs.evolve(
        base, dtype="float16", q_lens=(66, 2), kv_lens=(90, 50), window=(20, 3), is_causal=False
    )
    yield attrs.evolve(base, dtype="float32", q_lens=(5, 1, 4), kv_lens=(2, 0, 9), layout="odd")
    yield attrs.evolve(base, q_heads=12, kv_heads=2, layout="transposed", mask_dim=3, has_lse=False)
    yield attrs.evolve(base, dtype="float32", is_causal=False, softmax_scale=0.2, holes=1.0)
    yield attrs.evolve(base, q_lens=(), kv_lens=())


def _row_cases() -> Iterator[CrossCase]:
    for dtype in _DTYPES:
        rows = CrossCase(
            op="rotary_emb", dtype=dtype, q_lens=(5, 4), head_dim=64, value_dim=64, rotary_dim=64
        )
        yield attrs.evolve(rows, layout="padded")
        yield attrs.evolve(rows, op="rotary_qk_", pairing="half", rotary_dim=32)
        yield attrs.evolve(rows, op="rotary_append_", value_dim=40, holes=0.3, layout="transposed")
        yield attrs.evolve(rows, op="merge_states", head_dim=80, value_dim=80)
    rows = CrossCase(op="rotary_emb", dtype="bfloat16", q_lens=(3,), head_dim=80, value_dim=80, rotary_dim=48)
    yield attrs.evolve(rows, pairing="half", layout="odd")
    yield attrs.evolve(rows, op="rotary_qk_", layout="odd")
    yield attrs.evolve(rows, op="rotary_append_", pairing="half", layout="padded", q_heads=5, kv_heads=1)
    yield attrs.evolve(rows, op="merge_states", layout="odd", dtype="float16")
    yield attrs.evolve(rows, op="rotary_append_", q_lens=())


def draw_cross_cases(count: int, seed: int) -> list[CrossCase]:
    """``count`` random calls; a seed gives the same ones, and the first of them for a smaller count."""
    return [_draw_case(np.random.default_rng((seed, index)), index) for index in range(count)]


def _draw_case(generator: np.random.Generator, index: int) -> CrossCase:
    def pick(*values: _T) -> _T:
        return values[int(generator.integers(len(values)))]

    # Each operation gets its turn, so that a few cases already touch all of them.
    op = CROSS_OPS[index % len(CROSS_OPS)]
    head_dim = pick(16, 32, 40, 64, 72, 80, 128)
    kv_heads = pick(1, 2)
    fields: dict[str, Any] = {
        "op": op,
        "dtype": pick(*_DTYPES),
        "kv_heads": kv_heads,
        "q_heads": kv_heads * pick(1, 2, 3, 5, 8),
        "head_dim": head_dim,
        "value_dim": pick(head_dim, head_dim, 24, 64) if op in _WITH_VALUES else head_dim,
        "layout": pick("contiguous", "padded", "transposed", "odd"),
        "seed": int(generator.integers(1 << 31)),
    }
    if not op.startswith("attn_"):
        fields["q_lens"] = (int(generator.integers(1, 12)),)
        if op == "rotary_append_":
            fields["holes"] = pick(0.0, 0.4)
        if op != "merge_states":
            fields |= {
                "rotary_dim": 2 * int(generator.integers(1, head_dim // 2 + 1)),
                "pairing": pick("adjacent", "half"),
            }
        return CrossCase(**fields)
    q_lens, kv_lens = _draw_lens(generator, op)
    fields |= {
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "mask_dim": pick(0, 0, 2, 3),
        "is_causal": op.endswith("prefill") and pick(True, False),
        "window": pick(
            (-1, -1), (-1, -1), (int(generator.integers(12)), -1), (7, int(generator.integers(9)))
        ),
        "softcap": pick(0.0, 0.0, 2.5),
        "softmax_scale": pick(None, None, 0.3),
        "has_sinks": pick(False, False, True),
        "has_lse": pick(True, True, False),
        "appends": pick(True, True, False),
        "holes": pick(0.0, 0.0, 0.3) if "paged" in op else 0.0,
    }
    return CrossCase(**fields)


def _draw_lens(generator: np.random.Generator, op: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and keys: requests without either, and some with fewer keys than rows."""
    batch = int(generator.integers(1, 4))
    count = batch if "paged" in op else 1
    q_lens = [1 if op.endswith("decode") else int(generator.integers(0, 12)) for _ in range(count)]
    kv_lens = [max(0, q_len + int(generator.integers(-2, 30))) for q_len in q_lens]
    repeat = batch // count
    return tuple(q_lens * repeat), tuple(kv_lens * repeat)
