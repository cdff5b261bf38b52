"""Prefill over the Triton backend: one launch turns q and k and writes K and V, with the bits of several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_triton.backend import attention, attn_backend
from astrai_triton.cache import PagePool
from astrai_triton.model import Decoder, LayerConfig, ModelConfig, RopeConfig, layers
from astrai_triton.ops import rotary
from random_models import VARIANTS, random_decoder, small_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(3, 12)), [11, 3, 40]]
PREFILL, DECODE = ([6, 3], [9, 3]), ([10, 4],)
"""Tokens of each prompt that are in the cache after a step."""
MODELS = {
    **VARIANTS,
    "whole heads turn": {"layers": (LayerConfig(rope=RopeConfig(rotary_dim=16)),) * 2},
    "norm of heads": {"qk_norm": True},
}


def config_of(name: str, pairing: str) -> ModelConfig:
    """A head_dim of 16 is the least the kernels take."""
    return small_config(head_dim=16, pairing=pairing, **MODELS[name])


class Run:
    """The prompts, step by step: logits of each, and what the pool holds at the end."""

    def __init__(self, decoder: Decoder, backend: str, steps: tuple[list[int], ...]) -> None:
        config = decoder.config
        pool = PagePool(
            n_layers=config.n_layers,
            n_q_heads=config.n_q_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_batch_size=4,
            max_seq_len=64,
            max_step_tokens=64,
            page_size=4,
            n_tokens=96,
            device=DEVICE,
        )
        leases: list[Any] = [pool.open(prompt) for prompt in PROMPTS]
        sequences = [[*prompt, 5] for prompt in PROMPTS]
        done = [0] * len(PROMPTS)
        self.logits = []
        for ends in steps:
            rows = [b for b in range(len(PROMPTS)) if ends[b] > done[b]]
            for b in rows:
                pool.extend(leases[b], ends[b])
            lens, stops = [ends[b] - done[b] for b in rows], [ends[b] for b in rows]
            cache = pool.bind_tasks([leases[b] for b in rows], lens, stops)
            tokens = [token for b in rows for token in sequences[b][done[b] : ends[b]]]
            positions = [position for b in rows for position in range(done[b], ends[b])]
            with attn_backend(backend):
                ids, at = (torch.tensor(values, device=DEVICE) for values in (tokens, positions))
                self.logits.append(decoder(ids, at, cache))
            done = list(ends)
        self.pool = torch.stack((pool.storage.k_buffer, pool.storage.v_buffer))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of every rotary kernel that is launched."""
    names: list[str] = []

    def count(name: str) -> None:
        kernel = getattr(rotary, name)

        class Counted:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                names.append(name)
                return kernel[grid]

        monkeypatch.setattr(rotary, name, Counted())

    count("rotate_qk_kernel")
    count("append_rotated_kernel")
    return names


def attend_in_torch(*args: Any, **options: Any) -> torch.Tensor:
    """Interpreted attention would take most of the time, and is compared elsewhere."""
    with attn_backend("torch_native"):
        return attention(*args, **options)


def assert_same(got: Run, want: Run) -> None:
    for have, should in zip(got.logits, want.logits, strict=True):
        assert torch.equal(have, should)
    assert torch.equal(got.pool, want.pool)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_pool_have_the_bits_of_rotary_and_separate_writes(
    name: str, pairing: str, monkeypatch: pytest.MonkeyPatch, launches: list[str]
) -> None:
    decoder = random_decoder(config_of(name, pairing)).to(DEVICE)
    monkeypatch.setattr(layers, "attention", attend_in_torch)
    got = Run(decoder, "triton", PREFILL)
    assert launches == ["append_rotated_kernel"] * 4
    monkeypatch.setattr(layers, "append_rotated_", lambda *args, **options: False)
    assert_same(got, Run(decoder, "triton", PREFILL))
    assert launches[4:] == ["rotate_qk_kernel"] * 4


def test_a_step_of_either_kind_launches_one_rotary_kernel_a_layer(
    monkeypatch: pytest.MonkeyPatch, launches: list[str]
) -> None:
    decoder = random_decoder(config_of("norm of heads", "half")).to(DEVICE)
    got = Run(decoder, "triton", PREFILL + DECODE)
    assert launches == ["append_rotated_kernel"] * 4 + ["rotate_qk_kernel"] * 2
    monkeypatch.setattr(layers, "append_rotated_", lambda *args, **options: False)
    assert_same(got, Run(decoder, "triton", PREFILL + DECODE))


@pytest.mark.skipif(DEVICE != "cpu", reason="where a GPU is, its kernel turns q and k for every backend")
def test_torch_native_on_a_cpu_launches_no_kernel(launches: list[str]) -> None:
    Run(random_decoder(config_of("plain", "half")), "torch_native", PREFILL + DECODE)
    assert launches == []
