"""The whole engine over tiny random models: attention in Triton's interpreter answers as torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_triton.backend import attn_backend
from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.engine import graphs as graphs_module
from drive import Replayer, build_engine, drain_events, run_all
from fakes import VOCAB
from random_models import VARIANTS, random_decoder, small_config

ROOT = Path(__file__).parents[2]
PROMPTS = ([7, 3, 250, 9, 11, 40, 41], [5], [200, 100, 7, 3, 250, 9, 2, 1, 0, 77, 78, 79, 80])
PAGED: dict[str, Any] = {"page_size": 4, "n_tokens": 96}
CONTIGUOUS: dict[str, Any] = {"n_tokens": None}

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU tensors need Triton's interpreter, which is off where a GPU is"
)


def build(variant: str, **sizes: Any) -> InferenceEngine:
    """An engine over a random decoder; head_dim 16 is the least the kernels take."""
    config = small_config(vocab_size=VOCAB, head_dim=16, **VARIANTS[variant])
    return build_engine(random_decoder(config, seed=3), max_batch_size=4, max_seq_len=48, **sizes)


def answer_greedily(engine: InferenceEngine, backend: str) -> list[list[int]]:
    """Token ids of the answers to PROMPTS, side by side."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    with attn_backend(backend):
        handles = [
            engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=2 + i, ignore_eos=True))
            for i, prompt in enumerate(PROMPTS)
        ]
    run_all(engine)
    for answer, handle in zip(tokens, handles, strict=True):
        for event in drain_events(handle):
            assert event.error is None
            answer.append(event.token_id)
    return tokens


@needs_interpreter
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [*((variant, PAGED) for variant in VARIANTS), ("plain", CONTIGUOUS), ("gemma", CONTIGUOUS)],
)
def test_interpreted_kernels_answer_as_torch_native(variant: str, sizes: dict[str, Any]) -> None:
    expected = answer_greedily(build(variant, **sizes), "torch_native")
    assert answer_greedily(build(variant, **sizes), "triton") == expected
    assert [len(answer) for answer in expected] == [2, 3, 4]


@needs_interpreter
def test_prompts_in_chunks_and_cached_prefixes_answer_the_same() -> None:
    expected = answer_greedily(build("plain", **PAGED), "torch_native")
    engine = build("plain", max_step_tokens=6, **PAGED)
    assert answer_greedily(engine, "triton") == expected
    assert answer_greedily(engine, "triton") == expected
    assert engine.get_stats()["cache_hit_rate"] > 0


@needs_interpreter
def test_captured_steps_of_the_triton_backend_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU goes: padded, with the bound of the longest context, on fixed buffers."""
    recorder = Replayer()
    monkeypatch.setattr(graphs_module, "why_no_graphs", lambda device: None)
    monkeypatch.setattr(graphs_module, "CudaRecorder", lambda device: recorder)
    expected = answer_greedily(build("gemma", cuda_graphs=False, **PAGED), "torch_native")
    engine = build("gemma", **PAGED)
    assert engine.graph_sizes == (1, 2, 4)
    assert answer_greedily(engine, "triton") == expected
    assert set(recorder.replayed) == {1, 2, 4}


# A minute of one idle core: 30 layers of interpreted kernels for 39 prompt tokens and 7 more.
@pytest.mark.timeout(900)
@pytest.mark.real_model
@needs_interpreter
def test_the_command_line_answers_the_same_through_interpreted_kernels() -> None:
    def generate(**environment: str) -> str:
        code = "from astrai_server.cli import main; main()"
        command = [sys.executable, "-c", code, "generate", "Count from 1 to 12.", "--quiet"]
        options = ["--temperature", "0", "--max-tokens", "8", "--dtype", "float32", "--max-seq-len", "256"]
        done = subprocess.run(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    expected = generate(ASTR_BACKEND="torch_native")
    assert len(expected) > 8
    assert generate(ASTR_BACKEND="triton", TRITON_INTERPRET="1") == expected
