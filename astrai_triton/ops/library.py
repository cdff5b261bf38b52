"""The ops as operators of torch, under ``torch.ops.astrai``, so that they work in ``torch.compile``.

Every operator has one schema per form of the call, chosen by its overload name: ``lse`` also returns the
log-sum-exp, ``out`` writes into a tensor of the caller, ``append`` (paged decode) writes the new K and V into
the pool. A schema cannot say "sometimes": each form says exactly what it returns and what it mutates.

The functions of this module have the names and arguments of the plain launchers. Called from Python they are
the launchers; traced by ``torch.compile`` they become the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from astrai_triton.ops import decode, prefill, rotary

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LIBRARY: Any = torch.library.Library("astrai", "DEF")  # type: ignore[no-untyped-call]
# The kernels want a unit last stride: what was traced must be what runs.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_OPTIONS = (
    "Tensor? mask=None, float? softmax_scale=None, int[2] window_size=[-1, -1], float softcap=0.0, "
    "Tensor? sinks=None, float? k_scale=None, float? v_scale=None"
)
_CAUSAL = "bool is_causal=False"
_SCRATCH = "Tensor(s!)? o_part=None, Tensor(t!)? ml_part=None"
_PAGED = f"{_SCRATCH}, SymInt? max_kv_len=None"
_TABLE = "Tensor req_to_token, Tensor req_pool_indices, Tensor kv_indptr"
_TILES = "Tensor qo_indptr, Tensor q_tile_to_batch, Tensor q_tile_to_index"


def _define(
    name: str, arguments: str, returns: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"astrai::{name}", fake, lib=_LIBRARY)


def _define_attention(launch: Callable[..., Any], tensors: str, options: str, prefix: str = "") -> None:
    """The four forms of an attention op: with and without lse, with and without out."""
    for has_lse in (False, True):
        for has_out in (False, True):
            parts = [prefix, "lse" if has_lse else "", "out" if has_out else ""]
            overload = "_".join(part for part in parts if part)
            name = f"{launch.__name__}.{overload}" if overload else launch.__name__
            arguments = f"{tensors}, *, Tensor(o!) out, {options}" if has_out else f"{tensors}, *, {options}"
            returns = {(0, 0): "Tensor", (1, 0): "(Tensor, Tensor)", (0, 1): "()", (1, 1): "Tensor"}
            run = functools.partial(_run_attention, launch, has_lse, has_out)
            fake = functools.partial(_fake_attention, has_lse, has_out)
            _define(name, arguments, returns[has_lse, has_out], run, fake)


def _run_attention(
    launch: Callable[..., Any], has_lse: bool, has_out: bool, *args: Any, **kwargs: Any
) -> Any:
    if "window_size" in kwargs:
        kwargs["window_size"] = tuple(kwargs["window_size"])
    result = launch(*args, return_lse=has_lse, **kwargs)
    if has_out:
        return result[1] if has_lse else None
    return result


def _fake_attention(
    has_lse: bool, has_out: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    out = None if has_out else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32) if has_lse else None
    if out is None:
        return lse
    return out if lse is None else (out, lse)


def _run_merge_out(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return decode.merge_states(*args, out=out)[1]


def _run_rotary_out(*args: torch.Tensor, out: torch.Tensor, **kwargs: Any) -> None:
    rotary.rotary_emb(*args, out=out, **kwargs)


def _return_nothing(*_: Any, **__: Any) -> None:
    return None


def _define_all() -> None:
    _define_attention(decode.attn_decode, "Tensor q, Tensor k, Tensor v", _OPTIONS)
    _define_attention(
        prefill.attn_prefill, "Tensor q, Tensor k, Tensor v", f"{_OPTIONS}, {_CAUSAL}, {_SCRATCH}"
    )
    pool = "Tensor q, Tensor k_buffer, Tensor v_buffer"
    written = "Tensor q, Tensor(k!) k_buffer, Tensor(v!) v_buffer"
    _define_attention(
        prefill.attn_paged_prefill, f"{pool}, {_TABLE}, {_TILES}", f"{_OPTIONS}, {_CAUSAL}, {_PAGED}"
    )
    _define_attention(decode.attn_paged_decode, f"{pool}, {_TABLE}", f"{_OPTIONS}, {_PAGED}")
    _define_attention(
        decode.attn_paged_decode,
        f"{written}, {_TABLE}",
        f"Tensor new_k, Tensor new_v, {_OPTIONS}, {_PAGED}",
        "append",
    )
    states = "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b"
    _define(
        "merge_states",
        states,
        "(Tensor, Tensor)",
        decode.merge_states,
        lambda o_a, lse_a, *_: (o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)),
    )
    _define(
        "merge_states.out",
        f"{states}, *, Tensor(o!) out",
        "Tensor",
        _run_merge_out,
        lambda o_a, lse_a, *_, out: lse_a.new_empty(lse_a.shape),
    )
    table = 'Tensor freqs_cis, *, str pairing="adjacent"'
    _define(
        "rotary_emb",
        f"Tensor x, {table}",
        "Tensor",
        rotary.rotary_emb,
        lambda x, *_, **__: x.new_empty(x.shape),
    )
    _define("rotary_emb.out", f"Tensor x, {table}, Tensor(o!) out", "()", _run_rotary_out, _return_nothing)
    _define("rotary_qk_", f"Tensor(q!) q, Tensor(k!) k, {table}", "()", rotary.rotary_qk_, _return_nothing)
    _define(
        "rotary_append_",
        "Tensor(q!) q, Tensor k, Tensor v, Tensor freqs_cis, Tensor(k!) k_buffer, Tensor(v!) v_buffer, "
        'Tensor out_cache_loc, *, str pairing="adjacent", float? k_scale=None, float? v_scale=None',
        "()",
        rotary.rotary_append_,
        _return_nothing,
    )


_define_all()


def _trace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator form that says what this call of a launcher does."""
    out, has_lse = kwargs.pop("out", None), kwargs.pop("return_lse", False)
    forms = []
    if name == "attn_paged_decode":
        if kwargs.get("new_k") is not None:
            forms.append("append")
        else:
            kwargs.pop("new_k", None)
            kwargs.pop("new_v", None)
    if has_lse:
        forms.append("lse")
    if out is not None:
        forms.append("out")
        kwargs["out"] = out
    operator = getattr(getattr(torch.ops.astrai, name), "_".join(forms) or "default")
    result = operator(*args, **kwargs)
    if out is None:
        return result
    return out if result is None else (out, result)


def _traceable(launch: Callable[_P, _R]) -> Callable[_P, _R]:
    name = launch.__name__

    @functools.wraps(launch)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            traced: _R = _trace(name, args, dict(kwargs))
            return traced
        return launch(*args, **kwargs)

    return call


attn_decode = _traceable(decode.attn_decode)
attn_paged_decode = _traceable(decode.attn_paged_decode)
attn_prefill = _traceable(prefill.attn_prefill)
attn_paged_prefill = _traceable(prefill.attn_paged_prefill)
merge_states = _traceable(decode.merge_states)
rotary_emb = _traceable(rotary.rotary_emb)
rotary_qk_ = _traceable(rotary.rotary_qk_)
rotary_append_ = _traceable(rotary.rotary_append_)
