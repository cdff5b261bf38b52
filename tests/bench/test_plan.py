"""What a plan says that a call launches is what the op launches: kernels, constants, types and grids."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from astrai_bench import plan
from astrai_bench.cases import Case, Op
from astrai_bench.errors import BenchError
from astrai_bench.plan import list_launches
from astrai_bench.static import KernelReport, Listed, list_variants
from astrai_triton.ops import attn_decode, attn_paged_decode, attn_paged_prefill, attn_prefill
from astrai_triton.ops.launch import ARCHES, Arch, arch_of
from astrai_triton.schedule import build_indptr, build_q_tiles
from recorded import find_compilation, fix_launch, fix_variant, record_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

HEADS = ((32, 8), (9, 3), (8, 8), (40, 2), (64, 1), (24, 2))
DIMS = (64, 80, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")


def make_case(op: Op, heads: tuple[int, int], head_dim: int, dtype: str, **lens: tuple[int, ...]) -> Case:
    return Case(
        op=op, q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype,
        page=16 if op.startswith("paged") else 0, **lens,
    )  # fmt: skip


def run_case(case: Case) -> None:
    """Call the op as the benches do, with K and V of one row seen again and again."""
    dtype = getattr(torch, case.dtype)

    def rows(*shape: int) -> torch.Tensor:
        row = torch.zeros(*shape[-2:], case.head_dim, dtype=dtype, device=DEVICE)
        return row.expand(*shape, case.head_dim)

    batch, context = case.batch, max(case.kv_lens)
    if not case.is_paged:
        q = rows(batch, case.q_lens[0], 1, case.q_heads)[:, :, 0]
        k = rows(batch, context, 1, case.kv_heads)[:, :, 0]
        if case.is_decode:
            attn_decode(q, k, k)
        else:
            attn_prefill(q, k, k, is_causal=True)
        return
    pool = rows(64, 1, case.kv_heads)[:, 0].contiguous()
    table = torch.zeros(batch, context, dtype=torch.int32, device=DEVICE)
    indices, kv_indptr, qo_indptr, *tiles = (
        torch.as_tensor(numbers, device=DEVICE)
        for numbers in (
            torch.arange(batch, dtype=torch.int32), build_indptr(case.kv_lens), build_indptr(case.q_lens),
            *build_q_tiles(case.q_lens),
        )
    )  # fmt: skip
    q = rows(case.num_tokens, 1, case.q_heads)[:, 0]
    if case.is_decode:
        new = rows(batch, 1, case.kv_heads)[:, 0]
        attn_paged_decode(q, pool, pool.clone(), table, indices, kv_indptr, new_k=new, new_v=new)
    else:
        attn_paged_prefill(q, pool, pool, table, indices, kv_indptr, qo_indptr, *tiles, is_causal=True)


LENS: dict[Op, tuple[dict[str, Any], ...]] = {
    "decode": (
        {"q_lens": (1,) * 3, "kv_lens": (1,) * 3},
        {"q_lens": (1,) * 3, "kv_lens": (256,) * 3},
        {"q_lens": (1,), "kv_lens": (4097,)},
    ),
    "prefill": (
        {"q_lens": (20,) * 2, "kv_lens": (20,) * 2},
        {"q_lens": (33,) * 2, "kv_lens": (2049,) * 2},
        {"q_lens": (5000,), "kv_lens": (5000,)},
    ),
    "paged-decode": (
        {"q_lens": (1,) * 2, "kv_lens": (7, 200)},
        {"q_lens": (1,) * 3, "kv_lens": (1, 300, 3000)},
    ),
    "paged-prefill": (
        {"q_lens": (20, 33, 1), "kv_lens": (20, 40, 2048)},
        {"q_lens": (8, 8), "kv_lens": (8, 9000)},
        {"q_lens": (700, 1, 300), "kv_lens": (700, 100_000, 300)},
        {"q_lens": (6000,), "kv_lens": (6000,)},
    ),
}


@pytest.mark.parametrize("op", LENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_is_what_the_op_launches(op: Op, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    listed = list_variants(arch_of(DEVICE))
    # What the reports of the list are compiled with.
    fusion = {entry.variant.kernel: entry.has_fp_fusion for entry in listed}
    splits = set()
    for heads, head_dim, lens in itertools.product(HEADS, DIMS, LENS[op]):
        case = make_case(op, heads, head_dim, dtype, **lens)
        launches.clear()
        run_case(case)
        planned = list_launches(case, arch_of(DEVICE))
        assert [fix_launch(launch) for launch in launches] == [fix_variant(variant) for variant, _ in planned]
        assert [launch.grid for launch in launches] == [grid for _, grid in planned]
        for launch, (variant, _) in zip(launches, planned, strict=True):
            assert launch.options["enable_fp_fusion"] is fusion[variant.kernel]
            assert find_compilation(launch).signature == variant.signature
        splits.add(len(planned))
    # Both calls that are split, with a merge, and such that are not.
    assert splits == {1, 2}


@pytest.mark.parametrize(
    ("heads", "head_dim", "names"),
    [
        ((32, 8), 128, ["decode_paged_split_h32_8_d128_128_bf16", "merge_splits_paged_h32_8_d128_bf16"]),
        # The same groups of the same width are the same compilations.
        ((64, 16), 128, ["decode_paged_split_h32_8_d128_128_bf16", "merge_splits_paged_h32_8_d128_bf16"]),
        ((32, 8), 72, ["decode_paged_split_h32_8_d72_72_bf16", "merge_splits_paged_h32_8_d72_bf16"]),
    ],
)
def test_a_listed_launch_goes_by_its_name_in_the_list(
    heads: tuple[int, int], head_dim: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(listed: Listed, arch: Arch) -> KernelReport:
        return KernelReport(listed.variant.name, arch.name, "", resident_ctas=2)

    monkeypatch.setattr(plan, "examine_variant", report)
    case = make_case("paged-decode", heads, head_dim, "bfloat16", q_lens=(1,) * 3, kv_lens=(3000,) * 3)
    attend, merge = plan.plan_case(case, ARCHES[90], list(list_variants(ARCHES[90])))
    assert [attend.report.variant, merge.report.variant] == names
    assert {attend.is_listed, merge.is_listed} == {head_dim == 128}
    assert attend.ctas == 3 * heads[1] * 12
    assert attend.waves == attend.ctas / (2 * 132)


def test_what_has_no_kernel_is_an_error() -> None:
    case = make_case("decode", (8, 8), 100, "float16", q_lens=(1,), kv_lens=(5,))
    with pytest.raises(BenchError, match=r"head_dim: wanted a head_dim that is a multiple of 8 .* got 100"):
        list_launches(case, ARCHES[90])
    rotary = make_case("rotary", (8, 8), 64, "float16", q_lens=(1,), kv_lens=(1,))
    with pytest.raises(BenchError, match="explain: wanted attention, got rotary"):
        list_launches(rotary, ARCHES[90])
