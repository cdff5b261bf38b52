from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from astrai_triton.backend import apply_rotary_emb
from astrai_triton.model import RopeConfig, RotaryEmbedding, permute_pairing
from astrai_triton.model.rotary import build_freqs_cis, compute_inv_freq

YARN = {"scaling": "yarn", "factor": 4.0, "original_max_len": 64}
SCALINGS = {
    "linear": ({"scaling": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (
        {"scaling": "dynamic", "factor": 2.0, "original_max_len": 64},
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "llama3": (
        {
            "scaling": "llama3",
            "factor": 8.0,
            "original_max_len": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn with all options": (
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
        },
    ),
    "yarn with a given gain": (
        {**YARN, "attention_factor": 0.6},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.6},
    ),
    "yarn with an empty ramp": (
        {**YARN, "original_max_len": 2},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_scaled_frequencies_equal_those_of_transformers(scaling, part):
    ours, theirs = SCALINGS[scaling]
    rope = RopeConfig(rotary_dim=int(32 * part), base=5000.0, **ours)
    hf_config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": part, **theirs},
    )
    wanted, wanted_gain = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](hf_config, "cpu", seq_len=150)
    inv_freq, gain = compute_inv_freq(rope, max_len=150)
    # transformers computes in float32.
    torch.testing.assert_close(inv_freq.float(), wanted, rtol=2e-6, atol=0.0)
    assert gain == pytest.approx(wanted_gain, rel=1e-12)


def test_dynamic_scaling_leaves_the_original_context_alone():
    rope = RopeConfig(rotary_dim=8, scaling="dynamic", factor=4.0, original_max_len=64)
    plain = RopeConfig(rotary_dim=8)
    assert torch.equal(compute_inv_freq(rope, max_len=64)[0], compute_inv_freq(plain, max_len=64)[0])
    assert not torch.equal(compute_inv_freq(rope, max_len=65)[0], compute_inv_freq(plain, max_len=65)[0])


def test_freq_factors_divide_the_frequencies_and_replace_the_scaling():
    factors = (1.0, 2.0, 4.0, 8.0)
    rope = RopeConfig(rotary_dim=8, scaling="linear", factor=3.0, freq_factors=factors)
    plain = compute_inv_freq(RopeConfig(rotary_dim=8), max_len=64)[0]
    torch.testing.assert_close(compute_inv_freq(rope, max_len=64)[0] * torch.tensor(factors), plain)


@pytest.mark.parametrize("start", [0, 131_000, 999_990])
def test_entries_are_right_to_1e_6_up_to_position_one_million(start):
    table = build_freqs_cis(RopeConfig(rotary_dim=64, base=100000.0), 1_000_000, start, start + 10)
    positions = np.arange(start, start + 10, dtype=np.longdouble)
    exponents = np.arange(0, 64, 2, dtype=np.longdouble) / 64
    angles = positions[:, None] * np.longdouble(100000.0) ** -exponents
    wanted = np.stack((np.cos(angles), np.sin(angles)), axis=-1)
    assert np.abs(table.numpy() - wanted).max() <= 1e-6


def test_the_gain_of_yarn_multiplies_both_cos_and_sin():
    rope = RopeConfig(rotary_dim=8, scaling="yarn", factor=1.0, original_max_len=64, attention_factor=0.5)
    plain = build_freqs_cis(RopeConfig(rotary_dim=8), 64, 0, 64)
    torch.testing.assert_close(build_freqs_cis(rope, 64, 0, 64), plain * 0.5)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_lookup_adds_pairs_to_the_shape_of_the_positions(shape):
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 16)
    position_ids = torch.arange(6)[: torch.Size(shape).numel()].view(shape)
    freqs_cis = rotary(position_ids)
    assert freqs_cis.shape == (*shape, 4, 2)
    assert torch.equal(freqs_cis.reshape(-1, 4, 2), rotary.freqs_cis[position_ids.flatten()])


def test_a_lookup_of_no_positions_is_empty():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 16)
    assert rotary(torch.zeros(0, dtype=torch.int64)).shape == (0, 4, 2)


def test_a_short_context_gets_a_short_table():
    assert RotaryEmbedding(RopeConfig(rotary_dim=8), 16).freqs_cis.shape == (16, 4, 2)


def test_the_table_grows_to_the_positions_asked_for_and_keeps_its_entries():
    rope = RopeConfig(rotary_dim=8, scaling="dynamic", factor=2.0, original_max_len=5000)
    rotary = RotaryEmbedding(rope, 20_000)
    rotary(torch.tensor([19_999]))
    assert torch.equal(rotary.freqs_cis, build_freqs_cis(rope, 20_000, 0, 20_000))


def test_the_table_never_grows_beyond_max_len():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 10_000)
    rotary.reserve(9_000)
    assert rotary.freqs_cis.shape[0] == 10_000
    with pytest.raises(ValueError, match="max_len=10000"):
        rotary.reserve(10_001)


def test_a_table_that_was_outgrown_stays_for_captured_graphs_that_read_it():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 20_000)
    first = rotary.freqs_cis.untyped_storage()
    address = first.data_ptr()
    del first
    rotary.reserve(9_000)
    assert [table.data_ptr() for table in rotary._outgrown] == [address]


def test_a_position_at_max_len_is_refused():
    with pytest.raises(ValueError, match="at most max_len=16"):
        RotaryEmbedding(RopeConfig(rotary_dim=8), 16)(torch.tensor([3, 16]))


def test_a_table_without_positions_is_refused():
    with pytest.raises(ValueError, match="max_len"):
        RotaryEmbedding(RopeConfig(rotary_dim=8), 0)


def test_casting_a_module_does_not_cast_its_table():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 16)
    before = rotary.freqs_cis.clone()
    module = torch.nn.Sequential(rotary, torch.nn.Linear(2, 2)).to(torch.bfloat16).half()
    assert module[1].weight.dtype == torch.float16
    assert torch.equal(rotary.freqs_cis, before)


def test_moving_a_module_moves_its_table():
    rotary = RotaryEmbedding(RopeConfig(rotary_dim=8), 16)
    assert torch.nn.Sequential(rotary).to("meta")[0].freqs_cis.device.type == "meta"


@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_permuting_to_the_other_pairing_and_back_changes_nothing(rotary_dim, shape):
    rows = torch.randn(shape)
    there = permute_pairing(rows, 3, 8, rotary_dim, "half", "adjacent")
    assert torch.equal(permute_pairing(there, 3, 8, rotary_dim, "adjacent", "half"), rows)


def test_half_rows_alternate_in_adjacent_order_and_the_rest_stays():
    rows = torch.arange(16)
    assert permute_pairing(rows, 2, 8, 6, "half", "adjacent").tolist() == [
        *(0, 3, 1, 4, 2, 5, 6, 7),
        *(8, 11, 9, 12, 10, 13, 14, 15),
    ]


def test_permuting_to_the_same_pairing_returns_the_tensor_itself():
    rows = torch.randn(16, 3)
    assert permute_pairing(rows, 2, 8, 8, "half", "half") is rows


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_scores_are_the_same_in_both_pairings(rotary_dim):
    freqs_cis = RotaryEmbedding(RopeConfig(rotary_dim=rotary_dim), 16)(torch.arange(5))
    q, k = torch.randn(5, 1, 8), torch.randn(5, 1, 8)

    def scores(pairing):
        rotated = [
            apply_rotary_emb(
                permute_pairing(x.reshape(5, 8).T, 1, 8, rotary_dim, "half", pairing).T.reshape(5, 1, 8),
                freqs_cis,
                pairing=pairing,
            )[:, 0]
            for x in (q, k)
        ]
        return rotated[0] @ rotated[1].T

    torch.testing.assert_close(scores("adjacent"), scores("half"))


@pytest.mark.parametrize(
    ("rows", "rotary_dim", "culprit"), [(15, 8, "tensor"), (16, 7, "rotary_dim"), (16, 10, "rotary_dim")]
)
def test_rows_that_are_not_whole_heads_are_refused(rows, rotary_dim, culprit):
    with pytest.raises(ValueError, match=culprit):
        permute_pairing(torch.zeros(rows), 2, 8, rotary_dim, "half", "adjacent")
