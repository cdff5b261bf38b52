"""Models on the Hugging Face hub, through ``huggingface_hub`` and its cache."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from astrai_triton.checkpoint.progress import Progress
from astrai_triton.errors import FetchError

# Never *.bin or *.pt: pickles can run code.
_WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja"]
# Other forms of the same weights: subdirectories, and Mistral's own layout.
_UNWANTED = ["*/*", "consolidated*"]


def fetch_repository(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch a model repository, or find it in the hub's cache (``HF_HOME``; ``HF_HUB_OFFLINE`` is honoured).

    Args:
        name: ``org/name``.
        progress: told how many bytes are here; None leaves the display to ``huggingface_hub``.

    Returns:
        The snapshot's directory.

    Raises:
        FetchError: no such repository, no access to it, no network, no safetensors in it, or
            ``huggingface_hub`` is not installed.
    """
    try:
        # Slow to import, and not needed for the default model.
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FetchError(
            f"{name}: fetching needs huggingface_hub; pip install 'astrai-triton[serve]'"
        ) from error
    bar = None if progress is None else _reporting_bar(f"fetching {name}", progress)
    try:
        directory = snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, tqdm_class=bar)
    except Exception as error:  # the hub raises its own, httpx's, requests' and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FetchError(
            f"{name}: could not fetch it from the Hugging Face hub: {reason}; check the name, the "
            "network and your access (HF_TOKEN), or give the path of a local directory or .gguf file"
        ) from error
    if not any(Path(directory).glob("*.safetensors")):
        raise FetchError(
            f"{name}: the repository has no *.safetensors at its top; if it has GGUF files, fetch the one "
            "you want and give its path"
        )
    return Path(directory)


def _reporting_bar(phase: str, progress: Progress) -> type[Any]:
    """A progress bar class that calls ``progress`` instead of drawing."""

    def display(bar: Any, *_args: object, **_options: object) -> bool:
        # Other bars count files; they would run backwards between the bytes.
        if bar.unit == "B":
            progress(phase, int(bar.n), int(bar.total or 0))
        return True

    # Untyped, and there only where huggingface_hub is.
    base = importlib.import_module("tqdm").tqdm
    return type("Bar", (base,), {"display": display})
