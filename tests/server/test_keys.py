"""API keys: how they are read, whom they let in, and what never shows."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from astrai_server import keys as keys_module
from astrai_server.config import ConfigError
from astrai_server.keys import KeyRing, load_keys
from astrai_server.problem import ApiKeyError
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body, serve

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
ROUTES = ("/v1/chat/completions", "/v1/messages")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "keys.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


def load(path: Path | None = None, env: dict[str, str] | None = None, **options: Any) -> KeyRing:
    return load_keys(build_settings(keys_file=None if path is None else str(path), **options), env or {})


def both() -> KeyRing:
    return load(env={"ASTRAI_API_KEYS": f"alice: {ALICE}, bob:{BOB}"})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Where keys come from


def test_without_any_source_everybody_is_let_in() -> None:
    keys = load()
    assert len(keys) == 0
    assert keys.authenticate({}) is None


def test_a_file_has_names_comments_quotes_and_keys_alone(write: Any) -> None:
    path = write(f"\ufeff---\n# for the team\n\nalice: {ALICE}  # since spring\nbob: '{BOB}'\n{ALICE}-2\n")
    keys = load(path)
    assert keys.names == ("alice", "bob", "key-3")
    for name, key in (("alice", ALICE), ("bob", BOB), ("key-3", f"{ALICE}-2")):
        assert keys.authenticate(bearer(key)) == name


def test_keys_of_the_file_and_of_the_environment_are_valid(write: Any) -> None:
    keys = load(write(f"alice: {ALICE}\n"), {"ASTRAI_API_KEYS": f"{BOB}"})
    assert keys.names == ("alice", "key-2")
    assert keys.authenticate({"x-api-key": BOB}) == "key-2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice: short\n", "keys.txt:1: wanted a key of at least 16 characters, got 5"),
        ("# x\n\nshort\n", "keys.txt:3: wanted a key of at least 16 characters, got 5"),
        (f"alice:\n  {ALICE}\n", "keys.txt:1: wanted a key of at least 16 characters, got 0"),
        (f"a b: {ALICE}\n", "keys.txt:1: wanted a name of at most 64"),
        (f": {ALICE}\n", "keys.txt:1: wanted a name of at most 64"),
        (f"{ALICE}#x\n", "keys.txt:1: wanted a key of letters, digits and"),
        (f"'{ALICE}\n", "keys.txt:1: wanted a key of letters, digits and"),
        (f"- {ALICE}\n", "keys.txt:1: wanted a key of letters, digits and"),
        (f"alice: {ALICE}\nbob: {ALICE}\n", "keys.txt:2: this key occurs twice, first at"),
        (f"alice: {ALICE}\nalice: {BOB}\n", "keys.txt:2: the name 'alice' occurs twice, first at"),
        (f"key-2: {ALICE}\n{BOB}\n", "keys.txt:2: the name 'key-2' occurs twice, first at"),
        ("# nothing\n", "api.keys_file: wanted at least one key in"),
        (b"\xff", "api.keys_file: wanted UTF-8 text in"),
        (b"\n" * (2 << 20), "api.keys_file: wanted at most 1048576 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_without_its_keys(
    write: Any, text: str | bytes, problem: str
) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value).replace(f"{path.parent}/", "")
    assert message.startswith(problem)
    assert "0123456789abcdef" not in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api.keys_file: cannot read .*none.txt: No such file"):
        load(tmp_path / "none.txt")


@pytest.mark.parametrize("value", ["", " ", ",", f"{ALICE},"])
def test_a_variable_that_is_set_and_holds_no_key_leaves_nothing_open(value: str) -> None:
    with pytest.raises(ConfigError, match=r"ASTRAI_API_KEYS: key \d: wanted a key of at least 16"):
        load(env={"ASTRAI_API_KEYS": value})


def test_the_same_key_in_file_and_environment_is_refused(write: Any) -> None:
    with pytest.raises(ConfigError, match="ASTRAI_API_KEYS: key 1: this key occurs twice, first at"):
        load(write(f"alice: {ALICE}\n"), {"ASTRAI_API_KEYS": ALICE})


@pytest.mark.parametrize(
    ("options", "name"),
    [({"isolate": True}, "cache.isolate"), ({"max_requests_per_key": 2}, "limits.max_requests_per_key")],
)
def test_what_makes_no_sense_without_keys_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: wanted API keys"):
        load(**options)
    assert len(load(env={"ASTRAI_API_KEYS": ALICE}, **options)) == 1


# Whom they let in


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {ALICE}x"},
        {"Authorization": f"Bearer {ALICE[:-1]}"},
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {ALICE}"},
        {"x-api-key": "\udcff"},
    ],
)
def test_anything_but_a_known_key_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ApiKeyError):
        both().authenticate(headers)


def test_one_valid_key_is_enough_and_bearer_counts_first() -> None:
    keys = both()
    assert keys.authenticate(bearer(ALICE) | {"x-api-key": BOB}) == "alice"
    assert keys.authenticate(bearer("placeholder") | {"x-api-key": BOB}) == "bob"
    assert keys.authenticate({"Authorization": f"bearer  {ALICE} "}) == "alice"


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(a: bytes, b: bytes) -> bool:
        assert len(a) == len(b) == 32
        compared.append(hmac.compare_digest(a, b))
        return compared[-1]

    class Hmac:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(keys_module, "hmac", Hmac)
    keys = both()
    assert keys.authenticate(bearer(ALICE)) == "alice"
    assert compared == [True, False]


def test_keys_do_not_show_in_what_the_server_keeps() -> None:
    keys = both()
    assert ALICE not in repr(vars(keys))
    assert keys.names == ("alice", "bob")


# Over HTTP


def send(method: str, path: str, headers: dict[str, str], **options: Any) -> Answer:
    async def use(client: Client) -> Answer:
        return await client.send(method, path, headers=headers, **options)

    return ask(FakeEngine(), use, build_settings(debug=True), both())


@pytest.mark.parametrize("headers", [{}, bearer("wrong-0123456789abcdef"), {"x-api-key": "wrong"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", ROUTES[0]),
        ("POST", ROUTES[1]),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/astrai"),
        ("GET", "/stats"),
        ("GET", "/debug/prefix"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("DELETE", "/stats"),
        ("GET", "/health/../stats"),
        ("OPTIONS", ROUTES[0]),
    ],
)
def test_every_route_but_health_and_page_asks_for_a_key(
    method: str, path: str, headers: dict[str, str]
) -> None:
    answer = send(method, path, headers)
    assert answer.status == 401
    body = answer.json
    assert body.keys() == {"type", "error", "detail", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    assert body["error"]["code"] == "invalid_api_key"
    assert "Bearer" in body["error"]["message"]
    assert "x-api-key" in body["error"]["message"]
    assert body["request_id"] == answer.headers["x-request-id"]
    challenge = answer.headers["www-authenticate"]
    assert challenge == 'Bearer realm="astrai"' + (', error="invalid_token"' if headers else "")
    assert b"wrong" not in answer.body


def test_health_stays_open() -> None:
    assert send("GET", "/health", {}).status == 200
    assert send("HEAD", "/health", {}).status == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("headers", [bearer(ALICE), {"x-api-key": ALICE}])
@pytest.mark.parametrize("isolate", [False, True])
def test_a_request_runs_under_the_name_of_its_key(path: str, headers: dict[str, str], isolate: bool) -> None:
    engine = FakeEngine()

    async def use(client: Client) -> Answer:
        return await client.post(path, chat_body(), headers)

    assert ask(engine, use, build_settings(isolate=isolate), both()).status == 200
    assert engine.owners == [("alice", "alice" if isolate else None)]


def test_without_keys_a_request_has_no_name() -> None:
    engine = FakeEngine()
    assert ask(engine, lambda client: client.chat()).status == 200
    assert engine.owners == [(None, None)]


def test_a_refused_body_is_not_waited_for() -> None:
    async def use(client: Client) -> Answer:
        body = json.dumps(chat_body("x" * 100_000)).encode()
        async with asyncio.timeout(5):
            return await client.send("POST", ROUTES[0], data=body)

    assert ask(FakeEngine(), use, keys=both()).status == 401


def test_a_browser_may_ask_before_it_sends_its_key() -> None:
    headers = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }

    async def use(client: Client) -> tuple[Answer, Answer]:
        preflight = await client.send("OPTIONS", ROUTES[0], headers=headers)
        return preflight, await client.send("GET", "/stats", headers={"Origin": "https://a.example"})

    preflight, refused = ask(FakeEngine(), use, build_settings(cors_origins=("https://a.example",)), both())
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    # Without this the page could not read why.
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


def test_the_log_has_the_name_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: Client) -> None:
        await client.post(ROUTES[0], chat_body(), bearer(ALICE))
        await client.post(ROUTES[0], chat_body(), bearer("wrong-0123456789abcdef"))

    with caplog.at_level(logging.DEBUG):
        ask(FakeEngine(), use, keys=both())
    lines = [record.getMessage() for record in caplog.records if record.name == "astrai.server"]
    assert len(lines) == 2
    assert " POST /v1/chat/completions 200 key=alice finish=stop in=" in lines[0]
    assert " 401 " in lines[1]
    assert "0123456789abcdef" not in caplog.text


def test_a_key_has_so_many_requests_at_a_time_and_others_still_get_in() -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use(client: Client) -> None:
        held = [asyncio.ensure_future(client.post(path, chat_body(), bearer(ALICE))) for path in ROUTES]
        while len(engine.prompts) < 2:
            await asyncio.sleep(0.01)
        refused = await client.post(ROUTES[0], chat_body(), bearer(ALICE))
        assert (refused.status, refused.json["error"]["code"]) == (429, "key_limit")
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        other = asyncio.ensure_future(client.post(ROUTES[1], chat_body(), bearer(BOB)))
        while len(engine.prompts) < 3:
            await asyncio.sleep(0.01)
        engine.is_held = False
        for answer in await asyncio.gather(*held, other):
            assert answer.status == 200
        assert (await client.post(ROUTES[0], chat_body(), bearer(ALICE))).status == 200

    ask(engine, use, build_settings(max_requests_per_key=2), both())


def test_a_client_that_goes_away_frees_its_place() -> None:
    engine = FakeEngine(["a", "b"])
    engine.is_held = True

    async def use() -> None:
        async with serve(engine, build_settings(max_requests_per_key=1), both()) as client:
            work = asyncio.ensure_future(client.post(ROUTES[0], chat_body(stream=True), bearer(ALICE)))
            while not engine.prompts:
                await asyncio.sleep(0.01)
            work.cancel()
            async with asyncio.timeout(5):
                while client.gate.num_inside:
                    await asyncio.sleep(0.01)
            engine.is_held = False
            assert (await client.post(ROUTES[0], chat_body(), bearer(ALICE))).status == 200

    asyncio.run(use())
