"""``astrai serve``: the HTTP server."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from astrai_server.cli.failure import debug_flag
from astrai_server.cli.flags import config_flag, give, resolve, setting_flags
from astrai_server.config import Settings

if TYPE_CHECKING:
    from astrai_server.terminal import LoadDisplay
    from astrai_triton.engine import InferenceEngine

_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.argument("model", required=False)
@config_flag
@setting_flags()
@click.option(
    "--log-level",
    type=click.Choice(_LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    help="How much to log on stderr.",
)
@debug_flag
@click.pass_context
def serve(ctx: click.Context, /, model: str | None, config: Path | None, log_level: str) -> None:
    """Answer OpenAI and Anthropic clients over HTTP.

    MODEL is a known name, a directory, a .gguf file or org/name. SIGTERM or Ctrl-C lets running answers
    finish, a second one ends them.
    """
    if model is not None:
        give(ctx, "server.param_path", model)
    settings = resolve(ctx, config).settings
    # Slow to import, so only once the settings are known to be right.
    from astrai_server.keys import load_keys
    from astrai_server.loading import load_engine
    from astrai_server.run import run_server
    from astrai_server.terminal import LoadDisplay

    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s"
    )
    with LoadDisplay(sys.stderr, is_quiet=log_level.lower() in ("warning", "error")) as display:
        keys = load_keys(settings, os.environ)
        greeter = _Greeter(display, has_keys=bool(keys))

        def load() -> InferenceEngine:
            return load_engine(settings, display, missing="background")

        try:
            status = run_server(
                settings, load, keys=keys, on_listening=greeter.welcome, on_ready=greeter.show_example
            )
        except OSError as error:
            # Once it listens, an OSError is about something else: the model's files, say.
            if greeter.urls:
                raise
            raise click.ClickException(_explain_address(settings, error)) from error
    ctx.exit(status)


class _Greeter:
    """Tells on the terminal where the server is and how to try it."""

    def __init__(self, display: LoadDisplay, *, has_keys: bool) -> None:
        self._display = display
        self._has_keys = has_keys
        self.urls: list[str] = []

    def welcome(self, urls: list[str]) -> None:
        """The sockets are open."""
        self.urls = urls
        self._display.say(f"listens  {', '.join(urls)}")
        wide = [url for url in urls if not ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback]
        if wide and not self._has_keys:
            self._display.say(
                f"WARNING  {', '.join(wide)} is open to the network and asks for no API key: "
                "whoever reaches it can use it; set api.keys_file, or keep it to this machine with "
                "--host 127.0.0.1"
            )

    def show_example(self, engine: InferenceEngine) -> None:
        """The model is loaded."""
        self._display.close()
        url = self.urls[0].replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        body = {
            "model": engine.model_name,
            "messages": [{"role": "user", "content": "Count from 1 to 12."}],
            "temperature": 0,
            "max_tokens": 64,
        }
        self._display.say(
            f"ready    chat {url}/, OpenAI {url}/v1/chat/completions, Anthropic {url}/v1/messages"
        )
        key = ' -H "Authorization: Bearer $API_KEY"' if self._has_keys else ""
        self._display.say(
            f"try      curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )


def _explain_address(settings: Settings, error: OSError) -> str:
    server = settings.server
    reason = (error.strerror or str(error)).rpartition(": ")[2]
    return f"cannot listen on {server.host}:{server.port}: {reason}; choose another with --host or --port"
