"""One transformer layer: attention and gated MLP, each behind a norm, added to a float32 residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astrai_triton.backend import apply_rotary_emb, attention
from astrai_triton.backend.rotary import append_rotated_
from astrai_triton.kvcache import KVCache
from astrai_triton.model.config import Activation, ModelConfig

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# Above so many rows turning the result of a weight-first product costs more than the product saves.
_TRANSPOSE_ROWS = 128


@attrs.frozen(eq=False)
class Step:
    """What all layers of one forward share. ``T`` rows, packed, or ``B * L`` of a dense batch flattened."""

    shape: tuple[int, ...]
    """``(T,)`` packed, ``(B, L)`` dense."""
    freqs_cis: tuple[Tensor, ...]
    """One ``[T, rotary_dim/2, 2]`` float32 per distinct rope of the model."""
    kv_cache: KVCache | None


@attrs.frozen(eq=False)
class Slot:
    """Where one tensor of a checkpoint goes."""

    shape: tuple[int, ...]
    """Shape the checkpoint's tensor must have."""
    view: Tensor
    """Part of a parameter that receives it; ``shape`` broadcasts to it."""


def make_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without gradient whose values are not set yet."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, *, row_major: bool = True) -> Tensor:
    """``x @ weight.T + bias``.

    In bfloat16 on a CPU the weight is the left operand: as the right one oneDNN repacks it for its matrix
    units on every call. At the left, its blocking does not depend on the number of rows either, so that a row
    has the same bits alone and in a batch of up to 128.

    Args:
        x: ``[T, in]``.
        weight: ``[out, in]``, dtype of x.
        bias: ``[out]``, dtype of x.
        row_major: whether the caller is slower with contiguous columns.

    Returns:
        ``[T, out]``, rows or columns contiguous.
    """
    if x.dtype != torch.bfloat16 or not x.is_cpu:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if rows == 1:
        return (torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0]))[None]
    if row_major and rows > _TRANSPOSE_ROWS:
        return F.linear(x, weight, bias)
    columns = x.t()
    return (torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)).t()


class Attention(nn.Module):
    """q, k, v from one matrix, norm of heads, rotary, attention, output.

    Args:
        config: the model.
        layer_idx: which layer of it.
        rope_idx: which entry of ``Step.freqs_cis`` it turns by.
        dtype: of weights and activations.
        device: of the weights.
    """

    def __init__(
        self, config: ModelConfig, layer_idx: int, rope_idx: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.rope_idx = rope_idx
        self.n_q_heads, self.n_kv_heads, self.head_dim = config.n_q_heads, config.n_kv_heads, config.head_dim
        self.n_qk_heads = self.n_q_heads + self.n_kv_heads
        self.norm_eps = config.norm_eps
        self.pairing = config.pairing
        self.softmax_scale = config.softmax_scale
        self.softcap = config.attn_softcap
        window = config.layers[layer_idx].window
        self.window_size = (-1, -1) if window < 0 else (window - 1, 0)
        hidden, q_rows = config.hidden_size, self.n_q_heads * self.head_dim
        all_rows = (self.n_qk_heads + self.n_kv_heads) * self.head_dim
        self.qkv_weight = make_parameter(all_rows, hidden, dtype=dtype, device=device)
        self.qkv_bias = make_parameter(all_rows, dtype=dtype, device=device) if config.qkv_bias else None
        self.o_weight = make_parameter(hidden, q_rows, dtype=dtype, device=device)
        self.o_bias = make_parameter(hidden, dtype=dtype, device=device) if config.o_bias else None
        # q_norm repeated for every q head, then k_norm for every k head: both are applied in one pass.
        self.qk_gain = (
            make_parameter(self.n_qk_heads, self.head_dim, dtype=torch.float32, device=device)
            if config.qk_norm
            else None
        )
        self.sinks = (
            make_parameter(self.n_q_heads, dtype=torch.float32, device=device) if config.sinks else None
        )

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Name inside the layer and place of every tensor."""
        sizes = [heads * self.head_dim for heads in (self.n_q_heads, self.n_kv_heads, self.n_kv_heads)]
        for name, part in zip("qkv", torch.split(self.qkv_weight, sizes), strict=True):
            yield f"attn.{name}.weight", Slot(tuple(part.shape), part)
        if self.qkv_bias is not None:
            for name, part in zip("qkv", torch.split(self.qkv_bias, sizes), strict=True):
                yield f"attn.{name}.bias", Slot(tuple(part.shape), part)
        yield "attn.o.weight", Slot(tuple(self.o_weight.shape), self.o_weight)
        if self.o_bias is not None:
            yield "attn.o.bias", Slot(tuple(self.o_bias.shape), self.o_bias)
        if self.qk_gain is not None:
            yield "attn.q_norm.weight", Slot((self.head_dim,), self.qk_gain[: self.n_q_heads])
            yield "attn.k_norm.weight", Slot((self.head_dim,), self.qk_gain[self.n_q_heads :])
        if self.sinks is not None:
            yield "attn.sinks", Slot(tuple(self.sinks.shape), self.sinks)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``; writes K and V of the rows into ``step.kv_cache``."""
        rows = x.shape[0]
        qkv = project(x, self.qkv_weight, self.qkv_bias).contiguous()
        heads = qkv.view(rows, self.n_qk_heads + self.n_kv_heads, self.head_dim)
        qk = heads[:, : self.n_qk_heads]
        if self.qk_gain is not None:
            normed = F.rms_norm(qk.float(), (self.head_dim,), None, self.norm_eps)
            qk = normed.mul_(self.qk_gain).to(x.dtype)
        v = heads[:, self.n_qk_heads :]
        freqs_cis = step.freqs_cis[self.rope_idx]
        is_stored = append_rotated_(
            qk, v, freqs_cis, step.kv_cache, self.layer_idx, self.n_q_heads, pairing=self.pairing
        )
        if not is_stored:
            qk = apply_rotary_emb(qk, freqs_cis, pairing=self.pairing)
        if step.kv_cache is None:
            qk, v = qk.view(*step.shape, *qk.shape[1:]), v.view(*step.shape, *v.shape[1:])
        out = attention(
            qk[..., : self.n_q_heads, :],
            qk[..., self.n_q_heads :, :],
            v,
            step.kv_cache,
            self.layer_idx,
            is_causal=True,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            softcap=self.softcap,
            sinks=self.sinks,
            is_stored=is_stored,
        )
        return project(out.reshape(rows, self.n_q_heads * self.head_dim), self.o_weight, self.o_bias)


class Mlp(nn.Module):
    """``down(act(gate(x)) * up(x))``, gate and up from one matrix.

    Args:
        config: the model.
        dtype: of weights and activations.
        device: of the weights.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = _ACTIVATIONS[config.activation]
        self.gate_up_weight = make_parameter(2 * inner, hidden, dtype=dtype, device=device)
        self.gate_up_bias = make_parameter(2 * inner, dtype=dtype, device=device) if config.mlp_bias else None
        self.down_weight = make_parameter(hidden, inner, dtype=dtype, device=device)
        self.down_bias = make_parameter(hidden, dtype=dtype, device=device) if config.mlp_bias else None

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Name inside the layer and place of every tensor."""
        for kind, fused in (("weight", self.gate_up_weight), ("bias", self.gate_up_bias)):
            if fused is not None:
                for name, part in zip(("gate", "up"), fused.chunk(2), strict=True):
                    yield f"mlp.{name}.{kind}", Slot(tuple(part.shape), part)
        for kind, down in (("weight", self.down_weight), ("bias", self.down_bias)):
            if down is not None:
                yield f"mlp.down.{kind}", Slot(tuple(down.shape), down)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` -> ``[T, hidden]``."""
        gate, up = project(x, self.gate_up_weight, self.gate_up_bias, row_major=False).chunk(2, dim=-1)
        return project(self.activation(gate).mul_(up), self.down_weight, self.down_bias)


class RmsNorm(nn.Module):
    """``x / rms(x) * weight``, computed in float32.

    Args:
        size: elements of a row.
        eps: added to the mean square.
        dtype: of the result.
        device: of the weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.weight = make_parameter(size, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, size]`` float32 -> the same in ``dtype``."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)


class Layer(nn.Module):
    """norm, attention, (norm,) add; norm, MLP, (norm,) add.

    Args:
        config: the model.
        layer_idx: which layer of it.
        rope_idx: which entry of ``Step.freqs_cis`` it turns by.
        dtype: of weights and activations.
        device: of the weights.
    """

    def __init__(
        self, config: ModelConfig, layer_idx: int, rope_idx: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn_norm = RmsNorm(size, eps, dtype=dtype, device=device)
        self.attn = Attention(config, layer_idx, rope_idx, dtype=dtype, device=device)
        self.mlp_norm = RmsNorm(size, eps, dtype=dtype, device=device)
        self.mlp = Mlp(config, dtype=dtype, device=device)
        self.post_attn_norm: RmsNorm | None = None
        self.post_mlp_norm: RmsNorm | None = None
        if config.post_norms:
            self.post_attn_norm = RmsNorm(size, eps, dtype=torch.float32, device=device)
            self.post_mlp_norm = RmsNorm(size, eps, dtype=torch.float32, device=device)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Name inside the layer and place of every tensor."""
        for name in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm"):
            norm = getattr(self, name)
            if norm is not None:
                yield f"{name}.weight", Slot(tuple(norm.weight.shape), norm.weight)
        yield from self.attn.slots()
        yield from self.mlp.slots()

    def forward(self, residual: Tensor, step: Step) -> None:
        """Add this layer to ``residual [T, hidden]`` float32, in place."""
        out = self.attn(self.attn_norm(residual), step)
        if self.post_attn_norm is not None:
            out = self.post_attn_norm(out.float())
        residual.add_(out)
        out = self.mlp(self.mlp_norm(residual))
        if self.post_mlp_norm is not None:
            out = self.post_mlp_norm(out.float())
        residual.add_(out)
