"""What a kernel has to give, in float64, and how far off a result is."""

from __future__ import annotations

import math

import attrs
import torch

from astrai_bench.cases import Case
from astrai_bench.inputs import DenseInputs, Inputs, PagedInputs, RotaryInputs

TOLERANCE = {"float32": 2e-5, "float16": 1.25e-3, "bfloat16": 1e-2}
"""Largest relative error of the vector of one head of one row.

Some implementations round scores, softmax weights and result to the dtype, each by up to 2^-9 of its value in
bfloat16 and 2^-12 in float16: five such roundings are allowed. float32 rounds by 2^-25, but hundreds of
products are summed and scores become exponents; TF32, at 2^-12, fails.
"""

_MAX_ROWS = 256
_MAX_SCORES = 1 << 25


@attrs.frozen(eq=False, kw_only=True)
class Expected:
    """Right values of some rows."""

    rows: torch.Tensor
    """``[n]`` int64, packed rows."""
    values: torch.Tensor
    """``[n, heads, D]`` float64."""


def compute_expected(case: Case, inputs: Inputs) -> Expected:
    """Rows spread over every request, at most 256 of each, with its first and its last.

    ``heads`` are those of q; in rotary those of q, then of k; over a pool those of q, then what the call must
    have left in the pool for the row, K before V.
    """
    rows, values = [], []
    first = 0
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        chosen = choose_rows(q_len, kv_len * (case.q_heads // case.kv_heads)).to(inputs.q.device)
        rows.append(first + chosen)
        if isinstance(inputs, RotaryInputs):
            at = first + chosen
            heads = torch.cat((inputs.q[at], inputs.k[at]), dim=1)
            values.append(_rotate(heads, inputs.freqs_cis[at]))
        elif isinstance(inputs, DenseInputs):
            values.append(_attend(inputs.q[b, chosen], inputs.k[b], inputs.v[b], kv_len - q_len + chosen))
        else:
            values.append(_attend_pool(inputs, b, first, chosen, q_len, kv_len))
        first += q_len
    return Expected(rows=torch.cat(rows), values=torch.cat(values))


def choose_rows(q_len: int, scores_per_row: int) -> torch.Tensor:
    """``[n]`` int64, evenly spread, the first and the last among them."""
    count = max(2, min(_MAX_ROWS, _MAX_SCORES // max(1, scores_per_row)))
    if count >= q_len:
        return torch.arange(q_len)
    return torch.linspace(0, q_len - 1, count, dtype=torch.float64).round().long()


def _attend_pool(
    inputs: PagedInputs, b: int, first: int, chosen: torch.Tensor, q_len: int, kv_len: int
) -> torch.Tensor:
    cache = inputs.cache
    slots = cache.req_to_token[b, :kv_len].long()
    k, v = cache.k_buffer[0, slots], cache.v_buffer[0, slots]
    new = slice(first, first + q_len)
    k[kv_len - q_len :], v[kv_len - q_len :] = inputs.k[new], inputs.v[new]
    at = first + chosen
    out = _attend(inputs.q[at], k, v, kv_len - q_len + chosen)
    return torch.cat((out, inputs.k[at].double(), inputs.v[at].double()), dim=1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """q ``[n, Hq, D]`` at positions ``[n]`` over k, v ``[L, Hkv, D]`` -> ``[n, Hq, D]`` float64, causal."""
    num_rows, q_heads, head_dim = q.shape
    kv_len, kv_heads, _ = k.shape
    is_hidden = torch.arange(kv_len, device=k.device) > positions[:, None]
    out = q.new_empty(num_rows, kv_heads, q_heads // kv_heads, head_dim, dtype=torch.float64)
    # One KV head at a time: the float64 copies of a long request stay small.
    for head, q_group in enumerate(q.double().view(num_rows, kv_heads, -1, head_dim).unbind(1)):
        scores = q_group @ k[:, head].double().T / math.sqrt(head_dim)
        weights = torch.softmax(scores.masked_fill_(is_hidden[:, None], -math.inf), dim=-1)
        out[:, head] = weights @ v[:, head].double()
    return out.flatten(1, 2)


def _rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Adjacent pairs of x ``[n, H, D]`` turned by ``[n, D/2, 2]``, in float64."""
    even, odd = x[..., 0::2].double(), x[..., 1::2].double()
    cos, sin = freqs_cis[:, None].double().unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def collect(inputs: Inputs, result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A provider's result in the form of ``Expected.values``, for all rows: ``[T, heads, D]``."""
    if isinstance(result, tuple):
        return torch.cat(result, dim=1)
    if isinstance(inputs, PagedInputs):
        slots = inputs.cache.out_cache_loc.long()
        pools = (inputs.cache.k_buffer[0, slots], inputs.cache.v_buffer[0, slots])
        return torch.cat((result, *pools), dim=1)
    return result.flatten(0, 1)


def measure_error(expected: Expected, got: torch.Tensor) -> float:
    """Largest ``|got - want| / |want|`` over the head vectors of the expected rows.

    Infinite where any row of ``got`` is not finite, or where its shape is wrong.
    """
    if got.shape[1:] != expected.values.shape[1:] or got.shape[0] <= int(expected.rows.max()):
        return math.inf
    if not bool(torch.isfinite(got).all()):
        return math.inf
    want = expected.values
    off = torch.linalg.vector_norm(got[expected.rows].double() - want, dim=-1)
    size = torch.linalg.vector_norm(want, dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return float((off / size).max())
