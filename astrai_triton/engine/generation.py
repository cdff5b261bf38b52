"""Pieces of several tasks on their way into one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from astrai_triton.engine.result import GenerateResult, TaskHandle, TokenEvent


def bind_index(result: GenerateResult, index: int) -> Callable[[TokenEvent], None]:
    """A callback that gives what it hears to ``result`` under ``index``."""
    return lambda event: result.push(index, event)


def cancel_all(handles: Sequence[TaskHandle]) -> None:
    """End all that have not ended."""
    for handle in handles:
        handle.cancel()


def iterate_pieces(result: GenerateResult, handles: Sequence[TaskHandle]) -> Iterator[tuple[int, str]]:
    """Index and text as they come; tasks are cancelled when nobody takes more."""
    try:
        while True:
            result.wait()
            pieces = result.pop()
            if not pieces and result.is_complete:
                return
            yield from pieces
    finally:
        cancel_all(handles)
