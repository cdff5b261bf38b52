from __future__ import annotations

from typing import Any

import pytest

from astrai_bench.cases import (
    Case,
    Ceilings,
    Op,
    Request,
    count_bytes,
    count_flops,
    describe_case,
    h200_ceilings,
    is_memory_bound,
    make_case,
    predict_seconds,
)


def make(op: Op, *, batch: int = 1, q_len: int = 1, kv_len: int = 1, **changes: Any) -> Case:
    plain: dict[str, Any] = {
        "op": op,
        "q_heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "q_lens": (q_len,) * batch,
        "kv_lens": (kv_len,) * batch,
        "dtype": "bfloat16",
        "page": 16 if op.startswith("paged-") else 0,
    }
    return Case(**plain | changes)


@pytest.mark.parametrize(
    ("batch", "kv_len", "microseconds"), [(1, 4096, 3.9), (1, 131072, 125), (16, 4096, 62), (64, 4096, 250)]
)
@pytest.mark.parametrize("op", ["decode", "paged-decode"])
def test_decode_on_an_h200_has_the_known_floor(op: Op, batch: int, kv_len: int, microseconds: float) -> None:
    case = make(op, batch=batch, kv_len=kv_len)
    ceilings = h200_ceilings(case.dtype)
    assert is_memory_bound(case, ceilings)
    # The known figures have two or three digits.
    assert predict_seconds(case, ceilings) * 1e6 == pytest.approx(microseconds, rel=0.015)


@pytest.mark.parametrize("op", ["prefill", "paged-prefill"])
def test_causal_prefill_of_8k_on_an_h200_has_the_known_floor(op: Op) -> None:
    case = make(op, q_len=8192, kv_len=8192)
    ceilings = h200_ceilings(case.dtype)
    assert not is_memory_bound(case, ceilings)
    assert predict_seconds(case, ceilings) * 1e3 == pytest.approx(0.70, abs=0.005)


def test_decode_is_memory_bound_up_to_184_rows_per_kv_head_on_an_h200() -> None:
    few, many = (make("decode", kv_len=1 << 20, kv_heads=1, q_heads=group) for group in (183, 185))
    ceilings = h200_ceilings("bfloat16")
    assert is_memory_bound(few, ceilings)
    assert not is_memory_bound(many, ceilings)


def test_attention_bytes_are_each_operand_once() -> None:
    case = make("paged-prefill", q_lens=(3, 5), kv_lens=(7, 11), batch=2, dtype="float32")
    keys_and_values = 2 * (7 + 11) * 8 * 128 * 4
    q_and_out = 2 * (3 + 5) * 32 * 128 * 4
    assert count_bytes(case) == keys_and_values + q_and_out


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (4, 4), (3, 10)])
def test_causal_flops_count_every_pair_that_is_seen(q_len: int, kv_len: int) -> None:
    pairs = sum(key <= kv_len - q_len + row for row in range(q_len) for key in range(kv_len))
    assert count_flops(make("prefill", q_len=q_len, kv_len=kv_len)) == 4 * 32 * 128 * pairs


def test_rotary_reads_and_writes_q_and_k_and_reads_one_table() -> None:
    case = make("rotary", q_len=10, kv_len=10)
    assert count_bytes(case) == 10 * (2 * (32 + 8) * 128 * 2 + 64 * 2 * 4)
    assert count_flops(case) == 10 * (32 + 8) * 64 * 6


def test_the_roofline_is_the_longer_of_memory_and_arithmetic() -> None:
    case = make("decode", kv_len=100)
    ceilings = Ceilings(bandwidth=count_bytes(case) / 2.0, flops=count_flops(case) / 3.0, source="made up")
    assert predict_seconds(case, ceilings) == pytest.approx(3.0)
    assert not is_memory_bound(case, ceilings)


@pytest.mark.parametrize(
    ("op", "changes", "text"),
    [
        ("decode", {"q_heads": 5}, "q_heads: wanted a multiple of kv_heads=8, got 5"),
        ("decode", {"kv_heads": 0}, "kv_heads: wanted >= 1, got 0"),
        ("decode", {"dtype": "int8"}, "dtype: wanted one of float32, bfloat16, float16, got 'int8'"),
        ("decode", {"q_lens": ()}, "wanted one of each per request, got 0 and 1"),
        ("decode", {"kv_lens": (0,)}, "lengths of at least 1"),
        ("prefill", {"q_lens": (2,)}, "kv_lens: wanted at least the q_len of every request"),
        ("paged-decode", {"page": 0}, "page: wanted >= 1, got 0"),
        ("decode", {"q_lens": (1, 1), "kv_lens": (1, 2)}, "use paged-decode"),
        ("rotary", {"head_dim": 7}, "head_dim: wanted an even number for rotary, got 7"),
    ],
)
def test_sizes_that_make_no_case_are_refused_by_name(op: Op, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        make(op, **changes)


def test_a_cpu_gets_smaller_defaults_and_says_which() -> None:
    on_gpu, nothing = make_case(Request(op="decode"), is_gpu=True)
    on_cpu, smaller = make_case(Request(op="decode"), is_gpu=False)
    assert (on_gpu.batch, on_gpu.kv_lens[0], nothing) == (16, 4096, ())
    assert (on_cpu.batch, on_cpu.kv_lens[0], smaller) == (4, 1024, ("batch 4", "kv-len 1024"))


def test_sizes_asked_for_are_never_made_smaller() -> None:
    case, smaller = make_case(Request(op="decode", batch=99, kv_lens=(8192,)), is_gpu=False)
    assert (case.batch, set(case.kv_lens), smaller) == (99, {8192}, ())


def test_lengths_are_repeated_until_every_request_has_one() -> None:
    case, _ = make_case(Request(op="paged-decode", batch=5, kv_lens=(7, 9)), is_gpu=False)
    assert case.kv_lens == (7, 9, 7, 9, 7)
    assert case.q_lens == (1,) * 5
    with pytest.raises(ValueError, match="batch: wanted at least 3"):
        make_case(Request(op="paged-decode", batch=2, kv_lens=(7, 9, 11)), is_gpu=False)


def test_prefill_has_as_many_keys_as_rows_unless_told_otherwise() -> None:
    case, _ = make_case(Request(op="paged-prefill", q_lens=(70, 10, 130)), is_gpu=False)
    assert case.kv_lens == case.q_lens == (70, 10, 130)


@pytest.mark.parametrize(("alias", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_dtype_names_mean_the_long_ones(alias: str, name: str) -> None:
    assert make_case(Request(op="rotary", dtype=alias), is_gpu=True)[0].dtype == name


def test_a_case_is_described_on_one_line() -> None:
    assert describe_case(make("paged-decode", batch=2, kv_lens=(5, 9))) == (
        "paged-decode: batch 2, 32/8 heads of 128, 5..9 keys, bfloat16, page 16"
    )
    assert describe_case(make("prefill", q_len=4, kv_len=8)) == (
        "prefill: batch 1, 32/8 heads of 128, 4 rows over 8 keys, causal, bfloat16"
    )
