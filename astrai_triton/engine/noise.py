"""Counter-based noise: the uniform number of one draw is a pure function of (seed, position)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
# 2^64 over the golden ratio, made odd: the step of SplitMix64's counter.
_STEP = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    """Finalizer of SplitMix64, a bijection on 64 bits."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int) -> float:
    """Give output number ``position`` of the SplitMix64 stream of ``seed``, as a number in [0, 1).

    No state is kept, so a task draws the same numbers alone, in any batch and after it was preempted. The
    seed passes the finalizer first, or the streams of some seeds would be shifted copies of each other.

    Args:
        seed: any integer; its lowest 64 bits count.
        position: index of the token being sampled in its task, >= 0.

    Returns:
        A multiple of 2^-52 in [0, 1 - 2^-52]: so u * total rounds to less than total for every float64 total.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    word = _mix((_mix(seed & _MASK) + (position + 1) * _STEP) & _MASK)
    return (word >> 12) * 2.0**-52


def uniform_array(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.signedinteger]
) -> npt.NDArray[np.float64]:
    """``uniform`` of every pair, bit for bit.

    Args:
        seeds: ``[B]``.
        positions: ``[B]``, >= 0.

    Returns:
        ``[B]``.
    """
    # uint64 arrays wrap around without a warning, as SplitMix64 wants it.
    words = _mix_array(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    return (_mix_array(words) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix_array(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
