from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from astrai_triton.engine.params import SamplingParams, check_vocab
from astrai_triton.grammar import Grammar

NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
COUNTS = {"max_tokens": 0, "min_tokens": 0, "top_k": -1, "seed": -(2**63)}


@pytest.mark.parametrize(("name", "bounds"), NUMBERS.items())
def test_a_number_is_accepted_up_to_its_bounds(name: str, bounds: tuple[float, float]) -> None:
    for bound in bounds:
        assert getattr(SamplingParams(**{name: bound}), name) == bound


@pytest.mark.parametrize(("name", "bounds"), NUMBERS.items())
def test_a_number_out_of_range_names_field_range_and_value(name: str, bounds: tuple[float, float]) -> None:
    low, high = bounds
    for value in (
        math.nextafter(low, -math.inf),
        math.nextafter(high, math.inf),
        math.nan,
        math.inf,
        -math.inf,
        10**400,
    ):
        with pytest.raises(ValueError, match=f"{name}: wanted {low} to {high}, got {value}"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", None, [1.0]])
def test_a_number_of_another_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}: wanted a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_an_integer_is_accepted_from_its_least_value_on(name: str, least: int) -> None:
    assert getattr(SamplingParams(**{name: least}), name) == least
    assert getattr(SamplingParams(**{name: 10**9}), name) == 10**9
    with pytest.raises(ValueError, match=f"{name}: wanted >= {least}, got {least - 1}"):
        SamplingParams(**{name: least - 1})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_an_integer_of_another_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}: wanted an integer"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["ignore_eos", "logprobs", "prompt_logprobs"])
def test_a_flag_is_a_bool_and_nothing_else(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: wanted True or False, got 1"):
        SamplingParams(**{name: 1})


def test_one_stop_string_and_several_are_both_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize(
    ("value", "error"), [([""], ValueError), ("", ValueError), ([1], TypeError), (None, TypeError)]
)
def test_an_empty_stop_or_one_that_is_no_string_is_an_error(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="stop: wanted"):
        SamplingParams(stop=value)


@pytest.mark.parametrize(
    ("value", "error"), [([-1], ValueError), ([1.0], TypeError), ([True], TypeError), (5, TypeError)]
)
def test_stop_token_ids_are_integers_from_zero_on(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="stop_token_ids: wanted"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({-1: 0.0}, ValueError),
        ({1: 100.5}, ValueError),
        ({1: math.nan}, ValueError),
        ({"1": 1.0}, TypeError),
        ({1: "1"}, TypeError),
        (None, TypeError),
        ([1], TypeError),
    ],
)
def test_logit_bias_maps_ids_to_numbers_within_100(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="logit_bias: wanted"):
        SamplingParams(logit_bias=value)


def test_alternatives_are_0_to_20_and_want_logprobs() -> None:
    assert SamplingParams(top_logprobs=20, logprobs=True).top_logprobs == 20
    for value in (-1, 21):
        with pytest.raises(ValueError, match=r"top_logprobs: wanted .* got"):
            SamplingParams(top_logprobs=value, logprobs=True)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="top_logprobs: wanted an integer"):
            SamplingParams(top_logprobs=wrong, logprobs=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top_logprobs: wanted logprobs=True beside it, got top_logprobs=3"):
        SamplingParams(top_logprobs=3)


@pytest.mark.parametrize("value", ["{}", {"type": "object"}, True])
def test_a_grammar_is_a_grammar_and_nothing_else(value: Any) -> None:
    grammar = Grammar.regex("a+")
    assert SamplingParams(grammar=grammar).grammar == grammar
    with pytest.raises(TypeError, match="grammar: wanted a Grammar"):
        SamplingParams(grammar=value)


def test_params_cannot_be_changed_from_outside() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_greedy_is_a_temperature_below_1e_minus_5() -> None:
    assert [SamplingParams(temperature=t).is_greedy for t in (0, 1e-30, 9.9e-6, 1e-5, 1)] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_asks_for_counts(name: str) -> None:
    assert SamplingParams(**{name: 0.5}).has_penalties
    assert not SamplingParams().has_penalties


def test_ids_beyond_the_vocabulary_are_refused_by_name() -> None:
    check_vocab(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,)), 10)
    with pytest.raises(ValueError, match=r"logit_bias: wanted token ids below 10 .* got 10"):
        check_vocab(SamplingParams(logit_bias={3: 1.0, 10: 1.0}), 10)
    with pytest.raises(ValueError, match=r"stop_token_ids: wanted token ids below 10 .* got 11"):
        check_vocab(SamplingParams(stop_token_ids=(11,)), 10)
