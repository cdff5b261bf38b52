"""Arrivals, steps, cancels and faults in any order: every text is the solo text, and no page is lost."""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astrai_triton.engine import SamplingParams, TaskHandle
from drive import answer, assert_nothing_held, build_engine, drain_events, run_all
from fakes import Context, ScriptedModel

PROMPTS = [b"a", b"ab", b"shared prefix, end one", b"shared prefix, end two", b"0123456789abcdef", b"x" * 37]


@cache
def solo_text(prompt: bytes, max_tokens: int) -> str:
    return answer(build_engine(), prompt, max_tokens=max_tokens)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.num_faults = 0
        # 14 pages of 4: two of the longest tasks do not fit side by side.
        self.engine = build_engine(
            ScriptedModel(on_forward=self.on_forward), n_tokens=56, max_batch_size=4, max_step_tokens=12
        )
        self.open: dict[TaskHandle, tuple[bytes, int, str]] = {}
        self.cancelled: set[TaskHandle] = set()

    def on_forward(self, contexts: list[Context]) -> None:
        if self.num_faults:
            self.num_faults -= 1
            raise RuntimeError("injected")

    @rule(prompt=st.sampled_from(PROMPTS), max_tokens=st.integers(1, 18), salt=st.sampled_from([None, "s"]))
    def arrive(self, prompt: bytes, max_tokens: int, salt: str | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.open[self.engine.submit(list(prompt), params, salt=salt)] = (prompt, max_tokens, "")

    @rule(
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=2),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 18),
        salt=st.sampled_from([None, "s"]),
    )
    def arrive_in_choices(self, prompts: list[bytes], n: int, max_tokens: int, salt: str | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        handles = self.engine.submit_many([list(prompt) for prompt in prompts], params, n=n, salt=salt)
        asked = [prompt for prompt in prompts for _ in range(n)]
        for handle, prompt in zip(handles, asked, strict=True):
            self.open[handle] = (prompt, max_tokens, "")

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.open)))
        handle.cancel()
        self.cancelled.add(handle)

    @rule(count=st.integers(1, 3))
    def inject_faults(self, count: int) -> None:
        self.num_faults = count
        self.engine.step()
        self.num_faults = 0

    @invariant()
    def pages_and_texts_are_right(self) -> None:
        self.engine.pool.check()
        for handle, (prompt, max_tokens, text) in list(self.open.items()):
            for event in drain_events(handle):
                text += event.text
                reason = event.finish_reason
                assert reason != "cancelled" or handle in self.cancelled
                assert reason != "length" or text == solo_text(prompt, max_tokens)
                if reason is not None:
                    del self.open[handle]
            assert solo_text(prompt, max_tokens).startswith(text)
            if handle in self.open:
                self.open[handle] = (prompt, max_tokens, text)

    def teardown(self) -> None:
        run_all(self.engine)
        self.pages_and_texts_are_right()
        assert not self.open
        assert_nothing_held(self.engine)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase
