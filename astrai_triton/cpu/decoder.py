"""A decoder whose whole forward is one call into our kernels."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from astrai_triton.backend import current_backend
from astrai_triton.cpu import abi
from astrai_triton.cpu.build import build, why_not_build
from astrai_triton.cpu.isa import Isa, cpu_flags, list_isas
from astrai_triton.cpu.shape import DTYPES, WEIGHTS, describe_layer, describe_shape, list_ropes
from astrai_triton.errors import BackendError, UnsupportedCallError
from astrai_triton.kvcache import KVCache
from astrai_triton.model import Decoder, ModelConfig, RotaryEmbedding
from astrai_triton.model.layers import Layer

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
    if model.device.type != "cpu":
        return f"the CPU kernels need the model on the CPU, it is on {model.device}"
    return why_not_config(
        model.config, dtype=model.dtype, quantize=quantize, isa=isa, check_build=check_build
    )


def why_not_config(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    quantize: abi.Quantize = "none",
    isa: Isa | None = None,
    check_build: bool = True,
) -> str | None:
    """``why_not`` of a model that is not there yet.

    Args:
        config: of the model.
        dtype: of the model.
        quantize: as for ``CpuDecoder``.
        isa: as for ``CpuDecoder``.
        check_build: also ask whether the kernels can be built here.

    Raises:
        ValueError: ``quantize`` or ``isa`` is unknown.
    """
    if quantize != "none" and quantize not in WEIGHTS:
        raise ValueError(f"quantize: wanted none, {', '.join(WEIGHTS)}, got {quantize!r}")
    if dtype not in DTYPES:
        return f"the CPU kernels compute in bfloat16 and float32, the model is in {dtype}"
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

    With quantised weights the only row of a request in a step is rounded to int8 before products. Where AMX
    serves a bfloat16 model, the rows of a request that has several are not: their weights are widened, so
    that a prefill is as fast as without quantisation, and nearer to it. Both follow from the request alone.

    Weights are packed once, in a copy of its own. One forward runs at a time.

    Args:
        model: loaded, on the CPU, bfloat16 or float32.
        quantize: "int8" holds linear weights and the LM head in groups of 64 inputs with a scale each. "int4"
            holds linear weights in groups of 32 with a scale and a minimum, which keeps those of a GGUF in
            Q4_0 or Q4_1, and the LM head as int8.
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
        rotary = [rotary for rotary in model.rotary if isinstance(rotary, RotaryEmbedding)]
        self._create(model.config, model.dtype, quantize, isa, threads, model.embed_scale, rotary)
        self._pack(model, release=release)

    @classmethod
    def from_packed(
        cls,
        config: ModelConfig,
        fill: Callable[[memoryview], None],
        *,
        dtype: torch.dtype,
        quantize: abi.Quantize = "none",
        isa: Isa | None = None,
        threads: int | None = None,
        max_seq_len: int | None = None,
    ) -> CpuDecoder:
        """Build one from the ``packed_weights`` of another with the same arguments.

        Args:
            config: of the model.
            fill: writes them into the memory it is given, which is zero; what it raises is passed on.
            dtype: bfloat16 or float32, of the model.
            quantize: as for the class.
            isa: as for the class.
            threads: as for the class.
            max_seq_len: positions ever used; None is ``config.max_seq_len``.

        Raises:
            BackendError: ``why_not_config`` has a reason, or the kernels do not build.
            MemoryError: there is no room for the packed weights.
            ValueError: an argument is out of range.
        """
        reason = why_not_config(config, dtype=dtype, quantize=quantize, isa=isa)
        if reason is not None:
            raise BackendError(f"{reason}; use a Decoder")
        max_len = config.max_seq_len if max_seq_len is None else max_seq_len
        decoder = cls.__new__(cls)
        rotary = [RotaryEmbedding(rope, max_len) for rope in list_ropes(config)]
        # Rounded like that of a Decoder.
        embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))
        decoder._create(config, dtype, quantize, isa, threads, embed_scale, rotary)
        fill(decoder._weights())
        return decoder

    def _create(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        quantize: abi.Quantize,
        isa: Isa | None,
        threads: int | None,
        embed_scale: float,
        rotary: list[RotaryEmbedding],
    ) -> None:
        """Everything but the weights."""
        if threads is not None and threads < 1:
            raise ValueError(f"threads: wanted >= 1, got {threads}")
        self.config: ModelConfig = config
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.quantize = quantize
        self.isa: Isa = isa or list_isas(cpu_flags())[0]
        self.phase_seconds: list[float] | None = None
        """Seconds of the phases ``abi.PHASES`` are added here by every forward where it is a list."""
        self._rotary = rotary
        self._library = build(self.isa)
        self._busy = threading.Lock()
        self._error = ctypes.create_string_buffer(abi.ERROR_BYTES)
        self._freqs = (ctypes.c_void_p * len(rotary))()
        self._num_positions = (ctypes.c_int64 * len(rotary))()
        shape = describe_shape(config, dtype, quantize, embed_scale, threads or torch.get_num_threads())
        ropes, per_layer = list_ropes(config), ctypes.c_int64 * config.n_layers
        windows = per_layer(*(layer.window for layer in config.layers))
        tables = per_layer(*(ropes.index(layer.rope) for layer in config.layers))
        self._model = self._library.astrai_create(ctypes.byref(shape), windows, tables)
        if not self._model:
            raise MemoryError("no memory for the packed weights")
        weakref.finalize(self, self._library.astrai_destroy, self._model)

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.config.vocab_size

    @property
    def num_bytes(self) -> int:
        """Packed weights that every forward reads: all but the embedding where it is a table of its own."""
        return int(self._library.astrai_num_bytes(self._model))

    def packed_weights(self) -> memoryview:
        """The packed weights themselves, bytes, which live as long as this view of them.

        What lies where follows from the config, the dtype, ``quantize`` and the sources of the kernels.
        """
        return self._weights().toreadonly()

    def _weights(self) -> memoryview:
        num_bytes = ctypes.c_int64()
        address = self._library.astrai_weights(self._model, ctypes.byref(num_bytes))
        array = (ctypes.c_uint8 * num_bytes.value).from_address(address)
        # Keeps the memory alive as long as the view. Arrays of ctypes take attributes; stubs do not say so.
        array.owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

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
                tensors, kept = describe_layer(model.dtype, layer)
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


def _release(module: nn.Module) -> None:
    for parameter in _parameters(module):
        parameter.data = parameter.data.new_empty(0)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters()
