"""The variants that are built for a call are those that the op launches, argument by argument."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from astrai_triton.ops import (
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
    launch_decode,
    launch_prefill,
    launch_rotary,
    merge_states,
    rotary_append_,
    rotary_emb,
    rotary_qk_,
)
from astrai_triton.ops.launch import ARCHES, FP8_DTYPES, Variant, arch_of
from astrai_triton.ops.launch_decode import DecodeFlags, DecodeShape
from astrai_triton.ops.launch_prefill import PrefillFlags, PrefillShape
from astrai_triton.ops.variant import describe_variant
from recorded import Launch, find_compilation, fix_launch, fix_variant, record_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# q heads, KV heads, head_dim, value_dim.
HEADS = (
    (32, 8, 128, 128),
    (9, 3, 64, 64),
    (8, 4, 256, 256),
    (32, 32, 80, 80),
    (40, 2, 128, 128),
    (8, 1, 192, 128),
)
DTYPES = ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, torch.float8_e5m2), (FP16, torch.float8_e4m3fn))
# Mask, softcap, dtype of the sinks, lse.
OPTIONS: tuple[tuple[bool, float, torch.dtype | None, bool], ...] = (
    (False, 0.0, None, False),
    (True, 0.0, None, False),
    (False, 30.0, None, True),
    (False, 0.0, FP32, False),
    (True, 1.0, BF16, True),
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    return record_launches(monkeypatch)


def list_shapes() -> list[tuple[tuple[int, ...], tuple[torch.dtype, torch.dtype]]]:
    """Heads and dtypes that the device at hand can do."""
    has_fp8 = arch_of(DEVICE).has_fp8
    dtypes = [pair for pair in DTYPES if has_fp8 or pair[1] != torch.float8_e4m3fn]
    return list(itertools.product(HEADS, dtypes))


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def misalign(x: torch.Tensor) -> torch.Tensor:
    """A tensor like x, one element beyond a multiple of 16 bytes."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)


def assert_launched(launches: Sequence[Launch], variants: Sequence[Variant]) -> None:
    """Kernels, constants, types of all arguments and compiler options are those of the variants."""
    assert [fix_launch(launch) for launch in launches] == [fix_variant(variant) for variant in variants]
    for launch, variant in zip(launches, variants, strict=True):
        assert launch.kernel is variant.kernel
        compilation = find_compilation(launch)
        assert compilation.signature == variant.signature
        assert compilation.specialized == set(variant.divisible)
        for name, value in variant.constexprs.items():
            assert launch.arguments[name] == value


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kv_len", [200, 3000])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_decode_launches_what_is_built_for_its_shape_and_flags(
    launches: list[Launch], options: tuple[Any, ...], kv_len: int, is_aligned: bool
) -> None:
    has_mask, softcap, sinks, has_lse = options
    for (heads, dtypes), mode in itertools.product(list_shapes(), ("dense", "paged", "new")):
        q_heads, kv_heads, head_dim, value_dim = heads
        shape = DecodeShape(
            q_dtype=dtypes[0], kv_dtype=dtypes[1], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
            value_dim=value_dim, align=16 if is_aligned else 1,
        )  # fmt: skip
        q = zeros(2, q_heads, head_dim, dtype=dtypes[0])
        q = q if is_aligned else misalign(q)
        asked: dict[str, Any] = {
            "mask": zeros(2, kv_len, dtype=torch.bool) if has_mask else None,
            "softcap": softcap,
            "sinks": None if sinks is None else zeros(q_heads, dtype=sinks),
            "return_lse": has_lse,
        }
        launches.clear()
        if mode == "dense":
            k, v = (zeros(2, 1, kv_heads, size, dtype=dtypes[1]) for size in (head_dim, value_dim))
            attn_decode(q[:, None], k.expand(-1, kv_len, -1, -1), v.expand(-1, kv_len, -1, -1), **asked)
        else:
            pools = (zeros(4, kv_heads, size, dtype=dtypes[1]) for size in (head_dim, value_dim))
            new_k, new_v = (zeros(2, kv_heads, size, dtype=dtypes[0]) for size in (head_dim, value_dim))
            asked["mask"] = zeros(7, dtype=torch.bool) if has_mask else None
            asked |= {"new_k": new_k, "new_v": new_v} if mode == "new" else {}
            attn_paged_decode(q, *pools, zeros(3, kv_len), zeros(2), zeros(3), **asked)
        is_split = kv_len > shape.chunk
        flags = DecodeFlags(
            is_paged=mode != "dense", is_split=is_split, has_new=mode == "new", has_mask=has_mask,
            has_softcap=softcap > 0, sinks=sinks, has_lse=has_lse,
        )  # fmt: skip
        assert len(launches) == 1 + is_split
        assert_launched(launches, launch_decode.build_variants(arch_of(DEVICE), shape, flags))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(8, 100), (100, 100), (8, 5000), (100, 5000)])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_prefill_launches_what_is_built_for_its_shape_and_flags(
    launches: list[Launch], options: tuple[Any, ...], q_len: int, kv_len: int, is_aligned: bool
) -> None:
    has_mask, softcap, sinks, has_lse = options
    windows = ((True, (-1, -1)), (False, (-1, -1)), (True, (300, -1)), (False, (300, 5)))
    for (heads, dtypes), (is_causal, window), is_packed in itertools.product(
        list_shapes(), windows, (False, True)
    ):
        q_heads, kv_heads, head_dim, value_dim = heads
        shape = PrefillShape(
            q_dtype=dtypes[0], kv_dtype=dtypes[1], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
            value_dim=value_dim, align=16 if is_aligned else 1,
        )  # fmt: skip
        q = zeros(1, 1, q_heads, head_dim, dtype=dtypes[0])
        q = (q if is_aligned else misalign(q)).expand(1, q_len, -1, -1)
        k, v = (zeros(1, 1, kv_heads, size, dtype=dtypes[1]) for size in (head_dim, value_dim))
        asked: dict[str, Any] = {
            "softcap": softcap,
            "sinks": None if sinks is None else zeros(q_heads, dtype=sinks),
            "return_lse": has_lse,
            "is_causal": is_causal,
            "window_size": window,
        }
        launches.clear()
        if is_packed:
            mask, tiles = zeros(7, dtype=torch.bool) if has_mask else None, zeros(-(-q_len // 64))
            maps = (zeros(3, kv_len), zeros(1), zeros(2), zeros(2), tiles, tiles)
            attn_paged_prefill(q[0], k[0], v[0], *maps, mask=mask, **asked)
        else:
            mask = zeros(1, kv_len, dtype=torch.bool) if has_mask else None
            attn_prefill(q, k.expand(1, kv_len, -1, -1), v.expand(1, kv_len, -1, -1), mask=mask, **asked)
        is_split = len(launches) == 2
        # What a window leaves is not split when it fits into one.
        assert is_split == (kv_len > 2048 and (is_packed or window[0] < 0))
        flags = PrefillFlags(
            is_packed=is_packed, is_short=q_len <= 32, is_split=is_split,
            mask_dim=(3 if is_packed else 2) if has_mask else 0, has_left=window[0] >= 0,
            has_right=is_causal or window[1] >= 0, has_softcap=softcap > 0, sinks=sinks, has_lse=has_lse,
        )  # fmt: skip
        assert_launched(launches, launch_prefill.build_variants(arch_of(DEVICE), shape, flags))


def test_rotary_and_merge_states_launch_what_is_listed(launches: list[Launch]) -> None:
    for tokens in (1, 5, 64):
        q = zeros(tokens, 32, 128, dtype=BF16)
        k, table, slots = zeros(tokens, 8, 128, dtype=BF16), zeros(tokens, 64, 2, dtype=FP32), zeros(tokens)
        for pairing in ("adjacent", "half"):
            rotary_emb(torch.cat((q, k), dim=1), table, pairing=pairing)
            rotary_qk_(q, k, table, pairing=pairing)
            rotary_append_(q, k, k, table, zeros(9, 8, 128, dtype=BF16), zeros(9, 8, 128, dtype=BF16), slots,
                           pairing=pairing)  # fmt: skip
        for dtype in FP8_DTYPES:
            pool = zeros(9, 8, 128, dtype=dtype)
            rotary_append_(q, k, k, table, pool, pool.clone(), slots, pairing="half")
        lse = zeros(tokens, 32, dtype=FP32)
        merge_states(q, lse, q, lse)
    listed = [*launch_rotary.list_variants(ARCHES[90]), *launch_decode.list_variants(ARCHES[90])]
    fp_fusion = {variant.kernel: launch_rotary.FP_FUSION for variant in listed if "rotary" in variant.name}
    for launch in launches:
        same = [
            variant
            for variant in listed
            if variant.kernel is launch.kernel
            and dict(variant.constexprs) == launch.constexprs
            and variant.signature == find_compilation(launch).signature
        ]
        # More than one where two ops come to one compilation.
        assert same
        config = same[0].config
        assert launch.options == {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": fp_fusion.get(launch.kernel, True),
        }
    assert len(launches) == 3 * 9


def test_every_listed_variant_is_one_that_a_call_builds() -> None:
    """The list has no hand-made entry: kinds are flags, and the signature says what is fixed."""
    for arch, family in itertools.product(ARCHES.values(), (launch_decode, launch_prefill, launch_rotary)):
        variants = family.list_variants(arch)
        assert len({variant.name for variant in variants}) == len(variants)
        for variant in variants:
            assert list(variant.signature) == list(variant.kernel.arg_names)
            fixed = {name for name, kind in variant.signature.items() if kind == "constexpr"}
            assert fixed == set(variant.constexprs)
            # Every argument that is fixed, but is no compile-time one, is a pointer that is not there.
            absent = {name: value for name, value in variant.constexprs.items() if not name.isupper()}
            assert all(name.endswith("_ptr") and value is None for name, value in absent.items())


def test_names_tell_variants_of_one_shape_apart() -> None:
    """Also of what is not listed: a report of any call names it."""
    arch, dtypes = ARCHES[90], (None, FP32, BF16)
    shape = DecodeShape(q_dtype=BF16, kv_dtype=BF16, q_heads=8, kv_heads=2, head_dim=64, value_dim=64)
    decode_names = {}
    for bits in itertools.product((False, True), repeat=6):
        on = dict(
            zip(("is_paged", "is_split", "has_new", "has_mask", "has_softcap", "has_lse"), bits, strict=True)
        )
        for sinks, align in itertools.product(dtypes, (1, 16)):
            if on["has_new"] and not on["is_paged"]:
                continue
            flags = DecodeFlags(**on, sinks=sinks)
            for variant in launch_decode.build_variants(arch, attrs.evolve(shape, align=align), flags):
                compiled = (fix_variant(variant), tuple(variant.signature.values()))
                assert decode_names.setdefault(variant.name, compiled) == compiled
    prefill_names = {}
    rows = PrefillShape(q_dtype=BF16, kv_dtype=BF16, q_heads=9, kv_heads=3, head_dim=64, value_dim=64)
    flag_names = ("is_packed", "is_short", "is_split", "has_left", "has_right", "has_softcap", "has_lse")
    for bits in itertools.product((False, True), repeat=7):
        for sinks, align, mask_dim in itertools.product(dtypes, (1, 16), (0, 2, 3)):
            asked = PrefillFlags(**dict(zip(flag_names, bits, strict=True)), sinks=sinks, mask_dim=mask_dim)
            for variant in launch_prefill.build_variants(arch, attrs.evolve(rows, align=align), asked):
                compiled = (fix_variant(variant), tuple(variant.signature.values()))
                assert prefill_names.setdefault(variant.name, compiled) == compiled


def test_a_pointer_without_a_type_is_an_error() -> None:
    variant = launch_decode.list_variants(ARCHES[90])[0]
    with pytest.raises(KeyError, match="q_ptr"):
        describe_variant(
            "toy", variant.kernel, variant.constexprs, variant.config, pointers={}, tile=variant.tile
        )


def test_more_keys_than_an_int32_counts_are_refused() -> None:
    k = zeros(1, 1, 1, 16, dtype=FP32).expand(1, 2**31, 1, 16)
    with pytest.raises(
        ValueError, match=r"k: wanted at most 2147483647 positions, got 2147483648; attend to"
    ):
        attn_decode(zeros(1, 1, 2, 16, dtype=FP32), k, k, window_size=(100, 0))
