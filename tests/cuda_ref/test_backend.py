"""The backend over cuda_ref: what it refuses, that it runs when asked for, and that it answers as torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import cuda_ref
import oracle
from astrai_triton.backend import (
    ATTN_BACKEND,
    AttentionCall,
    CudaBackend,
    TorchNativeBackend,
    attention,
    attn_backend,
    backend_reasons,
    cuda,
)
from astrai_triton.backend.base import Forward
from astrai_triton.backend.selection import select
from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.errors import UnsupportedCallError
from drive import build_engine, drain_events, run_all
from fakes import VOCAB
from random_models import VARIANTS, random_decoder, small_config
from strategies import Heads, assert_close, build_packed, expected_packed, make_call, packed_case

ROOT = Path(__file__).parents[2]
ROWS = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(0))


def dense_call(q: torch.Tensor = ROWS, k: torch.Tensor = ROWS, **changes: Any) -> AttentionCall:
    plain = AttentionCall(q, k, k, None, 0, None, True, "dense", None, (-1, -1), 0.0, None)
    return attrs.evolve(plain, **changes)


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """What ``cuda_ref.why_not`` says, to be changed at will before the first question."""
    said: dict[str, str | None] = {"host": None, "cuda": None}
    monkeypatch.setattr(cuda_ref, "why_not", said.__getitem__)
    cuda._why_not_kind.cache_clear()
    yield said
    cuda._why_not_kind.cache_clear()


def test_it_is_unavailable_when_neither_build_can_be_had(reasons: dict[str, str | None]) -> None:
    reasons.update(host="no compiler", cuda="no device")
    assert CudaBackend().unavailable() == "no device; no compiler"
    assert backend_reasons()["cuda"] == "no device; no compiler"
    with attn_backend("cuda"), pytest.raises(UnsupportedCallError, match=r"'cuda' .*: no device; no"):
        attention(ROWS, ROWS, ROWS)


@pytest.mark.parametrize("able", ["host", "cuda"])
def test_one_build_is_enough_to_be_available_and_the_other_is_a_reason(
    reasons: dict[str, str | None], able: str
) -> None:
    other = "host" if able == "cuda" else "cuda"
    reasons[other] = "not to be had"
    assert CudaBackend().unavailable() is None
    refused = CudaBackend().why_not(dense_call())
    assert refused == (None if able == "host" else "not to be had")


def test_without_the_package_it_is_unavailable(
    reasons: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cuda_ref" else find_spec(name)
    )
    assert CudaBackend().unavailable() == "the package cuda_ref is not installed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": ROWS[..., :8], "k": ROWS[..., :8]}, "head_dim of 16 to 256 in steps of 8, got 8"),
        ({"v": torch.zeros(1, 3, 2, 264)}, "head_dim of 16 to 256 in steps of 8, got 264"),
        ({"q": ROWS.to("meta")}, "cuda_ref needs CUDA or CPU tensors, got meta"),
        ({"q": ROWS.clone().requires_grad_()}, "no backward; use torch.no_grad"),
        (
            {"sinks": torch.zeros(2).double()},
            "take sinks in float16, bfloat16 or float32, got torch.float64",
        ),
        ({}, None),
    ],
)
def test_why_not_names_what_the_kernels_cannot_do(
    reasons: dict[str, str | None], changes: dict[str, Any], reason: str | None
) -> None:
    got = CudaBackend().why_not(dense_call(**changes))
    assert (reason in got) if reason is not None and got is not None else got is reason


def test_it_runs_only_when_asked_for(reasons: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTR_BACKEND", raising=False)
    assert select(dense_call()).name is not ATTN_BACKEND.CUDA
    with attn_backend("cuda"):
        assert isinstance(select(dense_call()), CudaBackend)
    monkeypatch.setenv("ASTR_BACKEND", "cuda")
    assert isinstance(select(dense_call()), CudaBackend)


def test_asking_for_reasons_builds_nothing(
    reasons: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kind: str) -> None:
        raise AssertionError(kind)

    monkeypatch.setattr(cuda_ref, "build", fail)
    assert backend_reasons()["cuda"] is None
    assert CudaBackend().why_not(dense_call()) is None


HEADS = Heads(dtype=torch.float32, head_dim=16, value_dim=24, kv_heads=2, group=3)
CHANGES: list[dict[str, Any]] = [
    {},
    {"heads": attrs.evolve(HEADS, dtype=torch.bfloat16), "has_mask": True},
    {
        "holes": 0.3,
        "has_sinks": True,
        "options": oracle.Options(is_causal=True, window_size=(5, 0), softcap=2.0),
    },
]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("fwd", ["decode", "prefill"])
def test_packed_calls_write_the_cache_and_answer_as_the_oracle(changes: dict[str, Any], fwd: Forward) -> None:
    q_lens = (1, 1, 1) if fwd == "decode" else (2, 1, 5)
    case = packed_case(q_lens, (9, 1, 5), **{"heads": HEADS, **changes})
    tensors, others = build_packed(case), build_packed(case)
    got = CudaBackend().forward(make_call(case, tensors, fwd=fwd))
    assert_close(got, expected_packed(case, others))
    TorchNativeBackend().forward(make_call(case, others, fwd=fwd))
    for mine, theirs in (
        (tensors.cache.k_buffer, others.cache.k_buffer),
        (tensors.cache.v_buffer, others.cache.v_buffer),
    ):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0, equal_nan=True)
    assert (got is tensors.cache.decode_out) is (fwd == "decode")
    # Once stored, k and v are neither read nor written.
    call = make_call(case, attrs.evolve(tensors, k=torch.full_like(tensors.k, torch.nan)), fwd=fwd)
    again = CudaBackend().forward(attrs.evolve(call, is_stored=True))
    assert torch.equal(again, got)
    torch.testing.assert_close(tensors.cache.k_buffer, others.cache.k_buffer, atol=0, rtol=0, equal_nan=True)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("mask_dim", [0, 2, 3])
def test_dense_attention_is_what_torch_native_computes(q_len: int, mask_dim: int) -> None:
    generator = torch.Generator().manual_seed(q_len)
    q = torch.randn(2, q_len, 4, 16, generator=generator)
    k, v = torch.randn(2, 2, 5, 2, 16, generator=generator).unbind(0)
    shape = (2, 5) if mask_dim == 2 else (2, q_len, 5)
    mask = torch.rand(shape, generator=generator) < 0.7 if mask_dim else None
    outs = {}
    for backend in ("cuda", "torch_native"):
        with attn_backend(backend):
            outs[backend] = attention(q, k, v, attn_mask=mask, is_causal=True)
    assert_close(outs["cuda"], outs["torch_native"])


PROMPTS = ([7, 3, 250, 9, 11, 40, 41], [5], [200, 100, 7, 3, 250, 9, 2, 1, 0, 77])


def answer_greedily(variant: str, backend: str) -> list[list[int]]:
    """Answers of an engine over a random decoder to PROMPTS, side by side; head_dim 16 is the least."""
    config = small_config(vocab_size=VOCAB, head_dim=16, **VARIANTS[variant])
    engine: InferenceEngine = build_engine(
        random_decoder(config, seed=3), max_batch_size=4, max_seq_len=48, page_size=4, n_tokens=96
    )
    with attn_backend(backend):
        handles = [
            engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=2 + i, ignore_eos=True))
            for i, prompt in enumerate(PROMPTS)
        ]
    run_all(engine)
    events = [list(drain_events(handle)) for handle in handles]
    assert all(event.error is None for answer in events for event in answer)
    return [[event.token_id for event in answer] for answer in events]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("variant", ["plain", "gemma", "sinks"])
def test_a_whole_model_answers_as_with_torch_native(variant: str) -> None:
    expected = answer_greedily(variant, "torch_native")
    assert answer_greedily(variant, "cuda") == expected
    assert [len(answer) for answer in expected] == [2, 3, 4]


@pytest.mark.real_model
@pytest.mark.usefixtures("host")
def test_the_command_line_answers_the_same_through_the_reference_kernels() -> None:
    def generate(backend: str) -> str:
        code = "from astrai_server.cli import main; main()"
        command = [sys.executable, "-c", code, "generate", "Count from 1 to 12.", "--quiet"]
        options = ["--temperature", "0", "--max-tokens", "8", "--dtype", "float32", "--max-seq-len", "256"]
        done = subprocess.run(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "ASTR_BACKEND": backend},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    expected = generate("torch_native")
    assert len(expected) > 8
    assert generate("cuda") == expected
