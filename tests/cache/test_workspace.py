from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_triton.cache import KVStorage, ReqToTokenPool, Workspace
from astrai_triton.errors import CacheError
from astrai_triton.kvcache import KVCache
from astrai_triton.schedule import Q_TILE, build_q_tiles

INDEX_TENSORS = (
    "req_pool_indices",
    "seq_lens",
    "kv_indptr",
    "qo_indptr",
    "out_cache_loc",
    "q_tile_to_batch",
    "q_tile_to_index",
)
ROWS, WIDTH = 6, 400
STORAGE = KVStorage(ROWS * WIDTH, 1, 2, 8)


def make(*, staged: bool = False, **sizes: int) -> Workspace:
    defaults: dict[str, Any] = {"max_batch_size": ROWS, "max_step_tokens": 900, "max_seq_len": WIDTH}
    heads = {"n_q_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return Workspace(**(defaults | heads | sizes), staged=staged)


def scrambled_table(*, staged: bool = False) -> ReqToTokenPool:
    """A table whose slots are in no order, as after some paging."""
    table = ReqToTokenPool(ROWS, WIDTH, staged=staged)
    slots = np.random.default_rng(0).permutation(ROWS * WIDTH).astype(np.int32).reshape(ROWS, WIDTH)
    for row in range(ROWS):
        table.write(row, 0, slots[row])
    return table


def bind(
    workspace: Workspace,
    rows: list[int],
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    table: ReqToTokenPool,
) -> KVCache:
    return workspace.bind(rows, q_lens, kv_lens, table, STORAGE)


def check_plan(
    cache: KVCache, rows: list[int], q_lens: list[int], kv_lens: list[int], table: np.ndarray
) -> None:
    """Compare a plan with what its definition says, one position at a time."""
    assert cache.req_pool_indices.tolist() == rows
    assert cache.seq_lens.tolist() == list(cache.kv_lens) == kv_lens
    assert list(cache.q_lens) == q_lens
    assert cache.kv_indptr.tolist() == [sum(kv_lens[:n]) for n in range(len(rows) + 1)]
    assert cache.qo_indptr.tolist() == [sum(q_lens[:n]) for n in range(len(rows) + 1)]
    assert cache.out_cache_loc.tolist() == [
        int(table[row, position])
        for row, q_len, kv_len in zip(rows, q_lens, kv_lens, strict=True)
        for position in range(kv_len - q_len, kv_len)
    ]
    q_tile_to_batch, q_tile_to_index = build_q_tiles(q_lens)
    assert cache.q_tile_to_batch.tolist() == q_tile_to_batch.tolist()
    assert cache.q_tile_to_index.tolist() == q_tile_to_index.tolist()
    assert cache.max_len == max(kv_lens, default=0)


@pytest.mark.parametrize("staged", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_plan_is_what_its_definition_says(staged: bool, data: st.DataObject) -> None:
    workspace, table = make(staged=staged), scrambled_table(staged=staged)
    for _ in range(2):
        rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(0, ROWS))]
        is_decode = data.draw(st.booleans())
        kv_lens = [data.draw(st.integers(is_decode, WIDTH)) for _ in rows]
        q_lens = [1 if is_decode else data.draw(st.integers(0, min(kv_len, 150))) for kv_len in kv_lens]
        check_plan(
            bind(workspace, rows, tuple(q_lens), tuple(kv_lens), table), rows, q_lens, kv_lens, table.table
        )
        table.check()
        assert not staged or (table.req_to_token.numpy() == table.table).all()


def test_the_documented_example() -> None:
    cache = bind(make(), [3, 0, 5], (70, 10, 130), (70, 60, 200), scrambled_table())
    assert cache.qo_indptr.tolist() == [0, 70, 80, 210]
    assert cache.q_tile_to_batch.tolist() == [0, 0, 1, 2, 2, 2]
    assert cache.q_tile_to_index.tolist() == [0, 1, 0, 0, 1, 2]
    assert cache.kv_indptr.tolist() == [0, 70, 130, 330]


def test_a_step_without_requests_is_legal() -> None:
    cache = bind(make(), [], (), (), scrambled_table())
    check_plan(cache, [], [], [], np.empty((0, 0)))
    assert cache.decode_out.shape == (0, 4, 8)


def test_addresses_never_change() -> None:
    workspace, table = make(), scrambled_table()
    first = bind(workspace, [0], (1,), (1,), table)
    bind(workspace, [1, 2], (100, 300), (200, 300), table)
    again = bind(workspace, [3], (1,), (50,), table)
    for name in (*INDEX_TENSORS, "decode_o_part", "decode_ml_part", "decode_out"):
        assert getattr(first, name).data_ptr() == getattr(again, name).data_ptr(), name


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_index_tensors_are_int32_and_aligned_alike(batch: int) -> None:
    workspace, table = make(max_batch_size=5, max_step_tokens=333), scrambled_table()
    base = workspace.plan.data_ptr()
    for q_len in (1, 40):
        cache = bind(workspace, list(range(batch)), (q_len,) * batch, (50,) * batch, table)
        for name in INDEX_TENSORS:
            tensor = getattr(cache, name)
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            inside = 0 <= tensor.data_ptr() - base < workspace.plan.nbytes
            assert not inside or (tensor.data_ptr() - base) % 128 == 0


def test_index_tensors_do_not_overlap_at_their_largest() -> None:
    workspace, table = make(), scrambled_table()
    q_lens = (1, 1, 1, 1, 399, 400)
    kv_lens = (400, 400, 400, 400, 400, 400)
    cache = bind(workspace, [5, 4, 3, 2, 1, 0], q_lens, kv_lens, table)
    check_plan(cache, [5, 4, 3, 2, 1, 0], list(q_lens), list(kv_lens), table.table)
    spans = sorted(
        (getattr(cache, name).data_ptr(), getattr(cache, name).data_ptr() + getattr(cache, name).nbytes)
        for name in INDEX_TENSORS
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_decode_scratch_has_a_split_axis_that_covers_the_context() -> None:
    workspace = make(n_q_heads=16, n_kv_heads=1, max_seq_len=3000, max_batch_size=6)
    table = ReqToTokenPool(6, 3000)
    table.fill_linear()
    cache = bind(workspace, [0, 1], (1, 1), (2000, 3000), table)
    # 16 query heads per KV head in float32: 128 * 16 / 4 = 512 tokens a split.
    assert cache.decode_o_part.shape == (2, 16, 6, 8)
    assert cache.decode_ml_part.shape == (2, 16, 6, 2)
    assert cache.decode_out.shape == (2, 16, 8)
    assert cache.decode_o_part.dtype == cache.decode_ml_part.dtype == torch.float32


def test_decode_out_has_the_model_dtype() -> None:
    workspace = Workspace(
        max_batch_size=2,
        max_step_tokens=4,
        max_seq_len=8,
        n_q_heads=2,
        n_kv_heads=1,
        head_dim=8,
        dtype=torch.bfloat16,
    )
    cache = workspace.bind([0], (1,), (1,), ReqToTokenPool(2, 8), KVStorage(16, 1, 1, 8))
    assert cache.decode_out.dtype == torch.bfloat16
    assert cache.decode_o_part.dtype == torch.float32


def test_views_made_in_inference_mode_can_be_written_outside_it() -> None:
    workspace, table = make(), scrambled_table()
    with torch.inference_mode():
        bind(workspace, [0], (1,), (1,), table)
    cache = bind(workspace, [1], (1,), (5,), table)
    cache.decode_out.fill_(1.0)
    assert cache.seq_lens.tolist() == [5]


def test_more_updates_than_the_plan_has_room_for_reach_the_device() -> None:
    workspace = make(staged=True, max_step_tokens=6, max_seq_len=WIDTH)
    table = scrambled_table(staged=True)
    bind(workspace, [0], (1,), (400,), table)
    assert (table.req_to_token.numpy() == table.table).all()


def test_one_row_per_request_is_always_provided_for() -> None:
    workspace, table = make(max_step_tokens=1), scrambled_table()
    cache = bind(workspace, list(range(ROWS)), (1,) * ROWS, (9,) * ROWS, table)
    assert cache.out_cache_loc.shape == (ROWS,)


@pytest.mark.parametrize(
    ("rows", "q_lens", "kv_lens", "text"),
    [
        ([*range(6), 0], (1,) * 7, (1,) * 7, "q_lens: wanted at most max_batch_size=6, got 7"),
        ([0, 1, 2], (400, 400, 101), (400,) * 3, "wanted at most max_step_tokens=900 rows, got 901"),
        ([0], (1,), (WIDTH + 1,), "kv_lens: wanted at most max_seq_len=400, got 401"),
    ],
)
def test_steps_beyond_the_workspace_are_refused(
    rows: list[int], q_lens: tuple[int, ...], kv_lens: tuple[int, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        bind(make(), rows, q_lens, kv_lens, scrambled_table())


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size, max_step_tokens, max_seq_len: wanted >= 1"),
        ({"max_seq_len": 2**31}, "max_batch_size \\* max_seq_len: wanted at most"),
        ({"n_q_heads": 5}, "n_q_heads: wanted a multiple of n_kv_heads=2, got 5"),
        ({"n_kv_heads": 0}, "n_q_heads: wanted a multiple of n_kv_heads=0"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**sizes)


def test_scratch_that_does_not_fit_is_reported() -> None:
    with pytest.raises(CacheError, match=r"decode scratch .* lower max_batch_size or max_seq_len"):
        make(n_q_heads=2**20, n_kv_heads=2**20, head_dim=2**14, max_seq_len=2**20)


def test_tiles_of_a_full_step_fit() -> None:
    workspace, table = make(max_step_tokens=ROWS * Q_TILE + ROWS), scrambled_table()
    q_lens = (Q_TILE + 1,) * ROWS
    assert bind(workspace, list(range(ROWS)), q_lens, q_lens, table).q_tile_to_batch.numel() == 2 * ROWS


@pytest.mark.parametrize("staged", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_padded_plan_shows_its_requests_and_rows_that_see_and_write_nothing(
    staged: bool, data: st.DataObject
) -> None:
    workspace, table = make(staged=staged), scrambled_table(staged=staged)
    for _ in range(2):
        rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(0, ROWS))]
        kv_lens = [data.draw(st.integers(1, WIDTH)) for _ in rows]
        num_rows = data.draw(st.integers(max(1, len(rows)), ROWS))
        workspace.bind_padded(rows, tuple(kv_lens), num_rows, table)
        cache = workspace.view_padded(num_rows, table, STORAGE)
        padding = num_rows - len(rows)
        written = [table.table[row, kv_len - 1] for row, kv_len in zip(rows, kv_lens, strict=True)]
        assert cache.req_pool_indices.tolist() == rows + [0] * padding
        assert cache.seq_lens.tolist() == kv_lens + [0] * padding
        assert cache.out_cache_loc.tolist() == written + [-1] * padding
        assert cache.kv_indptr.tolist() == [sum(kv_lens[:n]) for n in range(num_rows + 1)]
        assert cache.qo_indptr.tolist() == list(range(num_rows + 1))
        assert cache.q_tile_to_batch.tolist() == list(range(num_rows))
        assert cache.q_tile_to_index.tolist() == [0] * num_rows
        assert not staged or (table.req_to_token.numpy() == table.table).all()


def test_a_padded_view_has_the_addresses_of_every_bind_and_the_longest_lengths() -> None:
    workspace, table = make(), scrambled_table()
    plain = bind(workspace, [0, 3], (1, 1), (1, 9), table)
    cache = workspace.view_padded(2, table, STORAGE)
    for name in (*INDEX_TENSORS, "decode_o_part", "decode_ml_part", "decode_out"):
        ours, theirs = getattr(cache, name), getattr(plain, name)
        assert ours.data_ptr() == theirs.data_ptr(), name
        assert ours.shape == theirs.shape, name
    assert cache.max_len == WIDTH
    assert cache.kv_lens == (WIDTH, WIDTH)
    assert cache.q_lens == (1, 1)


@pytest.mark.parametrize(
    ("rows", "kv_lens", "num_rows", "text"),
    [
        ([0, 1], (1, 1), 1, "num_rows: wanted at least the 2 requests, got 1"),
        ([0], (1,), ROWS + 1, "wanted at most max_batch_size=6, got 7"),
        ([0], (WIDTH + 1,), 2, "kv_lens: wanted at most max_seq_len=400, got 401"),
    ],
)
def test_padded_steps_beyond_the_workspace_are_refused(
    rows: list[int], kv_lens: tuple[int, ...], num_rows: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make().bind_padded(rows, kv_lens, num_rows, scrambled_table())
