"""Tiles of the rotary kernels, and that what is listed is what is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.ops import rotary
from astrai_triton.ops.launch import ARCHES
from astrai_triton.ops.launch_rotary import choose_rotary, count_blocks, list_variants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@given(
    st.lists(st.integers(1, 256), min_size=1, max_size=3).map(tuple),
    st.integers(1, 512),
    st.integers(0, 256),
)
def test_a_tile_holds_a_row_and_fits_into_registers(heads: tuple[int, ...], pairs: int, rest: int) -> None:
    rotary_dim = 2 * pairs
    config = choose_rotary(heads, rotary_dim, min(1024, rotary_dim + rest))
    assert config.block_n >= rotary_dim
    assert config.block_m & (config.block_m - 1) == 0
    assert config.block_m * config.block_n <= 2048
    assert 1 <= config.num_warps <= 8
    assert count_blocks(heads, config.block_m) * config.block_m >= sum(heads)


@pytest.mark.parametrize(
    ("heads", "rotary_dim", "row_dim", "block_m", "num_warps"),
    [
        ((32,), 128, 128, 16, 4),
        # 16 would leave half of the block of k empty.
        ((32, 8), 128, 128, 8, 2),
        ((32, 8, 8), 128, 128, 8, 2),
        ((9, 3), 64, 64, 8, 1),
        ((1,), 64, 192, 1, 1),
        # The rest of a head is copied by the same program: its width counts.
        ((32,), 32, 256, 8, 4),
    ],
)
def test_tiles_of_known_models(
    heads: tuple[int, ...], rotary_dim: int, row_dim: int, block_m: int, num_warps: int
) -> None:
    config = choose_rotary(heads, rotary_dim, row_dim)
    assert (config.block_m, config.num_warps) == (block_m, num_warps)


def test_variants_have_names_of_their_own_and_describe_every_argument() -> None:
    for arch in ARCHES.values():
        variants = list_variants(arch)
        assert len({variant.name for variant in variants}) == len(variants)
        for variant in variants:
            assert list(variant.signature) == variant.kernel.arg_names
            fixed = {name for name, kind in variant.signature.items() if kind == "constexpr"}
            assert fixed == set(variant.constexprs)


def test_a_launch_is_one_of_the_listed_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, Any]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launched.append(kwargs)

    monkeypatch.setattr(rotary, "rotate_qk_kernel", Recorded())
    monkeypatch.setattr(rotary, "append_rotated_kernel", Recorded())
    for tokens in (1, 5, 64):
        q = torch.zeros(tokens, 24, 128, dtype=torch.bfloat16, device=DEVICE)
        k, pool = q[:, :8].clone(), q.new_zeros(9, 8, 128)
        table = torch.zeros(tokens, 48, 2, device=DEVICE)
        slots = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        rotary.rotary_emb(torch.cat((q, k), dim=1), table)
        rotary.rotary_qk_(q, k, table)
        rotary.rotary_append_(q, k, k, table, pool, pool.clone(), slots)
    listed = [
        dict(variant.constexprs) | {"num_warps": variant.config.num_warps}
        for variant in list_variants(ARCHES[90])
    ]
    for kwargs in launched:
        fixed = {name: value for name, value in kwargs.items() if name.isupper() or name == "num_warps"}
        assert fixed in listed
    assert len(launched) == 9
    assert launched[:3] == launched[3:6] == launched[6:]
