from __future__ import annotations

import attrs
import pytest

from astrai_triton.cache import PagePool
from astrai_triton.kvcache import KVCache

FIELDS = [
    *("k_buffer", "v_buffer", "req_to_token", "req_pool_indices", "seq_lens", "out_cache_loc", "max_len"),
    *("kv_indptr", "qo_indptr", "q_tile_to_batch", "q_tile_to_index"),
    *("decode_o_part", "decode_ml_part", "decode_out", "q_lens", "kv_lens"),
]


def bind_one() -> KVCache:
    pool = PagePool(
        n_layers=2,
        n_q_heads=4,
        n_kv_heads=2,
        head_dim=8,
        max_batch_size=2,
        max_seq_len=32,
        max_step_tokens=16,
    )
    lease = pool.open([1, 2, 3])
    assert lease is not None
    return pool.bind_tasks([lease], [3], [3])


def test_kvcache_has_the_documented_fields() -> None:
    assert [field.name for field in attrs.fields(KVCache)] == FIELDS


def test_kvcache_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        bind_one().max_len = 7  # type: ignore[misc]


def test_kvcache_compares_by_identity() -> None:
    cache = bind_one()
    assert cache == cache
    assert cache != attrs.evolve(cache)


def test_kvcache_has_no_methods_of_its_own() -> None:
    names = {name for name in vars(KVCache) if not name.startswith("_")}
    assert not [name for name in names if callable(getattr(KVCache, name))]
