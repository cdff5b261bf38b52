"""Values at the edge through the whole stack: every one of them is answered, or refused with its name."""

from __future__ import annotations

from typing import Any

import pytest

from astrai_triton.engine import InferenceEngine
from fake_engine import Answer, Client, ask, chat_body
from fakes import ByteTokenizer, ScriptedModel

ROUTES = ("/v1/chat/completions", "/v1/messages")
SAMPLING = ("temperature", "top_p", "top_k")
OPENAI_ONLY = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stop",
)
VOCAB_SIZE = 260


def send(path: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> Answer:
    """Ask a new engine; it must be idle and hold nothing afterwards."""
    sizes: dict[str, int] = {"max_batch_size": 4, "max_seq_len": 256, "page_size": 4, "n_tokens": 1024}

    async def use(client: Client) -> Answer:
        body = chat_body(**({"max_tokens": 6} | fields))
        return await client.post(path, body | ({} if messages is None else {"messages": messages}))

    with InferenceEngine(ScriptedModel(spread=7.0), ByteTokenizer(), **sizes) as engine:  # type: ignore[arg-type]
        answer = ask(engine, use)
        assert engine.drain(10)
        assert engine.get_stats()["pages_used"] == 0
    return answer


def read(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    body = answer.json
    return str(body["choices"][0]["message"]["content"] if "choices" in body else body["content"][0]["text"])


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path in ROUTES for field in SAMPLING] + [(ROUTES[0], field) for field in OPENAI_ONLY],
)
@pytest.mark.parametrize("stream", [False, True])
def test_null_is_answered_like_the_default(path: str, field: str, stream: bool) -> None:
    answer = send(path, stream=stream, **{field: None})
    assert answer.status == 200, answer.body
    if stream:
        assert answer.frames[-1] == "data: [DONE]"
    else:
        assert len(read(answer)) == 6


@pytest.mark.parametrize("path", ROUTES)
def test_null_for_max_tokens_leaves_it_to_the_context(path: str) -> None:
    prompt_len = len("<user>hi<assistant>")
    assert len(read(send(path, max_tokens=None))) == 256 - prompt_len


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-30},
        {"temperature": 1e-4},
        {"top_k": 1},
        {"top_p": 0},
        {"top_p": 0, "temperature": 1, "top_k": 0},
    ],
)
def test_where_one_token_is_left_it_is_the_most_likely(path: str, fields: dict[str, Any]) -> None:
    assert read(send(path, **fields)) == read(send(path, temperature=0))


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9])
def test_a_top_k_that_cuts_nothing_is_off(top_k: int) -> None:
    wanted = {"temperature": 2, "seed": 3, "max_tokens": 12}
    assert read(send(ROUTES[0], top_k=top_k, **wanted)) == read(send(ROUTES[0], top_k=VOCAB_SIZE, **wanted))
    assert read(send(ROUTES[0], top_k=2, **wanted)) != read(send(ROUTES[0], top_k=VOCAB_SIZE, **wanted))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 2.01), ("temperature", -0.1), ("top_p", 1.01), ("top_k", -2)]
)
def test_a_step_beyond_the_edge_is_a_422_that_names_the_field(path: str, field: str, value: float) -> None:
    answer = send(path, **{field: value})
    assert answer.status == 422
    assert field in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}], 200),
        ([{"role": "user", "content": "u"}, {"role": "tool", "content": "t", "tool_call_id": "1"}], 200),
        ([{"role": "user", "content": "u"}, {"role": "user", "content": "again"}], 200),
        # By the refusal of the template.
        ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}], 400),
        ([{"role": "narrator", "content": "n"}], 400),
        ([], 422),
        ([{"role": "user", "content": ""}], 200),
    ],
    ids=["developer", "tool", "user twice", "assistant first", "unknown", "none", "empty"],
)
def test_any_order_of_roles_has_its_status(messages: list[dict[str, Any]], status: int) -> None:
    answer = send(ROUTES[0], messages)
    assert answer.status == status, answer.body
    assert status == 200 or answer.json["error"]["message"]
