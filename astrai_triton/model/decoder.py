"""The decoder-only transformer: embedding, layers, norm, LM head, all as the config says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from astrai_triton.errors import WeightsMismatchError
from astrai_triton.kvcache import KVCache
from astrai_triton.model.config import ModelConfig
from astrai_triton.model.layers import Layer, RmsNorm, Slot, Step, make_parameter, project
from astrai_triton.model.rotary import RotaryEmbedding

Progress = Callable[[int, int], None]
"""Called with (tensors placed, tensors in all)."""

_LISTED = 5


def choose_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype a model runs fastest in on ``device``.

    A GPU gets bfloat16, or float16 where it only emulates bfloat16. A CPU gets bfloat16 if it has AMX, else
    float32. Other devices get float32.

    CPU time in ms of all linear layers of SmolLM2-135M for 1, 16 and 128 rows (LM head on at most 16), the
    better operand order each; one core of a Xeon (family 6, model 207), torch 2.13, 2026-11-30:

    ==========================  ============  =============
    oneDNN instruction set      bfloat16      float32
    ==========================  ============  =============
    AMX                         28  30    67  48  109   247
    AVX512_CORE_BF16            45  73   373  45  101   266
    AVX2                        48  377 2271  43   97   242
    ==========================  ============  =============
    """
    device = torch.device(device)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False):
        return torch.bfloat16
    return torch.float32


class Decoder(nn.Module):
    """One implementation of every supported architecture, for inference.

    Weights are uninitialised until ``load_weights``. Linear weights and embeddings are in ``dtype``; norms,
    the residual stream, rotary tables and logits are float32.

    Args:
        config: what to build.
        dtype: bfloat16, float16 or float32; see ``choose_dtype``.
        device: where weights live.
        max_seq_len: positions ever used; None is ``config.max_seq_len``.

    Raises:
        ValueError: ``max_seq_len`` is below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        max_len = config.max_seq_len if max_seq_len is None else max_seq_len
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, max_len, device=device) for rope in ropes)
        self.embed = make_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Layer(config, idx, ropes.index(layer.rope), dtype=dtype, device=device)
            for idx, layer in enumerate(config.layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            self.embed
            if config.tie_embeddings
            else make_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )
        # Checkpoints were trained with the scale rounded like this.
        self.embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of linear weights, activations, K and V."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.config.vocab_size

    def slots(self) -> dict[str, Slot]:
        """Canonical name -> place of every tensor a checkpoint must have."""
        slots = {"embed.weight": Slot(tuple(self.embed.shape), self.embed)}
        for idx, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            slots.update((f"layers.{idx}.{name}", slot) for name, slot in layer.slots())
        slots["norm.weight"] = Slot(tuple(self.norm.weight.shape), self.norm.weight)
        if not self.config.tie_embeddings:
            slots["lm_head.weight"] = Slot(tuple(self.lm_head.shape), self.lm_head)
        return slots

    def load_weights(self, named: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Copy tensors into place one by one, cast to the dtype of their place; none is kept.

        Args:
            named: canonical names and tensors, any dtype and device, each once, q and k rows in the order of
                ``config.pairing``.
            progress: called after every tensor that found its place.

        Raises:
            WeightsMismatchError: tensors are missing, surplus, given twice or of another shape. The model is
                then partly filled and must not be used.
        """
        slots = self.slots()
        waiting = dict.fromkeys(slots)
        surplus: list[str] = []
        misshapen: list[str] = []
        for name, tensor in named:
            slot = slots.get(name)
            if slot is None or name not in waiting:
                surplus.append(name if slot is None else f"{name} (given twice)")
                continue
            del waiting[name]
            if tuple(tensor.shape) != slot.shape:
                misshapen.append(f"{name} (wanted {list(slot.shape)}, got {list(tensor.shape)})")
                continue
            slot.view.copy_(tensor)
            if progress is not None:
                progress(len(slots) - len(waiting), len(slots))
        faults = [
            f"{len(names)} {kind}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
            for kind, names in (("missing", list(waiting)), ("surplus", surplus), ("misshapen", misshapen))
            if names
        ]
        if faults:
            raise WeightsMismatchError(
                f"weights do not fit the {self.config.arch} model of the config: {'; '.join(faults)}; "
                "config and weights must be of the same checkpoint"
            )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache | None = None,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token.

        With ``kv_cache`` rows of all requests lie packed and their K and V are written into the cache.
        Without, every row of a batch sees itself and the rows before it.

        Args:
            token_ids: ``[T]`` packed or ``[B, L]`` dense, int64, in ``[0, vocab_size)``.
            positions: shape of ``token_ids``, int64, below the ``max_seq_len`` of the model.
            kv_cache: what ``PagePool.bind_tasks`` returned for this step.
            logits_rows: ``[R]`` int64, packed rows to give logits for; None is all. Packed only.

        Returns:
            ``[R, vocab_size]`` or ``[B, L, vocab_size]`` float32.

        Raises:
            ValueError: shapes do not fit together, or a position is beyond the model's ``max_seq_len``.
        """
        rank = 2 if kv_cache is None else 1
        if token_ids.dim() != rank or positions.shape != token_ids.shape:
            wanted = "[B, L] without kv_cache" if kv_cache is None else "[T] with kv_cache"
            raise ValueError(
                f"token_ids, positions: wanted the same shape {wanted}, "
                f"got {list(token_ids.shape)} and {list(positions.shape)}"
            )
        if kv_cache is None and logits_rows is not None:
            raise ValueError("logits_rows: wanted None without kv_cache; index the logits instead")
        with torch.inference_mode():
            length = None if kv_cache is None else kv_cache.max_len
            flat_positions = positions.flatten()
            freqs_cis = tuple(rotary(flat_positions, length) for rotary in self.rotary)
            step = Step(tuple(token_ids.shape), freqs_cis, kv_cache)
            residual = F.embedding(token_ids.flatten(), self.embed).to(torch.float32, copy=True)
            if self.embed_scale != 1.0:
                residual.mul_(self.embed_scale)
            for layer in self.layers:
                layer(residual, step)
            if logits_rows is not None:
                residual = residual[logits_rows]
            logits = self._logits(residual)
        return logits.view(*step.shape, -1) if kv_cache is None else logits

    def _logits(self, residual: Tensor) -> Tensor:
        """``[R, hidden]`` float32 -> ``[R, vocab_size]`` float32, contiguous."""
        logits = project(self.norm(residual), self.lm_head, None)
        logits = logits.to(torch.float32, memory_format=torch.contiguous_format)
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
