from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.engine.stops import StopMatcher

# Two letters make overlapping and nested stops likely.
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
texts = st.text("ab", max_size=24)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop that starts first, and that stop; of two at one place the shorter."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def pieces_of(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[low:high] for low, high in pairwise(edges)]


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    released = [matcher.push(piece) for piece in pieces]
    return "".join(released) + matcher.flush(), matcher.matched


@given(stop_lists, texts, st.lists(st.integers(0, 100), max_size=8))
def test_any_chunking_gives_the_text_before_the_earliest_stop(
    stops: list[str], text: str, borders: list[int]
) -> None:
    assert run(stops, pieces_of(text, borders)) == cut(text, stops)


@given(stop_lists, texts)
def test_a_character_is_held_exactly_while_a_continuation_could_cut_it(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    released = matcher.push(text)
    # What every continuation leaves in place: the text up to the first position where a stop may start.
    futures = [text] + [
        text[:start] + stop for start in range(len(text)) for stop in stops if stop.startswith(text[start:])
    ]
    sure = min((cut(future, stops)[0] for future in futures), key=len)
    assert released == sure


@given(stop_lists, texts)
def test_a_match_is_reported_as_soon_as_no_continuation_can_change_it(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    matcher.push(text)
    futures = [text] + [
        text[:start] + stop for start in range(len(text)) for stop in stops if stop.startswith(text[start:])
    ]
    outcomes = {cut(future, stops) for future in futures}
    settled = len(outcomes) == 1 and cut(text, stops)[1] is not None
    assert (matcher.matched is not None) == settled


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["one E", "N", "D two"], ["END"], "one ", "END"),
        (["one END two"], ["END"], "one ", "END"),
        (["a", "b", "c", "d"], ["d", "bc"], "a", "bc"),
        (["xabc"], ["bc", "abcd"], "xa", "bc"),
        (["xabcd"], ["bc", "abcd"], "x", "abcd"),
        (["xabc"], ["abc", "ab"], "x", "ab"),
        (["xabce"], ["xabcd", "ab", "abc"], "x", "ab"),
        (["\n", "\nUser:"], ["\n\nUser:", "\nUser:"], "", "\n\nUser:"),
        (["caf", "é 🙂", "!"], ["é 🙂"], "caf", "é 🙂"),
        ([" leading"], ["END"], " leading", None),
        (["EN"], ["END"], "EN", None),
        ([], ["END"], "", None),
    ],
)
def test_stops_across_inside_and_beside_pieces(
    pieces: list[str], stops: list[str], text: str, matched: str | None
) -> None:
    assert run(stops, pieces) == (text, matched)


def test_without_stops_every_piece_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert [matcher.push(piece) for piece in ("a", "", "\n")] == ["a", "", "\n"]
    assert matcher.flush() == ""


def test_nothing_is_released_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "b"


def test_flush_settles_on_a_stop_that_waited_for_an_earlier_one() -> None:
    matcher = StopMatcher(["abcd", "b"])
    assert matcher.push("xabc") == "x"
    assert matcher.matched is None
    assert matcher.flush() == "a"
    assert matcher.matched == "b"


def test_an_empty_stop_is_an_error() -> None:
    with pytest.raises(ValueError, match="stops: wanted strings that are not empty"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize(
    "stops",
    [["a" * 4000 + "b"], [f"stop number {number}" for number in range(1000)] + ["a" * 4000 + "b"]],
    ids=["one", "a thousand"],
)
def test_a_stop_that_almost_matches_everywhere_costs_linear_time(stops: list[str]) -> None:
    def seconds(num_chars: int) -> float:
        matcher = StopMatcher(stops)
        start = time.process_time()
        for _ in range(num_chars):
            matcher.push("a")
        return time.process_time() - start

    seconds(1000)
    # About 0.1 s. The bound leaves room for a busy machine, not for 4000 held characters read each time.
    assert seconds(60_000) < 2.0
