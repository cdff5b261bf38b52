from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from astrai_bench.cli import bench
from astrai_bench.divergence import PrefillDecode, Tally, compare_models
from astrai_bench.errors import BenchError
from astrai_bench.quality_text import cut_windows, load_manual, read_text
from astrai_triton.cpu import why_not_build
from random_models import random_decoder, small_config


def table_model(table: Tensor) -> object:
    """Predicts by the last token alone."""

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        assert token_ids.shape == positions.shape
        return table[token_ids]

    return forward


def test_a_uniform_model_has_the_vocabularys_size_as_perplexity() -> None:
    tally = Tally()
    logits = torch.zeros(100, 50)
    tally.add(logits, logits, torch.arange(100) % 50)
    summary = tally.summarize()
    assert summary["perplexity"] == pytest.approx(50)
    assert summary["perplexity_error"] == pytest.approx(0, abs=1e-6)
    assert (summary["top1_agreement"], summary["kl_max"]) == (1.0, 0.0)


def test_divergence_is_from_the_reference_in_nats() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log() + 7.0
    tally = Tally()
    tally.add(logits, reference, torch.tensor([0]))
    summary = tally.summarize()
    assert summary["kl_mean"] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert summary["perplexity"] == pytest.approx(4)
    assert summary["top1_agreement"] == 0.0


def test_rows_are_counted_alike_in_one_piece_and_in_many() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, reference = (torch.randn(150, 20, generator=generator) for _ in range(2))
    targets = torch.randint(0, 20, (150,), generator=generator)
    whole, pieces = Tally(), Tally()
    whole.add(logits, reference, targets)
    for start in range(0, 150, 7):
        part = slice(start, start + 7)
        pieces.add(logits[part], reference[part], targets[part])
    assert pieces.summarize() == pytest.approx(whole.summarize())


def test_every_model_is_held_against_the_reference() -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(2))
    models = {"float32": table_model(table), "same": table_model(table), "other": table_model(-table)}
    windows = [[1, 2, 3, 4], [5, 6, 7, 8], [0, 1, 0, 1]]
    *_, last = compare_models(models, "float32", windows)
    found = {name: tally.summarize() for name, tally in last.items()}
    assert last["other"].num_tokens == 9
    assert found["same"] == found["float32"]
    assert found["float32"]["kl_max"] == 0.0
    assert found["other"]["kl_mean"] > 0.1
    assert found["other"]["top1_agreement"] < 1.0


def test_half_of_a_window_is_a_prefill_and_the_rest_is_decoded_to_the_same_logits() -> None:
    decoder = random_decoder(small_config(vocab_size=60))
    counts: list[int] = []

    class Counting:
        config, dtype = decoder.config, decoder.dtype

        def __call__(self, token_ids: Tensor, positions: Tensor, kv_cache: object) -> Tensor:
            counts.append(len(token_ids))
            return decoder(token_ids, positions, kv_cache)

    ids = torch.tensor([[(7 * i) % 60 for i in range(9)]])
    with torch.inference_mode():
        wanted = decoder(ids, torch.arange(9)[None])
    got = PrefillDecode(Counting())(ids, torch.arange(9)[None])
    assert counts == [4, 1, 1, 1, 1, 1]
    torch.testing.assert_close(got, wanted)


def test_windows_are_spread_over_the_text() -> None:
    assert cut_windows(list(range(10)), 2, 3) == [[0, 1], [3, 4], [6, 7]]
    with pytest.raises(BenchError, match=r"wanted at most 10 tokens, .* got 3 windows of 4"):
        cut_windows(list(range(10)), 4, 3)


def test_the_manual_is_long_and_the_same_every_time() -> None:
    assert load_manual() == load_manual()
    assert len(load_manual().content) > 300_000


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(BenchError, match=r"--text .*empty\.txt: wanted text"):
        read_text(path)
    with pytest.raises(BenchError, match=r"none\.txt"):
        read_text(tmp_path / "none.txt")


@pytest.mark.real_model
def test_bfloat16_is_close_to_float32_and_the_last_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    options = ["--context", "48", "--windows", "1", "--threads", "1", "--json", str(path)]
    result = CliRunner().invoke(bench, ["quality", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])
    assert document == json.loads(path.read_text(encoding="utf-8"))
    assert document["predicted"] == 47
    full, half = document["rows"]
    assert (full["dtype"], full["kl_max"], full["top1_agreement"]) == ("float32", 0.0, 1.0)
    assert half["dtype"] == "bfloat16"
    # Eight bits of mantissa: the divergence is near 1e-3 nats; wrong weights would give nats.
    assert 0.0 < half["kl_mean"] < 1e-2
    assert half["perplexity"] == pytest.approx(full["perplexity"], rel=0.05)


@pytest.mark.real_model
@pytest.mark.skipif(why_not_build() is not None, reason=str(why_not_build()))
def test_quantised_weights_are_rows_of_their_own_and_close_to_float32() -> None:
    options = [
        "--context",
        "48",
        "--windows",
        "2",
        "--threads",
        "1",
        "--quantize",
        "int8",
        "--quantize",
        "int4",
    ]
    result = CliRunner().invoke(bench, ["quality", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output.splitlines()[-1])["rows"]
    assert [row["quantize"] for row in rows] == ["none", "none", "int8", "int4"]
    assert {row["dtype"] for row in rows[2:]} == {"bfloat16"}
    full, *_, int8, int4 = rows
    assert 0.0 < int8["kl_mean"] < 2e-2
    # The model comes from four bits, in groups that int4 keeps.
    assert 0.0 < int4["kl_mean"] < 2e-2
    assert int8["perplexity"] == pytest.approx(full["perplexity"], rel=0.1)


@pytest.mark.real_model
def test_a_window_beyond_the_models_context_is_refused() -> None:
    result = CliRunner().invoke(bench, ["quality", "--context", "1000000"])
    assert "--context: wanted at most 8192" in str(result.exception)
