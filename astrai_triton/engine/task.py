"""The life of one request inside the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from astrai_triton.backend import ATTN_BACKEND
from astrai_triton.cache import Lease
from astrai_triton.engine.logprobs import LogprobQueue
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.result import FinishReason, TaskHandle, TextDecoder, TokenEvent, TokenLogprob
from astrai_triton.engine.sampling import SampledToken, SampleRow
from astrai_triton.engine.scoring import PromptScores
from astrai_triton.engine.stops import StopMatcher
from astrai_triton.errors import GrammarError, NonFiniteLogitsError

if TYPE_CHECKING:
    from astrai_triton.grammar.matcher import GrammarMatcher

logger = logging.getLogger("astrai.engine")


@attrs.define(eq=False, kw_only=True)
class Task:
    """One prompt, its answer so far, and what it holds. Only the scheduler's thread writes it,
    ``is_cancelled`` apart."""

    handle: TaskHandle
    params: SamplingParams
    prompt_len: int
    max_tokens: int
    tokens: list[int]
    """Prompt, then every sampled token."""
    seed: int
    stop_ids: frozenset[int]
    text_decoder: TextDecoder
    stops: StopMatcher
    matcher: GrammarMatcher | None = None
    """What the answer must match, as far as it has come; None: anything goes."""
    arrival: int
    """Order of submission; the youngest is preempted first."""
    key: str | None = None
    """Whose task this is; keys share the engine evenly."""
    salt: str | None = None
    leader: Task | None = None
    """Task that computes the same prompt first; None: nobody does, or it has."""
    prompt_scores: PromptScores | None = None
    """Of the prompt's tokens, where they are asked for."""
    backend: ATTN_BACKEND | None = None
    """Attention backend in force where the task was submitted; None is automatic."""
    callback: Callable[[TokenEvent], None] | None = None
    lease: Lease | None = None
    num_prefilled: int = 0
    """Leading tokens whose K and V are in the cache, while prompt or lost tokens are computed."""
    is_decoding: bool = False
    """Whether the cache holds all tokens but the last, which was sampled and is to run next."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache at the first start."""
    num_preempted: int = 0
    num_lost: int = 0
    """``num_computed`` when it was last preempted."""
    num_overtaken: int = 0
    """Starts of others since it has been the longest waiting task."""
    num_metered: int = 0
    """Sampled tokens that are on its key's meter already."""
    submitted_at: float = attrs.field(factory=time.monotonic)
    """``time.monotonic()``."""
    started_at: float = 0.0
    """``time.monotonic()`` of the first start."""
    counts: dict[int, int] = attrs.field(factory=dict)
    """Generated token -> occurrences; kept only where a penalty needs it."""
    is_cancelled: bool = False
    is_done: bool = False

    is_quiet: bool = attrs.field(init=False)
    """Whether its tokens matter to nobody but the reader until it ends: the handle decodes the text then."""
    _logprobs: LogprobQueue | None = attrs.field(init=False, default=None)
    """Entries that wait for the text of their tokens, where they are asked for."""

    def __attrs_post_init__(self) -> None:
        params = self.params
        self.is_quiet = self.matcher is None and not (
            params.stop or params.logprobs or params.has_penalties or self.callback
        )
        if self.is_quiet:
            self.handle.decode_with(self.text_decoder)
        if params.logprobs:
            self._logprobs = LogprobQueue()

    @property
    def num_computed(self) -> int:
        """Leading tokens whose K and V are in the cache."""
        return len(self.tokens) - 1 if self.is_decoding else self.num_prefilled

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.prompt_len + self.max_tokens - len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def is_held(self) -> bool:
        """Whether it must not start before its leader has computed their prompt, or has ended."""
        leader = self.leader
        return leader is not None and not (leader.is_done or leader.num_generated)

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.prompt_scores is not None and not self.prompt_scores.is_complete

    @property
    def num_pending(self) -> int:
        """Tokens that must still pass through the model before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    def sample_row(self) -> SampleRow:
        """What the sampler must know about this task's next token."""
        needs_min = self.num_generated < self.params.min_tokens
        return SampleRow(
            params=self.params,
            seed=self.seed,
            position=len(self.tokens),
            counts=self.counts,
            suppressed=tuple(self.stop_ids) if needs_min else (),
            matcher=self.matcher,
        )

    def accept(self, sampled: SampledToken) -> TokenEvent:
        """Append a sampled token and say what it released and whether the task ends with it."""
        token_id = sampled.token_id
        if token_id < 0:
            return self.end("error", error=NonFiniteLogitsError("the model's logits are not finite"))
        self.tokens.append(token_id)
        self._count(token_id)
        if self.is_quiet:
            return self._accept_quietly(sampled)
        if token_id in self.stop_ids:
            return self._finish(sampled, "stop", self.stops.push(self.text_decoder.flush()))
        if self.matcher is not None:
            try:
                self.matcher.accept(token_id)
            except GrammarError as error:
                return self.end("error", error=error)
        text = self.stops.push(self._decode(sampled))
        if self.stops.matched is not None:
            return self._finish(sampled, "stop", text)
        is_complete = self.matcher is not None and self.matcher.is_complete
        if is_complete or self.num_left <= 0:
            text += self.stops.push(self.text_decoder.flush())
            return self._finish(sampled, "stop" if is_complete else "length", text)
        return TokenEvent(
            token_id=token_id,
            text=text,
            logprob=sampled.logprob,
            logprobs=self._logprobs.release(len(text)) if self._logprobs is not None else (),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_generated,
        )

    def _decode(self, sampled: SampledToken) -> str:
        """Whole characters that a token completes; its log-probability is kept until they are released."""
        text = self.text_decoder.push(sampled.token_id)
        if self._logprobs is not None:
            assert sampled.logprob is not None, (
                "a task that reports log-probabilities was sampled without them"
            )
            self._logprobs.push(sampled.token_id, sampled.logprob, sampled.top, len(text))
        return text

    def _accept_quietly(self, sampled: SampledToken) -> TokenEvent:
        """The text is the reader's business."""
        if sampled.token_id in self.stop_ids:
            return self.end("stop", token_id=sampled.token_id)
        if self.num_left <= 0:
            return self.end("length", token_id=sampled.token_id)
        return TokenEvent(
            token_id=sampled.token_id,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_generated,
        )

    def _count(self, token_id: int) -> None:
        if self.params.has_penalties:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1

    def _finish(self, sampled: SampledToken, reason: FinishReason, text: str) -> TokenEvent:
        # What was held back is settled now: the last bytes, or the end itself, may complete a stop string.
        if self.stops.matched is None:
            text += self.stops.flush()
        is_cut = self.stops.matched is not None
        return self.end(
            "stop" if is_cut else reason,
            text=text,
            token_id=sampled.token_id,
            logprob=sampled.logprob,
            logprobs=self._logprobs.finish(len(text), is_cut=is_cut) if self._logprobs is not None else (),
            stop_string=self.stops.matched,
        )

    def end(
        self,
        reason: FinishReason,
        *,
        text: str = "",
        token_id: int | None = None,
        logprob: float | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        stop_string: str | None = None,
        error: BaseException | None = None,
    ) -> TokenEvent:
        """Mark the task as done and make its last event."""
        self.is_done = True
        return TokenEvent(
            token_id=token_id,
            text=text,
            logprob=logprob,
            logprobs=logprobs,
            finish_reason=reason,
            stop_string=stop_string,
            error=error,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_generated,
        )

    def call_back(self, event: TokenEvent) -> TokenEvent:
        """Call the callback, if there is one; what it raises ends the task, and it is told of that end too.

        Returns:
            The event that counts: ``event``, or the end with the callback's error.
        """
        if self.callback is None:
            return event
        try:
            self.callback(event)
        except Exception as error:
            logger.exception("the callback of task %s failed", self.handle.id)
            event = self.end("error", error=error)
            try:
                self.callback(event)
            except Exception:
                # It was told; there is nobody left to tell.
                logger.exception("the callback of task %s failed again", self.handle.id)
        return event


def select_stop_ids(params: SamplingParams, model_stop_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end a task: the model's own, unless ignored, and the caller's."""
    own: Sequence[int] = () if params.ignore_eos else tuple(model_stop_ids)
    return frozenset((*own, *params.stop_token_ids))
