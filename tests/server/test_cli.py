from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from astrai_server import loading, run
from astrai_server.cli import main
from astrai_server.config import Settings, list_options
from astrai_server.keys import KeyRing
from astrai_server.terminal import LoadDisplay
from astrai_triton.engine import InferenceEngine
from fakes import ByteTokenizer, ScriptedModel, answer_script

ANSWERS = {"<user>hello<assistant>": "Hällo there.\n", "<assistant>": "what?", "once": " upon a time"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASTRAI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def invoke(*args: str, **options: Any) -> Result:
    return CliRunner().invoke(main, list(args), prog_name="astrai", **options)


def assert_fails_with(result: Result, status: int, text: str) -> None:
    """The cause is on one line, without a traceback."""
    assert result.exit_code == status, result.output
    assert text in result.stderr
    assert "Traceback" not in result.output
    if status == 1:
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


# The command as a whole


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["generate"], ["check"], ["warmup"], ["replay"], ["info"], ["chat"]]
)
def test_every_command_explains_itself(command: list[str]) -> None:
    for flag in ("-h", "--help"):
        result = invoke(*command, flag)
        assert result.exit_code == 0
        assert "Usage: astrai" in result.output


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from astrai_server.cli import main; main(['serve', '--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_one_line() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"astrai-triton (\d[\w.+]*|not installed)\n", result.output)


def test_every_setting_that_has_a_flag_is_in_the_help_with_its_default() -> None:
    text = " ".join(invoke("serve", "--help", terminal_width=300).output.split())
    for option in list_options():
        if option.has_flag:
            assert f"{option.flag} " in text
            assert option.doc in text


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["serv"], "No such command 'serv'"),
        (["serve", "--prot", "1"], "No such option"),
        (["serve", "--port", "x"], "Invalid value for '--port': wanted an integer from 0 to 65535, got 'x'"),
        (["serve", "--port", "70000"], "wanted an integer from 0 to 65535, got 70000"),
        (["serve", "--dtype", "bf16"], "wanted auto, float32, bfloat16 or float16, got 'bf16'"),
        (["serve", "--n-tokens", "["], "wanted an integer from 1 to 2147483647 or null; not valid YAML"),
        (["serve", "a", "--param-path", "b"], "server.param_path was given twice: 'a' and 'b'"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "x", "--temperature", "3"], "3.0 is not in the range 0<=x<=2"),
        (["generate", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["check", "a.yaml", "b.yaml"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_status_2(args: list[str], text: str) -> None:
    assert_fails_with(invoke(*args), 2, text)


@pytest.mark.parametrize("command", [["serve", "-c"], ["generate", "x", "-c"], ["check"]])
def test_a_wrong_configuration_is_one_line_and_status_1(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("server:\n  prot: 1\n")
    assert_fails_with(
        invoke(*command, str(path)), 1, f"{path}:2: unknown key 'prot' in section 'server'; did you"
    )


def test_a_wrong_variable_is_one_line_and_status_1() -> None:
    assert_fails_with(
        invoke("check", env={"ASTRAI_SERVER__PORT": "x"}), 1, "ASTRAI_SERVER__PORT: server.port: wanted"
    )


def test_debug_lets_the_exception_through(tmp_path: Path) -> None:
    result = invoke("check", "--debug", str(tmp_path / "none.yaml"))
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "ConfigError"


def test_an_unforeseen_error_is_one_line_that_names_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(loading, "load_engine", explode)
    assert_fails_with(
        invoke("generate", "x"), 1, "Error: ZeroDivisionError: a b (--debug shows the traceback)"
    )


@pytest.mark.parametrize(("given", "used"), [(None, "10000"), ("7", "7")])
def test_idle_threads_spin_briefly_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    invoke("info")
    assert os.environ["GOMP_SPINCOUNT"] == used


# serve


@attrs.define
class ServerCall:
    """What ``run_server`` was called with; plays the given part of a server's life."""

    settings: Settings | None = None
    keys: KeyRing | None = None
    urls: list[str] = attrs.field(factory=lambda: ["http://127.0.0.1:8000"])
    status: int = 0

    def __call__(
        self, settings: Settings, load: Callable[[], Any], *, keys: KeyRing, on_listening: Any, on_ready: Any
    ) -> int:
        self.settings, self.keys = settings, keys
        on_listening(self.urls)
        with load() as engine:
            on_ready(engine)
        return self.status


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, scripted_engine: list[Settings]) -> ServerCall:
    call = ServerCall()
    monkeypatch.setattr(run, "run_server", call)
    return call


@pytest.fixture
def scripted_engine(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings of every engine that was loaded; the engine is real, the model and the tokenizer are not."""
    seen: list[Settings] = []

    def load(settings: Settings, audience: LoadDisplay, **_: Any) -> InferenceEngine:
        seen.append(settings)
        audience.say("model    scripted")
        return InferenceEngine(
            ScriptedModel(answer_script(ANSWERS)),
            ByteTokenizer(),
            max_batch_size=settings.server.max_batch_size,
            n_tokens=1600,
            max_seq_len=100,
            model_name="it's",
        )

    monkeypatch.setattr(loading, "load_engine", load)
    return seen


def test_flags_beat_variables_beat_the_file(server: ServerCall, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("server:\n  port: 1\n  max_batch_size: 1\n  threads: 1\ncache:\n  n_tokens: 1600\n")
    env = {"ASTRAI_SERVER__PORT": "2", "ASTRAI_SERVER__MAX_BATCH_SIZE": "2"}
    args = [
        "-c",
        str(path),
        "--port",
        "3",
        "--n-tokens",
        "null",
        "--no-prefix-cache",
        "--usage-frame",
        "seed",
    ]
    assert invoke("serve", "some/model", *args, env=env).exit_code == 0
    assert server.settings is not None
    seen = server.settings
    assert (seen.server.port, seen.server.max_batch_size, seen.server.threads) == (3, 2, 1)
    assert (seen.cache.n_tokens, seen.cache.prefix_cache) == (None, False)
    assert (seen.server.param_path, seen.api.usage_frame) == ("some/model", "seed")


def test_the_exit_status_is_the_servers(server: ServerCall) -> None:
    assert invoke("serve").exit_code == 0
    server.status = 1
    assert invoke("serve").exit_code == 1


def test_the_start_says_where_and_ends_with_a_command_to_try(server: ServerCall) -> None:
    lines = invoke("serve").stderr.splitlines()
    assert len(lines) < 12
    assert lines[0] == "listens  http://127.0.0.1:8000"
    assert "http://127.0.0.1:8000/v1/messages" in lines[-2]
    word, command = lines[-1].split(maxsplit=1)
    assert word == "try"
    arguments = shlex.split(command)
    assert arguments[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(arguments[arguments.index("-d") + 1])
    assert (body["model"], body["temperature"]) == ("it's", 0)


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000", "http://192.168.1.2:80"])
def test_a_server_open_to_the_network_warns(server: ServerCall, url: str) -> None:
    server.urls = [url]
    text = invoke("serve").stderr
    assert f"WARNING  {url} is open to the network and asks for no API key" in text
    assert "curl http://0.0.0.0" not in text
    assert "curl http://[::]" not in text


def test_a_server_with_keys_does_not_warn_and_shows_where_the_key_goes(server: ServerCall) -> None:
    server.urls = ["http://0.0.0.0:8000"]
    result = invoke("serve", env={"ASTRAI_API_KEYS": "alice: alice-0123456789abcdef"})
    assert "WARNING" not in result.stderr
    assert ' -H "Authorization: Bearer $API_KEY"' in result.stderr.splitlines()[-1]
    assert "0123456789abcdef" not in result.output
    assert server.keys is not None
    assert server.keys.names == ("alice",)


def test_bad_keys_end_the_start_before_anything_is_loaded(server: ServerCall) -> None:
    assert_fails_with(invoke("serve", env={"ASTRAI_API_KEYS": "short"}), 1, "ASTRAI_API_KEYS: key 1: wanted")
    assert_fails_with(
        invoke("serve", "--cache-isolate"), 1, "--cache-isolate: cache.isolate: wanted API keys"
    )
    assert server.settings is None


def test_debugging_of_the_api_has_a_flag_of_its_own(server: ServerCall) -> None:
    assert invoke("serve", "--api-debug", "--policy", "fcfs", "--max-overtaken", "7").exit_code == 0
    assert server.settings is not None
    limits = server.settings.limits
    assert (server.settings.api.debug, limits.policy, limits.max_overtaken) == (True, "fcfs", 7)


def test_generating_leaves_the_trace_of_the_server_alone(
    scripted_engine: list[Settings], tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("server:\n  trace_file: trace.jsonl\n")
    assert invoke("generate", "hello", "-q", "-c", str(path)).exit_code == 0
    assert scripted_engine[0].server.trace_file is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000"])
def test_a_server_on_loopback_does_not_warn(server: ServerCall, url: str) -> None:
    server.urls = [url]
    assert "WARNING" not in invoke("serve").stderr


def test_few_words_are_asked_for_with_the_log_level(server: ServerCall) -> None:
    assert invoke("serve", "--log-level", "error").stderr == ""


def test_a_port_in_use_is_one_line_and_status_1(scripted_engine: list[Settings]) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("serve", "--port", str(port))
    assert_fails_with(result, 1, f"cannot listen on 127.0.0.1:{port}: address already in use; choose another")
    assert scripted_engine == []


def test_a_host_that_does_not_exist_is_one_line_and_status_1(scripted_engine: list[Settings]) -> None:
    assert_fails_with(
        invoke("serve", "--host", "no.such.host.invalid"), 1, "cannot listen on no.such.host.invalid"
    )


def test_a_model_that_does_not_exist_ends_the_server_with_one_line() -> None:
    result = invoke("serve", "no-such-model", "--port", "0", "--dtype", "float32", "--device", "cpu")
    assert result.exit_code == 1
    assert "Error: no model 'no-such-model'" in result.stderr.splitlines()[-1]


# generate


def test_the_answer_is_on_stdout_and_the_statistics_on_stderr(scripted_engine: list[Settings]) -> None:
    result = invoke("generate", "hello", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hällo there.\n\n"
    assert re.search(
        r"\[22 prompt tokens, 15 tokens, first after \d+ ms, then [\d.]+ tokens/s, finish stop\]",
        result.stderr,
    )
    assert scripted_engine[0].server.max_batch_size == 1


def test_quiet_leaves_stderr_empty(scripted_engine: list[Settings]) -> None:
    result = invoke("generate", "hello", "-q", "--temperature", "0")
    assert (result.stdout, result.stderr) == ("Hällo there.\n\n", "")


def test_a_system_prompt_goes_first(scripted_engine: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    encode = ByteTokenizer.encode_chat

    def spy(tokenizer: ByteTokenizer, messages: list[Any]) -> list[int]:
        seen.extend(messages)
        return encode(tokenizer, messages)

    monkeypatch.setattr(ByteTokenizer, "encode_chat", spy)
    invoke("generate", "hello", "--system", "be kind")
    assert seen == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


def test_a_raw_prompt_is_continued_without_the_template(scripted_engine: list[Settings]) -> None:
    assert invoke("generate", "once", "--raw", "--temperature", "0").stdout == " upon a time\n"


def test_a_dash_reads_the_prompt_from_stdin(scripted_engine: list[Settings]) -> None:
    assert invoke("generate", "-", "--raw", "--temperature", "0", input="once").stdout == " upon a time\n"


def test_length_and_stop_end_the_answer(scripted_engine: list[Settings]) -> None:
    args = ["generate", "once", "--raw", "--temperature", "0"]
    result = invoke(*args, "--max-tokens", "5")
    assert result.stdout == " upon\n"
    assert "finish length" in result.stderr
    assert invoke(*args, "--stop", "time", "--stop", "x").stdout == " upon a \n"


def test_more_tokens_than_the_context_has_room_for_are_not_an_error(scripted_engine: list[Settings]) -> None:
    assert invoke("generate", "once", "--raw", "--max-tokens", "100000", "--temperature", "0").exit_code == 0


def test_a_prompt_longer_than_the_context_is_one_line_and_status_1(scripted_engine: list[Settings]) -> None:
    result = invoke("generate", "x" * 101, "--raw", "-q")
    assert_fails_with(result, 1, "maximum context length is 100 tokens")


def test_a_model_without_a_chat_template_points_to_raw(
    scripted_engine: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template", None)
    assert_fails_with(invoke("generate", "hello", "-q"), 1, "it's has no chat template; use --raw")


def test_an_error_in_the_engine_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: object) -> None:
        raise RuntimeError("out of memory")

    def load(settings: Settings, audience: LoadDisplay) -> InferenceEngine:
        return InferenceEngine(ScriptedModel(on_forward=explode), ByteTokenizer(), max_seq_len=100)

    monkeypatch.setattr(loading, "load_engine", load)
    assert_fails_with(invoke("generate", "hello", "-q"), 1, "out of memory")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tritno", "ASTR_BACKEND: wanted one of triton, cuda, flash, torch_native, got 'tritno'"),
        ("flash", "attention backend 'flash' cannot run this call"),
    ],
)
def test_a_backend_that_is_not_there_ends_the_start(name: str, text: str) -> None:
    assert_fails_with(invoke("generate", "hello", env={"ASTR_BACKEND": name}), 1, text)
