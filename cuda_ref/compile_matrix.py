"""``python -m cuda_ref.compile_matrix``: what nvcc makes of every kernel, on a machine without a GPU.

Each source goes through the front end once per set of instructions it may use, and ptxas assembles that PTX
for every architecture: kernels use nothing newer than sm_80, and the front end is much of the time. sm_75 has
neither ``cp.async`` nor bf16 ``mma``, so it gets the sources without them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from astrai_triton.errors import AstraiError

ROOT = Path(__file__).parent
SOURCES = ROOT / "csrc" / "kernels"
FORMAT = 1
"""Version of the JSON object; grows when a reader of the old one would go wrong."""


class CompileError(AstraiError):
    """nvcc is missing, or refused a source."""


@attrs.frozen
class Target:
    """An architecture and how its code is made."""

    name: str
    virtual: str
    """Of the PTX that is assembled for it."""
    shared_bytes: int
    """Largest shared memory of a block."""
    defines: tuple[str, ...] = ()


_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("sm_75", "compute_75", 64 * _KIB, ("-DASTRAI_NO_MMA",)),
        Target("sm_80", "compute_80", 163 * _KIB),
        Target("sm_89", "compute_80", 99 * _KIB),
        Target("sm_90", "compute_80", 227 * _KIB),
        Target("sm_100", "compute_80", 227 * _KIB),
    )
}
"""By name. Limits of a block: CUDA C++ Programming Guide, table of compute capabilities."""

MAX_REGISTERS = 255
"""Per thread, on every architecture here."""


@attrs.frozen(kw_only=True)
class Usage:
    """What ptxas gave one kernel on one architecture."""

    kernel: str
    """Mangled until ``shorten_names``."""
    arch: str
    registers: int
    """32-bit, per thread."""
    spill_stores: int
    """Bytes per thread that registers were stored to local memory with."""
    spill_loads: int
    stack_bytes: int
    """Local memory per thread: spilled registers, and arrays that are indexed at run time."""
    shared_bytes: int
    """Static shared memory per block. What a launch adds is not known to ptxas."""


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\d+)a?'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def parse_usage(text: str) -> list[Usage]:
    """What ``ptxas -v`` printed, one kernel after another.

    Raises:
        CompileError: a kernel is named whose figures are missing, or there is none.
    """
    entries = list(_ENTRY.finditer(text))
    if not entries:
        raise CompileError(
            f"ptxas -v: wanted the figures of kernels, got {text.strip()!r}; check nvcc's version"
        )
    ends = [entry.start() for entry in entries[1:]] + [len(text)]
    return [
        _parse_entry(entry[1], entry[2], text[entry.end() : end])
        for entry, end in zip(entries, ends, strict=True)
    ]


def _parse_entry(kernel: str, arch: str, text: str) -> Usage:
    # One frame is the kernel's own; functions that were not inlined follow with theirs.
    frames, used = _FRAME.findall(text), _USED.search(text)
    if not frames or used is None:
        raise CompileError(
            f"ptxas -v: wanted frame and registers of {kernel}, got {text.strip()!r}; check nvcc's version"
        )
    shared = _SHARED.search(text)
    return Usage(
        kernel=kernel,
        arch=arch,
        registers=int(used[1]),
        spill_stores=sum(int(stores) for _, stores, _ in frames),
        spill_loads=sum(int(loads) for _, _, loads in frames),
        stack_bytes=sum(int(stack) for stack, _, _ in frames),
        shared_bytes=int(shared[1]) if shared else 0,
    )


def find_faults(usage: Usage) -> list[str]:
    """What ``--check`` refuses of a kernel."""
    faults = []
    if usage.spill_stores or usage.spill_loads:
        faults.append(
            f"spills: wanted none, got {usage.spill_stores} bytes of stores and {usage.spill_loads} of loads"
        )
    if usage.registers > MAX_REGISTERS:
        faults.append(f"registers: wanted at most {MAX_REGISTERS}, got {usage.registers}")
    limit = TARGETS[usage.arch].shared_bytes
    if usage.shared_bytes > limit:
        faults.append(f"shared memory: wanted at most {limit} bytes, got {usage.shared_bytes}")
    return faults


def find_nvcc() -> Path:
    """nvcc from PATH, else from ``CUDA_HOME``.

    Raises:
        CompileError: it is in neither.
    """
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    home = os.environ.get("CUDA_HOME")
    if home and (nvcc := Path(home) / "bin" / "nvcc").exists():
        return nvcc
    raise CompileError(
        f"nvcc: wanted on PATH or in CUDA_HOME/bin, got neither (CUDA_HOME is {home or 'not set'}); "
        "install the CUDA toolkit 12.8 or later, whose compiler needs no GPU"
    )


def compile_sources(
    sources: Sequence[Path], targets: Sequence[Target], *, nvcc: Path, workers: int = 2
) -> list[Usage]:
    """Compile every source for every target, with ``workers`` processes at once.

    Raises:
        CompileError: what nvcc or ptxas said of a source it refused.
    """
    with (
        tempfile.TemporaryDirectory(prefix="compile-matrix-") as scratch,
        ThreadPoolExecutor(workers) as pool,
    ):
        fronts = {
            (source, target.virtual, target.defines): Path(scratch) / f"{source.stem}-{target.virtual}.ptx"
            for source in sources
            for target in targets
        }
        # The pool is first in, first out: the front ends of all sources come before any assembler.
        for _ in pool.map(
            lambda front: _make_ptx(nvcc, *front), ((*key, ptx) for key, ptx in fronts.items())
        ):
            pass
        jobs = [
            (source, fronts[source, target.virtual, target.defines], target)
            for source in sources
            for target in targets
        ]
        return [usage for usages in pool.map(lambda job: _assemble(nvcc, *job), jobs) for usage in usages]


def _make_ptx(nvcc: Path, source: Path, virtual: str, defines: Iterable[str], ptx: Path) -> None:
    flags = ("-std=c++17", "-I", str(ROOT), *defines, f"-arch={virtual}")
    _run(source, virtual, [str(nvcc), *flags, "-ptx", "-o", str(ptx), str(source)])


def _assemble(nvcc: Path, source: Path, ptx: Path, target: Target) -> list[Usage]:
    cubin = ptx.with_name(f"{source.stem}-{target.name}.cubin")
    command = [str(nvcc), f"-arch={target.name}", "-cubin", "-Xptxas", "-v", "-o", str(cubin), str(ptx)]
    return parse_usage(_run(source, target.name, command))


def _run(source: Path, arch: str, command: list[str]) -> str:
    """What the command printed to stderr."""
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    if printed.returncode:
        raise CompileError(
            f"{source.name}, {arch}: nvcc gave status {printed.returncode}:\n{printed.stderr.strip()}"
        )
    return printed.stderr


def shorten_names(usages: Sequence[Usage]) -> list[Usage]:
    """Names as in the source, without namespace and arguments; mangled ones where there is no c++filt."""
    filt = shutil.which("c++filt")
    if filt is None or not usages:
        return list(usages)
    mangled = "\n".join(usage.kernel for usage in usages)
    names = subprocess.run(
        [filt], input=mangled, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [attrs.evolve(usage, kernel=shorten_name(name)) for usage, name in zip(usages, names, strict=True)]


def shorten_name(name: str) -> str:
    """``void astrai::f<__half, (int)64>(astrai::P)`` -> ``f<f16, 64>``."""
    name = re.sub(r"\((?:unsigned )?(?:int|bool)\)", "", name.removeprefix("void "))
    if name.endswith(")"):
        depth = 0
        for at in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[at], 0)
            if depth == 0:
                name = name[:at]
                break
    name = re.sub(r"\bastrai::|\(anonymous namespace\)::", "", name)
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "f16")


_COLUMNS = ("arch", "registers", "spill st/ld", "stack", "static smem")


def build_lines(usages: Sequence[Usage]) -> list[str]:
    """A table, one line per kernel and architecture; ``!`` before those with a fault."""
    rows = [
        (
            usage.arch,
            str(usage.registers),
            f"{usage.spill_stores}/{usage.spill_loads}",
            str(usage.stack_bytes),
            str(usage.shared_bytes),
        )
        for usage in usages
    ]
    widths = [max(len(cell) for cell in column) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  " + _join(_COLUMNS, widths) + "  kernel"]
    for usage, row in zip(usages, rows, strict=True):
        lines.append(("! " if find_faults(usage) else "  ") + _join(row, widths) + f"  {usage.kernel}")
    return lines


def _join(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def build_document(usages: Sequence[Usage], version: str) -> dict[str, object]:
    """The JSON object of a run."""
    kernels = [{**attrs.asdict(usage), "faults": find_faults(usage)} for usage in usages]
    return {"format": FORMAT, "nvcc": version, "max_registers": MAX_REGISTERS, "kernels": kernels}


def find_version(nvcc: Path) -> str:
    """Such as "13.0"."""
    printed = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"release (\d+\.\d+)", printed)
    return version[1] if version else "unknown"


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ref.compile_matrix",
        description="Compile the CUDA kernels for every architecture without a GPU.",
    )
    parser.add_argument("--arch", action="append", choices=TARGETS, help="may be given again; all without it")
    parser.add_argument(
        "--source", action="append", type=Path, help="a .cu file; may be given again; all kernels without it"
    )
    parser.add_argument(
        "--check", action="store_true", help="show only what is wrong; status 1 if anything is"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    parser.add_argument("--workers", type=int, default=2, help="compilers at once (default: 2)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 for a fault, 2 where nothing could be compiled."""
    options = _parse_arguments(arguments)
    sources = options.source or sorted(SOURCES.glob("*.cu"))
    targets = [TARGETS[name] for name in options.arch or TARGETS]
    try:
        nvcc = find_nvcc()
        if not sources:
            raise CompileError(f"sources: wanted .cu files in {SOURCES}, got none; reinstall the package")
        usages = shorten_names(compile_sources(sources, targets, nvcc=nvcc, workers=max(1, options.workers)))
    except CompileError as error:
        print(f"compile_matrix: {error}", file=sys.stderr)  # noqa: T201 - the command's output
        return 2
    usages.sort(key=lambda usage: usage.kernel)
    if options.json is not None:
        options.json.write_text(
            json.dumps(build_document(usages, find_version(nvcc))) + "\n", encoding="utf-8"
        )
    unfit = [usage for usage in usages if find_faults(usage)]
    for line in build_lines(unfit if options.check else usages):
        print(line)  # noqa: T201
    return _judge(usages, options.check)


def _judge(usages: Sequence[Usage], is_gate: bool) -> int:
    faults = [f"{usage.kernel} on {usage.arch}: {fault}" for usage in usages for fault in find_faults(usage)]
    for fault in faults:
        print(fault)  # noqa: T201
    kernels, arches = {usage.kernel for usage in usages}, {usage.arch for usage in usages}
    scope = f"{len(usages)} compiled: {len(kernels)} kernels for {len(arches)} architectures"
    print(f"{scope}; {len(faults)} faults")  # noqa: T201
    return 1 if is_gate and faults else 0


if __name__ == "__main__":
    sys.exit(main())
