from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_server.capacity import MIB, count_parameters, plan_pool
from astrai_server.config import CacheSettings, ConfigError, ServerSettings, Settings
from astrai_triton.model.config import LayerConfig, ModelConfig, RopeConfig


def make_model(**changes: Any) -> ModelConfig:
    """SmolLM2-135M's shape."""
    shape: dict[str, Any] = {
        "arch": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "n_q_heads": 9,
        "n_kv_heads": 3,
        "head_dim": 64,
        "max_seq_len": 8192,
        "tie_embeddings": True,
        "layers": (LayerConfig(rope=RopeConfig(rotary_dim=64)),) * 30,
    }
    return ModelConfig(**(shape | changes))


def make_settings(cache: dict[str, Any] | None = None, **server: Any) -> Settings:
    return Settings(server=ServerSettings(**server), cache=CacheSettings(**(cache or {})))


def test_an_open_pool_holds_2048_tokens_for_every_request() -> None:
    plan = plan_pool(make_settings(max_batch_size=16), make_model(), 4, 100 << 30)
    assert (plan.n_tokens, plan.max_seq_len, plan.bytes_per_token) == (16 * 2048, 8192, 46080)
    assert plan.num_bytes == 16 * 2048 * 46080


def test_an_open_pool_holds_one_whole_context_at_least() -> None:
    assert plan_pool(make_settings(max_batch_size=1), make_model(), 4, None).n_tokens == 8192


def test_an_open_pool_of_short_contexts_is_no_larger_than_they_need() -> None:
    plan = plan_pool(
        make_settings({"page_size": 64}, max_batch_size=3, max_seq_len=100), make_model(), 4, None
    )
    assert plan.n_tokens == 320


def test_an_open_pool_takes_half_of_little_memory() -> None:
    plan = plan_pool(make_settings({"page_size": 16}), make_model(), 4, 46080 * 1000)
    assert plan.n_tokens == 496
    assert "free memory" in plan.reason


def test_a_pool_of_given_size_is_taken_as_it_is() -> None:
    plan = plan_pool(make_settings({"n_tokens": 160}), make_model(), 2, 100 << 30)
    assert (plan.n_tokens, plan.bytes_per_token, plan.reason) == (160, 23040, "cache.n_tokens")


def test_a_pool_larger_than_the_memory_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"within the 100 MiB .* got 703 MiB .* lower it or server\.max_batch_size"
    ):
        plan_pool(make_settings({"n_tokens": 16000}), make_model(), 4, 100 * MIB)


def test_memory_for_not_even_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="within the 0 MiB of free memory"):
        plan_pool(make_settings(), make_model(), 4, 1000)


def test_contiguous_mode_reserves_every_context() -> None:
    plan = plan_pool(
        make_settings({"mode": "contiguous"}, max_batch_size=4, max_seq_len=100), make_model(), 4, None
    )
    assert (plan.n_tokens, plan.is_paged) == (400, False)


def test_contiguous_mode_shortens_an_open_context_to_the_memory() -> None:
    plan = plan_pool(make_settings({"mode": "contiguous"}, max_batch_size=4), make_model(), 4, 46080 * 8000)
    assert (plan.max_seq_len, plan.n_tokens) == (1000, 4000)


def test_an_open_context_ends_at_32768_and_at_the_models() -> None:
    assert plan_pool(make_settings(), make_model(max_seq_len=131072), 4, None).max_seq_len == 32768
    assert plan_pool(make_settings(), make_model(max_seq_len=512), 4, None).max_seq_len == 512


def test_a_given_context_may_be_longer_than_the_default_but_not_than_the_models() -> None:
    settings = make_settings(max_seq_len=100_000)
    assert plan_pool(settings, make_model(max_seq_len=131072), 4, None).max_seq_len == 100_000
    with pytest.raises(ConfigError, match=r"server\.max_seq_len: wanted at most 8192, .* got 100000"):
        plan_pool(settings, make_model(), 4, None)


def test_requests_at_once_are_bounded_by_pool_and_batch() -> None:
    plan = plan_pool(make_settings({"n_tokens": 1600}), make_model(), 4, None)
    assert [plan.count_requests(tokens, 16) for tokens in (10, 400, 1600, 1601)] == [16, 4, 1, 0]


def test_requests_of_contiguous_mode_take_a_context_each() -> None:
    plan = plan_pool(
        make_settings({"mode": "contiguous"}, max_batch_size=4, max_seq_len=100), make_model(), 4, None
    )
    assert plan.count_requests(10, 4) == 4


def test_parameters_are_counted_to_a_percent() -> None:
    assert count_parameters(make_model()) == pytest.approx(134_515_008, rel=0.01)
    untied = count_parameters(make_model(tie_embeddings=False))
    assert untied - count_parameters(make_model()) == 49152 * 576


@given(
    batch=st.integers(1, 64),
    page_size=st.integers(1, 128),
    context=st.integers(2, 8192) | st.none(),
    free=st.integers(0, 1 << 40) | st.none(),
    mode=st.sampled_from(["paged", "contiguous"]),
)
def test_a_plan_fits_the_memory_and_is_whole_pages(
    batch: int, page_size: int, context: int | None, free: int | None, mode: str
) -> None:
    settings = make_settings(
        {"mode": mode, "page_size": page_size}, max_batch_size=batch, max_seq_len=context
    )
    try:
        plan = plan_pool(settings, make_model(), 2, free)
    except ConfigError:
        assert free is not None
        return
    assert free is None or plan.num_bytes <= free
    assert plan.n_tokens > 0
    assert plan.max_seq_len >= 2
    if mode == "paged":
        assert plan.n_tokens % page_size == 0
    else:
        assert plan.n_tokens == batch * plan.max_seq_len
