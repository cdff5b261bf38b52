"""``astrai chat``: one question, flags, keys, models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from astrai_server.keys import load_keys
from chatting import GOOD, Reply, chat, odd_server, talk
from fake_engine import FakeEngine, build_settings, serve_in_thread

KEY = "sk-0123456789abcdefghij"

# One question


def test_the_answer_goes_to_stdout_and_the_statistics_to_stderr() -> None:
    engine = FakeEngine(("Hel", "lo ", "ä\n", "**b**"), cached_tokens=5)
    with serve_in_thread(engine) as url:
        result = chat(url, "hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello ä\n**b**\n"
    assert result.stderr.startswith("[19 tokens in (5 cached), 4 out, first after ")
    assert engine.prompts == ["<user>hi<assistant>"]


def test_quiet_leaves_the_answer_alone() -> None:
    with serve_in_thread(FakeEngine()) as url:
        result = chat(url, "hi", "--quiet")
    assert (result.stdout, result.stderr) == ("Hello\n", "")


def test_flags_become_parameters_and_others_are_left_to_the_server() -> None:
    flags = ["--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "7", "--seed", "-3", "--model", "x/y"]
    with odd_server(GOOD) as server:
        chat(server.url, "hi", "--system", "be brief", *flags)
        chat(server.url, "hi")
    assert server.bodies[0] == {
        "model": "x/y",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": -3,
    }
    assert set(server.bodies[1]) == {"model", "messages", "stream", "stream_options"}


def test_a_piped_stdin_is_the_question_or_its_end() -> None:
    engine = FakeEngine()
    with serve_in_thread(engine) as url:
        assert chat(url, stdin="from a pipe\n").stdout == "Hello\n"
        assert chat(url, "sum up", stdin=b"line 1\nline \xff\n").exit_code == 0
    assert engine.prompts == [
        "<user>from a pipe<assistant>",
        "<user>sum up\n\nline 1\nline \ufffd<assistant>",
    ]


def test_no_question_is_a_usage_error() -> None:
    result = chat("http://127.0.0.1:9", stdin=" \n")
    assert result.exit_code == 2
    assert "there is no question" in result.stderr


def test_prompt_and_interactive_exclude_each_other() -> None:
    assert chat("http://127.0.0.1:9", "hi", "-i").exit_code == 2


@pytest.mark.parametrize(
    ("url", "cause"), [("ftp://x", "wanted http://HOST:PORT"), ("http://a:b@c", "--api-key")]
)
def test_a_wrong_url_is_a_usage_error(url: str, cause: str) -> None:
    result = chat(url, "hi")
    assert result.exit_code == 2
    assert cause in result.stderr


@pytest.mark.parametrize("flag", ["--temperature", "--top-p", "--timeout"])
@pytest.mark.parametrize("value", ["nan", "-1"])
def test_a_wrong_number_is_a_usage_error(flag: str, value: str) -> None:
    assert chat("http://127.0.0.1:9", "hi", flag, value).exit_code == 2


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_have_its_version(suffix: str) -> None:
    with serve_in_thread(FakeEngine()) as url:
        assert chat(url.removeprefix("http://") + suffix, "hi").stdout == "Hello\n"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_every_end_of_the_servers_is_a_success(finish: str) -> None:
    with serve_in_thread(FakeEngine(finish=finish)) as url:
        result = chat(url, "hi")
    assert result.exit_code == 0
    assert ("cut at the token limit" in result.stderr) == (finish == "length")


def test_the_command_needs_no_torch_and_its_help_no_aiohttp() -> None:
    code = (
        "import sys; from astrai_server.cli import main\n"
        "def run(*args):\n"
        "    try: main(['chat', *args])\n"
        "    except SystemExit as end: return end.code\n"
        "assert run('--help') == 0 and 'aiohttp' not in sys.modules and 'rich' not in sys.modules\n"
        "assert run('--url', sys.argv[1], 'hi') == 0 and 'torch' not in sys.modules\n"
    )
    with odd_server(GOOD) as server:
        command = [sys.executable, "-c", code, server.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("fine\n")


# Keys


@pytest.mark.parametrize("way", ["--api-key", "ASTRAI_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_sent_and_never_shown(way: str) -> None:
    flags = ["--api-key", KEY] if way == "--api-key" else []
    env = {} if flags else {way: KEY}
    refusal = Reply(
        (json.dumps({"error": {"message": f"bad key {KEY}!"}}).encode(),), 401, "application/json"
    )
    keys = load_keys(build_settings(), {"ASTRAI_API_KEYS": f"me: {KEY}"})
    with serve_in_thread(FakeEngine(), keys=keys) as url, odd_server(refusal) as server:
        assert chat(url, "hi", *flags, env=env).stdout == "Hello\n"
        result = chat(server.url, "hi", *flags, env=env)
        helped = chat(server.url, "--help", env=env)
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert "refuses this API key (401): bad key ***!" in result.stderr
    assert KEY not in result.output + helped.output


def test_a_key_that_no_header_can_carry_is_refused_unseen() -> None:
    result = chat("http://127.0.0.1:9", "hi", "--api-key", "geheim\nnis")
    assert result.exit_code == 2
    assert "characters that no header can carry" in result.stderr
    assert "geheim" not in result.stderr


# Models


def test_the_first_model_answers_unless_another_is_chosen() -> None:
    models = Reply((b'{"data": [{"id": "a"}, {"id": "b\\u001b[2J"}]}',), type="application/json")
    with odd_server(GOOD, models=models) as server:
        result = talk(server.url, "hi", "/model", "/model c", "hi")
    assert [body["model"] for body in server.bodies] == ["a", "c"]
    assert "2 models are served; a answers" in result.stderr
    assert "* a\n  b\n" in result.stderr
    assert "c answers from now on" in result.stderr


def test_a_server_without_a_list_of_models_is_asked_without_a_name() -> None:
    with odd_server(GOOD, models=Reply(status=404)) as server:
        assert chat(server.url, "hi").stdout == "fine\n"
    assert "model" not in server.bodies[0]


def test_a_list_of_models_that_is_none_is_said() -> None:
    with odd_server(GOOD, models=Reply((b"{}",), type="application/json")) as server:
        result = chat(server.url, "hi")
    assert result.exit_code == 1
    assert "no list of models; name one with --model" in result.stderr
