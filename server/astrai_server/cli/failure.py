"""How a command fails: one line and status 1; the traceback only for those who ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from astrai_server.config import ConfigError, Resolved

RESOLVED = "astrai.resolved"
"""Key of the command's ``Resolved`` in the context's ``meta``."""
_DEBUG = "astrai.debug"
_Command = TypeVar("_Command", bound=Callable[..., Any])


class OneLineGroup(click.Group):
    """Turns whatever a command raises into one line on stderr and exit status 1.

    Usage errors keep click's status 2. With ``--debug`` the exception goes on as it is, traceback and all.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if is_debug(ctx):
                raise
            text = describe_failure(error)
            resolved = ctx.meta.get(RESOLVED)
            if isinstance(error, ConfigError) and isinstance(resolved, Resolved):
                text = resolved.locate(text)
            raise click.ClickException(text) from error


def describe_failure(error: Exception) -> str:
    """The cause on one line; what is not one of our own errors is named by its type too."""
    text = " ".join(str(error).split())
    if type(error).__module__.startswith("astrai"):
        return text
    hint = "" if isinstance(error, OSError) else " (--debug shows the traceback)"
    return f"{type(error).__name__}: {text}{hint}" if text else f"{type(error).__name__}{hint}"


def is_debug(ctx: click.Context) -> bool:
    """Whether ``--debug`` was given."""
    return bool(ctx.meta.get(_DEBUG))


def debug_flag(command: _Command) -> _Command:
    """Add ``--debug``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        ctx.meta[_DEBUG] = value

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show the traceback of an error."
    )(command)
