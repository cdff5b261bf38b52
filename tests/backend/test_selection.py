"""Which backend runs a call, and how a choice that cannot run it is refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from astrai_triton.backend import (
    ATTN_BACKEND,
    TorchNativeBackend,
    attention,
    attn_backend,
    backend_reasons,
    current_backend,
)
from astrai_triton.backend.base import AttentionCall
from astrai_triton.backend.selection import select
from astrai_triton.errors import BackendError, UnknownBackendError, UnsupportedCallError
from strategies import build_packed, packed_case

ROWS = torch.randn(1, 2, 2, 8, generator=torch.Generator().manual_seed(0))
CALL = AttentionCall(ROWS, ROWS, ROWS, None, 0, None, False, "dense", None, (-1, -1), 0.0, None)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTR_BACKEND", raising=False)


@pytest.fixture
def flash_without_cuda() -> str:
    """Why the flash backend refuses here: the package is missing, or the tensors are not on a GPU."""
    reason = backend_reasons()["flash"]
    return "cannot be imported" if reason else "flash_attn needs CUDA tensors"


def test_the_automatic_order_ends_at_the_torch_backend() -> None:
    assert current_backend() is None
    assert select(CALL).name is ATTN_BACKEND.TORCH_NATIVE


def test_the_environment_chooses_for_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    assert current_backend() is ATTN_BACKEND.TORCH_NATIVE
    assert select(CALL).name is ATTN_BACKEND.TORCH_NATIVE


def test_the_environment_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "flash")
    assert current_backend() is ATTN_BACKEND.FLASH
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    assert current_backend() is ATTN_BACKEND.TORCH_NATIVE


def test_an_empty_environment_variable_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "")
    assert current_backend() is None


@pytest.mark.parametrize("name", ["torch", "TRITON", "cuda ", "auto"])
def test_an_unknown_name_in_the_environment_raises_with_the_choices(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASTR_BACKEND", name)
    for ask in (current_backend, lambda: attention(ROWS, ROWS, ROWS)):
        with pytest.raises(
            UnknownBackendError, match="ASTR_BACKEND: wanted one of triton, cuda, flash, torch_native"
        ):
            ask()


def test_an_unknown_name_raises_before_its_context_is_entered() -> None:
    with pytest.raises(
        UnknownBackendError, match="wanted one of triton, cuda, flash, torch_native, got 'torch'"
    ):
        attn_backend("torch")


def test_a_context_beats_the_environment(monkeypatch: pytest.MonkeyPatch, flash_without_cuda: str) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "flash")
    with attn_backend("torch_native") as chosen:
        assert chosen is ATTN_BACKEND.TORCH_NATIVE
        assert current_backend() is ATTN_BACKEND.TORCH_NATIVE
        attention(ROWS, ROWS, ROWS)
    with pytest.raises(UnsupportedCallError, match=flash_without_cuda):
        attention(ROWS, ROWS, ROWS)


def test_an_explicit_backend_that_cannot_run_the_call_raises_its_reason(flash_without_cuda: str) -> None:
    with (
        attn_backend(ATTN_BACKEND.FLASH),
        pytest.raises(UnsupportedCallError, match=flash_without_cuda) as caught,
    ):
        attention(ROWS, ROWS, ROWS)
    assert caught.value.backend == "flash"
    assert isinstance(caught.value, BackendError)


def test_every_backend_has_a_reason_or_none() -> None:
    reasons = backend_reasons()
    assert list(reasons) == [backend.value for backend in ATTN_BACKEND]
    assert reasons["torch_native"] is None


def test_contexts_nest_and_unwind() -> None:
    with attn_backend("flash"):
        with attn_backend("torch_native"):
            assert current_backend() is ATTN_BACKEND.TORCH_NATIVE
        assert current_backend() is ATTN_BACKEND.FLASH
    assert current_backend() is None


def test_an_exception_unwinds_the_context() -> None:
    with pytest.raises(KeyError), attn_backend("flash"):
        raise KeyError
    assert current_backend() is None


def test_a_context_does_not_reach_another_thread_and_a_captured_choice_does() -> None:
    seen: list[ATTN_BACKEND | None] = []

    def work(choice: ATTN_BACKEND | None) -> None:
        seen.append(current_backend())
        assert choice is not None
        with attn_backend(choice):
            seen.append(current_backend())
        seen.append(current_backend())

    with attn_backend("torch_native"):
        thread = threading.Thread(target=work, args=(current_backend(),))
        thread.start()
        thread.join()
    assert seen == [None, ATTN_BACKEND.TORCH_NATIVE, None]


def test_concurrent_tasks_keep_their_own_choice() -> None:
    async def work(name: str) -> str:
        with attn_backend(name):
            await asyncio.sleep(0)
            chosen = current_backend()
            await asyncio.sleep(0)
        assert chosen is not None
        return chosen.value

    async def both() -> list[str]:
        return await asyncio.gather(work("flash"), work("torch_native"))

    assert asyncio.run(both()) == ["flash", "torch_native"]


def test_automatic_goes_on_to_the_next_backend_only_when_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(self: TorchNativeBackend, call: AttentionCall) -> str | None:
        asked.append("torch_native")
        return "not today"

    monkeypatch.setattr(TorchNativeBackend, "why_not", refuse)
    with pytest.raises(UnsupportedCallError, match=r"triton: .*; flash: .*; torch_native: not today"):
        attention(ROWS, ROWS, ROWS)
    assert asked == ["torch_native"]


def test_forward_goes_by_the_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for kind in ("decode", "prefill", "dense"):
        monkeypatch.setattr(
            TorchNativeBackend, f"fwd_{kind}", lambda self, call, kind=kind: ran.append(kind) or call.q
        )
    attention(ROWS, ROWS, ROWS)
    for q_lens in ((1, 1), (2, 1)):
        tensors = build_packed(packed_case(q_lens, (5, 5)))
        attention(tensors.q, tensors.k, tensors.v, tensors.cache)
    attention(tensors.q, tensors.k, tensors.v, tensors.cache, fwd="prefill")
    assert ran == ["dense", "decode", "prefill", "prefill"]
