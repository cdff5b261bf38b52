from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from astrai_triton import ATTN_BACKEND, attn_backend
from astrai_triton.backend import current_backend
from astrai_triton.engine import InferenceEngine, SamplingParams
from astrai_triton.engine.trace import StepTrace, replay
from astrai_triton.errors import GrammarError, TaskError
from astrai_triton.grammar import Grammar
from drive import answer, assert_nothing_held, build_engine, finish, run_all
from fakes import EOS, VOCAB, ByteTokenizer, Context, ScriptedModel, echo_script


class LiteralCompiler:
    """A compiler whose grammars are texts: nothing else can be answered. Counts what it does."""

    def __init__(self, tokenizer: ByteTokenizer, vocab_size: int) -> None:
        assert isinstance(tokenizer, ByteTokenizer)
        assert vocab_size == VOCAB
        made.append(self)
        self.num_compiled: Counter[str] = Counter()

    def compile(self, grammar: Grammar) -> LiteralCompiler.Compiled:
        self.num_compiled[grammar.source] += 1
        if not grammar.source:
            raise GrammarError("source: wanted a text, got an empty one")
        return LiteralCompiler.Compiled(grammar.source.encode())

    class Compiled:
        def __init__(self, text: bytes) -> None:
            self._text = text

        def start(self) -> LiteralCompiler.Matcher:
            return LiteralCompiler.Matcher(self._text)

    class Matcher:
        def __init__(self, text: bytes) -> None:
            self._left = text

        def fill_mask(self, mask: np.ndarray) -> None:
            mask.fill(0)
            token_id = self._left[0] if self._left else EOS
            mask[token_id // 32] = 1 << token_id % 32

        def accept(self, token_id: int) -> None:
            assert token_id == self._left[0]
            self._left = self._left[1:]

        @property
        def is_accepting(self) -> bool:
            return not self._left

        is_complete = is_accepting


made: list[LiteralCompiler] = []


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[LiteralCompiler]:
    """Compilers that engines of this test make."""
    module = ModuleType("astrai_triton.grammar.compiler")
    module.GrammarCompiler = LiteralCompiler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made.clear()
    return made


@pytest.fixture
def engine() -> Iterator[InferenceEngine]:
    with build_engine(start=True) as running:
        yield running
        assert running.drain(10)
        assert_nothing_held(running)


def test_one_prompt_gives_one_text(engine: InferenceEngine) -> None:
    assert engine.generate("abc", temperature=0, max_tokens=24) == answer(build_engine(), "abc")


def test_a_list_of_prompts_gives_their_texts_in_order(engine: InferenceEngine) -> None:
    prompts = ["abc", "d", "efghijklm"]
    texts = engine.generate(prompts, params=SamplingParams(temperature=0, max_tokens=24))
    assert texts == [answer(build_engine(), prompt) for prompt in prompts]
    assert engine.generate([], temperature=0) == []


def test_a_stream_of_one_prompt_yields_text(engine: InferenceEngine) -> None:
    pieces = list(engine.generate("abc", stream=True, temperature=0, max_tokens=24))
    assert len(pieces) == 24
    assert "".join(pieces) == answer(build_engine(), "abc")


def test_a_stream_of_several_prompts_yields_index_and_text(engine: InferenceEngine) -> None:
    texts = ["", ""]
    for index, piece in engine.generate(["abc", "d"], stream=True, temperature=0, max_tokens=24):
        texts[index] += piece
    assert texts == [answer(build_engine(), "abc"), answer(build_engine(), "d")]


def test_leaving_a_stream_cancels_its_task(engine: InferenceEngine) -> None:
    stream = engine.generate("abc", stream=True, temperature=0)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def test_params_and_fields_together_are_an_error(engine: InferenceEngine) -> None:
    with pytest.raises(TypeError, match="temperature"):
        engine.generate("abc", params=SamplingParams(), temperature=0.5)


def test_an_error_is_raised_where_the_answer_is_taken() -> None:
    def explode(contexts: list[Context]) -> None:
        if any(context[0] == ord("B") for context in contexts):
            raise RuntimeError("injected")

    with build_engine(ScriptedModel(on_forward=explode), start=True) as engine:
        with pytest.raises(TaskError, match="injected"):
            engine.generate("B")
        with pytest.raises(TaskError, match="answer 1"):
            list(engine.generate(["a", "B"], stream=True, max_tokens=3))
        with pytest.raises(TaskError):
            asyncio.run(collect(engine, "B"))


async def collect(engine: InferenceEngine, prompt: str) -> str:
    return "".join([piece async for piece in engine.generate_async(prompt, temperature=0, max_tokens=24)])


def test_async_streams_of_several_event_loops_agree(engine: InferenceEngine) -> None:
    expected = answer(build_engine(), "abc")
    texts: list[str] = []

    async def many() -> None:
        texts.extend(await asyncio.gather(*(collect(engine, "abc") for _ in range(5))))

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [expected] * 15


def test_leaving_an_async_stream_cancels_its_task(engine: InferenceEngine) -> None:
    async def leave() -> None:
        stream = engine.generate_async("abc", temperature=0)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())


def test_a_task_whose_event_loop_closed_is_cancelled() -> None:
    # Slow enough that the loop is long closed when the task could end by itself.
    gate = threading.Event()
    model = ScriptedModel(on_forward=lambda contexts: gate.wait(0.01) and None)
    with build_engine(model, start=True) as engine:

        async def read_one() -> None:
            handle = engine.submit([97], SamplingParams(temperature=0.0))
            await anext(handle.events())

        asyncio.run(read_one())
        assert engine.drain(10)
        assert engine.get_stats()["total_tokens"] < 400


def test_started_tells_the_cached_tokens_before_the_first_token(engine: InferenceEngine) -> None:
    prompt = list(b"some prompt of a few pages")
    engine.generate(bytes(prompt).decode(), max_tokens=1)

    async def start() -> int:
        handle = engine.submit(prompt, SamplingParams(max_tokens=2))
        await handle.started()
        cached = handle.cached_tokens
        events = [event async for event in handle.events()]
        assert all(event.cached_tokens == cached for event in events)
        return cached

    assert asyncio.run(start()) == 24


def test_batches_hand_a_slow_reader_everything_at_once(engine: InferenceEngine) -> None:
    async def read() -> list[int]:
        handle = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=24))
        await asyncio.to_thread(engine.drain, 10)
        return [len(batch) async for batch in handle.batches()]

    assert asyncio.run(read()) == [24]


def test_the_backend_chosen_at_submit_holds_in_the_scheduler_thread() -> None:
    seen: list[ATTN_BACKEND | None] = []
    model = ScriptedModel(on_forward=lambda contexts: seen.append(current_backend()))
    with build_engine(model, start=True) as engine:
        with attn_backend(ATTN_BACKEND.TORCH_NATIVE):
            handle = engine.submit([97], SamplingParams(max_tokens=3))
        list(handle.iter_events())
        engine.generate("b", max_tokens=2)
    assert seen == [ATTN_BACKEND.TORCH_NATIVE] * 3 + [None] * 2


def test_tasks_of_different_backends_run_in_the_same_step() -> None:
    engine = build_engine()
    with attn_backend("torch_native"):
        engine.submit([97], SamplingParams(temperature=0.0, max_tokens=4))
    engine.submit([98], SamplingParams(temperature=0.0, max_tokens=4))
    for _ in range(4):
        engine.step()
    assert engine.get_stats()["active_tasks"] == 0


def test_stop_strings_across_tokens_never_leak_into_a_stream() -> None:
    with build_engine(ScriptedModel(echo_script("say STOP now", 1)), start=True) as engine:
        assert "".join(engine.generate("x", stream=True, temperature=0, stop=["STOP", "now"])) == "say "
        assert engine.generate("x", temperature=0, stop="STOPPED") == "say STOP now"


def test_stats_carry_the_counters_of_engine_and_pool(engine: InferenceEngine) -> None:
    engine.generate("abcdefgh", max_tokens=5)
    engine.drain(10)
    stats = engine.get_stats()
    assert (stats["total_tasks"], stats["total_tokens"]) == (1, 5)
    assert (stats["active_tasks"], stats["waiting_queue"], stats["pages_used"]) == (0, 0, 0)
    assert stats["pages_cached"] == 3
    assert stats["step_us"] > 0


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_seq_len": 5000}, "max_seq_len: wanted 1 to 4096"),
        ({"max_step_tokens": 4}, "max_step_tokens: wanted at least 8"),
        ({"max_queue": 0}, "max_queue"),
        ({"n_tokens": 30}, "n_tokens"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_engine(**sizes)


def test_a_grammar_compiler_is_made_for_the_first_grammar_and_kept(compilers: list[LiteralCompiler]) -> None:
    engine = build_engine()
    answer(engine, "no grammar here")
    assert not compilers
    engine.compile_grammar(Grammar.regex("one"))
    engine.compile_grammar(Grammar.regex("two"))
    assert [compiler.num_compiled for compiler in compilers] == [{"one": 1, "two": 1}]


def test_one_grammar_compiler_is_made_however_many_threads_ask(compilers: list[LiteralCompiler]) -> None:
    engine = build_engine()
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait(10)
        engine.compile_grammar(Grammar.regex("one"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [compiler.num_compiled for compiler in compilers] == [{"one": 8}]


def test_every_task_follows_the_grammar_by_itself(compilers: list[LiteralCompiler]) -> None:
    engine = build_engine()
    params = SamplingParams(temperature=1.0, grammar=Grammar.regex("constrained"))
    handles = [*engine.submit_many([list(b"several pages of it"), [98]], params, n=3)]
    free = engine.submit([97], SamplingParams(temperature=0.0, max_tokens=24))
    answers = finish(engine, [*handles, free])
    assert answers == [("constrained", "stop")] * 6 + [(answer(build_engine(), "a"), "length")]


def test_a_broken_grammar_is_refused_before_anything_is_queued(compilers: list[LiteralCompiler]) -> None:
    engine = build_engine()
    with pytest.raises(GrammarError):
        engine.compile_grammar(Grammar.regex(""))
    with pytest.raises(GrammarError):
        engine.submit([97], SamplingParams(grammar=Grammar.regex("")))
    with pytest.raises(GrammarError):
        engine.submit_many([[97], [98]], SamplingParams(grammar=Grammar.regex("")), n=2)
    assert engine.get_stats()["total_tasks"] == 0


def test_a_tokenizer_that_knows_no_bytes_is_told_what_grammars_need() -> None:
    class Plain:
        stop_ids = ByteTokenizer.stop_ids
        encode = ByteTokenizer.encode
        detokenizer = ByteTokenizer.detokenizer

    with InferenceEngine(ScriptedModel(), Plain(), max_seq_len=64, max_batch_size=2) as engine:
        assert len(engine.generate("ab", temperature=0, max_tokens=5)) == 5
        with pytest.raises(GrammarError, match="this one has no vocab_size, special_tokens, token_bytes"):
            engine.compile_grammar(Grammar.json_object())


def test_without_the_grammar_engine_grammars_are_refused_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "astrai_triton.grammar.compiler", None)
    engine = build_engine()
    with pytest.raises(GrammarError, match="llguidance"):
        engine.submit([97], SamplingParams(grammar=Grammar.json_object()))
    assert len(answer(engine, "abc")) == 24


def test_answers_match_a_grammar_that_is_really_compiled() -> None:
    engine = build_engine(ScriptedModel(spread=7.0))
    params = SamplingParams(grammar=Grammar.regex("(ab|cd){3,5}[.]"), max_tokens=40)
    answers = finish(engine, engine.submit_many([list(b"several pages"), [98]], params, n=4))
    assert {reason for _, reason in answers} == {"stop"}
    assert all(re.fullmatch(r"(ab|cd){3,5}\.", text) for text, _ in answers)
    assert len(set(answers)) > 1
    assert_nothing_held(engine)


def test_a_grammar_is_traced_and_replayed(compilers: list[LiteralCompiler], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        engine = build_engine(observer=StepTrace(file))
        params = SamplingParams(grammar=Grammar.regex("text"), logprobs=True, top_logprobs=2)
        engine.submit([97], params)
        run_all(engine)
    task = json.loads(path.read_text().splitlines()[1])["arrived"][0]
    assert task["params"]["grammar"] == {"kind": "regex", "source": "text"}
    assert task["params"]["top_logprobs"] == 2
    result = replay(path, ScriptedModel(), ByteTokenizer())
    assert (result.difference, result.open_tasks, len(compilers)) == (None, (), 2)


def test_a_tokenizer_without_stop_ids_runs_to_the_limit() -> None:
    class Endless(ByteTokenizer):
        stop_ids = frozenset()

    with InferenceEngine(ScriptedModel(), Endless(), max_seq_len=32, max_batch_size=2) as engine:
        assert len(engine.generate("ab", temperature=0)) == 30
