"""Whatever the traffic of a model: what its calls compile is a short list, known beforehand."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
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
    merge_states,
    rotary_append_,
    rotary_emb,
    rotary_qk_,
)
from astrai_triton.ops.launch import Variant, arch_of
from astrai_triton.ops.launch_decode import DecodeFlags, DecodeShape
from astrai_triton.ops.launch_prefill import PrefillFlags, PrefillShape
from recorded import Launch, find_compilation, fix_launch, fix_variant, record_launches
from toy_kernels import walk_rows_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Around every value that Triton could treat by itself: 1, multiples of 16, and what 31 bits hold.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 2048, 2049, 4096, 100_000)
SIZES = (1, 2, 3, 16, 17, 64)
WINDOWS = (0, 1, 15, 16, 300, 4096, 2**30, 2**31 - 1, 2**31, 2**40)
SCALES = (None, 0, 1, -1, 0.125, -0.3, 1.0, 16.0)
STORAGE = 1 << 26
BITS = {"i32": 32, "i64": 64}


@attrs.frozen(kw_only=True)
class Model:
    """Everything that a compilation may depend on."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def list_expected(self) -> list[Variant]:
        """What its attention compiles, one after the other."""
        sizes = {
            "q_dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
        }
        arch, bits = arch_of(DEVICE), (False, True)
        decode, prefill = DecodeShape(**sizes), PrefillShape(**sizes)
        variants: list[Variant] = []
        for is_paged, is_split in itertools.product(bits, bits):
            asked = DecodeFlags(is_paged=is_paged, has_new=is_paged, is_split=is_split)
            variants += launch_decode.build_variants(arch, decode, asked)
        names = ("is_packed", "is_short", "is_split", "has_left", "has_right")
        for values in itertools.product(bits, repeat=len(names)):
            flags = PrefillFlags(**dict(zip(names, values, strict=True)))
            variants += launch_prefill.build_variants(arch, prefill, flags)
        return variants


class Traffic:
    """Random calls of one model; only what is not part of a variant differs between them."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self._rng = model, random.Random(seed)
        self._storages: dict[torch.dtype, torch.Tensor] = {}

    def draw_call(self) -> None:
        """Make one call of some op."""
        calls = (
            self._decode, self._decode_paged, self._prefill, self._prefill_paged, self._merge_states,
            self._rotate, self._rotate_both, self._append,
        )  # fmt: skip
        self._rng.choices(calls, (2, 4, 3, 4, 1, 1, 1, 2))[0]()

    def _decode(self) -> None:
        model, batch = self._model, self._pick(SIZES)
        length = self._pick((0, *LENGTHS, 2**18))
        q = self._rows(model.dtype, (batch, 1, model.q_heads))
        k, v = (self._rows(model.kv_dtype, (batch, length, model.kv_heads)) for _ in range(2))
        out = self._maybe(lambda: self._rows(model.dtype, (batch, 1, model.q_heads), is_written=True))
        attn_decode(q, k, v, out=out, window_size=self._window(), **self._scales())

    def _decode_paged(self) -> None:
        model, batch = self._model, self._pick(SIZES)
        context = self._pick((*LENGTHS, 2**18))
        q, new_k, new_v = (
            self._rows(model.dtype, (batch, heads))
            for heads in (model.q_heads, model.kv_heads, model.kv_heads)
        )
        attn_paged_decode(
            q, *self._pools(), self._table(context), self._ints(batch), self._ints(batch + 1),
            new_k=new_k, new_v=new_v, max_kv_len=self._maybe(lambda: self._rng.randint(0, context)),
            out=self._maybe(lambda: self._rows(model.dtype, (batch, model.q_heads), is_written=True)),
            window_size=self._window(), **self._scales(),
        )  # fmt: skip

    def _prefill(self) -> None:
        model, batch = self._model, self._pick((1, 2, 3, 16))
        q_len, kv_len = self._pick(LENGTHS[:-1]), self._pick((0, *LENGTHS))
        q = self._rows(model.dtype, (batch, q_len, model.q_heads))
        k, v = (self._rows(model.kv_dtype, (batch, kv_len, model.kv_heads)) for _ in range(2))
        attn_prefill(
            q, k, v, is_causal=self._rng.random() < 0.5, window_size=self._window(), **self._scales()
        )

    def _prefill_paged(self) -> None:
        model, batch = self._model, self._pick((1, 2, 3, 16, 17))
        tokens, tiles, context = self._pick(LENGTHS[:-1]), self._pick(LENGTHS), self._pick((*LENGTHS, 2**18))
        maps = (self._ints(size) for size in (batch, batch + 1, batch + 1, tiles, tiles))
        attn_paged_prefill(
            self._rows(model.dtype, (tokens, model.q_heads)), *self._pools(), self._table(context), *maps,
            is_causal=self._rng.random() < 0.5, window_size=self._window(), **self._scales(),
            max_kv_len=self._maybe(lambda: self._rng.randint(0, context)),
        )  # fmt: skip

    def _merge_states(self) -> None:
        shape = (self._pick(LENGTHS[:-1]), self._model.q_heads)
        o_a, o_b = (self._rows(self._model.dtype, shape) for _ in range(2))
        storage = self._storage(torch.float32)
        lse_a, lse_b = (
            storage.as_strided(shape, self._rng.choice(((shape[1], 1), (1, shape[0]), (64, 3))), offset)
            for offset in (0, 1)
        )
        merge_states(o_a, lse_a, o_b, lse_b)

    def _rotate(self) -> None:
        shape = (*self._leading(), self._model.q_heads + self._model.kv_heads)
        x = self._rows(self._model.dtype, shape)
        out = self._maybe(lambda: self._rows(self._model.dtype, shape, is_written=True))
        rotary_emb(x, self._turns(shape[:-1]), pairing="half", out=out)

    def _rotate_both(self) -> None:
        model, leading = self._model, self._leading()
        q, k = (
            self._rows(model.dtype, (*leading, heads), is_written=True)
            for heads in (model.q_heads, model.kv_heads)
        )
        rotary_qk_(q, k, self._turns(leading), pairing="half")

    def _append(self) -> None:
        model, tokens = self._model, self._pick(LENGTHS[:-1])
        q = self._rows(model.dtype, (tokens, model.q_heads), is_written=True)
        k, v = (self._rows(model.dtype, (tokens, model.kv_heads)) for _ in range(2))
        slots = self._pick(LENGTHS[:-1])
        pools = (self._rows(model.kv_dtype, (slots, model.kv_heads), is_written=True) for _ in range(2))
        rotary_append_(q, k, v, self._turns((tokens,)), *pools, self._ints(tokens), pairing="half",
                       **self._kv_scales())  # fmt: skip

    def _pick(self, values: Iterable[Any]) -> Any:
        return self._rng.choice(tuple(values))

    def _maybe(self, draw: Any) -> Any:
        return draw() if self._rng.random() < 0.5 else None

    def _leading(self) -> tuple[int, ...]:
        if self._rng.random() < 0.5:
            return (self._pick(LENGTHS[:-1]),)
        return self._pick((1, 2, 16)), self._pick(LENGTHS[:14])

    def _window(self) -> tuple[int, int]:
        sides = (-1, *WINDOWS)
        return (-1, -1) if self._rng.random() < 0.5 else (self._pick(sides), self._pick(sides))

    def _scales(self) -> dict[str, Any]:
        return {"softmax_scale": self._pick(SCALES), **self._kv_scales()}

    def _kv_scales(self) -> dict[str, Any]:
        if self._model.kv_dtype == self._model.dtype:
            return {}
        return {name: self._pick((None, 1, 1.0, 0.3, 16)) for name in ("k_scale", "v_scale")}

    def _storage(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._storages:
            self._storages[dtype] = torch.empty(STORAGE, dtype=dtype, device=DEVICE)
        return self._storages[dtype]

    def _ints(self, size: int) -> torch.Tensor:
        """Indices at any address an int32 may have."""
        return self._storage(torch.int32).as_strided((size,), (1,), self._rng.randrange(64))

    def _table(self, context: int) -> torch.Tensor:
        rows = self._pick((*SIZES, 2**31 + 16))
        strides = self._pick(((0, 1), (0, 0), (1, 0), (16, 1))) if rows < 100 else (0, 1)
        return self._storage(torch.int32).as_strided((rows, context), strides, self._rng.randrange(64))

    def _pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self._pick((1, 16, 17, 4096, 2**31 - 1, 2**31, 2**33))
        k, v = (self._rows(self._model.kv_dtype, (slots, self._model.kv_heads)) for _ in range(2))
        return k, v

    def _turns(self, leading: tuple[int, ...]) -> torch.Tensor:
        pairs = self._model.head_dim // 2
        strides = tuple(self._pick((0, 2 * pairs, 4 * pairs)) if size < 5000 else 0 for size in leading)
        return self._storage(torch.float32).as_strided((*leading, pairs, 2), (*strides, 2, 1), 16)

    def _rows(
        self, dtype: torch.dtype, leading: tuple[int, ...], *, is_written: bool = False
    ) -> torch.Tensor:
        """``[*leading, head_dim]``, every row at a multiple of 16 bytes, dimensions in any order."""
        strides, taken = [0] * len(leading), self._model.head_dim
        for dim in self._rng.sample(range(len(leading)), len(leading)):
            size = leading[dim]
            pad = self._pick((0, 0, 16, 48))
            if size == 1:
                # There is no second row: any stride is as good as another.
                strides[dim] = self._pick((0, 1, 7, 16, 2**20 + 1, 2**33, 2**33 + 1))
            elif (taken + pad) * size < STORAGE // 2:
                strides[dim] = taken + pad
                taken = strides[dim] * size
            else:
                assert not is_written
        offset = 16 * self._rng.randrange(4)
        return self._storage(dtype).as_strided((*leading, self._model.head_dim), (*strides, 1), offset)


def collect_compilations(
    launches: Iterable[Launch], variants: dict[Any, dict[str, str]]
) -> dict[tuple[Any, ...], set[str]]:
    """Variant -> keys of what Triton compiled for it; each launch is one of ``variants``, type for type."""
    keys: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for launch in launches:
        fixed = fix_launch(launch)
        assert fixed in variants
        compilation = find_compilation(launch)
        assert compilation.signature == variants[fixed]
        assert not compilation.specialized
        for name, kind in compilation.signature.items():
            if kind in BITS:
                assert abs(launch.arguments[name]) < 2 ** (BITS[kind] - 1)
        keys[fixed].add(compilation.key)
    return keys


SMALL = Model(q_heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
FP8 = Model(q_heads=32, kv_heads=8, head_dim=128, dtype=torch.float16, kv_dtype=torch.float8_e5m2)


@pytest.mark.parametrize(
    ("model", "calls", "num_attention", "num_other"),
    # Twice two of decode and a merge each; prefill and its two merges. Short rows make no difference to a
    # group of 4, and rotating one tensor of 40 heads or two comes to the same.
    [(SMALL, 10_000, 6 + 32 + 2, 4), (FP8, 3_000, 6 + 16 + 2, 3)],
)
def test_any_traffic_of_a_model_compiles_what_is_known_beforehand_and_that_once(
    model: Model, calls: int, num_attention: int, num_other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = record_launches(monkeypatch)
    expected = {fix_variant(variant): dict(variant.signature) for variant in model.list_expected()}
    assert len(expected) == num_attention
    variants, traffic = dict(expected), Traffic(model, seed=2026)
    keys: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    others = set()
    for _ in range(calls):
        launches.clear()
        traffic.draw_call()
        for launch in launches:
            fixed = fix_launch(launch)
            if launch.kernel.fn.__name__.startswith(("rotate", "append", "merge_states")):
                # These have no flags: the first launch of an op says what all others are.
                others.add(fixed)
                variants.setdefault(fixed, dict(find_compilation(launch).signature))
        for fixed, found in collect_compilations(launches, variants).items():
            keys[fixed] |= found
    assert set(keys) == set(variants)
    assert len(others) == num_other
    assert all(len(found) == 1 for found in keys.values())


@pytest.mark.parametrize(
    "change",
    [
        {"num_rows": 1},
        {"num_rows": 32},
        {"x_stride": 2**31},
        {"x_ptr": torch.zeros(64)[4:]},
        {"x_ptr": torch.zeros(64, dtype=torch.float16)[1:]},
        {"BLOCK_D": 32},
    ],
)
def test_a_leak_would_be_seen(change: dict[str, Any]) -> None:
    """The toy kernel does not say what it is not to be compiled for."""
    floats, slots = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    plain = {
        "x_ptr": floats[1:], "slots_ptr": slots, "out_ptr": floats, "num_rows": 5, "x_stride": 3,
        "BLOCK_N": 16, "BLOCK_D": 16,
    }  # fmt: skip

    def find_key(**changes: Any) -> str:
        return find_compilation(Launch(walk_rows_kernel, (1,), plain | changes, {"num_warps": 4})).key

    assert find_key(num_rows=7) == find_key()
    assert find_key(**change) != find_key()
