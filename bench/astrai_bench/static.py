"""Compile one variant of a kernel for one architecture, without a GPU, and judge the result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

from astrai_bench.disassembly import count_loads, list_mma_kinds, read_usage
from astrai_bench.errors import BenchError
from astrai_bench.occupancy import find_occupancy
from astrai_bench.pipeline import measure_loop, measure_pipeline
from astrai_bench.static_rules import Fault, find_faults

if TYPE_CHECKING:
    from astrai_triton.ops.launch import Arch, Variant

FAMILIES = (
    "astrai_triton.ops.launch_decode",
    "astrai_triton.ops.launch_prefill",
    "astrai_triton.ops.launch_rotary",
)
"""Modules whose ``list_variants(arch)`` together list everything the library compiles. ``FP_FUSION`` of such
a module says whether its launches let the compiler contract products and sums."""


@attrs.frozen(eq=False)
class Listed:
    """A variant and how its family launches it."""

    variant: Variant
    has_fp_fusion: bool


@attrs.frozen
class KernelReport:
    """One variant on one architecture; sizes are 0 when it did not compile."""

    variant: str
    arch: str
    triton: str
    """Version that compiled it: registers change with it."""
    registers: int = 0
    spill_bytes: int = 0
    """Per thread."""
    shared_bytes: int = 0
    num_warps: int = 0
    num_stages: int = 0
    resident_ctas: int = 0
    """Per multiprocessor."""
    limit: str = ""
    """What keeps ``resident_ctas`` from being more."""
    tiles_in_flight: int = 0
    """Turns of the loop that K and V are loaded ahead, counted in the compiled loop."""
    ring_bytes: int = 0
    """Shared memory of the buffers they are loaded into."""
    bytes_in_flight: int = 0
    """Per multiprocessor, with ``resident_ctas`` at work."""
    mma: tuple[str, ...] = ()
    loads: dict[str, int] = attrs.field(factory=dict)
    """Load instructions by width in bits."""
    tile_bytes: int = 0
    """Loaded per turn of the main loop."""
    tile_flops: int = 0
    """Per turn of the main loop."""
    faults: tuple[Fault, ...] = ()


def list_variants(arch: Arch, families: tuple[str, ...] = FAMILIES) -> Iterator[Listed]:
    """Everything that a set of modules compiles for one architecture.

    Raises:
        BenchError: two variants have one name.
    """
    names = set()
    for family in families:
        module = import_module(family)
        for variant in module.list_variants(arch):
            if variant.name in names:
                raise BenchError(f"{family}: wanted distinct variant names, got {variant.name} twice")
            names.add(variant.name)
            yield Listed(variant, getattr(module, "FP_FUSION", True))


def examine_variant(listed: Listed, arch: Arch) -> KernelReport:
    """Compile a variant and measure it.

    Must run in a process where Triton does not interpret. What the compiler refuses becomes a fault.
    """
    import triton

    version, variant = triton.__version__, listed.variant
    config = variant.config
    try:
        compiled = compile_variant(listed, arch)
    # Triton's compiler raises whatever its passes and ptxas raise, and the report is about just that.
    except Exception as error:  # noqa: BLE001 - the report shows it as a fault of the kernel
        return KernelReport(
            variant.name, arch.name, version, faults=(Fault("compile", describe_refusal(error)),)
        )
    usage, shared = read_usage(compiled.asm["cubin"]), compiled.metadata.shared
    occupancy = find_occupancy(arch, usage.registers, shared, config.num_warps)
    pipeline, work = measure_pipeline(compiled.asm["ttgir"]), measure_loop(compiled.asm["ttir"])
    report = KernelReport(
        variant=variant.name,
        arch=arch.name,
        triton=version,
        registers=usage.registers,
        spill_bytes=usage.stack_bytes,
        shared_bytes=shared,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        resident_ctas=occupancy.ctas,
        limit=occupancy.limit,
        tiles_in_flight=pipeline.tiles,
        ring_bytes=pipeline.ring_bytes,
        bytes_in_flight=pipeline.bytes * occupancy.ctas,
        mma=list_mma_kinds(compiled.asm["ptx"]),
        loads=count_loads(compiled.asm["ptx"]),
        tile_bytes=work.load_bytes,
        tile_flops=work.flops,
    )
    return attrs.evolve(report, faults=find_faults(report, variant, arch, compiled.asm))


def compile_variant(listed: Listed, arch: Arch) -> Any:
    """Triton's compiled kernel; from Triton's own cache when it was compiled before."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = listed.variant
    names = list(variant.kernel.arg_names)
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constexprs), divisible)
    options = {
        "num_warps": variant.config.num_warps,
        "num_stages": variant.config.num_stages,
        "enable_fp_fusion": listed.has_fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch.capability, 32), options=options)


def describe_refusal(error: Exception) -> str:
    """The line that says why, without what differs from run to run.

    ptxas puts its errors before the command and the whole kernel; Triton's own passes end with their reason.
    """
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    reasons = [match[1] for line in lines if (match := re.match(r"ptxas .*?; error\s*: (.*)", line))]
    reason = (reasons or lines[-1:] or [""])[0]
    return f"{type(error).__name__}: {reason}".removesuffix(": ")
