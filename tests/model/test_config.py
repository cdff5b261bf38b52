from __future__ import annotations

import pytest

from astrai_triton.model import LayerConfig, RopeConfig
from random_models import ROPE, small_config


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"base": 0.0}, "base"),
        ({"factor": 0.5}, "factor"),
        ({"scaling": "longrope"}, "scaling"),
        ({"scaling": "yarn", "factor": 2.0}, "original_max_len"),
        ({"scaling": "llama3", "original_max_len": 0}, "original_max_len"),
        ({"scaling": "dynamic", "original_max_len": 8, "rotary_dim": 2}, "rotary_dim"),
        ({"scaling": "llama3", "original_max_len": 8, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"freq_factors": (1.0, 2.0)}, "freq_factors"),
        ({"freq_factors": (1.0, 2.0, 0.0, 1.0)}, "freq_factors"),
        ({"beta_fast": 0.0}, "beta_fast"),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(fields, culprit):
    with pytest.raises(ValueError, match=culprit):
        RopeConfig(**{"rotary_dim": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"n_kv_heads": 3}, "n_q_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"layers": ()}, "layers"),
        ({"layers": (LayerConfig(rope=RopeConfig(rotary_dim=10)),)}, "rotary_dim"),
        ({"layers": (LayerConfig(rope=ROPE), LayerConfig(rope=RopeConfig(rotary_dim=4)))}, "rotary_dim"),
        ({"activation": "relu"}, "activation"),
        ({"pairing": "interleaved"}, "pairing"),
        ({"attn_softcap": -1.0}, "attn_softcap"),
    ],
)
def test_a_model_whose_fields_contradict_each_other_is_refused(fields, culprit):
    with pytest.raises(ValueError, match=culprit):
        small_config(**fields)


@pytest.mark.parametrize("window", [0, -2])
def test_a_window_without_rows_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        LayerConfig(rope=ROPE, window=window)


def test_kv_elements_count_k_and_v_of_all_layers():
    assert small_config().kv_elements_per_token == 2 * 2 * 2 * 8
