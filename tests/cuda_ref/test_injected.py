"""Faults put into the kernels on purpose; the CPU runtime or the comparison with float64 finds each.

One altered copy of the sources holds all of them; an environment variable says which one is alive.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

import cuda_ref
import oracle
from cuda_ref import ops
from cuda_ref.build import ROOT
from cuda_ref.ops import call

pytestmark = pytest.mark.usefixtures("altered")

SWITCH = "ASTRAI_FAULT"
_SWITCH_CODE = f"""
#include <cstdlib>
namespace astrai {{
inline int living_fault() {{
    const char* text = std::getenv("{SWITCH}");
    return text == nullptr ? 0 : std::atoi(text);
}}
}}
"""


@attrs.frozen
class Fault:
    """A line of a kernel and what becomes of it; ``%d`` is the fault's number."""

    name: str
    file: str
    line: str
    altered: str
    finding: str
    """Words of the runtime's error, or "values" for a wrong result."""


PREFILL, DECODE = "attn_prefill_split_q_mma.cuh", "attn_decode_split_kv_mma.cuh"
COMBINE = "attn_decode_combine.cuh"
RACE, IN_FLIGHT = "shared memory race", "during an asynchronous copy"
FAULTS = (
    Fault(
        "fragment_index",
        "attn_mma_utils.cuh",
        "    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];",
        "    b[0][0] = r[0], b[0][1] = r[living_fault() == %d ? 2 : 1], b[1][0] = r[2], b[1][1] = r[3];",
        "values",
    ),
    Fault(
        "prefill_barrier",
        PREFILL,
        "            cp_async_wait<0>();\n            __syncthreads();",
        "            cp_async_wait<0>();\n            if (living_fault() != %d) { __syncthreads(); }",
        RACE,
    ),
    Fault(
        "decode_barrier",
        DECODE,
        "    states.store(shared, block.num_heads);\n    __syncthreads();",
        "    states.store(shared, block.num_heads);\n    if (living_fault() != %d) { __syncthreads(); }",
        RACE,
    ),
    Fault(
        "prefill_wait",
        PREFILL,
        "            cp_async_wait<0>();\n",
        "            if (living_fault() != %d) { cp_async_wait<0>(); }\n",
        IN_FLIGHT,
    ),
    Fault(
        "decode_wait",
        DECODE,
        "        cp_async_wait<Shape::BUFFERS - 2>();\n        __syncwarp();",
        "        if (living_fault() != %d) { cp_async_wait<Shape::BUFFERS - 2>(); }\n        __syncwarp();",
        IN_FLIGHT,
    ),
    Fault(
        "combine_one_less",
        COMBINE,
        "for (int split = warp; split < params.num_splits; split",
        "for (int split = warp; split < params.num_splits - (living_fault() == %d); split",
        "values",
    ),
    Fault(
        "combine_one_further",
        COMBINE,
        "        const int64_t part = row * params.num_splits + split;",
        "        const int64_t part = row * params.num_splits + split + (living_fault() == %d);",
        "global memory out of bounds",
    ),
)


@pytest.fixture(scope="module")
def altered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A build of few instantiations with every fault in it, in place of the one that the ops use."""
    reason = cuda_ref.why_not("host")
    if reason is not None:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("altered")
    for directory in ("csrc", "host"):
        shutil.copytree(ROOT / directory, root / directory)
    kernels = root / "csrc" / "kernels"
    for number, fault in enumerate(FAULTS, start=1):
        path = kernels / fault.file
        text = path.read_text()
        assert fault.line in text, f"{fault.name}: the line is not in {fault.file} any more"
        path.write_text(text.replace(fault.line, fault.altered % number, 1))
    device = kernels / "device.cuh"
    device.write_text(device.read_text().replace("#pragma once", "#pragma once\n" + _SWITCH_CODE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(root / "build"))
        module = cuda_ref.build("host", root=root, head_dims=(64,))
        patch.setattr(call, "load_extension", lambda kind: module)
        yield module


def run_decode() -> tuple[torch.Tensor, torch.Tensor]:
    """More keys than one split has, and what float64 says."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 4, 64, generator=generator).bfloat16()
    k, v = (torch.randn(1, 700, 2, 64, generator=generator).bfloat16() for _ in range(2))
    want, _ = oracle.attend_dense(q, k, v, oracle.Options())
    out = ops.attn_decode(q, k, v, variant="mma")
    assert isinstance(out, torch.Tensor)
    return out, want


def run_prefill() -> tuple[torch.Tensor, torch.Tensor]:
    """Several tiles of keys, and what float64 says."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 20, 1, 64, generator=generator).bfloat16()
    k, v = (torch.randn(1, 200, 1, 64, generator=generator).bfloat16() for _ in range(2))
    want, _ = oracle.attend_dense(q, k, v, oracle.Options(is_causal=True))
    out = ops.attn_prefill(q, k, v, is_causal=True, variant="mma")
    assert isinstance(out, torch.Tensor)
    return out, want


def is_right(run: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> bool:
    out, want = run()
    # bfloat16 keeps 8 bits; probabilities and the result are rounded to it.
    return bool((out.double() - want).abs().max() < 2e-2)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
def test_without_a_living_fault_the_altered_kernels_are_right(run: Any) -> None:
    assert SWITCH not in os.environ
    assert is_right(run)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, str(FAULTS.index(fault) + 1))
    runs = [run_prefill] if fault.file == PREFILL else [run_decode]
    if fault.finding == "values":
        assert not all(map(is_right, runs))
        return
    for run in runs:
        with pytest.raises(RuntimeError, match=fault.finding):
            run()
