"""Every exception the library raises on its own account.

A bad argument is a plain ``ValueError`` or ``TypeError``. Everything else is one of these::

    AstraiError
    ├── CheckpointError             a model's files cannot be used
    │   ├── UnknownModelError       no such name, directory or file
    │   ├── FetchError              the files exist somewhere but could not be brought here
    │   ├── CorruptFileError        a file is truncated, has the wrong magic or contradicts itself
    │   ├── UnsupportedModelError   an architecture, rope scaling or tensor type we do not implement
    │   └── WeightsMismatchError    missing, surplus or misshapen tensors
    ├── TokenizerError              the tokenizer's files are missing or of an unknown kind
    ├── ChatTemplateError           the chat template is broken or refused the conversation
    ├── GrammarError                a grammar is malformed, unsupported or unsatisfiable, or a token breaks it
    ├── BackendError                (also a RuntimeError)
    │   ├── UnknownBackendError     no attention backend has that name
    │   └── UnsupportedCallError    the chosen backend cannot run this call; says why
    ├── CacheError
    │   ├── OutOfPagesError         the KV pool cannot give the pages asked for now
    │   └── PageOwnershipError      a page was freed twice or used without being owned
    ├── AdmissionError              the engine refused a task before it began
    │   ├── ContextLengthError      the prompt leaves no room in the context
    │   ├── PoolTooSmallError       prompt + max_tokens can never fit into the KV pool
    │   ├── QueueFullError          try again after ``retry_after_s`` seconds
    │   └── EngineUnavailableError  loading, draining, shut down or dead
    ├── TaskError                   a task ended with an error after it was admitted
    │   └── NonFiniteLogitsError    the model produced NaN or Inf for this task
    └── TraceError                  a file is no trace of an engine's steps
"""

from __future__ import annotations


class AstraiError(Exception):
    """Root of the tree."""


class CheckpointError(AstraiError):
    """A model's files cannot be used."""


class UnknownModelError(CheckpointError):
    """No known name, directory or file matches."""


class FetchError(CheckpointError):
    """The files could not be downloaded or failed their checksum."""


class CorruptFileError(CheckpointError):
    """A file is truncated, has the wrong magic or contradicts itself."""


class UnsupportedModelError(CheckpointError):
    """An architecture, rope scaling or tensor type that is not implemented."""


class WeightsMismatchError(CheckpointError):
    """Tensors are missing, surplus or of the wrong shape."""


class TokenizerError(AstraiError):
    """The tokenizer's files are missing, broken or of an unknown kind."""


class ChatTemplateError(AstraiError):
    """The chat template is broken or refused the conversation."""


class GrammarError(AstraiError):
    """A grammar is malformed, unsupported or unsatisfiable, or a token breaks it."""


class BackendError(AstraiError, RuntimeError):
    """Attention backend selection or execution failed."""


class UnknownBackendError(BackendError):
    """No attention backend has that name."""


class UnsupportedCallError(BackendError):
    """The chosen backend cannot run this call.

    Args:
        backend: name of the backend.
        reason: what its ``why_not`` gave.
    """

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"attention backend {backend!r} cannot run this call: {reason}")
        self.backend = backend
        self.reason = reason


class CacheError(AstraiError):
    """The KV cache could not do what was asked."""


class OutOfPagesError(CacheError):
    """The pool cannot give the pages asked for now.

    Args:
        wanted: pages asked for.
        available: pages that are free or evictable.
    """

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"wanted {wanted} pages, {available} are free or evictable")
        self.wanted = wanted
        self.available = available


class PageOwnershipError(CacheError):
    """A page was freed twice or used without being owned."""


class AdmissionError(AstraiError):
    """The engine refused a task before it began."""


class ContextLengthError(AdmissionError):
    """The prompt leaves no room in the context.

    Args:
        prompt_len: tokens in the prompt.
        max_seq_len: tokens the context holds, prompt and answer together.
    """

    def __init__(self, prompt_len: int, max_seq_len: int) -> None:
        super().__init__(
            # Clients look for both of these wordings to tell this error from others.
            f"prompt is too long: this model's maximum context length is {max_seq_len} tokens, prompt and "
            f"answer together; the prompt has {prompt_len} tokens"
        )
        self.prompt_len = prompt_len
        self.max_seq_len = max_seq_len


class PoolTooSmallError(AdmissionError):
    """Prompt + max_tokens can never fit into the KV pool.

    Args:
        wanted: tokens the task may come to hold.
        capacity: tokens the whole pool holds.
    """

    def __init__(self, wanted: int, capacity: int) -> None:
        super().__init__(
            f"prompt + max_tokens need {wanted} tokens of KV cache, the pool holds {capacity}; "
            "shorten the prompt, lower max_tokens or enlarge cache.n_tokens"
        )
        self.wanted = wanted
        self.capacity = capacity


class QueueFullError(AdmissionError):
    """The queue is full.

    Args:
        depth: tasks waiting.
        retry_after_s: seconds after which a place is likely free.
    """

    def __init__(self, depth: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full ({depth} waiting); retry after {retry_after_s:.0f} s")
        self.depth = depth
        self.retry_after_s = retry_after_s


class EngineUnavailableError(AdmissionError):
    """The engine takes no tasks: it is loading, draining, shut down or dead."""


class TaskError(AstraiError):
    """A task ended with an error after it was admitted."""


class NonFiniteLogitsError(TaskError):
    """The model produced NaN or Inf for this task."""


class TraceError(AstraiError):
    """A file is no trace of an engine's steps."""
