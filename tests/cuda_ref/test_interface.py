"""The ops as seen from outside, nothing built: their signatures, and what they refuse before any launch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import astrai_triton.ops
import cuda_ref.ops
from cuda_ref import BuildError, ops
from cuda_ref.ops import call

ROWS, ROW = torch.zeros(2, 3, 4, 16), torch.zeros(2, 1, 4, 16)
POOL, TABLE = torch.zeros(9, 2, 16), torch.zeros(3, 8, dtype=torch.int32)
INTS = torch.zeros(9, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> None:
        raise AssertionError(f"the {kind} build was asked for")

    monkeypatch.setattr(call, "load_extension", fail)


@pytest.mark.parametrize("name", astrai_triton.ops.__all__)
def test_every_op_takes_what_the_triton_op_takes(name: str) -> None:
    theirs = inspect.signature(getattr(astrai_triton.ops, name))
    ours = inspect.signature(getattr(cuda_ref.ops, name))
    extra = [parameter for parameter in ours.parameters.values() if parameter.name == "variant"]
    assert [parameter.kind for parameter in extra] == [inspect.Parameter.KEYWORD_ONLY] * name.startswith(
        "attn"
    )
    rest = [parameter for parameter in ours.parameters.values() if parameter.name != "variant"]
    assert rest == list(theirs.parameters.values())
    assert ours.return_annotation == theirs.return_annotation


def test_the_packages_have_the_same_ops() -> None:
    assert cuda_ref.ops.__all__ == astrai_triton.ops.__all__


def decode(q: torch.Tensor = ROW, k: torch.Tensor = ROWS, v: torch.Tensor = ROWS, **options: Any) -> None:
    ops.attn_decode(q, k, v, **options)


def paged_decode(**changed: Any) -> None:
    arguments = {
        "q": ROW[:, 0],
        "k_buffer": POOL,
        "v_buffer": POOL,
        "req_to_token": TABLE,
        "req_pool_indices": INTS[:2],
        "kv_indptr": INTS[:3],
        **changed,
    }
    ops.attn_paged_decode(**arguments)


def paged_prefill(**changed: Any) -> None:
    arguments = {
        "q": ROW[:, 0],
        "k_buffer": POOL,
        "v_buffer": POOL,
        "req_to_token": TABLE,
        "req_pool_indices": INTS[:2],
        "kv_indptr": INTS[:3],
        "qo_indptr": INTS[:3],
        "q_tile_to_batch": INTS[:2],
        "q_tile_to_index": INTS[:2],
        **changed,
    }
    ops.attn_paged_prefill(**arguments)


def append(**changed: Any) -> None:
    arguments = {
        "q": ROW[:, 0],
        "k": ROW[:, 0, :2],
        "v": ROW[:, 0, :2],
        "freqs_cis": torch.zeros(2, 8, 2),
        "k_buffer": POOL,
        "v_buffer": POOL,
        "out_cache_loc": INTS[:2],
        **changed,
    }
    ops.rotary_append_(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": ROW.double()}, TypeError, "q: wanted one of float16, bfloat16, float32, got float64"),
        ({"q": ROWS}, ValueError, r"q: wanted shape \[B, 1, Hq, D\], got \[2, 3, 4, 16\]"),
        ({"q": ROW[..., :3, :]}, ValueError, "q: wanted a multiple of 4 kv heads, at least one, got 3 heads"),
        ({"k": ROWS.half()}, TypeError, "k: wanted the dtype of q, float32, got float16; .* cast it first"),
        ({"k": ROWS[:1]}, ValueError, r"v: wanted shape \[1, 3, 4, Dv\]"),
        ({"k": ROWS.mT}, ValueError, "k: wanted a unit last stride"),
        ({"k": ROWS.to("meta")}, ValueError, "k: wanted the device of the first tensor, cpu, got meta"),
        ({"v": ROWS[..., :12]}, ValueError, "v: wanted a head_dim that is a multiple of 8 .*, got 12"),
        ({"k": torch.zeros(2, 3, 4, 24)}, ValueError, "k: wanted the head_dim of q, 16, got 24"),
        ({"mask": torch.ones(2, 3)}, TypeError, "mask: wanted bool"),
        ({"softcap": -1.0}, ValueError, "softcap: wanted a finite number >= 0, got -1.0"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: wanted"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: wanted shape \[4\], got \[3\]"),
        ({"out": ROW.half()}, TypeError, "out: wanted float32, got float16"),
        (
            {"k_scale": 0.5},
            ValueError,
            "k_scale: wanted None, since cuda_ref has no fp8, got 0.5; leave it out",
        ),
        ({"v_scale": 2.0}, ValueError, "v_scale: wanted None, since cuda_ref has no fp8"),
    ],
)
def test_a_bad_argument_of_decode_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        decode(**changed)


def test_fp8_keys_are_refused_by_name() -> None:
    fp8 = ROWS.to(torch.float8_e5m2)
    with pytest.raises(
        TypeError, match="k: wanted the dtype of q, float16, got float8_e5m2; cuda_ref has no fp8"
    ):
        decode(ROW.half(), fp8, fp8)


@pytest.mark.parametrize("run", [paged_decode, paged_prefill])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k_buffer": POOL.half()}, TypeError, "k_buffer: wanted the dtype of q"),
        ({"v_buffer": POOL[:8]}, ValueError, r"v_buffer: wanted shape \[9, 2, Dv\]"),
        ({"req_to_token": TABLE.long()}, TypeError, "req_to_token: wanted int32, got int64"),
        ({"kv_indptr": INTS[:2]}, ValueError, r"kv_indptr: wanted shape \[3\], got \[2\]"),
        ({"kv_indptr": INTS[:6:2]}, ValueError, "kv_indptr: wanted a unit last stride"),
        ({"mask": torch.ones(4, 4).bool()}, ValueError, "mask: wanted shape"),
        ({"max_kv_len": -1}, ValueError, "max_kv_len: wanted"),
    ],
)
def test_a_bad_argument_of_the_paged_ops_is_named(
    run: Any, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(**changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"new_k": ROW[:, 0, :2]}, ValueError, "new_v: wanted together with its partner, got None"),
        (
            {"new_k": ROW[:, 0], "new_v": ROW[:, 0, :2]},
            ValueError,
            r"new_k: wanted shape \[2, 2, 16\], got \[2, 4, 16\]",
        ),
        ({"max_kv_len": 9}, ValueError, "max_kv_len: wanted 0 to the width of req_to_token, 8, got 9"),
    ],
)
def test_a_bad_argument_of_paged_decode_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        paged_decode(**changed)


def test_a_bad_map_of_paged_prefill_is_named() -> None:
    with pytest.raises(ValueError, match=r"q_tile_to_index: wanted shape \[2\], got \[1\]"):
        paged_prefill(q_tile_to_index=INTS[:1])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": ROW[:, 0, :2].half()}, TypeError, "k: wanted one of float32, got float16"),
        ({"k_buffer": POOL.half()}, TypeError, "k_buffer: wanted the dtype of q, float32, got float16"),
        ({"v_buffer": POOL[:8]}, ValueError, r"v_buffer: wanted shape \[9, 2, 16\], got \[8, 2, 16\]"),
        ({"out_cache_loc": INTS[:3]}, ValueError, r"out_cache_loc: wanted shape \[2\], got \[3\]"),
        ({"k_scale": 1.0}, ValueError, "k_scale: wanted None, since cuda_ref has no fp8"),
        ({"pairing": "interleaved"}, ValueError, "pairing: wanted 'adjacent' or 'half', got 'interleaved'"),
        ({"freqs_cis": torch.zeros(3, 8, 2)}, ValueError, r"freqs_cis: wanted leading dimensions \[2\] of q"),
    ],
)
def test_a_bad_argument_of_the_rotary_ops_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        append(**changed)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: ops.attn_decode(x, x, x),
        lambda x: ops.attn_prefill(x, x, x),
        lambda x: ops.rotary_emb(x, x),
        lambda x: ops.rotary_qk_(x, x, x),
        lambda x: ops.merge_states(x, x, x, x),
    ],
)
def test_a_device_without_a_build_is_an_error(run: Any) -> None:
    with pytest.raises(RuntimeError, match="device: wanted cpu or cuda, got meta; move the tensors"):
        run(ROW.to("meta"))


def test_without_a_build_every_op_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    call._check_kind.cache_clear()
    monkeypatch.setattr(call, "why_not", lambda kind: f"no {kind} here")
    for run in (decode, paged_decode, paged_prefill, append):
        with pytest.raises(BuildError, match="no host here"):
            run()
    assert issubclass(BuildError, RuntimeError)
    monkeypatch.undo()
    call._check_kind.cache_clear()
