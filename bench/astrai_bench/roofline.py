"""What the usual card of an architecture can do at most."""

from __future__ import annotations

from astrai_bench.cases import Ceilings, h200_ceilings

# Card, bytes per second, dense 16-bit products with float32 sums and float32 operations per second: NVIDIA's
# specifications of each card.
_CARDS = {
    80: ("A100 80GB SXM", 2.04e12, 312e12, 19.5e12),
    86: ("A40", 0.696e12, 149.7e12, 37.4e12),
    89: ("L40S", 0.864e12, 362e12, 91.6e12),
    100: ("B200", 8.0e12, 2250e12, 75e12),
    120: ("RTX PRO 6000 Blackwell", 1.79e12, 503.8e12, 126e12),
}


def find_ceilings(capability: int, dtype: str) -> Ceilings:
    """Ceilings of the card that stands for an architecture; measured ones for sm_90.

    Args:
        capability: 80, 86, 89, 90, 100 or 120.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
    """
    if capability == 90:
        return h200_ceilings(dtype)
    name, bandwidth, narrow_flops, float_flops = _CARDS[capability]
    flops = float_flops if dtype == "float32" else narrow_flops
    return Ceilings(bandwidth=bandwidth, flops=flops, source=f"{name}, specification")
