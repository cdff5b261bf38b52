"""The Python face of inference: prompts in, text out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, overload

from astrai_triton.cache import PagePool, PrefixReport, explain_prefix
from astrai_triton.engine.budget import POLICIES, PolicyName
from astrai_triton.engine.generation import bind_index, cancel_all, iterate_pieces
from astrai_triton.engine.graphs import capture_decode
from astrai_triton.engine.intake import Intake, TextCodec
from astrai_triton.engine.model import Model, check_replacement
from astrai_triton.engine.observer import Observer
from astrai_triton.engine.params import SamplingParams, merge_params
from astrai_triton.engine.queue import MAX_OVERTAKEN
from astrai_triton.engine.result import GenerateResult, TaskHandle, TokenEvent
from astrai_triton.engine.runner import ModelRunner
from astrai_triton.engine.sampling import SamplingPipeline
from astrai_triton.engine.scheduler import InferenceScheduler
from astrai_triton.engine.stats import StepHistogram, describe_stats
from astrai_triton.engine.task import Task
from astrai_triton.errors import TaskError
from astrai_triton.grammar.spec import Grammar


class InferenceEngine:
    """Continuous batching behind a plain interface. Use as a context manager.

    Args:
        model: the decoder.
        tokenizer: text <-> ids.
        max_batch_size: tasks that run at once.
        max_seq_len: tokens of a task, prompt and answer together; None is the model's own limit.
        page_size: tokens of a KV page (paged mode).
        n_tokens: tokens of the KV pool; None is contiguous mode, ``max_batch_size * max_seq_len`` slots
        without sharing.
        prefix_cache: share complete pages between prompts with the same beginning (paged mode, ``page_size``
        > 1).
        max_step_tokens: rows of one step.
        max_queue: tasks that may wait.
        policy: how prompts share a step: "budget" (equal shares) or "fcfs" (one after the other).
        max_overtaken: starts of others that the longest waiting task lets pass; see ``WaitingQueue``.
        observer: is told what every step does, and closed by ``shutdown``; see ``trace``.
        model_name: what clients see.
        cuda_graphs: capture the decode step at start-up, for every padded batch size, so that no step
            launches kernel by kernel. None does where the model is on a GPU and the backend is triton.
        start: start the step loop; without it, call ``step`` yourself (tests, replays).

    Raises:
        ValueError: a size is out of range, sizes contradict each other, or ``cuda_graphs`` is True where
            nothing can be captured.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TextCodec,
        *,
        max_batch_size: int = 16,
        max_seq_len: int | None = None,
        page_size: int = 16,
        n_tokens: int | None = None,
        prefix_cache: bool = True,
        max_step_tokens: int = 512,
        max_queue: int = 256,
        policy: PolicyName = "budget",
        max_overtaken: int = MAX_OVERTAKEN,
        observer: Observer | None = None,
        model_name: str = "astrai",
        cuda_graphs: bool | None = None,
        start: bool = True,
    ) -> None:
        config = model.config
        if max_seq_len is None:
            max_seq_len = config.max_seq_len
        if not 1 <= max_seq_len <= config.max_seq_len:
            raise ValueError(
                f"max_seq_len: wanted 1 to {config.max_seq_len} (the model's), got {max_seq_len}"
            )
        least = max(max_batch_size, page_size if n_tokens is not None else 1)
        if max_step_tokens < least:
            raise ValueError(
                f"max_step_tokens: wanted at least {least} (max_batch_size, page_size), got {max_step_tokens}"
            )
        if max_queue < 1:
            raise ValueError(f"max_queue: wanted >= 1, got {max_queue}")
        if max_overtaken < 0:
            raise ValueError(f"max_overtaken: wanted >= 0, got {max_overtaken}")
        if policy not in POLICIES:
            raise ValueError(f"policy: wanted one of {', '.join(POLICIES)}, got {policy!r}")
        self.tokenizer = tokenizer
        self.model = model
        self.model_name = model_name
        self.max_seq_len = max_seq_len
        self.vocab_size = config.vocab_size
        self.pool = PagePool(
            n_layers=config.n_layers,
            n_q_heads=config.n_q_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_step_tokens=max_step_tokens,
            page_size=page_size,
            n_tokens=n_tokens,
            prefix_cache=prefix_cache,
            dtype=model.dtype,
            device=model.device,
        )
        graphs = capture_decode(model, self.pool, max_batch_size, cuda_graphs)
        self.graph_sizes: tuple[int, ...] = () if graphs is None else graphs.sizes
        """Padded batch sizes for which the decode step was captured."""
        self._observer = observer
        self._arrivals = itertools.count()
        self._submitting = threading.Lock()
        self._runner = ModelRunner(model, self.pool, SamplingPipeline(), graphs)
        self._scheduler = InferenceScheduler(
            self._runner,
            self.pool,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
            max_queue=max_queue,
            policy=policy,
            max_overtaken=max_overtaken,
            observer=observer,
        )
        self._intake = Intake(
            tokenizer,
            self.pool,
            vocab_size=config.vocab_size,
            max_seq_len=max_seq_len,
            max_queue=max_queue,
            cancel=self._scheduler.cancel,
        )
        if observer is not None:
            observer.open(
                {
                    "max_batch_size": max_batch_size,
                    "max_seq_len": max_seq_len,
                    "page_size": page_size,
                    "n_tokens": n_tokens,
                    "prefix_cache": prefix_cache,
                    "max_step_tokens": max_step_tokens,
                    "max_queue": max_queue,
                    "policy": policy,
                    "max_overtaken": max_overtaken,
                }
            )
        if start:
            self._scheduler.start()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether the scheduler runs."""
        return self._scheduler.is_alive

    def room_for(self, prompt_len: int) -> int:
        """Tokens that can be sampled after a prompt of ``prompt_len`` tokens.

        Raises:
            ContextLengthError: the prompt fills the context.
            PoolTooSmallError: the prompt fills the KV pool.
        """
        return self._intake.room_for(prompt_len)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        key: str | None = None,
        salt: str | None = None,
        callback: Callable[[TokenEvent], None] | None = None,
    ) -> TaskHandle:
        """Queue one prompt. What can never run is refused here and now; what is accepted runs.

        Args:
            prompt_ids: at least one id in ``[0, vocab_size)``.
            params: how to sample; None is the defaults.
            request_id: name of the task in logs; None makes one.
            key: whose task this is; keys share the engine evenly, None being one of them.
            salt: tasks of different salts share no cached prefix.
            callback: called with each event in the scheduler's thread; what it raises ends this task.

        Raises:
            ValueError, TypeError: a bad prompt or parameter.
            GrammarError: ``params.grammar`` is malformed or not supported.
            AdmissionError: too long (``ContextLengthError``), larger than the pool (``PoolTooSmallError``),
                queue full (``QueueFullError``) or engine not running (``EngineUnavailableError``).
        """
        tokens = self._intake.check_prompt(prompt_ids)
        tasks = self._intake.build(
            [tokens], params, request_id=request_id, key=key, salt=salt, callback=callback
        )
        return self._enqueue(tasks)[0]

    def submit_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        request_id: str | None = None,
        key: str | None = None,
        salt: str | None = None,
    ) -> list[TaskHandle]:
        """Queue ``n`` choices of each prompt: all are accepted, or none.

        Choices fork where equal prompts share pages: once the first has computed the prompt, or has ended,
        the others start and find it in the prefix cache.

        Args:
            prompts: at least one, each as for ``submit``.
            params: how to sample; choice j of a prompt has seed ``params.seed + j``.
            n: choices of each prompt, >= 1.
            request_id: name of the tasks in logs, which append a number each where there are several.
            key, salt: as for ``submit``.

        Returns:
            Choices 0 to n - 1 of the first prompt, then those of the second, and so on.

        Raises:
            ValueError: besides a bad argument, more tasks than the queue ever holds.
            TypeError, GrammarError, AdmissionError: as ``submit``.
        """
        intake = self._intake
        checked = [intake.check_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        return self._enqueue(intake.build(checked, params, n=n, request_id=request_id, key=key, salt=salt))

    def _enqueue(self, tasks: Sequence[Task]) -> list[TaskHandle]:
        # Arrival numbers and the queue must agree on the order.
        with self._submitting:
            for task in tasks:
                task.arrival = next(self._arrivals)
            self._scheduler.submit(tasks)
        return [task.handle for task in tasks]

    def compile_grammar(self, grammar: Grammar) -> None:
        """Check a grammar and keep it compiled, or ``submit`` does it; the first time loads the compiler.

        Raises:
            GrammarError: the grammar is malformed or not supported.
        """
        self._intake.compile(grammar)

    @overload
    def generate(
        self, prompt: str, stream: Literal[False] = ..., *, params: SamplingParams | None = ..., **fields: Any
    ) -> str: ...

    @overload
    def generate(
        self, prompt: str, stream: Literal[True], *, params: SamplingParams | None = ..., **fields: Any
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompt: list[str],
        stream: Literal[False] = ...,
        *,
        params: SamplingParams | None = ...,
        **fields: Any,
    ) -> list[str]: ...

    @overload
    def generate(
        self, prompt: list[str], stream: Literal[True], *, params: SamplingParams | None = ..., **fields: Any
    ) -> Iterator[tuple[int, str]]: ...

    def generate(
        self,
        prompt: str | list[str],
        stream: bool = False,
        *,
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> str | list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """Complete one prompt or several at once. The text is taken as it is: no chat template.

        Args:
            prompt: text, or a list of texts.
            stream: return an iterator of pieces instead of whole answers.
            params: how to sample; or give its fields as keywords (``temperature=0, max_tokens=64``).

        Returns:
            ``str`` for a text, ``list[str]`` for a list; streamed: iterators of ``str`` and of ``(index,
            str)``.

        Raises:
            As ``submit``; ``TaskError`` where an answer that ended with an error is taken.
        """
        params = merge_params(params, fields)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        result = GenerateResult(len(prompts))
        handles: list[TaskHandle] = []
        try:
            for i, text in enumerate(prompts):
                ids = self.tokenizer.encode(text)
                handles.append(self.submit(ids, params, callback=bind_index(result, i)))
        except BaseException:
            cancel_all(handles)
            raise
        if stream:
            pieces = iterate_pieces(result, handles)
            return (text for _, text in pieces) if isinstance(prompt, str) else pieces
        try:
            answers = result.wait_completion()
        except BaseException:
            cancel_all(handles)
            raise
        return answers[0] if isinstance(prompt, str) else answers

    async def generate_async(
        self, prompt: str, *, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Complete one prompt and yield the pieces of the answer; leaving early cancels the task.

        Raises:
            As ``generate``.
        """
        handle = self.submit(self.tokenizer.encode(prompt), merge_params(params, fields))
        try:
            async for event in handle.events():
                if event.text:
                    yield event.text
                if event.error is not None:
                    raise TaskError(f"task {handle.id} failed: {event.error}") from event.error
        finally:
            handle.cancel()

    def replace_model(self, model: Model) -> Future[None]:
        """Run all further steps on another form of the same model; tasks that run go on with it.

        Args:
            model: of the same config, dtype and device, with the same weights up to rounding: what is in the
                KV pool stays.

        Returns:
            Done once no step uses the old model.

        Raises:
            ValueError: it is another model, or decode steps were captured from the old one.
            EngineUnavailableError: the engine is not running.
        """
        check_replacement(self.model, model, is_captured=bool(self.graph_sizes))

        def replace() -> None:
            self.model = self._runner.model = model

        return self._scheduler.call(replace)

    def step(self) -> None:
        """Run one step in the calling thread; only for an engine made with ``start=False``."""
        self._scheduler.step()

    def get_stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine; cheap, from any thread. See ``describe_stats``."""
        scheduler = self._scheduler
        return describe_stats(scheduler.stats, self.pool.stats(), scheduler.running, scheduler.num_waiting)

    def step_histogram(self) -> StepHistogram:
        """Durations of all steps so far, the model's time included; cheap, from any thread."""
        return self._scheduler.stats.histogram()

    def explain_prefix(self, prompt_ids: Sequence[int], salt: str | None = None) -> Future[PrefixReport]:
        """Say what the prefix cache would give a prompt now. Takes nothing; answered before the next step.

        Raises:
            ValueError, TypeError: a bad prompt.
            EngineUnavailableError: the engine is not running.
        """
        tokens, pool = self._intake.check_prompt(prompt_ids), self.pool
        return self._scheduler.call(lambda: explain_prefix(pool.radix, pool.page_size, tokens, salt))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new tasks and wait for the accepted ones; False when some remain after ``timeout_s``
        seconds."""
        return self._scheduler.drain(timeout_s)

    def shutdown(self) -> None:
        """Stop after the current step; open tasks end as cancelled. Does nothing the second time."""
        self._scheduler.stop()
        if self._observer is not None:
            self._observer.close()
