from __future__ import annotations

from collections.abc import Iterator

import pytest

from server_process import Server, start_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this directory."""
    log = tmp_path_factory.mktemp("server") / "log"
    with start_server(log, "--dtype", "float32", "--max-seq-len", "2048") as running:
        yield running
