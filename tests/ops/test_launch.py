"""Launch choices are pure functions of shape and architecture."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astrai_triton.ops import launch, launch_decode
from astrai_triton.ops.launch import ARCHES, row_alignment
from astrai_triton.ops.launch_decode import WINDOW_MAX, cover_splits, decode_config, list_variants
from astrai_triton.schedule import decode_chunk


@pytest.mark.parametrize("arch", ARCHES.values(), ids=lambda arch: arch.name)
def test_two_tiles_of_every_shape_are_in_flight_within_shared_memory(arch: launch.Arch) -> None:
    sizes = ((2, 2), (2, 1), (4, 4))
    for head_dim, value_dim, group, (q_itemsize, kv_itemsize) in itertools.product(
        (16, 64, 80, 128, 256), (16, 128, 256), (1, 8, 20, 64, 128), sizes
    ):
        config = decode_config(arch, head_dim, value_dim, group, q_itemsize, kv_itemsize)
        columns = launch.pad_block(head_dim) + launch.pad_block(value_dim)
        tile_bytes = config.block_n * columns * kv_itemsize
        assert config.num_stages >= 3
        # Both tiles, and the q that passes through shared memory before them.
        q_bytes = config.block_m * launch.pad_block(head_dim) * q_itemsize
        assert (config.num_stages - 1) * tile_bytes + q_bytes <= arch.shared_bytes
        # Wider groups are no longer bound by memory.
        if group <= 20:
            assert (config.num_stages - 1) * tile_bytes * (
                arch.shared_bytes // ((config.num_stages - 1) * tile_bytes + q_bytes)
            ) >= 32768
        assert decode_chunk(group, 1, kv_itemsize) % config.block_n == 0


@pytest.mark.parametrize("arch", ARCHES.values(), ids=lambda arch: arch.name)
def test_the_listed_variants_are_distinct_and_complete(arch: launch.Arch) -> None:
    variants = list_variants(arch)
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert list(variant.signature) == list(variant.kernel.arg_names)
        fixed = {name for name, kind in variant.signature.items() if kind == "constexpr"}
        assert fixed == set(variant.constexprs)
    assert any("fp8e4nv" in variant.name for variant in variants) == arch.has_fp8


@given(
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.sampled_from((256, 512)),
    st.one_of(st.none(), st.integers(0, 6000)),
)
def test_the_launched_splits_cover_every_shorter_request(
    kv_len: int, longer: int, chunk: int, window: int | None
) -> None:
    window_left = WINDOW_MAX if window is None else window
    splits = cover_splits(kv_len + longer, chunk, window_left)
    first_split = max(kv_len - 1 - window_left, 0) // chunk
    assert first_split + splits >= -(-kv_len // chunk)
    assert 1 <= splits <= max(1, -(-(kv_len + longer) // chunk))


def test_rows_are_aligned_when_every_start_is() -> None:
    x = torch.zeros(4, 3, 16, dtype=torch.float16)
    assert row_alignment(x, None, x[:, 1:], x[..., 8:]) == 16
    assert row_alignment(x, x[..., 4:12]) == 1
    assert row_alignment(x.view(-1)[:60].view(3, 20)) == 1
    # A dimension of size 1 has no second row that could be misaligned.
    assert row_alignment(x.as_strided((1, 3, 16), (5, 16, 1))) == 16


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 7), "sm_86"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)
def test_a_device_between_two_architectures_has_the_facts_of_the_lower(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        multi_processor_count = 7

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    launch._cuda_arch.cache_clear()
    arch = launch.arch_of(torch.device("cuda", 3))
    launch._cuda_arch.cache_clear()
    assert (arch.name, arch.num_sms) == (name, 7)


def test_a_device_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    launch._cuda_arch.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"wanted compute capability 8\.0 or newer, got 7\.5; use torch_native"
    ):
        launch.arch_of(torch.device("cuda", 3))


def test_the_merge_takes_fewer_columns_of_a_narrow_head() -> None:
    assert launch_decode.merge_config(40).block_n == 64
    assert launch_decode.merge_config(16).block_n == 16
