from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from astrai_bench import providers, rivals
from astrai_bench.cases import OPS, PROVIDERS, Case, Op
from astrai_bench.inputs import Inputs, make_inputs
from astrai_bench.providers import Call, list_providers
from astrai_bench.reference import TOLERANCE, collect, compute_expected, measure_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def make(op: Op, *, page: int = 4, dtype: str = "float32", batch: int = 2) -> Case:
    is_paged, is_decode = op.startswith("paged-"), op.endswith("decode")
    q_lens = (1, 1) if is_decode else (5, 3) if is_paged else (5, 5)
    kv_lens = q_lens if op == "rotary" else (9, 6) if is_paged else (9, 9)
    return Case(
        op=op,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        q_lens=q_lens[:batch],
        kv_lens=kv_lens[:batch],
        dtype=dtype,
        page=page if is_paged else 0,
    )


def assert_right(case: Case, prepare: Callable[[Case, Inputs], Call]) -> None:
    inputs = make_inputs(case, CPU)
    expected = compute_expected(case, inputs)
    got = prepare(case, inputs)()
    assert measure_error(expected, collect(inputs, got)) <= TOLERANCE[case.dtype]


def prepare_by_name(name: str) -> Callable[[Case, Inputs], Call]:
    provider = next(provider for provider in list_providers() if provider.name == name)
    assert provider.prepare is not None
    return provider.prepare


def test_every_name_has_its_provider() -> None:
    assert tuple(provider.name for provider in list_providers()) == PROVIDERS


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1; on a GPU the bench itself checks",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_triton_kernels_are_called_right(op: Op, dtype: str) -> None:
    assert_right(make(op, dtype=dtype), prepare_by_name("triton"))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["torch_sdpa", "flex_attention"])
def test_dense_torch_providers_are_called_right(name: str, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    # Compiling takes half a minute; uncompiled it computes the same.
    monkeypatch.setattr(providers, "_compile_flex", lambda: flex_attention)
    assert_right(make(op), prepare_by_name(name))


def test_a_square_prefill_is_causal_too() -> None:
    case = Case(
        op="prefill", q_heads=2, kv_heads=2, head_dim=8, q_lens=(6,), kv_lens=(6,), dtype="float32", page=0
    )
    assert_right(case, prepare_by_name("torch_sdpa"))


@pytest.mark.parametrize("op", ["paged-decode", "paged-prefill", "rotary"])
def test_the_torch_backend_is_called_right(op: Op) -> None:
    assert_right(make(op), prepare_by_name("torch_native"))


def test_interpreting_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = list_providers()[0]
    assert "unset it" in (triton.why_not(make("decode"), GPU) or "")
    assert triton.why_not(make("decode"), CPU) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton.why_not(make("decode"), GPU) is None


# Other packages are played by fakes that compute with torch what they are told, so a wrong argument shows.


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """q ``[n, Hq, D]``, k, v ``[L, Hkv, D]``; causal is bottom-right aligned."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)


def gather(pages: torch.Tensor, numbers: torch.Tensor, length: int) -> torch.Tensor:
    return pages[numbers.long()].flatten(0, 1)[:length]


class FakeFlashAttn(ModuleType):
    def flash_attn_func(self, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        return torch.stack([attend(*parts, causal=causal) for parts in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        block_table: Any,
    ) -> torch.Tensor:
        outs = []
        for b, numbers in enumerate(block_table):
            first, end = cu_seqlens_q[b : b + 2].tolist()
            length = int(cu_seqlens_k[b + 1] - cu_seqlens_k[b])
            assert end - first <= max_seqlen_q
            assert length <= max_seqlen_k
            outs.append(
                attend(q[first:end], gather(k, numbers, length), gather(v, numbers, length), causal=causal)
            )
        return torch.cat(outs)

    def flash_attn_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        k: Any,
        v: Any,
        cache_seqlens: Any,
        block_table: Any,
        causal: bool,
    ) -> torch.Tensor:
        outs = []
        for b, numbers in enumerate(block_table):
            page, place = divmod(int(cache_seqlens[b]), k_cache.shape[1])
            k_cache[numbers[page], place], v_cache[numbers[page], place] = k[b, 0], v[b, 0]
            length = int(cache_seqlens[b]) + 1
            outs.append(
                attend(
                    q[b], gather(k_cache, numbers, length), gather(v_cache, numbers, length), causal=causal
                )
            )
        return torch.stack(outs)


class FakeWrapper:
    """Both paged wrappers of flashinfer; decode is prefill of one row."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        outs = []
        for b, last in enumerate(self.last.tolist()):
            numbers = self.indices[self.indptr[b] : self.indptr[b + 1]]
            length = (len(numbers) - 1) * self.page_size + last
            rows = q[self.qo_indptr[b] : self.qo_indptr[b + 1]]
            k, v = (gather(pool, numbers, length) for pool in pages)
            outs.append(attend(rows, k, v, causal=self.causal))
        return torch.cat(outs)


class FakePrefillWrapper(FakeWrapper):
    def plan(
        self,
        qo_indptr: Any,
        indptr: Any,
        indices: Any,
        last: Any,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        self.qo_indptr, self.indptr, self.indices, self.last = qo_indptr, indptr, indices, last
        self.page_size, self.causal = page_size, causal


class FakeDecodeWrapper(FakeWrapper):
    def plan(
        self,
        indptr: Any,
        indices: Any,
        last: Any,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        self.qo_indptr, self.indptr, self.indices, self.last = (
            torch.arange(len(last) + 1),
            indptr,
            indices,
            last,
        )
        self.page_size, self.causal = page_size, False


class FakeFlashInfer(ModuleType):
    BatchPrefillWithPagedKVCacheWrapper = FakePrefillWrapper
    BatchDecodeWithPagedKVCacheWrapper = FakeDecodeWrapper

    def single_prefill_with_kv_cache(
        self, q: Any, k: Any, v: Any, *, causal: bool, kv_layout: str
    ) -> torch.Tensor:
        assert kv_layout == "NHD"
        return attend(q, k, v, causal=causal)

    def single_decode_with_kv_cache(self, q: Any, k: Any, v: Any, *, kv_layout: str) -> torch.Tensor:
        assert kv_layout == "NHD"
        return attend(q[None], k, v, causal=False)[0]

    def append_paged_kv_cache(
        self,
        k: Any,
        v: Any,
        requests: Any,
        positions: Any,
        pages: Any,
        indices: Any,
        indptr: Any,
        last: Any,
        kv_layout: str,
    ) -> None:
        for row, (b, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            page, place = divmod(position, pages[0].shape[1])
            number = indices[indptr[b] + page]
            pages[0][number, place], pages[1][number, place] = k[row], v[row]


@pytest.mark.parametrize("op", ["decode", "prefill", "paged-decode", "paged-prefill"])
def test_flash_attn_is_called_right(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn("flash_attn"))
    assert_right(make(op), rivals.prepare_flash_attn)


@pytest.mark.parametrize("op", ["decode", "prefill", "paged-decode", "paged-prefill"])
def test_flashinfer_is_called_right(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer("flashinfer"))
    batch = 2 if op.startswith("paged-") else 1
    assert_right(make(op, batch=batch), rivals.prepare_flashinfer)


def test_what_other_packages_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    flash, infer = rivals.why_not_flash_attn, rivals.why_not_flashinfer
    half = make("paged-decode", page=256, dtype="bfloat16")
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    assert "pip install flash-attn" in (flash(half, GPU) or "")
    assert "pip install flashinfer-python" in (infer(half, GPU) or "")
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: object())
    assert flash(half, GPU) is None
    assert infer(half, GPU) is None
    assert "needs a GPU" in (flash(half, CPU) or "")
    assert "needs float16 or bfloat16" in (infer(make("decode"), GPU) or "")
    assert "multiple of 256 tokens, got 4" in (flash(make("paged-decode", dtype="bfloat16"), GPU) or "")
    assert "of one request only, got 2" in (infer(make("decode", dtype="bfloat16"), GPU) or "")
    assert "attention only" in (flash(make("rotary", dtype="bfloat16"), GPU) or "")
