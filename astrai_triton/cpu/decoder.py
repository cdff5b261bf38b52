"""A decoder whose whole forward is one call into our kernels."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from astrai_triton.backend import current_backend
from astrai_triton.cpu import abi
from astrai_triton.cpu.build import build, why_not_build
from astrai_triton.cpu.isa import Isa
from astrai_triton.errors import BackendError, UnsupportedCallError
from astrai_triton.kvcache import KVCache
from astrai_triton.model import Decoder, ModelConfig, RotaryEmbedding
from astrai_triton.model.layers import Layer, RmsNorm

_DTYPES = {torch.float32: abi.DTYPE_F32, torch.bfloat16: abi.DTYPE_BF16}
_WEIGHTS = {"int8": abi.WEIGHTS_INT8, "int4": abi.WEIGHTS_INT4}
_MAX_HEAD_DIM, _MAX_GROUP, _MAX_LAYERS = 512, 96, 4096


def why_not(
    model: Decoder, *, quantize: abi.Quantize = "none", isa: Isa | None = None, check_build: bool = True
) -> str | None:
    """Why ``CpuDecoder`` cannot stand for ``model``; None when it can. Builds nothing.

    Args:
        model: loaded or not.
        quantize: as for ``CpuDecoder``.
        isa: as for ``CpuDecoder``.
        check_build: also ask whether the kernels can be built here.

    Raises:
        ValueError: ``quantize`` or ``isa`` is unknown.
    """
    if quantize != "none" and quantize not in _WEIGHTS:
        raise ValueError(f"quantize: wanted none, {', '.join(_WEIGHTS)}, got {quantize!r}")
    config = model.config
    if model.device.type != "cpu":
        return f"the CPU kernels need the model on the CPU, it is on {model.device}"
    if model.dtype not in _DTYPES:
        return f"the CPU kernels compute in bfloat16 and float32, the model is in {model.dtype}"
    if config.head_dim > _MAX_HEAD_DIM:
        return f"the CPU kernels take heads of up to {_MAX_HEAD_DIM}, this model has {config.head_dim}"
    if config.n_q_heads // config.n_kv_heads > _MAX_GROUP:
        return f"the CPU kernels take up to {_MAX_GROUP} query heads to a key head"
    return why_not_build(isa) if check_build else None


class CpuDecoder:
    """Runs the forward of a ``Decoder`` in one call into kernels compiled for this CPU.

    Logits are those of the ``Decoder`` up to rounding: float32 in the order of sums; in bfloat16 q, and what
    lies between a product and what follows it, are not rounded, which the ``Decoder`` does. A row of a
    request that decodes has the same bits whatever runs beside it, whatever the threads do.

    Weights are packed once, in a copy of its own. One forward runs at a time.

    Args:
        model: loaded, on the CPU, bfloat16 or float32.
        quantize: "int8" and "int4" hold linear weights and the LM head in groups of 64 with a scale each.
        isa: instruction set; None is the fastest there is.
        threads: None is ``torch.get_num_threads()`` now.
        release: free the weights of ``model`` as they are packed; it must not be used any more.

    Raises:
        BackendError: ``why_not`` has a reason, or the kernels do not build.
        MemoryError: there is no room for the packed weights.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        quantize: abi.Quantize = "none",
        isa: Isa | None = None,
        threads: int | None = None,
        release: bool = False,
    ) -> None:
        reason = why_not(model, quantize=quantize, isa=isa)
        if reason is not None:
            raise BackendError(f"{reason}; use the Decoder itself")
        if threads is not None and threads < 1:
            raise ValueError(f"threads: wanted >= 1, got {threads}")
        self.config: ModelConfig = model.config
        self.device = torch.device("cpu")
        self.dtype = model.dtype
        self.quantize = quantize
        self.phase_seconds: list[float] | None = None
        """Seconds of the phases ``abi.PHASES`` are added here by every forward where it is a list."""
        self._rotary = [rotary for rotary in model.rotary if isinstance(rotary, RotaryEmbedding)]
        self._library = build(isa)
        self._busy = threading.Lock()
        self._error = ctypes.create_string_buffer(abi.ERROR_BYTES)
        self._freqs = (ctypes.c_void_p * len(self._rotary))()
        self._num_positions = (ctypes.c_int64 * len(self._rotary))()
        shape = _describe_shape(model, quantize, threads or torch.get_num_threads())
        self._model = self._library.astrai_create(ctypes.byref(shape))
        if not self._model:
            raise MemoryError("no memory for the packed weights")
        weakref.finalize(self, self._library.astrai_destroy, self._model)
        self._pack(model, release=release)

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.config.vocab_size

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._library.astrai_num_bytes(self._model))

    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, logits_rows: Tensor | None = None
    ) -> Tensor:
        """Logits of the next token; K and V of the rows are written into the cache.

        Args:
            token_ids: ``[T]`` int64, in ``[0, vocab_size)``.
            positions: ``[T]`` int64, below the ``max_seq_len`` of the model.
            kv_cache: what ``PagePool.bind_tasks`` returned for this step, in the dtype of the model.
            logits_rows: ``[R]`` int64, rows to give logits for; None is all.

        Returns:
            ``[R, vocab_size]`` float32.

        Raises:
            TypeError, ValueError: tensors do not fit the model or each other, or an index is out of range;
                nothing was written.
            UnsupportedCallError: an attention backend was chosen by name, which these kernels do not go
                through.
            MemoryError: there is no room for activations.
        """
        backend = current_backend()
        if backend is not None:
            raise UnsupportedCallError(
                backend.value, "the CPU kernels have attention of their own; choose none, or use the Decoder"
            )
        rows = torch.arange(token_ids.shape[0]) if logits_rows is None else logits_rows
        self._check(token_ids, positions, kv_cache, rows)
        logits = torch.empty(rows.shape[0], self.vocab_size)
        with self._busy:
            self._run(token_ids, positions, kv_cache, rows, logits)
        return logits

    def _run(self, token_ids: Tensor, positions: Tensor, kv: KVCache, rows: Tensor, logits: Tensor) -> None:
        for i, rotary in enumerate(self._rotary):
            rotary.reserve(kv.max_len)
            self._freqs[i] = rotary.freqs_cis.data_ptr()
            self._num_positions[i] = rotary.freqs_cis.shape[0]
        table, times = kv.req_to_token, None
        if self.phase_seconds is not None:
            times = (ctypes.c_double * len(abi.PHASES))()
        step = abi.Step(
            token_ids.shape[0],
            kv.seq_lens.shape[0],
            rows.shape[0],
            token_ids.data_ptr(),
            positions.data_ptr(),
            rows.data_ptr(),
            table.data_ptr(),
            table.shape[0],
            table.shape[1],
            table.stride(0),
            kv.req_pool_indices.data_ptr(),
            kv.seq_lens.data_ptr(),
            kv.qo_indptr.data_ptr(),
            kv.out_cache_loc.data_ptr(),
            kv.k_buffer.data_ptr(),
            kv.v_buffer.data_ptr(),
            kv.k_buffer.shape[1],
            self._freqs,
            self._num_positions,
            logits.data_ptr(),
            times,
        )
        status = self._library.astrai_forward(self._model, ctypes.byref(step), self._error, len(self._error))
        if status:
            raise (ValueError if status == 1 else MemoryError)(self._error.value.decode())
        if self.phase_seconds is not None and times is not None:
            self.phase_seconds[:] = [a + b for a, b in zip(self.phase_seconds, times, strict=True)]

    def _check(self, token_ids: Tensor, positions: Tensor, kv: KVCache, rows: Tensor) -> None:
        """Everything the kernels cannot see for themselves: dtypes, shapes, strides."""
        config, batch, num_rows = self.config, kv.seq_lens.shape[0], token_ids.shape[0]
        num_slots = kv.k_buffer.shape[1] if kv.k_buffer.dim() == 4 else -1
        pool = (config.n_layers, num_slots, config.n_kv_heads, config.head_dim)
        _require("token_ids", token_ids, torch.int64, (num_rows,))
        _require("positions", positions, torch.int64, (num_rows,))
        _require("logits_rows", rows, torch.int64, (rows.shape[0],))
        _require("kv_cache.seq_lens", kv.seq_lens, torch.int32, (batch,))
        _require("kv_cache.req_pool_indices", kv.req_pool_indices, torch.int32, (batch,))
        _require("kv_cache.qo_indptr", kv.qo_indptr, torch.int32, (batch + 1,))
        _require("kv_cache.out_cache_loc", kv.out_cache_loc, torch.int32, (num_rows,))
        _require("kv_cache.k_buffer", kv.k_buffer, self.dtype, pool)
        _require("kv_cache.v_buffer", kv.v_buffer, self.dtype, pool)
        table = kv.req_to_token
        if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1 or not table.is_cpu:
            raise ValueError(
                "kv_cache.req_to_token: wanted [num_reqs, max_ctx_len] int32 on the CPU, rows contiguous, "
                f"got {list(table.shape)} {table.dtype} on {table.device}"
            )

    def _pack(self, model: Decoder, *, release: bool) -> None:
        with torch.inference_mode():
            for i, layer in enumerate(model.layers):
                assert isinstance(layer, Layer)
                tensors, kept = _describe_layer(model, layer)
                status = self._library.astrai_pack_layer(self._model, i, ctypes.byref(tensors))
                del kept
                if status:
                    raise MemoryError(f"no memory to pack layer {i}")
                if release:
                    _release(layer)
            embed, head, norm = (t.data_ptr() for t in (model.embed, model.lm_head, model.norm.weight))
            if self._library.astrai_pack_head(self._model, embed, head, norm):
                raise MemoryError("no memory to pack the LM head")
            if release:
                _release(model)


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != shape
        or not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name}: wanted {list(shape)} {dtype} on the CPU, contiguous, got {list(tensor.shape)} "
            f"{tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
        )


def _describe_shape(model: Decoder, quantize: abi.Quantize, threads: int) -> abi.Shape:
    config = model.config
    dtype = _DTYPES[model.dtype]
    scale = config.head_dim**-0.5 if config.softmax_scale is None else config.softmax_scale
    return abi.Shape(
        n_layers=config.n_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        n_q_heads=config.n_q_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.layers[0].rope.rotary_dim,
        vocab=config.vocab_size,
        n_ropes=len(model.rotary),
        # Weights of the model's own dtype have its number.
        weights=_WEIGHTS.get(quantize, dtype),
        dtype=dtype,
        activation=0 if config.activation == "silu" else 1,
        adjacent=config.pairing == "adjacent",
        threads=threads,
        norm_eps=config.norm_eps,
        embed_scale=model.embed_scale,
        softmax_scale=scale,
        attn_softcap=config.attn_softcap,
        logit_softcap=config.logit_softcap,
    )


def _describe_layer(model: Decoder, layer: Layer) -> tuple[abi.LayerTensors, list[Tensor]]:
    """Where the tensors of a layer are, and those that must live until they are packed."""
    attn, mlp, kept = layer.attn, layer.mlp, []

    def place(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if tensor is None:
            return None
        kept.append(tensor.detach().to(dtype).contiguous())
        return kept[-1].data_ptr()

    def weight_of(norm: RmsNorm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    tensors = abi.LayerTensors(
        qkv=place(attn.qkv_weight, model.dtype),
        o=place(attn.o_weight, model.dtype),
        gate_up=place(mlp.gate_up_weight, model.dtype),
        down=place(mlp.down_weight, model.dtype),
        qkv_bias=place(attn.qkv_bias),
        o_bias=place(attn.o_bias),
        gate_up_bias=place(mlp.gate_up_bias),
        down_bias=place(mlp.down_bias),
        attn_norm=place(layer.attn_norm.weight),
        post_attn_norm=place(weight_of(layer.post_attn_norm)),
        mlp_norm=place(layer.mlp_norm.weight),
        post_mlp_norm=place(weight_of(layer.post_mlp_norm)),
        qk_gain=place(attn.qk_gain),
        sinks=place(attn.sinks),
        window=model.config.layers[attn.layer_idx].window,
        rope=attn.rope_idx,
    )
    return tensors, kept


def _release(module: nn.Module) -> None:
    for parameter in _parameters(module):
        parameter.data = parameter.data.new_empty(0)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters()
