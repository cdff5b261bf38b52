"""Conversions between float32 and the 16-bit types, against numpy and torch."""

from __future__ import annotations

import numpy as np
import torch

_PATTERNS = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def _as_bf16(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()


def _round_to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _check_rounding(minis, x: np.ndarray) -> None:
    x = np.concatenate([x, -x]).astype(np.float32)
    of_bf16, of_f16 = minis.round(x)
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        want_f16 = x.astype(np.float16).view(np.uint16)
    assert (of_bf16[number] == _round_to_bf16(x)[number]).all()
    assert (of_f16[number] == want_f16[number]).all()
    # As CUDA has it: one pattern for every NaN.
    assert (of_bf16[~number] == 0x7FFF).all()
    assert (of_f16[~number] == 0x7FFF).all()


def test_every_16_bit_pattern_widens_to_its_value(minis) -> None:
    of_bf16, of_f16 = minis.widen(_PATTERNS)
    assert np.array_equal(of_bf16, _as_bf16(_PATTERNS), equal_nan=True)
    assert np.array_equal(of_f16, _PATTERNS.view(np.float16).astype(np.float32), equal_nan=True)
    assert (np.signbit(of_f16) == (_PATTERNS >> 15 == 1)).all()


def test_every_16_bit_number_comes_back_from_float32(minis) -> None:
    of_bf16, of_f16 = minis.widen(_PATTERNS)
    for widened, back in ((of_bf16, minis.round(of_bf16)[0]), (of_f16, minis.round(of_f16)[1])):
        number = ~np.isnan(widened)
        assert (back[number] == _PATTERNS[number]).all()


def test_halfway_between_neighbours_rounds_to_even_and_beside_it_to_the_nearer(minis) -> None:
    for values in minis.widen(_PATTERNS[: 0x7F80 + 1]):
        finite = np.sort(values[np.isfinite(values)]).astype(np.float64)
        middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        _check_rounding(minis, middle)
        _check_rounding(minis, np.nextafter(middle, np.float32(np.inf)))
        _check_rounding(minis, np.nextafter(middle, np.float32(0)))


def test_overflow_subnormal_numbers_zeros_and_nans(minis) -> None:
    edges = [0.0, 65504, 65519.996, 65520, 65536, 3.3895314e38, 3.3961775e38, 3.4028235e38, np.inf, np.nan]
    edges += [2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149]
    edges += [2.0**-25 * (1 + 2.0**-23), 2.0**-24 * 1.5, 2.0**-14 * (1 - 2.0**-12), 2.0**-14 * (1 - 2.0**-11)]
    _check_rounding(minis, np.array(edges, np.float32))


def test_random_patterns_of_float32_round_as_in_numpy_and_torch(minis) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    _check_rounding(minis, bits.view(np.float32))
