"""``astrai chat``: every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatting import DONE, END, GOOD, Reply, frame, odd_server, talk
from fake_engine import FakeEngine, serve_in_thread


def contents(bodies: list[dict[str, object]]) -> list[list[str]]:
    """Texts of the messages of each request."""
    return [[message["content"] for message in body["messages"]] for body in bodies]  # type: ignore[attr-defined]


def test_the_conversation_is_sent_with_every_question() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url:
        result = talk(url, "one", "", "   ", "two")
    assert result.stdout == "Hello\nHello\n"
    assert engine.prompts == ["<user>one<assistant>", "<user>one<assistant>Hello<user>two<assistant>"]


def test_the_history_has_the_text_as_the_model_wrote_it() -> None:
    with odd_server(Reply((frame("a\x1b[31m\r\n "), END, DONE))) as server:
        talk(server.url, "hi", "more")
    assert contents(server.bodies)[1] == ["hi", "a\x1b[31m\r\n ", "more"]


def test_reset_forgets_and_keeps_the_system_prompt() -> None:
    with odd_server(GOOD) as server:
        result = talk(server.url, "one", "/reset", "two", flags=("--system", "be brief"))
    assert contents(server.bodies) == [["be brief", "one"], ["be brief", "two"]]
    assert "a new conversation" in result.stderr


def test_system_sets_shows_and_removes() -> None:
    with odd_server(GOOD) as server:
        result = talk(
            server.url, "/system", "/system be \\", "brief", "one", "/system", "/unset system", "two"
        )
    assert contents(server.bodies) == [["be \nbrief", "one"], ["one", "fine", "two"]]
    assert server.bodies[0]["messages"][0]["role"] == "system"
    assert "no system prompt" in result.stderr
    assert "be \nbrief\n" in result.stderr


def test_undo_takes_back_question_by_question() -> None:
    with odd_server(GOOD) as server:
        result = talk(server.url, "one", "two", "/undo", "three", "/undo", "/undo", "/undo", "four")
    assert contents(server.bodies)[2:] == [["one", "fine", "three"], ["four"]]
    assert "took back 'two'; 1 answer left" in result.stderr
    assert "took back 'one'; nothing is left" in result.stderr
    assert "error: there is nothing to take back" in result.stderr


def test_retry_replaces_the_last_answer() -> None:
    replies = [Reply((frame(text), END, DONE)) for text in ("a", "b", "c")]
    with odd_server(*replies) as server:
        result = talk(server.url, "/retry", "one", "/retry", "two")
    assert "error: there is no question to ask again" in result.stderr
    assert result.stdout == "a\nb\nc\n"
    assert contents(server.bodies) == [["one"], ["one"], ["one", "b", "two"]]


def test_set_takes_any_parameter_and_unset_leaves_it_to_the_server() -> None:
    with odd_server(GOOD) as server:
        result = talk(
            server.url,
            "/set",
            "/set temperature 0.2",
            '/set stop=["x", "y"]',
            '/set chat_template_kwargs {"enable_thinking": false}',
            "/set user me and you",
            "one",
            "/set",
            "/unset temperature",
            "/unset stop",
            "two",
            flags=("--seed", "3"),
        )
    sent = {key: value for key, value in server.bodies[0].items() if key not in ("messages", "model")}
    assert sent == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        "temperature": 0.2,
        "stop": ["x", "y"],
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "me and you",
    }
    assert not {"temperature", "stop"} & set(server.bodies[1])
    assert 'seed = 3\ntemperature = 0.2\nstop = ["x", "y"]\n' in result.stderr


def test_set_reaches_the_engine() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url:
        result = talk(url, "/set temperature 9", "hi", "/set temperature 0", "/set seed 5", "/retry")
    assert "the server answers 422: temperature: wanted 0 to 2, got 9" in result.stderr
    assert [(params.temperature, params.seed) for params in engine.params] == [(0.0, 5)]
    assert result.stdout == "Hello\n"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/set temprature 0.2", "did you mean temperature? /unset temprature takes it back"),
        ("/set temperature", "error: wanted /set temperature VALUE"),
        ("/set temperature NaN", "error: wanted a number that JSON can carry, got NaN"),
        ("/set model x", "error: model cannot be set: use /model NAME"),
        ("/set 3 4", "error: wanted the name of a parameter"),
        ("/unset top_p", "error: wanted one of system, got 'top_p'"),
        ("/reset now", "error: /reset takes nothing after it, got 'now'"),
        ("/save", "error: wanted /save FILE"),
        ("/rety", "error: unknown command /rety; did you mean /retry?"),
        ("/etc/passwd: what is it?", "error: unknown command /etc/passwd:; /help shows those there are"),
        ("/\x1b[2J", "error: unknown command /;"),
    ],
)
def test_a_wrong_command_is_explained_and_asks_nothing(line: str, answer: str) -> None:
    with odd_server(GOOD) as server:
        result = talk(server.url, line)
    assert answer in result.stderr
    assert not server.bodies


def test_two_slashes_begin_a_question_with_one() -> None:
    with odd_server(GOOD) as server:
        talk(server.url, "//etc/passwd: what is it?")
    assert contents(server.bodies) == [["/etc/passwd: what is it?"]]


def test_a_question_may_have_several_lines() -> None:
    with odd_server(GOOD) as server:
        talk(server.url, "one\\", "  two\\", "three")
    assert contents(server.bodies) == [["one\n  two\nthree"]]


def test_help_names_every_command() -> None:
    with odd_server(GOOD) as server:
        result = talk(server.url, "/help")
    for name in ("retry", "undo", "reset", "system", "set", "unset", "model", "save", "help", "exit"):
        assert f"\n/{name} " in result.stderr


@pytest.mark.parametrize("command", ["/exit", "/quit"])
def test_exit_leaves(command: str) -> None:
    with odd_server(GOOD) as server:
        talk(server.url, "one", command, "two")
    assert len(server.bodies) == 1


def test_save_writes_json(tmp_path: Path) -> None:
    thought = frame(delta={"reasoning_content": "hm"})
    file = tmp_path / "chat.json"
    with odd_server(Reply((thought, frame("ä\x1b"), END, DONE)), Reply((frame("pa"),))) as server:
        result = talk(
            server.url,
            "/set temperature 0",
            "one",
            f"/save {file}",
            "two",
            f"/save {file}",
            flags=("--api-key", "geheim"),
        )
    assert f"saved as {file}" in result.stderr
    assert json.loads(file.read_text()) == {
        "model": "odd",
        "parameters": {"temperature": 0},
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "ä\x1b", "finish_reason": "stop", "reasoning_content": "hm"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "pa", "finish_reason": "error"},
        ],
    }
    assert "geheim" not in file.read_text()


def test_save_overwrites_nothing_of_others_and_survives_a_bad_path(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with odd_server(GOOD) as server:
        result = talk(server.url, f"/save {file}", f"/save {tmp_path}/no/where", f"/save {tmp_path}", "hi")
    assert file.read_text() == "mine"
    assert f"error: {file} exists already; choose another name" in result.stderr
    assert "no/where: No such file or directory" in result.stderr
    assert f"error: {tmp_path} exists already" in result.stderr
    assert result.stdout == "fine\n"
