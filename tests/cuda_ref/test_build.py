"""Building, with sources of a few lines: the cache, its lock, what goes into a build, what a failure says."""

from __future__ import annotations

import fcntl
import importlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cuda_ref import BuildError, build, why_not

# The package has a function of the same name.
build_module: Any = importlib.import_module("cuda_ref.build")

SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define SPELL_(...) #__VA_ARGS__
#define SPELL(...) SPELL_(__VA_ARGS__)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if !defined(ASTRAI_HOST)
#error the host runtime is not chosen
#endif
int kernel_answer();
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, SPELL(TORCH_EXTENSION_NAME), nullptr, -1, nullptr};
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", kernel_answer());
    PyModule_AddStringConstant(module, "head_dims", SPELL(ASTRAI_HEAD_DIMS));
    PyModule_AddStringConstant(module, "extra", SPELL(EXTRA));
    return module;
}
"""
KERNEL = '#include "csrc/kernels/answer.h"\nint kernel_answer() { return ANSWER; }\n'


@pytest.fixture(autouse=True)
def _needs_compiler() -> None:
    reason = why_not("host")
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sources laid out as those of the package are."""
    kernels = tmp_path / "root" / "csrc" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "answer.cu").write_text(KERNEL)
    (kernels / "answer.h").write_text("#define ANSWER 41\n")
    (kernels.parent / "bindings.cpp").write_text(SOURCE)
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of extensions, and a process that has loaded nothing."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    yield directory
    build_module._load.cache_clear()


def build_afresh(root: Path, **options: Any) -> ModuleType:
    """As a process would that starts now."""
    build_module._load.cache_clear()
    return build("host", root=root, **options)


def directory_of(root: Path) -> Path:
    """Where the build of ``root`` is or will be."""
    recipe = build_module.Recipe(kind="host", root=root)
    return build_module._cache_root() / build_module.name_build(recipe)


def test_it_is_built_once_with_one_line_of_progress(
    root: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build_afresh(root).answer == 41
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("building cuda_ref for the CPU, about a minute, once, in ")
    assert err.count("\n") == 1
    assert directory_of(root).parent == cache
    # A file that is younger than the build says nothing; what it holds does.
    (root / "csrc" / "kernels" / "answer.cu").touch()
    assert build_afresh(root).answer == 41
    assert capfd.readouterr() == ("", "")


def test_a_process_loads_a_build_once(root: Path) -> None:
    assert build("host", root=root) is build("host", root=root)


@pytest.mark.parametrize("changed", ["csrc/kernels/answer.h", "csrc/kernels/answer.cu"])
def test_what_changed_is_built_again(root: Path, changed: str) -> None:
    build_afresh(root)
    file = root / changed
    file.write_text(file.read_text().replace("41", "42").replace("ANSWER;", "ANSWER + 1;"))
    assert build_afresh(root).answer == 42


def test_flags_and_tools_are_part_of_the_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = build_module.Recipe(kind="host", root=root)
    plain = build_module.name_build(recipe)
    assert plain.isidentifier()
    assert build_module.name_build(build_module.Recipe(kind="host", root=root, defines=("EXTRA=1",))) != plain
    monkeypatch.setattr(build_module, "describe_toolchain", lambda kind: "another compiler")
    assert build_module.name_build(recipe) != plain


def test_head_dims_and_macros_reach_the_compiler(root: Path) -> None:
    module = build_afresh(root, head_dims=(32, 64), defines=("EXTRA=7",))
    assert (module.head_dims, module.extra) == ("32,64", "7")


def test_what_a_killed_build_left_behind_is_in_nobodys_way(root: Path) -> None:
    directory = directory_of(root)
    directory.mkdir(parents=True)
    for leftover in ("lock", "held", f"{directory.name}.so", "answer.o"):
        (directory / leftover).write_text("left in the middle")
    assert build_afresh(root).answer == 41


def test_a_build_waits_for_another_process_and_takes_what_that_one_built(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build_afresh(root)
    capfd.readouterr()
    answers: list[int] = []
    with (directory_of(root) / "held").open("w") as held:
        # A lock belongs to the opened file, so this one is as good as another process's.
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: answers.append(build_afresh(root).answer))
        thread.start()
        said, deadline = "", time.monotonic() + 60
        while "waiting" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert said == "waiting for another process that builds cuda_ref\n"
        assert answers == []
    thread.join(timeout=60)
    assert answers == [41]
    assert capfd.readouterr().err == ""


def test_a_failed_build_ends_with_what_the_compiler_said(root: Path) -> None:
    source = root / "csrc" / "kernels" / "answer.cu"
    source.write_text("int kernel_answer() { return no_such_name; }\n" + "// a long file\n" * 50)
    # The second attempt of one process must not take the first for a success.
    for _ in range(2):
        with pytest.raises(
            BuildError, match=r"the host build of cuda_ref failed; run ninja -v in "
        ) as caught:
            build_afresh(root)
        assert "answer.cu:1:30: error: " in str(caught.value)
        assert "no_such_name" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
    source.write_text(KERNEL)
    assert build_afresh(root).answer == 41


def test_a_build_that_cannot_be_loaded_is_a_failed_build(root: Path) -> None:
    (root / "csrc" / "kernels" / "answer.cu").write_text("int another_name() { return 41; }\n")
    with pytest.raises(BuildError, match="undefined symbol"):
        build_afresh(root)
    assert not (directory_of(root) / "complete").exists()


def test_a_cache_that_cannot_be_written_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(file))
    with pytest.raises(BuildError, match=r"cannot be written .*; set TORCH_EXTENSIONS_DIR to a directory"):
        build_afresh(root)


def test_without_what_it_takes_there_is_a_reason_and_no_build(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="'no-such-compiler' is not in PATH; install g"):
        build_afresh(root)
    assert not cache.exists()


def test_the_sources_of_the_package_are_all_compiled() -> None:
    recipe = build_module.Recipe(kind="host")
    names = [path.name for path in build_module.find_sources(recipe)]
    entries = ["attn_decode", "attn_paged_decode", "attn_prefill", "attn_paged_prefill", "rotary_emb"]
    assert {"bindings.cpp", "launch.cpp", "merge_states.cu", *(f"{entry}.cu" for entry in entries)} <= {
        *names
    }
    on_a_gpu = [path.name for path in build_module.find_sources(build_module.Recipe(kind="cuda"))]
    assert {*on_a_gpu} == {name for name in names if name.endswith(".cu") or name == "bindings.cpp"}
