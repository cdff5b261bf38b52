from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from astrai_bench.errors import BenchError
from astrai_bench.load import Load, Run, draw_arrivals, run_load
from astrai_bench.prompts import Prompt, fit_words, make_words, read_prompts
from astrai_bench.protocols import Answer, EventReader, Question, find_protocol
from scripted_server import Script, serve_script


def make_load(url: str, protocol: str = "chat", **changes: object) -> Load:
    question = Question(model="scripted", max_tokens=4, temperature=0.0, ignore_eos=False)
    options: dict[str, object] = {"num_requests": 6, "clients": 2, "input_tokens": 20, "question": question}
    return Load(url=url, protocol=find_protocol(protocol), **(options | changes))  # type: ignore[arg-type]


def send(script: Script, protocol: str = "chat", **changes: object) -> Run:
    with serve_script(script) as url:
        return asyncio.run(run_load(make_load(url, protocol, **changes)))


@pytest.mark.parametrize("protocol", ["chat", "completions", "anthropic"])
def test_every_protocol_gives_times_and_the_servers_counts(protocol: str) -> None:
    run = send(Script(template_tokens=7), protocol)
    assert [answer.error for answer in run.answers] == [None] * 6
    for answer in run.answers:
        assert (answer.input_tokens, answer.output_tokens, len(answer.chunks_s)) == (20, 4, 4)
        assert answer.done_s is not None
        assert answer.sent_s < answer.chunks_s[0] <= answer.chunks_s[-1] <= answer.done_s
    assert run.started_s <= min(answer.sent_s for answer in run.answers)
    assert run.ended_s >= max(answer.done_s or 0 for answer in run.answers)
    assert run.cpu_s > 0


@pytest.mark.parametrize("protocol", ["chat", "anthropic"])
def test_cached_tokens_are_part_of_the_input(protocol: str) -> None:
    run = send(Script(template_tokens=7, cached_tokens=5), protocol)
    assert {(answer.input_tokens, answer.cached_tokens) for answer in run.answers} == {(20, 5)}


def test_without_usage_a_word_is_a_token_and_chunks_are_counted() -> None:
    run = send(Script(has_usage=False))
    assert run.num_words == 20
    assert {(answer.input_tokens, answer.output_tokens) for answer in run.answers} == {(None, None)}
    assert {answer.num_tokens for answer in run.answers} == {4}


def test_a_closed_loop_has_as_many_requests_open_as_clients() -> None:
    script = Script(gap_s=0.002)
    run = send(script, clients=3, num_requests=12, num_warmup=3)
    assert script.most_open == 3
    assert len(run.answers) == 12


def test_warm_up_is_sent_but_not_measured_and_no_prompt_comes_twice() -> None:
    script = Script()
    run = send(script, num_warmup=5)
    # One probe finds the length, since nothing stands around the words.
    assert (len(script.bodies), len(run.answers)) == (12, 6)
    assert len({body["messages"][0]["content"] for body in script.bodies}) == 12
    assert script.bodies[0]["max_tokens"] == 1


def test_an_open_loop_does_not_wait_for_answers() -> None:
    script = Script(gap_s=0.05)
    run = send(script, clients=None, rate=200.0, num_requests=8)
    assert script.most_open > 3
    assert len(run.late_s) == 8
    gaps = [answer.sent_s - run.started_s for answer in run.answers]
    for sent, due in zip(gaps, draw_arrivals(200.0, 8, 0), strict=True):
        assert sent >= due - 1e-3


def test_arrivals_are_a_seeded_poisson_process() -> None:
    due = draw_arrivals(5.0, 4000, seed=3)
    assert due == draw_arrivals(5.0, 4000, seed=3)
    assert due != draw_arrivals(5.0, 4000, seed=4)
    assert due[0] == 0
    gaps = [after - before for before, after in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    # Of an exponential distribution mean and deviation are equal; 4000 gaps are within 5 %.
    assert mean == pytest.approx(0.2, rel=0.05)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.2, rel=0.1)


def test_failures_are_told_apart() -> None:
    # Request 0 is the probe.
    script = Script(statuses={1: 429, 2: 503}, broken=frozenset([3]), event_errors=frozenset([4]))
    run = send(script, clients=1)
    assert [answer.error for answer in run.answers] == [
        "status 429",
        "status 503",
        "broken off",
        "error event",
        None,
        None,
    ]
    assert "refused by script" in run.answers[0].detail
    assert "out of pages" in run.answers[3].detail


def test_a_request_is_sent_again_when_its_connection_was_closed_meanwhile() -> None:
    script = Script(drops="reused")
    run = send(script, clients=2, num_warmup=2)
    assert [answer.error for answer in run.answers] == [None] * 6
    assert (len(script.bodies), len(script.connections)) == (9, 9)


def test_a_server_that_drops_new_connections_has_failed() -> None:
    with pytest.raises(BenchError, match="nothing was measured: disconnected"):
        send(Script(drops="all"))


def test_an_answer_without_text_is_a_failure() -> None:
    assert {answer.error for answer in send(Script(num_chunks=0)).answers} == {"no tokens"}


def test_a_slow_answer_times_out() -> None:
    question = Question(model="m", max_tokens=50, temperature=0.0, ignore_eos=False)
    run = send(Script(gap_s=0.03), timeout_s=0.5, num_requests=1, question=question)
    assert run.answers[0].error == "timeout"


def test_a_server_that_refuses_the_first_request_ends_the_run_with_its_words() -> None:
    with pytest.raises(BenchError, match=r"nothing was measured: status 400 .*refused by script"):
        send(Script(statuses={0: 400}))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9/v1/chat/completions: .* cannot connect"):
        asyncio.run(run_load(make_load("http://127.0.0.1:9")))


def test_prompts_of_a_file_are_sent_in_turn_with_their_own_limits(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ["one two", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    path.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "three", "max_tokens": 2}])) + "\n\n")
    script = Script()
    run = send(script, "anthropic", prompts=read_prompts(path), clients=1)
    first, second, third = script.bodies[1:4]
    assert first["messages"] == [{"role": "user", "content": "one two"}]
    assert (second["system"], second["messages"]) == ("s", [{"role": "user", "content": "u"}])
    assert [answer.output_tokens for answer in run.answers] == [4, 4, 2, 4, 4, 2]
    assert third["max_tokens"] == 2


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"prompts\.jsonl:1: wanted JSON"),
        ("3", "wanted a string or an object"),
        ("{}", r"wanted either prompt .* or messages"),
        ('{"prompt": "a", "messages": []}', "wanted either prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: wanted an integer >= 1, got 0"),
        ("", "wanted at least one line"),
    ],
)
def test_a_bad_line_is_named(line: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(BenchError, match=text):
        read_prompts(path)


@pytest.mark.parametrize(
    ("per_word", "template"),
    [(1.0, 0), (1.0, 31), (1.3, 9), (2.0, 5)],
    ids=["plain", "chat", "long", "double"],
)
def test_words_are_fitted_to_the_servers_count(per_word: float, template: int) -> None:
    probes: list[int] = []

    async def probe(num_words: int) -> int:
        probes.append(num_words)
        return round(num_words * per_word) + template

    words = asyncio.run(fit_words(probe, 200))
    assert abs(round(words * per_word) + template - 200) <= per_word / 2
    assert len(probes) <= 5


def test_a_template_longer_than_the_prompt_is_refused() -> None:
    async def probe(num_words: int) -> int:
        return num_words + 31

    with pytest.raises(BenchError, match=r"wanted at least 32, .* got 16"):
        asyncio.run(fit_words(probe, 16))


def test_words_are_the_same_for_a_seed_and_differ_from_the_first_on() -> None:
    assert make_words(9, "a") == make_words(9, "a")
    beginnings = {(make_words(9, str(seed)).text or "")[:12] for seed in range(30)}
    assert len(beginnings) > 25


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_found_however_the_stream_is_torn(size: int, end: bytes) -> None:
    lines = [b"event: a", b"data: {1}", b"", b": a comment", b"", b"data:{2}", b"data: {3}", b"", b""]
    stream, reader = end.join(lines), EventReader()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [event for piece in pieces for event in reader.push(piece)] == [b"{1}", b"{2}\n{3}"]


def test_a_malformed_event_is_a_failure() -> None:
    for data in (b"no json", b"[1]"):
        answer = Answer(sent_s=0.0)
        assert find_protocol("chat").read(answer, data, 1.0) is False
        assert answer.error == "malformed event"


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(BenchError, match="wanted one of chat, completions, anthropic, got 'grpc'"):
        find_protocol("grpc")


def test_completions_take_no_conversation() -> None:
    prompt = Prompt(messages=({"role": "user", "content": "hi"},))
    question = Question(model="m", max_tokens=1, temperature=0.0, ignore_eos=True)
    with pytest.raises(BenchError, match="use --protocol chat"):
        find_protocol("completions").build(question, prompt)
    assert find_protocol("chat").build(question, prompt)["ignore_eos"] is True
