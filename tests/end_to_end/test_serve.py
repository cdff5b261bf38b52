from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from server_process import REFERENCE, Server, start_server

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

COUNT = "Count from 1 to 12."
GREEDY = REFERENCE["greedy_float32"]
# In float64 the two best logits of this token differ by 0.0015 in favour of the other one: less than the
# float16 KV cache of the reference resolves. Up to there the texts must agree.
NEAR_TIE = {"Write one sentence about the sea.": 19}


@pytest.fixture
def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def chat(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    fields = {"model": "astrai", "temperature": 0, "max_tokens": 64} | fields
    return client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **fields)


@pytest.mark.parametrize("prompt", sorted(GREEDY))
def test_greedy_answers_equal_an_independent_implementation(
    openai_client: openai.OpenAI, prompt: str
) -> None:
    reference = GREEDY[prompt]
    num_tokens = NEAR_TIE.get(prompt, len(reference["out"]))
    completion = chat(openai_client, prompt, max_tokens=num_tokens)
    text = completion.choices[0].message.content
    assert reference["text"].startswith(text)
    assert text == reference["text"] or num_tokens < len(reference["out"])
    assert completion.usage.completion_tokens == num_tokens
    assert completion.usage.prompt_tokens == len(reference["ids"])


def test_the_naive_openai_stream_loop_gives_the_whole_answer(openai_client: openai.OpenAI) -> None:
    whole = chat(openai_client, COUNT)
    text, reasons = "", []
    for chunk in chat(openai_client, COUNT, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == whole.choices[0].message.content
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]


def test_anthropic_whole_and_streamed_answers_agree(anthropic_client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "astrai",
        "max_tokens": 64,
        # The newest client has no argument for it.
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": COUNT}],
    }
    message = anthropic_client.messages.create(**ask)
    with anthropic_client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text == final.content[0].text
    assert final.stop_reason == message.stop_reason
    usage = final.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(GREEDY[COUNT]["ids"])
    assert usage.output_tokens == message.usage.output_tokens > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_both_streams_end_with_done_and_every_event_with_an_empty_line(server: Server, path: str) -> None:
    raw = stream_raw(server, path, {"messages": [{"role": "user", "content": COUNT}], "max_tokens": 5})
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    for event in raw.decode().split("\n\n")[:-1]:
        *names, data = event.split("\n")
        assert data.startswith("data: ")
        assert all(name.startswith("event: ") for name in names)


def stream_raw(server: Server, path: str, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request(
        "POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    data = response.read()
    connection.close()
    return data


def test_sixteen_clients_at_once_get_their_solo_texts_and_no_page_is_lost(
    server: Server, openai_client: openai.OpenAI
) -> None:
    prompts = [f"Write one sentence about the number {i}." + " Please." * (3 * i) for i in range(16)]

    def ask(prompt: str) -> str:
        return str(chat(openai_client, prompt, max_tokens=16).choices[0].message.content)

    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(ask, prompts))
    assert [ask(prompt) for prompt in prompts] == together
    stats = server.wait_until_idle()
    assert stats["pages_used"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_the_same_prompt_again_reports_cached_tokens_and_the_same_text(openai_client: openai.OpenAI) -> None:
    prompt = "Name three colours of the rainbow, one on each line, without anything else."
    first, second = chat(openai_client, prompt, max_tokens=16), chat(openai_client, prompt, max_tokens=16)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_a_client_that_goes_away_is_cancelled_and_its_pages_return(server: Server) -> None:
    before = server.wait_until_idle()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = {"messages": [{"role": "user", "content": "Tell a very long story."}], "max_tokens": 1500}
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body | {"stream": True, "temperature": 0}),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    response.read(300)
    response.close()
    connection.close()
    stats = server.wait_until_idle()
    assert stats["total_tokens"] - before["total_tokens"] < 400


def test_errors_come_with_their_status_and_leave_the_server_serving(
    server: Server, openai_client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
        chat(openai_client, "word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        chat(openai_client, "x", temperature=3)
    with pytest.raises(openai.BadRequestError, match="functions"):
        chat(openai_client, "x", functions=[{"name": "f"}])
    assert server.post("/v1/nothing", {})[0] == 404
    assert server.get("/health") == {"status": "ok", "model_loaded": True}
    assert chat(openai_client, COUNT, max_tokens=3).choices[0].finish_reason == "length"


def test_sigterm_finishes_live_streams_refuses_new_ones_and_exits_with_zero(tmp_path: Path) -> None:
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_NO_INDEX": "1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    flags = ("--dtype", "float32", "--max-seq-len", "1024", "--drain-timeout-s", "120")
    with start_server(tmp_path / "log", *flags, env=offline) as server:
        body = {"messages": [{"role": "user", "content": COUNT}], "max_tokens": 60, "temperature": 0}
        body["ignore_eos"] = True
        answers: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: answers.append(stream_raw(server, "/v1/chat/completions", body)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while server.get("/stats")["active_tasks"] < 4:
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGTERM)
        statuses = refuse_status(server, body)
        for thread in threads:
            thread.join(120)
        assert server.process.wait(60) == 0, server.log.read_text()
    assert len(answers) == 4
    assert all(
        answer.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in answer for answer in answers
    )
    assert statuses in (503, None)


def refuse_status(server: Server, body: dict[str, Any]) -> int | None:
    """Status of a request that comes during the drain; None where the socket no longer listens."""
    time.sleep(0.2)
    try:
        return server.post("/v1/chat/completions", body)[0]
    except OSError:
        return None
