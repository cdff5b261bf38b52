"""What ``nox -s static`` compiles, against everything there is to compile."""

from __future__ import annotations

import fnmatch
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from astrai_bench.static import list_variants
from astrai_bench.static_command import ARCHES as ARCH_NAMES
from astrai_triton.ops.launch import ARCHES, TRITON_TYPES, Arch, Variant

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _list(arch: Arch, globs: list[str]) -> list[Variant]:
    variants = [listed.variant for listed in list_variants(arch)]
    return [v for v in variants if any(fnmatch.fnmatchcase(v.name, glob) for glob in globs)]


def _kernels_and_dtypes(variants: list[Variant]) -> set[tuple[str, tuple[str, ...]]]:
    types = set(TRITON_TYPES.values())
    return {
        (variant.kernel.fn.__name__, tuple(word for word in variant.name.split("_") if word in types))
        for variant in variants
    }


@pytest.mark.parametrize("arch", ARCHES.values(), ids=lambda arch: arch.name)
def test_every_kernel_is_compiled_in_every_dtype_on_every_architecture(
    noxfile: ModuleType, arch: Arch
) -> None:
    wanted = _kernels_and_dtypes(_list(arch, ["*"]))
    assert {dtypes for _, dtypes in wanted} >= {("bf16",), ("fp16",), ("fp32",), ("bf16", "fp8e5")}
    assert _kernels_and_dtypes(_list(arch, noxfile.STATIC_EVERYWHERE)) == wanted


def test_every_head_dim_is_compiled_somewhere(noxfile: ModuleType) -> None:
    for kernel in ("attend_decode_kernel", "attend_prefill_kernel"):
        everything = [v for v in _list(ARCHES[90], ["*"]) if v.kernel.fn.__name__ == kernel]
        chosen = _list(ARCHES[90], noxfile.STATIC_EVERYWHERE + noxfile.STATIC_SHAPES)
        blocks = {v.constexprs["BLOCK_D"] for v in everything}
        assert {v.constexprs["BLOCK_D"] for v in chosen if v.kernel.fn.__name__ == kernel} == blocks


def test_no_pattern_and_no_architecture_is_idle(noxfile: ModuleType) -> None:
    for glob in noxfile.STATIC_EVERYWHERE + noxfile.STATIC_SHAPES:
        assert _list(ARCHES[90], [glob]), glob
    assert set(noxfile.STATIC_SHAPE_ARCHES) < set(ARCH_NAMES)
    assert set(ARCH_NAMES) == {arch.name for arch in ARCHES.values()}


def test_both_ends_of_the_supported_versions_of_triton_are_checked_by_default(noxfile: ModuleType) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (triton,) = [line for line in wanted if line.startswith("triton")]
    assert noxfile.OLDEST_TRITON.startswith(triton.split(";")[0].removeprefix("triton>="))
    sessions = noxfile.nox.options.sessions
    assert {"static(triton='installed')", f"static(triton='{noxfile.OLDEST_TRITON}')"} <= set(sessions)
    assert not [name for name in sessions if name.startswith("static_full")]
