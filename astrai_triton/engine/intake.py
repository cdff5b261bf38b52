"""From prompts and parameters to tasks. What can never run is refused here, before anything is queued."""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import attrs

from astrai_triton.backend import ATTN_BACKEND, current_backend
from astrai_triton.cache import PagePool
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import TaskHandle, TextDecoder, TokenEvent
from astrai_triton.engine.sampling import check_vocab
from astrai_triton.engine.scoring import PromptScores
from astrai_triton.engine.stops import StopMatcher
from astrai_triton.engine.task import Task, select_stop_ids
from astrai_triton.errors import ContextLengthError, GrammarError, PoolTooSmallError
from astrai_triton.grammar.spec import Grammar

if TYPE_CHECKING:
    from astrai_triton.grammar.compiler import CompiledGrammar, GrammarCompiler
    from astrai_triton.grammar.vocabulary import GrammarTokenizer


class TextCodec(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def detokenizer(self) -> TextDecoder: ...


@attrs.frozen(kw_only=True)
class _Terms:
    """What the tasks of one call have in common."""

    params: SamplingParams
    stop_ids: frozenset[int]
    grammar: CompiledGrammar | None
    key: str | None
    salt: str | None
    callback: Callable[[TokenEvent], None] | None
    backend: ATTN_BACKEND | None = attrs.field(factory=current_backend)


class Intake:
    """Checks what callers ask for and makes tasks of it. Safe from any thread.

    Args:
        tokenizer: text <-> ids.
        pool: owner of the KV cache; only its sizes are read.
        vocab_size: of the model.
        max_seq_len: tokens of a task, prompt and answer together.
        max_queue: tasks that may wait.
        cancel: ends a task.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        pool: PagePool,
        *,
        vocab_size: int,
        max_seq_len: int,
        max_queue: int,
        cancel: Callable[[Task], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._max_queue = max_queue
        self._capacity_tokens = pool.capacity_tokens
        self._shared_page_size = None if pool.radix is None else pool.page_size
        self._cancel = cancel
        self._compiler: GrammarCompiler | None = None
        self._making_compiler = threading.Lock()

    def room_for(self, prompt_len: int) -> int:
        """As ``InferenceEngine.room_for``."""
        if prompt_len >= self._max_seq_len:
            raise ContextLengthError(prompt_len, self._max_seq_len)
        if prompt_len >= self._capacity_tokens:
            raise PoolTooSmallError(prompt_len + 1, self._capacity_tokens)
        return self._capacity_tokens - prompt_len

    def check_prompt(self, prompt_ids: Sequence[int], name: str = "prompt_ids") -> list[int]:
        """A prompt as a list of its own.

        Raises:
            ValueError, TypeError: it is empty, no sequence, or has something else than ids of the vocabulary.
        """
        if not isinstance(prompt_ids, Iterable):
            raise TypeError(f"{name}: wanted a sequence of token ids, got {prompt_ids!r}")
        tokens = list(prompt_ids)
        if not tokens:
            raise ValueError(f"{name}: wanted at least one token, got an empty prompt")
        for token_id in tokens:
            if type(token_id) is not int:
                raise TypeError(f"{name}: wanted ints, got {token_id!r} ({type(token_id).__name__})")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            outside = next(token_id for token_id in tokens if not 0 <= token_id < self._vocab_size)
            raise ValueError(f"{name}: wanted ids in 0..{self._vocab_size - 1}, got {outside}")
        return tokens

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar for the tokenizer, or find it compiled.

        Raises:
            GrammarError: it is malformed or not supported.
        """
        with self._making_compiler:
            if self._compiler is None:
                self._compiler = _make_compiler(self._tokenizer, self._vocab_size)
            compiler = self._compiler
        return compiler.compile(grammar)

    def build(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | None,
        *,
        n: int = 1,
        request_id: str | None = None,
        key: str | None = None,
        salt: str | None = None,
        callback: Callable[[TokenEvent], None] | None = None,
    ) -> list[Task]:
        """Make the tasks of one call, all choices of a prompt next to each other, without arrival numbers.

        Args:
            prompts: as ``check_prompt`` gave them, at least one.

        Others, raises: as ``InferenceEngine.submit_many``.
        """
        params = params if params is not None else SamplingParams()
        self._check_count(len(prompts), n)
        check_vocab(params, self._vocab_size)
        limits = [self._limit(len(tokens), params) for tokens in prompts]
        terms = _Terms(
            params=params,
            stop_ids=select_stop_ids(params, self._tokenizer.stop_ids),
            grammar=None if params.grammar is None else self.compile(params.grammar),
            key=key,
            salt=salt,
            callback=callback,
        )
        name = request_id if request_id is not None else uuid.uuid4().hex
        tasks: list[Task] = []
        for tokens, max_tokens in zip(prompts, limits, strict=True):
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            first: Task | None = None
            for choice in range(n):
                task_id = name if n == len(prompts) == 1 else f"{name}-{len(tasks)}"
                task = self._make_task(task_id, tokens, max_tokens, seed + choice, terms)
                if first is None:
                    first = task
                elif self._has_shared_page(len(tokens)):
                    task.leader = first
                tasks.append(task)
        return tasks

    def _make_task(self, task_id: str, tokens: list[int], max_tokens: int, seed: int, terms: _Terms) -> Task:
        params, prompt_len = terms.params, len(tokens)
        handle = TaskHandle(task_id, prompt_len, params, lambda: self._cancel(task))
        task = Task(
            handle=handle,
            params=params,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            tokens=tokens.copy(),
            seed=seed,
            stop_ids=terms.stop_ids,
            text_decoder=self._tokenizer.detokenizer(),
            stops=StopMatcher(params.stop),
            matcher=None if terms.grammar is None else terms.grammar.start(),
            arrival=0,
            key=terms.key,
            salt=terms.salt,
            prompt_scores=PromptScores(prompt_len) if params.prompt_logprobs else None,
            backend=terms.backend,
            callback=terms.callback,
        )
        return task

    def _check_count(self, num_prompts: int, n: int) -> None:
        if type(n) is not int:
            raise TypeError(f"n: wanted an integer, got {n!r}")
        if n < 1:
            raise ValueError(f"n: wanted >= 1, got {n}")
        if num_prompts < 1:
            raise ValueError("prompts: wanted at least one, got none")
        if num_prompts * n > self._max_queue:
            raise ValueError(
                f"n, prompts: wanted at most {self._max_queue} tasks in one call (max_queue), got "
                f"{n} choices of {num_prompts} prompts; ask for fewer, or in several calls"
            )

    def _has_shared_page(self, prompt_len: int) -> bool:
        """Whether equal prompts of this length find anything of each other in the prefix cache."""
        return self._shared_page_size is not None and prompt_len > self._shared_page_size

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens that may be sampled after such a prompt."""
        room = self.room_for(prompt_len)
        if params.max_tokens is None:
            return room
        if params.max_tokens > self._max_seq_len - prompt_len:
            raise ContextLengthError(prompt_len + params.max_tokens, self._max_seq_len)
        if params.max_tokens > room:
            raise PoolTooSmallError(prompt_len + params.max_tokens, self._capacity_tokens)
        return params.max_tokens


def _make_compiler(tokenizer: TextCodec, vocab_size: int) -> GrammarCompiler:
    try:
        # Loads the grammar engine, for those who use it.
        from astrai_triton.grammar.compiler import GrammarCompiler
    except ImportError as error:
        raise GrammarError(
            f"grammars need the package llguidance, which cannot be loaded: {error}"
        ) from error
    missing = [
        name for name in ("vocab_size", "special_tokens", "token_bytes") if not hasattr(tokenizer, name)
    ]
    if missing:
        raise GrammarError(
            "grammars need a tokenizer that knows the bytes of its tokens; "
            f"this one has no {', '.join(missing)}"
        )
    return GrammarCompiler(cast("GrammarTokenizer", tokenizer), vocab_size)
