"""Questions and answers with one server, shown and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Any

from astrai_server.chat.answer import FAILED, STOPPED, Answer
from astrai_server.chat.client import ChatClient
from astrai_server.chat.control import make_line
from astrai_server.chat.conversation import Conversation
from astrai_server.chat.errors import ChatError
from astrai_server.chat.prompt import hide_typing
from astrai_server.chat.screen import REDRAW_S, AnswerView, Screen

_NO_LIST_STATUS = frozenset({404, 405, 501})


class ChatSession:
    """Talks to one server.

    Args:
        client: where questions go.
        screen: where answers go.
        model: name sent with requests; None takes the first that the server lists.
        system: system prompt; None leaves it to the server.
        parameters: further fields of every request, such as ``temperature``.
        is_interactive: whether there is somebody to be told of commands.
    """

    def __init__(
        self,
        client: ChatClient,
        screen: Screen,
        *,
        model: str | None = None,
        system: str | None = None,
        parameters: dict[str, Any] | None = None,
        is_interactive: bool = True,
    ) -> None:
        self.client = client
        self.screen = screen
        self.model = model
        self.parameters = dict(parameters or {})
        self._is_interactive = is_interactive
        self.conversation = Conversation(system=system)

    def ask(self, question: str, *, is_retry: bool = False) -> Answer:
        """Ask, show the answer and what is to be said of it, remember it.

        Args:
            question: the user's message.
            is_retry: it is the last question of the conversation, to be answered anew.
        """
        answer = Answer(question=question, asked_s=time.monotonic())
        error: ChatError | None = None
        try:
            self.choose_model()
            with hide_typing(), self.screen.show_answer() as view:
                asyncio.run(self._receive(answer, view, is_retry))
        except KeyboardInterrupt:
            answer.finish_reason = STOPPED
        except ChatError as caught:
            error, answer.finish_reason = caught, FAILED
        self.conversation.record(answer, is_retry=is_retry)
        self._report(answer, error)
        return answer

    def choose_model(self) -> None:
        """Take the first model that the server lists, unless one is named already.

        Raises:
            ChatError: the server cannot be asked.
        """
        if self.model is not None:
            return
        try:
            models = self.list_models()
        except ChatError as error:
            # A server without a list has one model, and needs no name for it.
            if error.status not in _NO_LIST_STATUS:
                raise
            return
        if models:
            self.model = models[0]
        if len(models) > 1:
            self.screen.note(f"{len(models)} models are served; {make_line(models[0])} answers")

    def list_models(self) -> list[str]:
        """Names of the models that are served.

        Raises:
            ChatError: the server cannot be asked.
        """
        return asyncio.run(self.client.list_models())

    async def _receive(self, answer: Answer, view: AnswerView, is_retry: bool) -> None:
        ticker = asyncio.create_task(_redraw_often(view))
        try:
            answer.asked_s = time.monotonic()
            body = {
                **({} if self.model is None else {"model": self.model}),
                "messages": self.conversation.list_messages(answer.question, is_retry=is_retry),
                **self.parameters,
            }
            async with contextlib.aclosing(self.client.ask(body)) as deltas:
                async for delta in deltas:
                    answer.add(delta, time.monotonic())
                    view.add(delta)
        finally:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker

    def _report(self, answer: Answer, error: ChatError | None) -> None:
        if error is not None:
            self.screen.fail(_advise(error))
        if answer.is_whole and not answer.text:
            self.screen.fail("the answer is empty")
        if answer.is_whole or answer.num_chunks:
            self.screen.note(f"[{answer.describe()}]")
        if self._is_interactive and not (answer.is_whole and answer.text):
            kept = ", /undo takes back what came of it" if answer.text else ""
            self.screen.note(f"/retry asks again{kept}")


async def _redraw_often(view: AnswerView) -> None:
    while True:
        view.redraw()
        await asyncio.sleep(REDRAW_S)


def _advise(error: ChatError) -> str:
    if error.retry_after_s is None:
        return str(error)
    return f"{error}; it asks to be tried again in {max(1, math.ceil(error.retry_after_s))} s"
