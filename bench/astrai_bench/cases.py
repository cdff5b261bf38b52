"""What a kernel bench measures: one shape, and what it must move and compute. Torch-free."""

from __future__ import annotations

from typing import Literal

import attrs

Op = Literal["decode", "prefill", "paged-decode", "paged-prefill", "rotary"]
OPS: tuple[Op, ...] = ("decode", "prefill", "paged-decode", "paged-prefill", "rotary")

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes a bench knows, by torch's name of them."""

PROVIDERS = (
    "triton",
    "cuda_ref",
    "torch_sdpa",
    "flex_attention",
    "torch_native",
    "flash_attn",
    "flashinfer",
)
"""Implementations a bench compares, in the order of the table."""

ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@attrs.frozen(kw_only=True)
class Case:
    """One shape of one operation.

    Prefill is causal, bottom-right aligned. In rotary ``q_lens`` are the rows of each request and
    ``kv_lens`` equal them.
    """

    op: Op
    q_heads: int
    kv_heads: int
    head_dim: int
    q_lens: tuple[int, ...]
    """Rows of each request; 1 in decode."""
    kv_lens: tuple[int, ...]
    """Keys of each request, its rows of this call included."""
    dtype: str
    """A key of ``ITEMSIZE``."""
    page: int
    """Tokens per page of the pool; 0 where K and V are dense."""

    def __attrs_post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted >= 1, got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads: wanted a multiple of kv_heads={self.kv_heads}, got {self.q_heads}")
        if self.op == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim: wanted an even number for rotary, got {self.head_dim}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype: wanted one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")
        if not self.q_lens or len(self.q_lens) != len(self.kv_lens):
            raise ValueError(
                f"q_lens, kv_lens: wanted one of each per request, got {len(self.q_lens)} and "
                f"{len(self.kv_lens)}"
            )
        if min(self.q_lens) < 1 or min(self.kv_lens) < 1:
            raise ValueError("q_lens, kv_lens: wanted lengths of at least 1")
        if any(q_len > kv_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True)):
            raise ValueError(
                "kv_lens: wanted at least the q_len of every request, since it counts those rows"
            )
        if self.is_paged and self.page < 1:
            raise ValueError(f"page: wanted >= 1, got {self.page}")
        is_dense = self.op in ("decode", "prefill")
        if is_dense and (len(set(self.q_lens)) > 1 or len(set(self.kv_lens)) > 1):
            raise ValueError(f"{self.op}: wanted one length for all requests; use paged-{self.op}")

    @property
    def is_paged(self) -> bool:
        """Whether K and V lie in a pool."""
        return self.op.startswith("paged-")

    @property
    def is_decode(self) -> bool:
        """Whether every request has one row that sees all keys."""
        return self.op.endswith("decode")

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.q_lens)

    @property
    def num_tokens(self) -> int:
        """Rows of q in all."""
        return sum(self.q_lens)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@attrs.frozen(kw_only=True)
class Ceilings:
    """What a machine can do at most, and where the figures come from."""

    bandwidth: float
    """Bytes read and written per second."""
    flops: float
    """Floating point operations per second of a large matrix product in the dtype of the case."""
    source: str


_H200_BANDWIDTH = 4.3e12
_H200_FLOPS = {"bfloat16": 790e12, "float16": 790e12, "float32": 67e12}
"""Measured with 16-bit operands; for float32 the specification, since it never goes through TF32."""


def h200_ceilings(dtype: str) -> Ceilings:
    """Ceilings of an NVIDIA H200."""
    source = "H200, specification" if dtype == "float32" else "H200, measured elsewhere"
    return Ceilings(bandwidth=_H200_BANDWIDTH, flops=_H200_FLOPS[dtype], source=source)


def count_bytes(case: Case) -> int:
    """Bytes that any implementation must move through memory: each operand once.

    Attention: K and V ``2 * L * Hkv * D * e`` per request, q and the output ``2 * Lq * Hq * D * e``. Rotary:
    q and k are read and written, and each row reads its float32 cosines and sines. Index tensors of a pool
    are left out: 4 bytes per token against ``2 * Hkv * D * e``.
    """
    if case.op == "rotary":
        row = 2 * (case.q_heads + case.kv_heads) * case.head_dim * case.itemsize
        return case.num_tokens * (row + case.head_dim // 2 * 2 * 4)
    kv = 2 * sum(case.kv_lens) * case.kv_heads * case.head_dim * case.itemsize
    return kv + 2 * case.num_tokens * case.q_heads * case.head_dim * case.itemsize


def count_flops(case: Case) -> int:
    """Floating point operations of the two matrix products, or of the rotations.

    Attention: ``4 * Hq * D`` per pair of a row and a key it sees. A causal request of Lq rows over L keys has
    ``Lq * L - Lq * (Lq - 1) / 2`` of them. Rotary: 6 per pair of elements.
    """
    if case.op == "rotary":
        return 3 * case.num_tokens * (case.q_heads + case.kv_heads) * case.head_dim
    lens = zip(case.q_lens, case.kv_lens, strict=True)
    pairs = sum(q_len * kv_len - q_len * (q_len - 1) // 2 for q_len, kv_len in lens)
    return 4 * case.q_heads * case.head_dim * pairs


def predict_seconds(case: Case, ceilings: Ceilings) -> float:
    """Roofline time: what memory takes or what arithmetic takes, whichever is longer."""
    return max(count_bytes(case) / ceilings.bandwidth, count_flops(case) / ceilings.flops)


def is_memory_bound(case: Case, ceilings: Ceilings) -> bool:
    """Whether memory sets the roofline time."""
    return count_bytes(case) / ceilings.bandwidth >= count_flops(case) / ceilings.flops


@attrs.frozen(kw_only=True)
class Defaults:
    """Sizes of a bench that are not given on the command line."""

    batch: int
    q_len: int
    kv_len: int
    """0: as many as ``q_len``."""


_ON_GPU: dict[Op, Defaults] = {
    "decode": Defaults(batch=16, q_len=1, kv_len=4096),
    "prefill": Defaults(batch=1, q_len=8192, kv_len=0),
    "paged-decode": Defaults(batch=16, q_len=1, kv_len=4096),
    "paged-prefill": Defaults(batch=4, q_len=2048, kv_len=0),
    "rotary": Defaults(batch=1, q_len=8192, kv_len=0),
}
_ON_CPU: dict[Op, Defaults] = {
    "decode": Defaults(batch=4, q_len=1, kv_len=1024),
    "prefill": Defaults(batch=1, q_len=512, kv_len=0),
    "paged-decode": Defaults(batch=4, q_len=1, kv_len=1024),
    "paged-prefill": Defaults(batch=2, q_len=256, kv_len=0),
    "rotary": Defaults(batch=1, q_len=1024, kv_len=0),
}
"""Small enough for two cores; the benches say so."""


def choose_defaults(op: Op, *, is_gpu: bool) -> Defaults:
    """Sizes of ``op`` that fit a machine with or without a GPU."""
    return (_ON_GPU if is_gpu else _ON_CPU)[op]


@attrs.frozen(kw_only=True)
class Request:
    """Sizes as asked for; None takes the default of the machine."""

    op: Op
    batch: int | None = None
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    page: int = 1


def make_case(request: Request, *, is_gpu: bool) -> tuple[Case, tuple[str, ...]]:
    """Fill in what was not asked for.

    Lists of lengths are repeated until every request has one; without ``batch`` there are as many requests
    as the longer list has entries, but at least the default.

    Returns:
        The case, and the names of the sizes that a CPU made smaller than a GPU would have had.

    Raises:
        ValueError: sizes that make no case.
    """
    ours, theirs = choose_defaults(request.op, is_gpu=is_gpu), choose_defaults(request.op, is_gpu=True)
    listed = max(len(request.q_lens or ()), len(request.kv_lens or ()))
    batch = request.batch if request.batch is not None else max(ours.batch, listed)
    if batch < max(1, listed):
        raise ValueError(f"batch: wanted at least {max(1, listed)}, one per length given, got {batch}")
    q_lens = _repeat(request.q_lens or (ours.q_len,), batch)
    if request.kv_lens is not None:
        kv_lens = _repeat(request.kv_lens, batch)
    else:
        kv_lens = tuple(ours.kv_len or q_len for q_len in q_lens)
    case = Case(
        op=request.op,
        q_heads=request.q_heads,
        kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dtype=ALIASES.get(request.dtype, request.dtype),
        page=request.page if request.op.startswith("paged-") else 0,
    )
    smaller = []
    if request.batch is None and not listed and ours.batch < theirs.batch:
        smaller.append(f"batch {ours.batch}")
    if request.q_lens is None and ours.q_len < theirs.q_len:
        smaller.append(f"q-len {ours.q_len}")
    if request.kv_lens is None and 0 < ours.kv_len < theirs.kv_len:
        smaller.append(f"kv-len {ours.kv_len}")
    return case, tuple(smaller)


def _repeat(lens: tuple[int, ...], batch: int) -> tuple[int, ...]:
    return tuple(lens[idx % len(lens)] for idx in range(batch))


def describe_case(case: Case) -> str:
    """The case on one line."""
    heads = f"{case.q_heads}/{case.kv_heads} heads of {case.head_dim}"
    page = f", page {case.page}" if case.is_paged else ""
    q_len, kv_len = _describe_lens(case.q_lens), _describe_lens(case.kv_lens)
    if case.op == "rotary":
        lens = f"{q_len} rows each"
    elif case.is_decode:
        lens = f"{kv_len} keys"
    else:
        lens = f"{q_len} rows over {kv_len} keys, causal"
    return f"{case.op}: batch {case.batch}, {heads}, {lens}, {case.dtype}{page}"


def _describe_lens(lens: tuple[int, ...]) -> str:
    return str(lens[0]) if len(set(lens)) == 1 else f"{min(lens)}..{max(lens)}"
