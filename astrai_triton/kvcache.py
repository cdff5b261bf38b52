"""What one step of attention needs to know about the KV cache."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(eq=False, kw_only=True)
class KVCache:
    """Everything one forward needs to find, read and write its K and V. Plain data, no methods.

    Built once per step by ``astrai_triton.cache.PagePool.bind_tasks``; index tensors live in fixed buffers
    and are overwritten by the next bind. Ragged rows lie packed: request ``b`` owns rows
    ``qo_indptr[b]:qo_indptr[b+1]`` of q, k, v and ``out_cache_loc``. K/V of those rows are written before
    they are read, so ``seq_lens`` counts them.

    ``B`` requests, ``T`` packed rows, ``N`` q tiles, ``S`` splits, ``Hq``/``Hkv`` heads, ``D`` head_dim.
    """

    k_buffer: torch.Tensor
    """``[n_layers, size, Hkv, D]``; owned by ``KVStorage``, written in place by attention."""
    v_buffer: torch.Tensor
    """``[n_layers, size, Hkv, D]``; owned by ``KVStorage``, written in place by attention."""
    req_to_token: torch.Tensor
    """``[num_reqs, max_ctx_len]`` int32, position -> slot; a negative slot is a masked token.

    Owned by ``ReqToTokenPool``.
    """
    req_pool_indices: torch.Tensor
    """``[B]`` int32, request -> row of ``req_to_token``."""
    seq_lens: torch.Tensor
    """``[B]`` int32, K/V tokens of each request including the rows of this step."""
    out_cache_loc: torch.Tensor
    """``[T]`` int32, slot that receives K/V of each row; negative: not written."""
    max_len: int
    """max(seq_lens), known on the host."""
    kv_indptr: torch.Tensor
    """``[B + 1]`` int32, prefix sum of ``seq_lens``."""
    qo_indptr: torch.Tensor
    """``[B + 1]`` int32, prefix sum of the row counts."""
    q_tile_to_batch: torch.Tensor
    """``[N]`` int32, q tile -> request."""
    q_tile_to_index: torch.Tensor
    """``[N]`` int32, q tile -> index of the tile inside its request."""
    decode_o_part: torch.Tensor
    """``[B, Hq, S, D]`` float32 scratch, un-normalised outputs of the splits. Owned by ``Workspace``."""
    decode_ml_part: torch.Tensor
    """``[B, Hq, S, 2]`` float32 scratch, (max, sum) of the splits. Owned by ``Workspace``."""
    decode_out: torch.Tensor
    """``[B, Hq, D]`` model dtype, decode output. Owned by ``Workspace``."""
    q_lens: tuple[int, ...]
    """Row counts on the host, so that nobody reads ``qo_indptr`` back from a device."""
    kv_lens: tuple[int, ...]
    """``seq_lens`` on the host."""
