"""``astrai chat``: a conversation on the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import io
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astrai_server.cli.failure import debug_flag

if TYPE_CHECKING:
    from astrai_server.chat.command import CommandSet
    from astrai_server.chat.session import ChatSession

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("ASTRAI_API_KEY", "OPENAI_API_KEY")


def _refuse_nan(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    # No range is wrong for it: it compares with nothing.
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"wanted a finite number, got {value}")
    return value


@click.command(short_help="Chat on the terminal with any OpenAI-compatible server.")
@click.argument("prompt", required=False)
@click.option(
    "--url", default=DEFAULT_URL, show_default=True, metavar="URL", help="Server, with or without /v1."
)
@click.option("-m", "--model", metavar="NAME", help="Model to ask; by default the first that is served.")
@click.option(
    "--api-key",
    envvar=KEY_VARIABLES,
    metavar="KEY",
    help=f"API key; better as {' or '.join(KEY_VARIABLES)}, which no list of processes shows.",
)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(0, 2), callback=_refuse_nan, help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(1), help="Length limit of an answer.")
@click.option("--top-p", type=click.FloatRange(0, 1), callback=_refuse_nan, help="1: off.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    callback=_refuse_nan,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest silence of the server.",
)
@click.option(
    "-i", "--interactive", is_flag=True, help="Take each line of a piped stdin as a question or a command."
)
@click.option("--keep-history", is_flag=True, help="Keep the lines you type for later chats, in ASTRAI_HOME.")
@click.option("--plain", is_flag=True, help="No Markdown: the text as the model writes it.")
@click.option("-q", "--quiet", is_flag=True, help="Answers and errors only.")
@debug_flag
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    prompt: str | None,
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    timeout: float,
    interactive: bool,
    keep_history: bool,
    plain: bool,
    quiet: bool,
    **parameters: Any,
) -> None:
    """Ask PROMPT and leave, or chat if there is none.

    A piped stdin is asked, after PROMPT if there are both. Answers go to stdout, everything else to stderr.
    The exit status is 1 if PROMPT got no whole answer.
    """
    if interactive and prompt is not None:
        raise click.UsageError("--interactive reads its questions from stdin; leave out PROMPT")
    # Slow to import, so only once the flags are known to be right.
    from astrai_server.chat.client import ChatClient
    from astrai_server.chat.command import CommandSet
    from astrai_server.chat.screen import Screen
    from astrai_server.chat.session import ChatSession

    try:
        client = ChatClient(url, api_key=api_key, timeout_s=timeout)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that does not know a character still shows the rest.
            stream.reconfigure(errors="replace")
    question = None if interactive else _read_question(prompt)
    session = ChatSession(
        client,
        Screen(sys.stdout, sys.stderr, is_plain=plain, is_quiet=quiet),
        model=model,
        system=system,
        parameters={name: value for name, value in parameters.items() if value is not None},
        is_interactive=question is None,
    )
    if question is None:
        _talk(session, CommandSet(session), _find_history() if keep_history else None)
    else:
        answer = session.ask(question)
        ctx.exit(0 if answer.is_whole and answer.text else 1)


def _read_question(prompt: str | None) -> str | None:
    """The one question of a chat without a keyboard; None if there is one."""
    if sys.stdin.isatty():
        return prompt
    piped = sys.stdin.buffer.read().decode("utf-8", "replace")
    question = "\n\n".join(text for text in (prompt, piped.strip()) if text)
    if not question:
        raise click.UsageError("there is no question: stdin is empty, and PROMPT is missing")
    return question


def _talk(session: ChatSession, commands: CommandSet, history: Path | None) -> None:
    from astrai_server.chat.control import make_line
    from astrai_server.chat.errors import ChatError
    from astrai_server.chat.loop import chat as run_loop
    from astrai_server.chat.prompt import KeyboardReader, PipeReader

    try:
        session.choose_model()
        session.screen.note(f"{make_line(session.model or 'a chat')} at {session.client.api}")
    except ChatError as error:
        session.screen.fail(str(error))
    session.screen.note("/help shows the commands, Ctrl-D leaves")
    if not sys.stdin.isatty():
        run_loop(session, commands, PipeReader(sys.stdin.buffer))
        return
    has_color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    with KeyboardReader(commands.names, history=history, has_color=has_color) as reader:
        run_loop(session, commands, reader)


def _find_history() -> Path:
    # As checkpoint.resolve.home has it, which comes with torch.
    return Path(os.environ.get("ASTRAI_HOME") or "~/.cache/astrai").expanduser() / "chat_history"
