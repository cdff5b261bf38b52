"""Kernels of ``kernels/`` in the CPU runtime, compiled once per state of the sources, called with arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2] / "cuda_ref"
_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
_ARRAY_GAP = 4096


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("is_broken", ctypes.c_int),
    ]


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64), ("is_writable", ctypes.c_int)]


class _Call(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("args", _Args),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("ranges", ctypes.POINTER(_Range)),
        ("num_ranges", ctypes.c_int),
    ]


class Minis:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def run(
        self,
        kernel: str,
        *,
        x: np.ndarray,
        out: np.ndarray,
        y: np.ndarray | None = None,
        n: int = 0,
        is_broken: bool = False,
        grid: Sequence[int] = (1, 1, 1),
        threads: int = 32,
        shared_bytes: int = 16384,
        is_scoped: bool = True,
    ) -> np.ndarray:
        """What ``out`` is after the kernel. ``x`` and ``y`` are read-only in it, unless ``is_scoped`` is off.

        Raises RuntimeError with the text of what the launch raised.
        """
        arrays = [x, np.zeros(4, np.float32) if y is None else y, out]
        memory, begins = _place(arrays)
        addresses = [memory.ctypes.data + begin for begin in begins]
        ranges = [
            (address, array.nbytes, array is out) for address, array in zip(addresses, arrays, strict=True)
        ]
        call = _Call(
            kernel=kernel.encode(),
            args=_Args(*addresses, n, is_broken),
            grid=(ctypes.c_uint * 3)(*grid),
            threads=threads,
            shared_bytes=shared_bytes,
            ranges=(_Range * len(ranges))(*ranges),
            num_ranges=len(ranges) if is_scoped else -1,
        )
        error = ctypes.create_string_buffer(4096)
        self._library.mini_run(ctypes.byref(call), error, ctypes.c_size_t(len(error)))
        if error.value:
            raise RuntimeError(error.value.decode())
        return memory[begins[2] :][: out.nbytes].view(out.dtype).reshape(out.shape).copy()

    def round(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Patterns of float32 ``x`` as bfloat16 and as float16."""
        results = np.zeros(x.shape, np.uint16), np.zeros(x.shape, np.uint16)
        self._library.mini_round(*(_pointer(array) for array in (x, *results)), ctypes.c_int64(x.size))
        return results

    def widen(self, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 of the patterns ``bits``, as those of bfloat16 and as those of float16."""
        results = np.zeros(bits.shape, np.float32), np.zeros(bits.shape, np.float32)
        self._library.mini_widen(*(_pointer(array) for array in (bits, *results)), ctypes.c_int64(bits.size))
        return results


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _place(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Copies of arrays in one buffer, far apart, at multiples of 256 bytes, and where each begins."""
    begins, end = [], _ARRAY_GAP
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // 256) * 256 + _ARRAY_GAP
    memory = np.full(end + 256, 0xFF, np.uint8)
    shift = -memory.ctypes.data % 256
    begins = [begin + shift for begin in begins]
    for array, begin in zip(arrays, begins, strict=True):
        memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memory, begins


@pytest.fixture(scope="session")
def minis() -> Minis:
    return Minis(_compile())


@pytest.fixture(scope="session")
def minis_with_ucontext() -> Minis:
    """With the switch of stacks that CPUs other than x86-64 use."""
    return Minis(_compile("-DASTRAI_UCONTEXT"))


def _compile(*defines: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    sources = sorted((ROOT / "host").glob("*.cpp"))
    headers = [*(ROOT / "host").glob("*.h"), *(HERE / "kernels").iterdir()]
    headers += [ROOT / "csrc" / "kernels" / name for name in ("device.cuh", "attn_warp_utils.cuh")]
    command = [compiler, *_FLAGS, "-DASTRAI_HOST", *defines, f"-I{ROOT}", str(HERE / "kernels" / "mini.cu")]
    command += map(str, sources)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    key = hashlib.sha256(version + repr(command).encode())
    for path in sorted([*sources, *headers]):
        key.update(path.name.encode() + path.read_bytes())
    directory = Path(tempfile.gettempdir()) / f"astrai-minis-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    library = directory / f"{key.hexdigest()[:24]}.so"
    if not library.exists():
        # Several test processes may compile at once; whole files only bear the final name.
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            subprocess.run([*command, "-o", f"{scratch}/mini.so"], check=True)
            os.replace(f"{scratch}/mini.so", library)
    return library
