"""A text that is on every machine: the reference manual that Python carries for ``help()``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs

from astrai_bench.errors import BenchError


@attrs.frozen(kw_only=True)
class Text:
    """What a model is asked to predict."""

    source: str
    content: str

    @property
    def sha256(self) -> str:
        """Of the UTF-8 bytes: perplexities of equal texts may be compared."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_manual() -> Text:
    """Python's topics, sorted by name. Prose and code; another text in each minor version."""
    import platform
    from pydoc_data.topics import topics

    content = "\n".join(topics[name] for name in sorted(topics))
    return Text(source=f"pydoc_data.topics of Python {platform.python_version()}", content=content)


def read_text(path: Path) -> Text:
    """A UTF-8 file.

    Raises:
        BenchError: it is not readable or empty.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--text {path}: {error}") from error
    if not content.strip():
        raise BenchError(f"--text {path}: wanted text, got an empty file")
    return Text(source=path.name, content=content)


def cut_windows(token_ids: list[int], context: int, num_windows: int) -> list[list[int]]:
    """Windows of ``context`` tokens, evenly spread over the text, not overlapping.

    Raises:
        BenchError: the text is too short for them.
    """
    if len(token_ids) < context * num_windows:
        raise BenchError(
            f"--windows, --context: wanted at most {len(token_ids)} tokens, which the text has, "
            f"got {num_windows} windows of {context}"
        )
    stride = len(token_ids) // num_windows
    return [token_ids[idx * stride : idx * stride + context] for idx in range(num_windows)]
