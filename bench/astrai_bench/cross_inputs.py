"""Tensors of one cross-validation call, laid out as the case says, with poison in all that is unused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from astrai_bench.cross_cases import CrossCase
from astrai_bench.cross_reference import find_visible
from astrai_triton.schedule import build_indptr, build_q_tiles, decode_chunk, num_decode_splits

_SPARE = 3
"""Slots, table rows and table columns that belong to nobody."""


@attrs.frozen(eq=False, kw_only=True)
class RequestKeys:
    """One request in the order of its positions, wherever K and V lie."""

    k: torch.Tensor
    """``[L, Hkv, D]``; keys that no row sees are poison."""
    v: torch.Tensor
    """``[L, Hkv, Dv]``."""
    visible: torch.Tensor
    """bool ``[Lq, L]``: causality, window, mask and negative slots together."""


@attrs.frozen(eq=False, kw_only=True)
class CrossInputs:
    """One call that has not run yet. Made again from its case, it has the same bits."""

    arguments: dict[str, Any]
    """Of the operation, by the names of its parameters."""
    bases: dict[str, torch.Tensor]
    """All memory behind each tensor of ``arguments`` that holds heads: gaps and spare slots included."""
    written: tuple[torch.Tensor, ...]
    """Views of all that the call may write."""
    requests: tuple[RequestKeys, ...] = ()
    """Of attention."""
    slots: torch.Tensor | None = None
    """``[T]`` int64, where K and V of each row are stored; -1: nowhere."""


def make_cross_inputs(case: CrossCase, device: torch.device, poison: float) -> CrossInputs:
    """Tensors of ``case``; the same seed gives the same numbers on every device.

    Args:
        case: the call.
        device: of all tensors.
        poison: what stands in gaps between heads, in outputs, in scratch, in slots that belong to nobody and
            in keys that no row sees.
    """
    build = {
        "rotary_emb": _build_rotary,
        "rotary_qk_": _build_rotary,
        "rotary_append_": _build_append,
        "merge_states": _build_merge,
    }.get(case.op, _build_paged if case.is_paged else _build_dense)
    return build(case, _Builder(case, device, poison))


class _Builder:
    """Draws numbers and puts them into memory."""

    def __init__(self, case: CrossCase, device: torch.device, poison: float) -> None:
        self.case, self.device, self.poison = case, device, poison
        self.bases: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(case.seed)
        self._dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(self, *shape: int) -> torch.Tensor:
        """Standard normal, drawn in float32, so that every dtype gets the same numbers, rounded."""
        return torch.randn(shape, generator=self._generator).to(self._dtype).to(self.device)

    def draw_float32(self, *shape: int) -> torch.Tensor:
        """Standard normal float32."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def draw_keep(self, share: float, *shape: int) -> torch.Tensor:
        """bool, True with the probability ``share``; on the CPU."""
        return torch.rand(shape, generator=self._generator) < share

    def permute(self, count: int) -> torch.Tensor:
        """``[count]`` int64 in random order; on the CPU."""
        return torch.randperm(count, generator=self._generator)

    def place(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Values ``[..., H, D]`` in the layout of the case, poison around them."""
        view = self.reserve(name, values.shape, values.dtype)
        return view.copy_(values)

    def reserve(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Poison of a shape ``[..., H, D]`` in the layout of the case."""
        *lead, heads, dim = shape
        layout = self.case.layout

        def fill(*sizes: int) -> torch.Tensor:
            base = torch.full(sizes, self.poison, dtype=dtype or self._dtype, device=self.device)
            self.bases[name] = base
            return base

        if layout == "padded":
            # 8 elements are 16 bytes at least: rows stay as aligned as they are without the gap.
            return fill(*lead, heads + 1, dim + 8)[..., :heads, :dim]
        if layout == "odd":
            return fill(*lead, heads, dim + 3)[..., 1 : 1 + dim]
        if layout == "transposed":
            return fill(*lead[:-1], heads, lead[-1], dim).transpose(-3, -2)
        return fill(*shape)

    def ints(self, values: object) -> torch.Tensor:
        """int32 on the device."""
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)


def _build_options(case: CrossCase, builder: _Builder) -> dict[str, Any]:
    options: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "window_size": case.window,
        "softcap": case.softcap,
        "sinks": builder.draw_float32(case.q_heads) if case.has_sinks else None,
        "return_lse": case.has_lse,
    }
    if not case.is_decode:
        options["is_causal"] = case.is_causal
    return options


def _build_dense(case: CrossCase, builder: _Builder) -> CrossInputs:
    batch, q_len, kv_len = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    q = builder.place("q", builder.draw(batch, q_len, case.q_heads, case.head_dim))
    k = builder.place("k", builder.draw(batch, kv_len, case.kv_heads, case.head_dim))
    v = builder.place("v", builder.draw(batch, kv_len, case.kv_heads, case.value_dim))
    out = builder.reserve("out", (batch, q_len, case.q_heads, case.value_dim))
    mask = None
    if case.mask_dim:
        is_per_row = case.mask_dim == 3 and not case.is_decode
        shape = (batch, q_len, kv_len) if is_per_row else (batch, kv_len)
        mask = builder.draw_keep(0.7, *shape).to(builder.device)
    requests = []
    for b in range(batch):
        visible = find_visible(case, q_len, kv_len, builder.device)
        if mask is not None:
            visible = visible & mask[b]
        unseen = ~visible.any(dim=0)
        k[b, unseen], v[b, unseen] = builder.poison, builder.poison
        requests.append(RequestKeys(k=k[b], v=v[b], visible=visible))
    arguments = {"q": q, "k": k, "v": v, "mask": mask, "out": out, **_build_options(case, builder)}
    return CrossInputs(arguments=arguments, bases=builder.bases, written=(out,), requests=tuple(requests))


def _build_paged(case: CrossCase, builder: _Builder) -> CrossInputs:
    batch, tokens, num_keys = len(case.q_lens), sum(case.q_lens), sum(case.kv_lens)
    table, positions, rows = _build_table(case, builder)
    q = builder.place("q", builder.draw(tokens, case.q_heads, case.head_dim))
    pools = {
        name: builder.reserve(name, (num_keys + _SPARE, case.kv_heads, dim))
        for name, dim in (("k_buffer", case.head_dim), ("v_buffer", case.value_dim))
    }
    out = builder.reserve("out", (tokens, case.q_heads, case.value_dim))
    masks = [
        builder.draw_keep(0.7 if case.mask_dim else 1.0, q_len, kv_len)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
    ]
    requests = []
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        slots = positions[b]
        visible = find_visible(case, q_len, kv_len, torch.device("cpu")) & masks[b] & (slots >= 0)
        seen = visible.any(dim=0)
        if case.is_decode and case.appends and kv_len:
            # Its K and V come with the call and are stored even where the mask hides them.
            seen[-1] = bool(slots[-1] >= 0)
        drawn = {
            "k_buffer": builder.draw(kv_len, case.kv_heads, case.head_dim),
            "v_buffer": builder.draw(kv_len, case.kv_heads, case.value_dim),
        }
        for name, values in drawn.items():
            values[~seen.to(builder.device)] = builder.poison
            pools[name][slots[seen].to(builder.device)] = values[seen.to(builder.device)]
        requests.append(
            RequestKeys(k=drawn["k_buffer"], v=drawn["v_buffer"], visible=visible.to(builder.device))
        )
    mask = torch.cat([mask.flatten() for mask in masks]) if case.mask_dim and batch else None
    arguments = {
        "q": q,
        **pools,
        "req_to_token": table,
        "req_pool_indices": builder.ints(rows),
        "kv_indptr": builder.ints(build_indptr(case.kv_lens)),
        "mask": None if mask is None else mask.to(builder.device),
        "out": out,
        "max_kv_len": max(case.kv_lens, default=0),
        **_build_options(case, builder),
    }
    add = _add_decode if case.is_decode else _add_prefill
    return add(case, builder, arguments, tuple(requests), positions)


def _build_table(case: CrossCase, builder: _Builder) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The table on the device, the slots of each request's positions, and its row: both on the CPU.

    What no position uses points at a slot that holds poison, so that reading it shows.
    """
    batch, num_keys = len(case.q_lens), sum(case.kv_lens)
    order, rows = builder.permute(num_keys), builder.permute(batch + _SPARE)[:batch]
    height, width = batch + _SPARE, max(case.kv_lens, default=0) + _SPARE
    # Every second entry, where heads are not contiguous either.
    step = 1 if case.layout == "contiguous" else 2
    table = builder.ints(torch.full((height, width * step), num_keys))[:, ::step]
    positions, first = [], 0
    for row, kv_len in zip(rows.tolist(), case.kv_lens, strict=True):
        slots = order[first : first + kv_len].clone()
        slots[builder.draw_keep(case.holes, kv_len)] = -1
        table[row, :kv_len] = builder.ints(slots)
        positions.append(slots)
        first += kv_len
    return table, positions, rows


def _add_decode(
    case: CrossCase,
    builder: _Builder,
    arguments: dict[str, Any],
    requests: tuple[RequestKeys, ...],
    positions: Sequence[torch.Tensor],
) -> CrossInputs:
    """The new keys, which stay poison in the pool until the call stores them, and scratch."""
    batch = len(requests)
    chunk = decode_chunk(case.q_heads, case.kv_heads, arguments["q"].element_size())
    splits = num_decode_splits(arguments["max_kv_len"], chunk)
    for name, dim in (("o_part", case.value_dim), ("ml_part", 2)):
        part = torch.full((batch, case.q_heads, splits, dim), builder.poison, device=builder.device)
        arguments[name] = builder.bases[name] = part
    written = [arguments["out"], arguments["o_part"], arguments["ml_part"]]
    slots = torch.tensor([int(slots[-1]) if len(slots) else -1 for slots in positions], dtype=torch.long)
    if case.appends:
        for name, pool, dim in (("new_k", "k_buffer", case.head_dim), ("new_v", "v_buffer", case.value_dim)):
            new = builder.reserve(name, (batch, case.kv_heads, dim))
            for b, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    new[b] = (requests[b].k if name == "new_k" else requests[b].v)[-1]
                    arguments[pool][slot] = builder.poison
                    written.append(arguments[pool][slot])
            arguments[name] = new
    return CrossInputs(
        arguments=arguments, bases=builder.bases, written=tuple(written), requests=requests, slots=slots
    )


def _add_prefill(
    case: CrossCase,
    builder: _Builder,
    arguments: dict[str, Any],
    requests: tuple[RequestKeys, ...],
    positions: Sequence[torch.Tensor],
) -> CrossInputs:
    """The maps from tiles to requests."""
    q_tile_to_batch, q_tile_to_index = build_q_tiles(case.q_lens)
    arguments |= {
        "qo_indptr": builder.ints(build_indptr(case.q_lens)),
        "q_tile_to_batch": builder.ints(q_tile_to_batch),
        "q_tile_to_index": builder.ints(q_tile_to_index),
    }
    slots = [
        int(positions[b][position]) if position >= 0 else -1
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True))
        for position in range(kv_len - q_len, kv_len)
    ]
    return CrossInputs(
        arguments=arguments,
        bases=builder.bases,
        written=(arguments["out"],),
        requests=requests,
        slots=torch.tensor(slots, dtype=torch.long),
    )


def _build_freqs(case: CrossCase, builder: _Builder) -> torch.Tensor:
    angles = 100 * builder.draw_float32(sum(case.q_lens), case.rotary_dim // 2)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def _build_rotary(case: CrossCase, builder: _Builder) -> CrossInputs:
    tokens = sum(case.q_lens)
    x = builder.place("q", builder.draw(tokens, case.q_heads, case.head_dim))
    rest = {"freqs_cis": _build_freqs(case, builder), "pairing": case.pairing}
    if case.op == "rotary_emb":
        out = builder.reserve("out", x.shape)
        return CrossInputs(arguments={"x": x, "out": out, **rest}, bases=builder.bases, written=(out,))
    k = builder.place("k", builder.draw(tokens, case.kv_heads, case.head_dim))
    written = (x[..., : case.rotary_dim], k[..., : case.rotary_dim])
    return CrossInputs(arguments={"q": x, "k": k, **rest}, bases=builder.bases, written=written)


def _build_append(case: CrossCase, builder: _Builder) -> CrossInputs:
    tokens = sum(case.q_lens)
    q = builder.place("q", builder.draw(tokens, case.q_heads, case.head_dim))
    k = builder.place("k", builder.draw(tokens, case.kv_heads, case.head_dim))
    v = builder.place("v", builder.draw(tokens, case.kv_heads, case.value_dim))
    pools = {
        name: builder.reserve(name, (tokens + _SPARE, case.kv_heads, dim))
        for name, dim in (("k_buffer", case.head_dim), ("v_buffer", case.value_dim))
    }
    slots = builder.permute(tokens + _SPARE)[:tokens]
    slots[builder.draw_keep(case.holes, tokens)] = -1
    stored = [pool[slot] for pool in pools.values() for slot in slots.tolist() if slot >= 0]
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "freqs_cis": _build_freqs(case, builder),
        **pools,
        "out_cache_loc": builder.ints(slots),
        "pairing": case.pairing,
    }
    written = (q[..., : case.rotary_dim], *stored)
    return CrossInputs(arguments=arguments, bases=builder.bases, written=written, slots=slots)


def _build_merge(case: CrossCase, builder: _Builder) -> CrossInputs:
    """Rows of every kind: both states have keys, one has, none has."""
    shape = (sum(case.q_lens), case.q_heads, case.head_dim)
    arguments: dict[str, Any] = {}
    for name in ("a", "b"):
        lse = 3 * builder.draw_float32(*shape[:2])
        is_empty = ~builder.draw_keep(0.7, *shape[:2]).to(builder.device)
        values = builder.draw(*shape)
        lse[is_empty], values[is_empty] = -torch.inf, builder.poison
        arguments |= {f"o_{name}": builder.place(f"o_{name}", values), f"lse_{name}": lse}
    out = builder.reserve("out", shape)
    return CrossInputs(arguments={**arguments, "out": out}, bases=builder.bases, written=(out,))
