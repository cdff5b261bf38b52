"""The kernels of these tests are CUDA: nvcc compiles the very same files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_the_same_sources(tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-cubin", f"-I{HERE.parents[2] / 'cuda_ref'}"]
    cubin = tmp_path / "mini.cubin"
    subprocess.run([*command, "-o", str(cubin), str(HERE / "kernels" / "mini.cu")], check=True)
    assert b"matmul_kernel" in cubin.read_bytes()
