from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from browser import NAMES, find_chromium, start_chromium


@pytest.fixture(scope="session")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the DevTools of one browser for all tests of this directory."""
    executable = find_chromium()
    if executable is None:
        reason = f"needs a Chromium on PATH, by one of the names {', '.join(NAMES)}"
        # Where checks count, a missing browser is a fault, unless whoever runs them says there can be none.
        if "CI" in os.environ and "ASTRAI_NO_BROWSER" not in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    with start_chromium(executable, tmp_path_factory.mktemp("chromium")) as url:
        yield url
