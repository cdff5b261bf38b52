"""Reading what ptxas prints, and refusing kernels that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import pytest

from cuda_ref.compile_matrix import (
    SOURCES,
    TARGETS,
    CompileError,
    Usage,
    build_lines,
    find_faults,
    find_nvcc,
    main,
    parse_usage,
    shorten_name,
)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH: the CUDA toolkit")

PRINTED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5plainPf' for 'sm_90'
ptxas info    : Function properties for _Z5plainPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4352 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 52.895 ms
ptxas info    : Compiling entry function '_Z5tightPf' for 'sm_90a'
ptxas info    : Function properties for _Z5tightPf
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for _Z6calledf
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 32 bytes cumulative stack size
ptxas info    : Compile time = 130.647 ms
"""

USAGE = Usage(
    kernel="f<32>",
    arch="sm_80",
    registers=255,
    spill_stores=0,
    spill_loads=0,
    stack_bytes=0,
    shared_bytes=163 * 1024,
)


def test_every_kernel_of_the_output_is_read_with_the_functions_it_calls() -> None:
    plain, tight = parse_usage(PRINTED)
    assert plain == Usage(
        kernel="_Z5plainPf",
        arch="sm_90",
        registers=40,
        spill_stores=0,
        spill_loads=0,
        stack_bytes=0,
        shared_bytes=4352,
    )
    assert (tight.kernel, tight.arch, tight.registers) == ("_Z5tightPf", "sm_90", 255)
    assert (tight.spill_stores, tight.spill_loads, tight.stack_bytes) == (20, 24, 32)
    assert tight.shared_bytes == 0


@pytest.mark.parametrize("text", ["", PRINTED.replace("Used 40 registers", "Used few registers")])
def test_output_without_figures_is_an_error_and_never_a_pass(text: str) -> None:
    with pytest.raises(CompileError, match="ptxas -v: wanted"):
        parse_usage(text)


def test_kernel_at_every_limit_fits() -> None:
    assert find_faults(USAGE) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spill_stores": 4}, "spills: wanted none, got 4 bytes of stores"),
        ({"spill_loads": 8}, "8 of loads"),
        ({"registers": 256}, "registers: wanted at most 255, got 256"),
        ({"shared_bytes": 163 * 1024 + 1}, "shared memory: wanted at most 166912 bytes"),
    ],
)
def test_kernel_over_a_budget_is_a_fault(change: dict[str, int], text: str) -> None:
    (fault,) = find_faults(attrs.evolve(USAGE, **change))
    assert text in fault


def test_shared_memory_is_judged_by_the_architecture() -> None:
    fits = [name for name in TARGETS if not find_faults(attrs.evolve(USAGE, arch=name))]
    assert fits == ["sm_80", "sm_90", "sm_100"]


def test_table_marks_a_kernel_with_a_fault() -> None:
    lines = build_lines([USAGE, attrs.evolve(USAGE, spill_loads=12)])
    assert lines[0].split() == ["arch", "registers", "spill", "st/ld", "stack", "static", "smem", "kernel"]
    assert [line[0] for line in lines[1:]] == [" ", "!"]
    assert "0/12" in lines[2]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void astrai::f<__half, 64, astrai::PagedKV>(astrai::AttnParams)", "f<f16, 64, PagedKV>"),
        ("void astrai::prefill::f<__nv_bfloat16, (int)96>(P)", "prefill::f<bf16, 96>"),
        ("astrai::(anonymous namespace)::f(void (*)(int), int)", "f"),
        ("_Z5plainPf", "_Z5plainPf"),
    ],
)
def test_names_are_those_of_the_source(name: str, short: str) -> None:
    assert shorten_name(name) == short


def test_missing_nvcc_is_an_error_that_says_where_it_was_sought(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main(["--check"]) == 2
    printed = capsys.readouterr().err
    assert "nvcc: wanted on PATH or in CUDA_HOME/bin" in printed
    assert str(tmp_path) in printed


def test_nvcc_is_found_in_cuda_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == nvcc


# 200 values that live at once and 32 registers for each of 1024 threads, twice per multiprocessor.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* x) {
    float held[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = held[i] * held[199 - i];
}
"""

FITTING = """
#include "csrc/kernels/device.cuh"
namespace astrai {
template <class T>
ASTRAI_GLOBAL(128) fitting_kernel(T* x) { store_global(x, from_float<T>(2.0f * to_float(load_global(x)))); }
template __global__ void fitting_kernel<bf16>(bf16*);
}
"""


@needs_nvcc
def test_kernel_that_spills_fails_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, results = tmp_path / "spilling.cu", tmp_path / "matrix.json"
    source.write_text(SPILLING)
    command = ["--source", str(source), "--arch", "sm_80", "--arch", "sm_90", "--json", str(results)]
    assert main([*command, "--check"]) == 1
    printed = capsys.readouterr().out
    assert "spilling_kernel on sm_80: spills: wanted none" in printed
    assert "2 compiled: 1 kernels for 2 architectures" in printed
    document = json.loads(results.read_text())
    assert [kernel["arch"] for kernel in document["kernels"]] == ["sm_80", "sm_90"]
    assert all(kernel["spill_stores"] > 0 and kernel["faults"] for kernel in document["kernels"])
    assert main(command) == 0


@needs_nvcc
def test_kernel_that_fits_passes_on_every_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "fitting.cu"
    source.write_text(FITTING)
    assert main(["--source", str(source), "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 compiled: 1 kernels for 5 architectures; 0 faults"
    assert main(["--source", str(source), "--arch", "sm_90"]) == 0
    assert "fitting_kernel<bf16>" in capsys.readouterr().out


@needs_nvcc
def test_source_that_does_not_compile_is_status_2_with_the_compiler_s_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken(float* x) { *x = missing; }\n")
    assert main(["--source", str(source), "--arch", "sm_90", "--check"]) == 2
    printed = capsys.readouterr().err
    assert "broken.cu, compute_80" in printed
    assert 'identifier "missing" is undefined' in printed


def test_every_source_is_found_without_naming_it() -> None:
    names = {source.stem for source in SOURCES.glob("*.cu")}
    assert {"attn_decode", "attn_prefill", "attn_paged_decode", "attn_paged_prefill", "rotary_emb"} <= names
