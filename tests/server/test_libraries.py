"""What ``astrai info`` says of the libraries under torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from astrai_server.libraries import find_allocator, find_openmp

LINE = "7f00-7f01 r-xp 00000000 fe:00 12  {}\n"


def write_maps(path: Path, *libraries: str) -> Path:
    maps = path / "maps"
    maps.write_text("".join(LINE.format(library) for library in ("/usr/lib/libc.so.6", *libraries)))
    return maps


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4.5.9", "tcmalloc"),
        ("/opt/libjemalloc.so.2", "jemalloc"),
        ("/opt/libmimalloc.so", "mimalloc"),
        ("/opt/not_a_libtcmalloc/libother.so", "the C library's"),
    ],
)
def test_an_allocator_that_was_preloaded_is_named(tmp_path: Path, library: str, name: str) -> None:
    assert find_allocator(write_maps(tmp_path, library)) == name


def test_a_preloaded_openmp_stands_before_the_one_that_torch_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gnu = "/site-packages/torch/lib/libgomp.so.1"
    assert find_openmp(write_maps(tmp_path, gnu)) == "GNU OpenMP"
    assert find_openmp(write_maps(tmp_path, gnu, "/opt/libiomp5.so")) == "Intel OpenMP"
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    expected = "GNU OpenMP (OMP_NUM_THREADS=2, GOMP_SPINCOUNT=10000)"
    assert find_openmp(write_maps(tmp_path, gnu)) == expected


def test_a_system_that_does_not_tell_has_none(tmp_path: Path) -> None:
    assert find_allocator(tmp_path / "none") == "the C library's"
    assert find_openmp(tmp_path / "none") == "no OpenMP"
