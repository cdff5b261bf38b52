"""The reason why a build cannot be had: each thing that may be missing, by itself."""

from __future__ import annotations

import importlib.util
import platform
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ref import toolchain, why_not
from cuda_ref.toolchain import why_not_build


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch with a device, nvcc, and all that a host build needs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "/cuda/bin/nvcc")
    monkeypatch.setattr(toolchain, "_why_no_compiler", lambda: None)


def test_a_machine_with_everything_has_no_reason(cuda_machine: None) -> None:
    assert why_not("cuda") is None
    if platform.system() == "Linux":
        assert why_not("host") is None


def test_an_unknown_kind_is_an_error() -> None:
    unknown: Any = "gpu"
    with pytest.raises(ValueError, match="kind: wanted 'host' or 'cuda', got 'gpu'"):
        why_not(unknown)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "'c\\+\\+' is not in PATH"),
        ("ccache no-such", "'ccache' is not in PATH; install g\\+\\+, or name"),
    ],
)
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, reason: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why_not("host"))


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_ninja", lambda: None)
    assert why_not("host") == "cuda_ref is built by ninja, which is not installed; pip install ninja"


def test_no_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    reason = why_not("host")
    assert reason is not None
    assert f"Python.h, which is not in {tmp_path}; install" in reason


def test_no_setuptools(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "setuptools" else find_spec(name)
    )
    reason = why_not("host")
    assert reason is not None
    assert "needs setuptools, which is not installed" in reason


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert why_not("host") == "the host build of cuda_ref needs Linux, this is Darwin"


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = why_not("cuda")
    assert (
        reason == f"torch {torch.__version__} has no CUDA; install a CUDA build of torch, or pass CPU tensors"
    )


def test_no_device(cuda_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not("cuda") == (
        "the CUDA build of cuda_ref needs a CUDA device, and there is none; pass CPU tensors"
    )


def test_no_nvcc(cuda_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert why_not("cuda") == (
        "the CUDA build of cuda_ref needs nvcc; install the CUDA toolkit, or set CUDA_HOME to where it is"
    )


def test_the_ninja_of_the_package_is_found_where_path_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ninja", reason="needs the package ninja")
    monkeypatch.setenv("PATH", str(tmp_path))
    ninja = toolchain.find_ninja()
    assert ninja is not None
    assert Path(ninja).is_file()


@pytest.mark.parametrize(
    ("arches", "has_mma"),
    [("7.5", False), ("7.5;9.0", False), ("8.0", True), ("8.6 9.0a+PTX", True), ("10.0;12.0", True)],
)
def test_tensor_cores_are_used_when_every_architecture_has_them(
    monkeypatch: pytest.MonkeyPatch, arches: str, has_mma: bool
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arches)
    assert toolchain.has_mma() is has_mma


@pytest.mark.parametrize(("capability", "has_mma"), [((7, 0), False), ((8, 0), True), ((12, 1), True)])
def test_without_a_list_the_devices_decide(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_mma: bool
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert toolchain.has_mma() is has_mma


def test_a_cuda_build_without_a_device_needs_the_name_of_one(
    cuda_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not_build("cuda") is None
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert "set TORCH_CUDA_ARCH_LIST" in (why_not_build("cuda") or "")
