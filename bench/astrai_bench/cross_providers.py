"""The implementations that are compared, what each can run here, and what each rounds."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch

from astrai_bench.cross_cases import CrossCase
from astrai_bench.cross_inputs import CrossInputs
from astrai_bench.cross_reference import attend, merge, rotate
from astrai_triton.backend import AttentionCall, TorchNativeBackend, apply_rotary_emb
from astrai_triton.kvcache import KVCache
from astrai_triton.schedule import build_indptr

PROVIDERS = ("triton", "cuda_scalar", "cuda_mma", "torch_native")
"""In the order of the table, behind the reference."""
REFERENCE = "float64"


@attrs.frozen(eq=False, kw_only=True)
class Outputs:
    """What one call gave."""

    vectors: dict[str, torch.Tensor]
    """``[n, H, D]`` each: out, rotated q and k, or rotated keys in the pool."""
    lse: torch.Tensor | None = None
    """``[n, H]``, natural logarithm; None where it was not asked for or is not offered."""
    stored: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """``[n, H, D]`` each: rows of the pool that must be copies of rows of the call."""


_Run: TypeAlias = Callable[[CrossCase, CrossInputs], Outputs]


@attrs.frozen(kw_only=True)
class CrossProvider:
    """One implementation."""

    name: str
    roundings: int
    """How often a value on its way to an attention result is rounded to the dtype."""
    unavailable: Callable[[torch.device], str | None]
    """Why it cannot run on a device at all; None when it can."""
    why_not: Callable[[CrossCase], str | None]
    """Why it has nothing to show for a case; None when it has."""
    run: _Run
    prepare: Callable[[torch.device], None] = lambda device: None
    """What is done once per device, such as a build."""


def list_cross_providers() -> tuple[CrossProvider, ...]:
    """All of them, in the order of ``PROVIDERS``.

    Everything rounds the result. Matrix units take softmax weights in the dtype, so those are rounded where
    one multiplies. torch's attention also rounds the scaled q, scores and sums where its kernel sees fit.
    """
    return (
        CrossProvider(
            name="triton",
            roundings=2,
            unavailable=_why_no_triton,
            why_not=lambda case: None,
            run=lambda case, inputs: run_operation("astrai_triton.ops", case, inputs),
        ),
        CrossProvider(
            name="cuda_scalar",
            roundings=1,
            unavailable=_why_no_cuda,
            why_not=lambda case: None,
            run=lambda case, inputs: run_operation("cuda_ref.ops", case, inputs, "scalar"),
            prepare=_build_cuda,
        ),
        CrossProvider(
            name="cuda_mma",
            roundings=2,
            unavailable=_why_no_cuda,
            why_not=_why_no_mma,
            run=lambda case, inputs: run_operation("cuda_ref.ops", case, inputs, "mma"),
            prepare=_build_cuda,
        ),
        CrossProvider(
            name="torch_native",
            roundings=5,
            unavailable=lambda device: None,
            why_not=_why_no_native,
            run=_run_native,
        ),
    )


def _why_no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        return "TRITON_INTERPRET=1 keeps kernels off the GPU; unset it" if is_interpreting else None
    if not is_interpreting:
        return "on a CPU kernels run in Triton's interpreter; set TRITON_INTERPRET=1"
    return None


def choose_interpreter(device: torch.device) -> None:
    """On a CPU, have Triton interpret: it decides when kernels are first imported, so this comes before."""
    if device.type == "cpu" and "astrai_triton.kernels" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _why_no_cuda(device: torch.device) -> str | None:
    if importlib.util.find_spec("cuda_ref") is None:
        return "the package cuda_ref is not installed; pip install -e . in a checkout"
    reason: str | None = importlib.import_module("cuda_ref").why_not(_choose_build(device))
    return reason


def _build_cuda(device: torch.device) -> None:
    importlib.import_module("cuda_ref").build(_choose_build(device))


def _choose_build(device: torch.device) -> str:
    """The same sources, compiled for the GPU or to run on the CPU under a checking runtime."""
    return "cuda" if device.type == "cuda" else "host"


def _why_no_mma(case: CrossCase) -> str | None:
    if not case.is_attention:
        return "multiplies no matrices; see cuda_scalar"
    if case.dtype == "float32":
        return "matrix units multiply 16-bit elements; see cuda_scalar"
    if case.layout == "odd":
        return "copies 16 bytes at a time, and heads do not start at multiples of that; see cuda_scalar"
    return None


def _why_no_native(case: CrossCase) -> str | None:
    return "torch has no such operation" if case.op == "merge_states" else None


def run_operation(module: str, case: CrossCase, inputs: CrossInputs, variant: str | None = None) -> Outputs:
    """The operation of a module that has the signatures of ``astrai_triton.ops``."""
    operation = getattr(importlib.import_module(module), case.op)
    # Rotary and merging have one implementation each.
    choice = {"variant": variant} if variant is not None and case.is_attention else {}
    return collect_outputs(case, inputs, operation(**inputs.arguments, **choice))


def collect_outputs(case: CrossCase, inputs: CrossInputs, result: Any) -> Outputs:
    """Results in the form that is compared, from what the operation returned and what it wrote."""
    arguments = inputs.arguments
    if case.op == "rotary_qk_":
        return Outputs(vectors={"q": arguments["q"], "k": arguments["k"]})
    if case.op == "rotary_append_":
        k, v = _read_stored(inputs)
        return Outputs(vectors={"q": arguments["q"], "k": k}, stored={"v": v})
    out, lse = result if isinstance(result, tuple) else (result, None)
    stored = {}
    if case.op == "attn_paged_decode" and case.appends:
        stored = dict(zip(("k", "v"), _read_stored(inputs), strict=True))
    return Outputs(
        vectors={"out": out.flatten(0, -3)}, lse=None if lse is None else lse.flatten(0, -2), stored=stored
    )


def _read_stored(inputs: CrossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    slots = _find_written(inputs)[1]
    return inputs.arguments["k_buffer"][slots], inputs.arguments["v_buffer"][slots]


def _find_written(inputs: CrossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that go to the pool, and their slots."""
    assert inputs.slots is not None
    rows = (inputs.slots >= 0).nonzero().flatten()
    device = inputs.arguments["q"].device
    return rows.to(device), inputs.slots[rows].to(device)


def compute_reference(case: CrossCase, inputs: CrossInputs) -> Outputs:
    """Right results in float64; ``inputs`` must not have run yet, and are not changed."""
    arguments = inputs.arguments
    if case.op == "merge_states":
        out, lse = merge(*(arguments[name] for name in ("o_a", "lse_a", "o_b", "lse_b")))
        return Outputs(vectors={"out": out}, lse=lse)
    if not case.is_attention:
        return _rotate_reference(case, inputs)
    q, sinks = arguments["q"], arguments["sinks"]
    rows = q.unbind(0) if q.dim() == 4 else q.split(case.q_lens)
    states = [
        attend(case, row, request.k, request.v, request.visible, sinks)
        for row, request in zip(rows, inputs.requests, strict=True)
    ]
    stored = {}
    if case.op == "attn_paged_decode" and case.appends:
        which = _find_written(inputs)[0]
        stored = {"k": arguments["new_k"][which], "v": arguments["new_v"][which]}
    shape = (case.q_heads, case.value_dim)
    return Outputs(
        vectors={"out": torch.cat([q.new_zeros(0, *shape).double(), *(out for out, _ in states)])},
        lse=torch.cat([q.new_zeros(0, shape[0]).double(), *(lse for _, lse in states)])
        if case.has_lse
        else None,
        stored=stored,
    )


def _rotate_reference(case: CrossCase, inputs: CrossInputs) -> Outputs:
    arguments = inputs.arguments
    freqs, pairing = arguments["freqs_cis"], case.pairing
    if case.op == "rotary_emb":
        return Outputs(vectors={"out": rotate(arguments["x"], freqs, pairing)})
    q, k = (rotate(arguments[name], freqs, pairing) for name in ("q", "k"))
    if case.op == "rotary_qk_":
        return Outputs(vectors={"q": q, "k": k})
    rows = _find_written(inputs)[0]
    return Outputs(vectors={"q": q, "k": k[rows]}, stored={"v": arguments["v"][rows]})


def _run_native(case: CrossCase, inputs: CrossInputs) -> Outputs:
    """torch's attention and torch's complex multiplication, which give no log-sum-exp."""
    arguments = inputs.arguments
    if not case.is_attention:
        return _rotate_native(case, inputs)
    cache, k, v = (None, arguments["k"], arguments["v"]) if not case.is_paged else _bind_cache(case, inputs)
    call = AttentionCall(
        q=arguments["q"],
        k=k,
        v=v,
        kv_cache=cache,
        layer_id=0,
        attn_mask=arguments["mask"],
        is_causal=arguments.get("is_causal", False),
        fwd="dense" if cache is None else "decode" if case.is_decode else "prefill",
        softmax_scale=case.softmax_scale,
        window_size=case.window,
        softcap=case.softcap,
        sinks=arguments["sinks"],
    )
    return collect_outputs(case, inputs, TorchNativeBackend().forward(call))


def _rotate_native(case: CrossCase, inputs: CrossInputs) -> Outputs:
    arguments = inputs.arguments

    def turn(x: torch.Tensor) -> torch.Tensor:
        # Under Triton's interpreter as on a GPU the same function might take the kernel; gradients never do.
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            turned = apply_rotary_emb(leaf, arguments["freqs_cis"], pairing=case.pairing)
        return turned.detach()

    if case.op == "rotary_emb":
        return Outputs(vectors={"out": turn(arguments["x"])})
    q, k = turn(arguments["q"]), turn(arguments["k"])
    if case.op == "rotary_qk_":
        return Outputs(vectors={"q": q, "k": k})
    rows, slots = _find_written(inputs)
    arguments["k_buffer"][slots], arguments["v_buffer"][slots] = k[rows], arguments["v"][rows]
    stored_k, stored_v = _read_stored(inputs)
    return Outputs(vectors={"q": q, "k": stored_k}, stored={"v": stored_v})


def _bind_cache(case: CrossCase, inputs: CrossInputs) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """The arguments as one step of a cache of one layer, and the rows that this step stores."""
    arguments, slots = inputs.arguments, inputs.slots
    assert slots is not None
    device = arguments["q"].device
    if "new_k" in arguments:
        k, v = arguments["new_k"], arguments["new_v"]
    else:
        # They lie in the pool already; torch_native stores them once more.
        k, v = (arguments[name][slots.clamp(min=0).to(device)] for name in ("k_buffer", "v_buffer"))
    indices: dict[str, Any] = {"dtype": torch.int32, "device": device}
    nothing = torch.empty(0, device=device)
    cache = KVCache(
        k_buffer=arguments["k_buffer"][None],
        v_buffer=arguments["v_buffer"][None],
        req_to_token=arguments["req_to_token"],
        req_pool_indices=arguments["req_pool_indices"],
        seq_lens=torch.tensor(case.kv_lens, **indices),
        out_cache_loc=slots.to(**indices),
        max_len=max(case.kv_lens, default=0),
        kv_indptr=arguments["kv_indptr"],
        qo_indptr=torch.as_tensor(build_indptr(case.q_lens), **indices),
        q_tile_to_batch=arguments.get("q_tile_to_batch", torch.zeros(0, **indices)),
        q_tile_to_index=arguments.get("q_tile_to_index", torch.zeros(0, **indices)),
        decode_o_part=nothing,
        decode_ml_part=nothing,
        decode_out=nothing,
        q_lens=case.q_lens,
        kv_lens=case.kv_lens,
    )
    return cache, k, v
