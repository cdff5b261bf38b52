from __future__ import annotations

import pytest

from astrai_bench.occupancy import Occupancy, find_occupancy
from astrai_triton.ops.launch import ARCHES


@pytest.mark.parametrize(
    ("capability", "registers", "shared_bytes", "num_warps", "wanted"),
    [
        # Cross-checked by hand: 65536 registers / (128 a thread x 128 threads) = 4.
        (90, 128, 0, 4, Occupancy(4, "registers")),
        # 129 registers round up to 136 a thread, 4352 a warp: 15 warps, of which 12 share out evenly.
        (90, 129, 0, 4, Occupancy(3, "registers")),
        (90, 255, 0, 8, Occupancy(1, "registers")),
        (90, 32, 56 * 1024, 4, Occupancy(4, "shared")),
        # 114 KiB twice would fit without the 1 KiB that each CTA pays on top.
        (90, 32, 114 * 1024, 4, Occupancy(1, "shared")),
        (90, 32, 228 * 1024, 4, Occupancy(0, "shared")),
        (90, 16, 0, 4, Occupancy(16, "warps")),
        (90, 16, 0, 1, Occupancy(32, "ctas")),
        (86, 16, 0, 1, Occupancy(16, "ctas")),
        (120, 16, 0, 4, Occupancy(12, "warps")),
    ],
)
def test_the_scarcest_resource_decides(
    capability: int, registers: int, shared_bytes: int, num_warps: int, wanted: Occupancy
) -> None:
    assert find_occupancy(ARCHES[capability], registers, shared_bytes, num_warps) == wanted
