"""``/debug/prefix`` over the real engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astrai_server.config import Settings
from astrai_server.keys import KeyRing, load_keys
from astrai_triton.engine import InferenceEngine
from astrai_triton.errors import EngineUnavailableError
from fake_engine import Answer, Client, FakeEngine, ask, build_settings, chat_body
from fakes import ByteTokenizer, ScriptedModel

PATH = "/debug/prefix"
KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}
DEBUG = build_settings(debug=True)


def build_engine(**sizes: Any) -> InferenceEngine:
    sizes = {"max_batch_size": 4, "max_seq_len": 256, "page_size": 4, "n_tokens": 1024} | sizes
    return InferenceEngine(ScriptedModel(), ByteTokenizer(), **sizes)


def look_up(
    *queries: dict[str, Any] | str, cached: str = "0123456789", settings: Settings = DEBUG, **sizes: Any
) -> list[Answer]:
    """Answers to ``queries`` once ``cached`` was a prompt."""

    async def use(client: Client) -> list[Answer]:
        return [
            await client.send("GET", PATH, params=query)
            if isinstance(query, dict)
            else await client.post(PATH, query.encode())
            for query in queries
        ]

    with build_engine(**sizes) as engine:
        engine.generate(cached, temperature=0, max_tokens=1)
        return ask(engine, use, settings)


def test_the_route_is_not_there_unless_it_is_asked_for() -> None:
    (answer,) = look_up({"prompt": "a"}, settings=build_settings())
    assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")


def test_the_first_token_that_differs_is_shown_with_the_one_in_the_cache() -> None:
    (answer,) = look_up({"prompt": "012345xyz"})
    assert answer.status == 200, answer.body
    body = answer.json
    assert [(page["start"], page["end"], page["state"]) for page in body["pages"]] == [
        (0, 4, "hit"),
        (4, 8, "missing"),
        (8, 9, "partial"),
    ]
    assert (body["num_tokens"], body["page_size"], body["is_on"]) == (9, 4, True)
    assert (body["cached_tokens"], body["agreeing_tokens"], body["salt"]) == (4, 6, None)
    assert body["difference"] == {
        "position": 6,
        "asked": {"id": ord("x"), "text": "x"},
        "cached": {"id": ord("6"), "text": "6"},
    }


def test_text_tokens_and_a_body_say_the_same() -> None:
    prompt = "012345xyz"
    ids = list(prompt.encode())
    answers = look_up(
        {"prompt": prompt},
        {"token_ids": ",".join(map(str, ids))},
        {"token_ids": json.dumps(ids)},
        json.dumps({"prompt": prompt}),
        json.dumps({"token_ids": ids}),
    )
    assert [answer.json for answer in answers] == [answers[0].json] * 5


def test_a_body_may_be_longer_than_a_url() -> None:
    (answer,) = look_up(json.dumps({"prompt": "0123" + "x" * 100_000}))
    assert (answer.json["num_tokens"], answer.json["cached_tokens"]) == (100_004, 4)


def test_bytes_that_are_no_character_are_replaced() -> None:
    (answer,) = look_up({"token_ids": "48,49,255"}, cached="01é3")
    assert answer.json["difference"] == {
        "position": 2,
        "asked": {"id": 255, "text": "\ufffd"},
        "cached": {"id": 0xC3, "text": "\ufffd"},
    }


def test_a_cache_without_prefixes_says_so() -> None:
    (answer,) = look_up({"prompt": "0123"}, prefix_cache=False)
    assert (answer.json["is_on"], answer.json["pages"], answer.json["cached_tokens"]) == (False, [], 0)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": "1"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"token_ids": ""}, "token_ids"),
        ({"token_ids": "1,x"}, "token_ids"),
        ({"token_ids": "-1"}, "token_ids"),
        ({"token_ids": "²"}, "token_ids"),
        ({"token_ids": "9" * 5000}, "token_ids"),
        ({"token_ids": "260"}, "token_ids[0]"),
        ({"prompt": "a", "slat": "b"}, "slat"),
        ({"chat": "{}"}, "chat"),
        ('{"chat": {"messages": [{"role": "user", "content": 1}]}}', "chat.messages[0].content"),
        ('{"chat": {"messages": []}}', "chat.messages"),
        ('{"token_ids": [1], "message": {"messages": [{"role": "user", "content": "a"}]}}', "prompt"),
        ("[]", None),
        ('{"token_ids": [true]}', "token_ids[0]"),
        ('{"token_ids": []}', "token_ids"),
    ],
)
def test_a_query_that_makes_no_sense_is_named(query: dict[str, str] | str, param: str | None) -> None:
    (answer,) = look_up(query)
    assert (answer.status, answer.json["error"]["param"]) == (422, param)


def test_isolated_clients_see_their_own_prefixes_only() -> None:
    settings = build_settings(debug=True, isolate=True)
    keys = load_keys(settings, {"ASTRAI_API_KEYS": ",".join(f"{name}: {key}" for name, key in KEYS.items())})
    prompt = "<user>0123456789<assistant>"

    async def use(client: Client) -> dict[str, Answer]:
        alice, bob = ({"x-api-key": key} for key in KEYS.values())
        assert (await client.post("/v1/messages", chat_body("0123456789", max_tokens=1), alice)).status == 200
        return {
            "nobody": await client.send("GET", PATH, params={"prompt": prompt}),
            "alice": await client.send("GET", PATH, params={"prompt": prompt}, headers=alice),
            "named": await client.send(
                "GET", PATH, params={"prompt": prompt, "salt": "alice"}, headers=alice
            ),
            "bob": await client.send("GET", PATH, params={"prompt": prompt[:9] + "x"}, headers=bob),
            "spy": await client.send("GET", PATH, params={"prompt": prompt, "salt": "alice"}, headers=bob),
        }

    with build_engine() as engine:
        answers = ask(engine, use, settings, keys)
    assert answers["nobody"].status == 401
    assert answers["alice"].json["cached_tokens"] == len(prompt) // 4 * 4
    assert answers["named"].json == answers["alice"].json
    assert (answers["bob"].json["cached_tokens"], answers["bob"].json["difference"]) == (0, None)
    assert (answers["spy"].status, answers["spy"].json["error"]["param"]) == (422, "salt")


@pytest.mark.parametrize("form", ["prompt", "chat", "message"])
def test_the_answer_is_what_the_next_request_finds(form: str) -> None:
    body = chat_body("one two four", max_tokens=4)

    async def use(client: Client) -> None:
        await client.chat("one two three", max_tokens=4)
        asked = "<user>one two four<assistant>" if form == "prompt" else body
        told = await client.post(PATH, {form: asked})
        found = (await client.chat("one two four", max_tokens=4)).json["usage"]
        assert told.json["cached_tokens"] == found["prompt_tokens_details"]["cached_tokens"] == 12

    with build_engine() as engine:
        ask(engine, use, DEBUG)


def test_an_engine_that_has_died_is_a_503() -> None:
    class Dying(FakeEngine):
        def explain_prefix(self, *_: object) -> None:
            raise EngineUnavailableError("the engine is shut down or dead")

    async def use(client: Client) -> Answer:
        return await client.send("GET", PATH, params={"prompt": "a"})

    answer = ask(Dying(), use, DEBUG)
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_keys_alone_do_not_restrict_the_salt() -> None:
    keys: KeyRing = load_keys(DEBUG, {"ASTRAI_API_KEYS": KEYS["bob"]})

    async def use(client: Client) -> Answer:
        return await client.send(
            "GET", PATH, params={"prompt": "abcde", "salt": "t"}, headers={"x-api-key": KEYS["bob"]}
        )

    with build_engine() as engine:
        engine.submit(list(b"abcde"), salt="t").cancel()
        assert ask(engine, use, DEBUG, keys).json["salt"] == "t"
