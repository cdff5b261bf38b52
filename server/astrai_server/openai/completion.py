"""``/v1/completions``: text that goes on where a prompt ends."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from astrai_server import builder as base
from astrai_server import sse
from astrai_server.answer import Piece, PromptScores, Text
from astrai_server.field import refuse
from astrai_server.openai.frame import (
    OpenAIContext,
    TokenSpeller,
    UsageForm,
    UsageFrame,
    choose_usage_form,
    describe_usage,
    format_usage,
    mark_usage,
    spell_token,
    speller_of,
)
from astrai_server.openai.request import CompletionRequest
from astrai_server.problem import Problem
from astrai_triton.engine.result import TokenLogprob

if TYPE_CHECKING:
    from astrai_triton.engine import InferenceEngine

_TEXT_MARKER = "\x00text\x00"


@attrs.frozen(kw_only=True, eq=False)
class CompletionContext(OpenAIContext):
    """One request."""

    echoes: Sequence[str]
    """For each prompt, its text, or nothing where it is not wanted back."""
    num_top: int = 0
    """Alternatives told with each token."""

    def echo_of(self, index: int) -> str:
        """What comes back before choice ``index``."""
        return self.echoes[index // self.num_choices]


class CompletionResponseBuilder(base.ResponseBuilder[CompletionRequest, CompletionContext]):
    """Completions as OpenAI's clients read them.

    Args:
        usage_frame: how a stream reports its usage where the request does not say (``api.usage_frame``).
    """

    request_type = CompletionRequest
    prompt_field = "prompt"

    def __init__(self, usage_frame: UsageFrame = "compat") -> None:
        self._usage_frame = usage_frame

    def prepare(self, request: CompletionRequest, engine: InferenceEngine) -> CompletionContext:
        """See ``ResponseBuilder.prepare``."""
        prompts = _encode_prompts(request, engine)
        max_tokens = min(base.limit_tokens(engine, len(ids), request.max_tokens) for ids in prompts)
        has_logprobs = request.logprobs is not None
        params = request.make_params(
            max_tokens,
            engine.vocab_size,
            logprobs=has_logprobs,
            top_logprobs=request.logprobs or 0,
            prompt_logprobs=has_logprobs and request.echo,
        )
        tokenizer = speller_of(engine)
        echoes = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)
            for prompt in request.prompts
        ]
        answer_id, created = base.new_id("cmpl-"), base.now()
        model = request.model or engine.model_name
        usage_form = choose_usage_form(self._usage_frame, request.stream_options)
        head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        num_choices = len(prompts) * request.n
        return CompletionContext(
            id=answer_id,
            created=created,
            model=model,
            prompts=prompts,
            num_choices=request.n,
            params=params,
            is_stream=request.stream,
            text_frames=tuple(
                sse.split_frame(
                    sse.format_data(_make_chunk(head, usage_form, index, _TEXT_MARKER)), _TEXT_MARKER
                )
                for index in range(num_choices)
                if request.stream
            ),
            head=head,
            usage_form=usage_form,
            has_logprobs=has_logprobs,
            num_top=request.logprobs or 0,
            tokenizer=tokenizer,
            echoes=echoes if request.echo else [""] * len(prompts),
        )

    def format_stream_start(self, context: CompletionContext, usage: base.Usage) -> bytes:
        """The prompts, where they are wanted back; with log-probabilities they come later."""
        if context.has_logprobs:
            return b""
        indices = range(len(context.prompts) * context.num_choices)
        return b"".join(
            self.format_chunk(context, context.echo_of(i), i) for i in indices if context.echo_of(i)
        )

    def format_piece(self, context: CompletionContext, index: int, piece: Piece) -> bytes:
        """A frame with text."""
        if isinstance(piece, PromptScores):
            logprobs = _describe_prompt(context, index, piece.logprobs)
            return _format_chunk(context, index, context.echo_of(index), logprobs=logprobs)
        if not isinstance(piece, Text):
            return b""
        if not context.has_logprobs:
            return self.format_chunk(context, piece.text, index)
        logprobs = _describe_answer(context, index, piece.logprobs)
        return _format_chunk(context, index, piece.text, logprobs=logprobs)

    def format_choice_end(self, context: CompletionContext, choice: base.Choice) -> bytes:
        """The frame with the finish reason."""
        return _format_chunk(context, choice.index, "", finish_reason=choice.finish_reason)

    def format_stream_end(
        self, context: CompletionContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """The usage, the end."""
        return format_usage(context, usage, _make_chunk(context.head, "none", 0, "")) + sse.DONE

    def format_stream_error(self, problem: Problem, request_id: str) -> bytes:
        """The error alone: no end marker follows."""
        return sse.format_data({"error": problem.as_error()})

    def format_response(
        self, context: CompletionContext, choices: Sequence[base.Choice], usage: base.Usage
    ) -> bytes:
        """A ``text_completion`` object."""
        described = [
            {
                "index": choice.index,
                "text": context.echo_of(choice.index) + choice.text,
                "logprobs": _describe_choice(context, choice),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return sse.encode_json({**context.head, "choices": described, "usage": describe_usage(usage)})


def _encode_prompts(request: CompletionRequest, engine: InferenceEngine) -> list[list[int]]:
    if not request.has_several_prompts:
        return [_encode_prompt(request.prompts[0], engine)]
    return [_encode_prompt(prompt, engine, i) for i, prompt in enumerate(request.prompts)]


def _encode_prompt(prompt: str | list[int], engine: InferenceEngine, *path: int) -> list[int]:
    if not isinstance(prompt, str):
        base.check_token_ids("prompt", prompt, engine.vocab_size, *path)
        return prompt
    ids = engine.tokenizer.encode(prompt)
    if not ids:
        refuse("prompt", "wanted text of at least one token, got an empty text", *path)
    return ids


def _make_chunk(
    head: Mapping[str, Any],
    usage_form: UsageForm,
    index: int,
    text: str,
    *,
    logprobs: Any = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return mark_usage({**head, "choices": [choice]}, usage_form)


def _format_chunk(context: CompletionContext, index: int, text: str, **fields: Any) -> bytes:
    return sse.format_data(_make_chunk(context.head, context.usage_form, index, text, **fields))


# Log-probabilities: four lists, with one item a token


def _describe_choice(context: CompletionContext, choice: base.Choice) -> dict[str, Any] | None:
    if not context.has_logprobs:
        return None
    described = _describe_answer(context, choice.index, choice.logprobs)
    scores = next((piece for piece in choice.pieces if isinstance(piece, PromptScores)), None)
    if scores is None:
        return described
    before = _describe_prompt(context, choice.index, scores.logprobs)
    return {name: before[name] + described[name] for name in before}


def _describe_answer(
    context: CompletionContext, index: int, entries: Iterable[TokenLogprob]
) -> dict[str, list[Any]]:
    entries = list(entries)
    before = len(context.echo_of(index))
    ids = [entry.token_id for entry in entries]
    return _describe(context, ids, entries, [before + entry.offset for entry in entries])


def _describe_prompt(
    context: CompletionContext, index: int, entries: Sequence[TokenLogprob | None]
) -> dict[str, list[Any]]:
    ids = context.prompts[index // context.num_choices]
    return _describe(context, ids, entries, _find_offsets(context.tokenizer, ids, context.echo_of(index)))


def _find_offsets(tokenizer: TokenSpeller, ids: Sequence[int], echo: str) -> list[int]:
    """Where in its echo the text of each token of a prompt begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for token_id in ids:
        offsets.append(end)
        end += len(decoder.decode(spell_token(tokenizer, token_id)[1]))
    # What a tokenizer puts before a text, a space or the token of its beginning, is not in the echo.
    added = max(0, end - len(echo))
    return [max(0, offset - added) for offset in offsets]


def _describe(
    context: CompletionContext,
    ids: Iterable[int],
    entries: Sequence[TokenLogprob | None],
    offsets: list[int],
) -> dict[str, list[Any]]:
    spell = _Speller(context.tokenizer)
    return {
        "tokens": [spell(token_id) for token_id in ids],
        "token_logprobs": [entry.logprob if entry is not None else None for entry in entries],
        "top_logprobs": [_list_top(spell, entry) if context.num_top else None for entry in entries],
        "text_offset": offsets,
    }


def _list_top(spell: _Speller, entry: TokenLogprob | None) -> dict[str, float] | None:
    """The alternatives, and the token itself wherever it stands."""
    if entry is None:
        return None
    return {spell(token_id): logprob for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))}


class _Speller:
    """Names tokens by their text; what is no text alone, by its bytes."""

    def __init__(self, tokenizer: TokenSpeller) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> str:
        text, data = spell_token(self._tokenizer, token_id)
        if text.encode() == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
