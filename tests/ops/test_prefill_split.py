"""Few rows over many keys: splits and their merge, and that a request's bits are its own."""

from __future__ import annotations

import attrs
import pytest
import torch

import oracle
import strategies
from astrai_triton.ops import launch_prefill
from astrai_triton.ops.launch import ARCHES
from astrai_triton.ops.launch_prefill import (
    WINDOW_MAX,
    choose_heads,
    count_places,
    count_splits,
    dense_grid,
    list_variants,
    packed_grid,
    prefill_config,
)
from astrai_triton.ops.prefill import attn_prefill
from prefill_calls import check_dense, check_paged, dense_case, expect_paged, run_paged
from strategies import Heads, PackedCase, assert_close, packed_case

PLAIN = Heads(dtype=torch.float16, head_dim=16, value_dim=16, kv_heads=1, group=2)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 128 keys, so that small requests are split."""
    monkeypatch.setattr(launch_prefill, "MIN_CHUNK", 128)
    monkeypatch.setattr(launch_prefill, "count_places", lambda q_heads, kv_heads: 4)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kv_len", [1, 127, 128, 129, 300, 700])
def test_any_number_of_splits_gives_the_right_result(kv_len: int) -> None:
    check_dense(dense_case(2, kv_len, heads=PLAIN, has_sinks=True))
    check_paged(packed_case((2, 0, 65), (kv_len, 5, 200), heads=PLAIN))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    "options",
    [
        oracle.Options(is_causal=True, window_size=(100, -1)),
        oracle.Options(is_causal=True, window_size=(260, -1), softcap=2.0),
        oracle.Options(window_size=(-1, 3), softmax_scale=0.4),
    ],
)
def test_windows_sinks_and_masks_go_with_splits(options: oracle.Options) -> None:
    check_paged(
        packed_case(
            (3, 2), (600, 140), heads=PLAIN, options=options, has_sinks=True, has_mask=True, holes=0.3
        )
    )


def attend_over_poison(rows: tuple[torch.Tensor, ...], **options: object) -> torch.Tensor:
    """Output over scratch full of NaN."""
    q, k, v, mask, sinks = rows
    return attn_prefill(
        q,
        k,
        v,
        mask=mask,
        sinks=sinks,
        o_part=torch.full((4 * 64, q.shape[2], v.shape[-1]), torch.nan),
        ml_part=torch.full((4 * 64, q.shape[2], 2), torch.nan),
        **options,
    )


@pytest.mark.usefixtures("short_chunks")
def test_a_split_whose_keys_are_all_masked_changes_nothing() -> None:
    case = dense_case(2, 500, heads=PLAIN, mask_dim=2, has_sinks=True)
    rows = strategies.build_dense(case)
    rows[3][:, :130] = False
    want, _ = oracle.attend_dense(*rows[:3], case.options, attn_mask=rows[3], sinks=rows[4])
    out = attend_over_poison(rows, is_causal=True)
    assert_close(out, want)


def test_real_lengths_are_split() -> None:
    assert count_splits(1, 4200, WINDOW_MAX, count_places(2, 1)) == 3
    check_dense(dense_case(1, 4200, heads=PLAIN, has_sinks=True))


@pytest.mark.usefixtures("short_chunks")
def test_bits_do_not_depend_on_the_batch() -> None:
    lengths = ((3, 300), (65, 280), (0, 9))
    case = packed_case(*zip(*lengths, strict=True), heads=PLAIN)
    tensors = strategies.build_packed(case)
    together, lse = run_paged(case, tensors)
    assert_close(together, expect_paged(case, tensors)[0])
    for b in range(len(lengths)):
        rows = slice(int(tensors.cache.qo_indptr[b]), int(tensors.cache.qo_indptr[b + 1]))
        alone, alone_lse = run_paged(*pick_request(case, tensors, b))
        assert torch.equal(alone, together[rows])
        assert torch.equal(alone_lse, lse[rows])


def pick_request(
    case: PackedCase, tensors: strategies.Tensors, b: int
) -> tuple[PackedCase, strategies.Tensors]:
    """The call of one request of a batch."""
    cache = tensors.cache
    start, stop = cache.qo_indptr[b : b + 2].tolist()
    alone = strategies.make_cache(
        cache.k_buffer,
        cache.v_buffer,
        cache.req_to_token,
        [int(cache.req_pool_indices[b])],
        case.q_lens[b : b + 1],
        case.kv_lens[b : b + 1],
        cache.out_cache_loc[start:stop].tolist(),
        q_heads=case.heads.q_heads,
    )
    parts = {name: getattr(tensors, name)[start:stop] for name in ("q", "k", "v")}
    picked = attrs.evolve(case, q_lens=case.q_lens[b : b + 1], kv_lens=case.kv_lens[b : b + 1])
    return picked, attrs.evolve(tensors, cache=alone, **parts)


@pytest.mark.usefixtures("short_chunks")
def test_scratch_that_is_too_small_is_refused() -> None:
    rows = strategies.build_dense(dense_case(2, 500))
    with pytest.raises(ValueError, match="o_part: wanted at least 256 rows, got 8; enlarge it"):
        attn_prefill(*rows[:3], o_part=torch.empty(8, 2, 16), ml_part=torch.empty(8, 2, 2))
    with pytest.raises(ValueError, match="ml_part: wanted together with its partner"):
        attn_prefill(*rows[:3], o_part=torch.empty(256, 2, 16))


def test_places_of_a_request_hold_its_tiles_and_splits() -> None:
    for q_heads, kv_heads in ((32, 8), (9, 3), (32, 32), (8, 1), (128, 64)):
        places = count_places(q_heads, kv_heads)
        for q_len in (1, 64, 65, 300, 5000):
            for kv_len in (0, 1, 2048, 2049, 100_000):
                splits = count_splits(q_len, kv_len, WINDOW_MAX, places)
                tiles = -(-q_len // 64)
                assert splits == 1 or tiles * splits <= places


def test_many_rows_are_not_split_and_their_grid_has_no_idle_programs() -> None:
    config = prefill_config(ARCHES[90], 128, 128, 2, mask_dim=0, has_left=False)
    grid = packed_grid(config, 1, 8192, 128, 131072, 32, 8)
    # 64 positions of the map are two tiles of 32 positions times 4 heads.
    assert (grid.shape, grid.part_rows, grid.max_tiles) == ((256, 8), 0, 0)
    dense = dense_grid(config, 2, 8192, 8192, 32, 8, WINDOW_MAX)
    assert (dense.shape, dense.part_rows) == ((512, 8), 0)


def test_short_rows_over_many_keys_fill_the_machine() -> None:
    config = prefill_config(ARCHES[90], 128, 128, 2, mask_dim=0, has_left=False)
    grid = dense_grid(config, 1, 64, 131072, 32, 8, WINDOW_MAX)
    assert grid.shape[0] * grid.shape[1] == 128


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 32, 48])
def test_many_rows_of_any_group_fill_their_tiles(group: int) -> None:
    heads = choose_heads(group, 128, is_short=False)
    assert group % heads == 0
    assert 128 % heads == 0
    assert choose_heads(group, 128, is_short=True) >= min(group, 128)


def test_variants_are_listed_once_and_completely() -> None:
    for arch in ARCHES.values():
        variants = list_variants(arch)
        assert len({variant.name for variant in variants}) == len(variants)
        for variant in variants:
            assert list(variant.signature) == list(variant.kernel.arg_names)
