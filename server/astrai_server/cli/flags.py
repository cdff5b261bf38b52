"""Settings as flags: made from the list of options, so that a new option is a flag without further work."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from astrai_server.cli.failure import RESOLVED
from astrai_server.config import ConfigError, Option, Resolved, list_options, resolve_settings
from astrai_server.option import Choice, Flag, Integer, Kind, Number

_GIVEN = "astrai.given"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def setting_flags(
    sections: Container[str] = ("server", "cache", "limits", "api"), *, leave_out: Container[str] = ()
) -> Callable[[_Command], _Command]:
    """Add ``-c/--config`` and a flag for every option of ``sections``.

    Args:
        sections: sections whose options become flags.
        leave_out: names (``server.port``) that do not.
    """
    options = [
        option
        for option in list_options()
        if option.has_flag and option.section in sections and option.name not in leave_out
    ]

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = _add_flag(option)(command)
        return command

    return decorate


def config_flag(command: _Command) -> _Command:
    """Add ``-c/--config``, passed as ``config``."""
    return click.option(
        "-c",
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="YAML configuration; flags and ASTRAI_<SECTION>__<KEY> variables beat it.",
    )(command)


def give(ctx: click.Context, name: str, value: Any) -> None:
    """Set ``section.key`` as if by a flag of this command, unless it was given already.

    Raises:
        UsageError: it was.
    """
    given = ctx.meta.setdefault(_GIVEN, {})
    if name in given:
        raise click.UsageError(f"{name} was given twice: {value!r} and {given[name]!r}; leave one out")
    given[name] = value


def resolve(ctx: click.Context, config: Path | None) -> Resolved:
    """Merge this command's flags, the environment, the file and the defaults.

    Raises:
        ConfigError: see ``resolve_settings``.
    """
    resolved = resolve_settings(config, os.environ, ctx.meta.get(_GIVEN, {}))
    ctx.meta[RESOLVED] = resolved
    return resolved


def _add_flag(option: Option) -> Callable[[_Command], _Command]:
    def remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        assert param.name is not None
        # None may be the value (--n-tokens null), so it cannot stand for "not given".
        if ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            give(ctx, option.name, value)

    name = option.flag
    common: dict[str, Any] = {
        "default": None,
        "expose_value": False,
        "callback": remember,
        "help": f"{option.doc} [{_show_default(option)}]",
    }
    if isinstance(option.kind, Flag):
        return click.option(f"{name}/--no-{name[2:]}", **common)
    return click.option(name, type=_make_parser(option.kind), metavar=_name_kind(option.kind), **common)


def _make_parser(kind: Kind) -> Callable[[str], Any]:
    """A flag's text becomes a value as an environment variable's does; a wrong one is a usage error."""

    def parse(text: str) -> Any:
        try:
            value = kind.parse(text)
        except ConfigError as error:
            raise click.BadParameter(f"wanted {kind.wanted}; {error}") from error
        problem = kind.check(value)
        if problem:
            raise click.BadParameter(problem)
        return value

    return parse


def _show_default(option: Option) -> str:
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return "null" if option.default is None else f"{option.default}"


def _name_kind(kind: Kind) -> str:
    if isinstance(kind, Choice):
        return "|".join(str(value) for value in kind.values)
    if isinstance(kind, Integer):
        return "N"
    return "SECONDS" if isinstance(kind, Number) else "TEXT"
