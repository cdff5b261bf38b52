from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_server import device
from astrai_server.config import ConfigError, ServerSettings


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("speedup", "dtype"), [(2.0, torch.bfloat16), (1.2, torch.float32), (0.1, torch.float32)]
)
def test_a_cpu_runs_bfloat16_only_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, speedup: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(device, "measure_bfloat16_speedup", lambda: speedup)
    placement = device.place_model(ServerSettings(cpu_kernels=False))
    assert (placement.device, placement.dtype) == (torch.device("cpu"), dtype)
    assert f"{speedup:.1f} x" in placement.reason


@pytest.mark.usefixtures("no_gpu")
def test_a_cpu_runs_bfloat16_where_the_kernels_multiply_it_in_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "prefers_bfloat16", lambda server: True)
    monkeypatch.setattr(device, "measure_bfloat16_speedup", lambda: pytest.fail("nothing to measure"))
    placement = device.place_model(ServerSettings())
    assert (placement.device, placement.dtype) == (torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_type_that_is_asked_for_is_taken(name: Any) -> None:
    placement = device.place_model(ServerSettings(dtype=name, device="cpu"))
    assert placement.dtype == getattr(torch, name)
    assert placement.dtype_name == name
    assert placement.reason == ""


def test_the_measured_speedup_is_a_plausible_ratio_and_leaves_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    assert 0.001 < device.measure_bfloat16_speedup() < 1000
    assert torch.get_num_threads() == threads


def test_the_number_of_threads_is_set() -> None:
    threads = torch.get_num_threads()
    try:
        device.place_model(ServerSettings(threads=threads + 1, dtype="float32", device="cpu"))
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"server\.device: wanted a GPU .* got '{name}' .* none; use cpu or auto"
    ):
        device.place_model(ServerSettings(device=name))


def test_a_gpu_beyond_the_last_is_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="2 of them"):
        device.place_model(ServerSettings(device="cuda:2", dtype="float16"))
    assert device.place_model(ServerSettings(device="cuda:1", dtype="float16")).device.index == 1


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_runs_bfloat16_if_it_has_it(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert device.place_model(ServerSettings()).dtype == dtype


def test_free_memory_of_the_machine_is_between_nothing_and_all() -> None:
    free = device.free_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 1 << 50


def test_a_machine_without_meminfo_tells_nothing(tmp_path: Path) -> None:
    assert device.read_meminfo(tmp_path / "none") is None
    assert device.read_cgroup(tmp_path) is None


def test_a_containers_limit_counts_its_file_pages_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 100\ninactive_file 50\n")
    assert device.read_cgroup(tmp_path) == 450


def test_a_container_without_a_limit_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("")
    assert device.read_cgroup(tmp_path) is None
