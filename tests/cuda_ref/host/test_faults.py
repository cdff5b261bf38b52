"""Every broken rule is reported, with its place; the same kernel that keeps the rule runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

_PARTS = ("shared", "copies", "global", "collectives")
_SOURCES = [Path(__file__).parent / "kernels" / f"faults_{part}.cuh" for part in _PARTS]
_BOUNDS, _ALIGNMENT = "shared memory out of bounds", "shared memory misaligned"
_UNWRITTEN, _RACE = "shared memory read before it is written", "shared memory race"
_IN_FLIGHT = "shared memory touched during an asynchronous copy"
_GLOBAL_BOUNDS, _GLOBAL_ALIGNMENT = "global memory out of bounds", "global memory misaligned"
_DIVERGENCE, _INVALID = "divergence", "invalid collective"

# Of each kernel: the fault, the thread that is found out, and words of the rest of the message. No thread
# where it depends on the order in which threads go on after a barrier.
FAULTS = {
    "index_past_the_end": (
        _BOUNDS,
        3,
        "4 bytes at element 32 of the array of 32 elements of 4 bytes at byte",
    ),
    "index_below_zero": (_BOUNDS, 3, "element -1 of the array of 32 elements of 4 bytes at byte 128"),
    "wide_past_the_end": (_BOUNDS, 3, "16 bytes at element 28 of the array of 30 elements"),
    "array_past_the_launch": (_BOUNDS, 0, "array of 129 elements of 4 bytes at byte 512 in the 1024 bytes"),
    "array_at_odd_byte": (_ALIGNMENT, 0, "array of 64 elements of 4 bytes at byte 6"),
    "slice_past_the_end": (_BOUNDS, 0, "slice of 65 elements from element 64 of the array of 128 elements"),
    "index_past_the_slice": (_BOUNDS, 3, "element 64 of the array of 64 elements of 4 bytes at byte 128"),
    "wide_misaligned": (_ALIGNMENT, None, "element 6 .* address 24 is not a multiple of 16"),
    "read_unwritten": (_UNWRITTEN, 23, "element 40"),
    "read_of_former_block": (_UNWRITTEN, None, "reads 4 bytes at element"),
    "read_half_written": (_UNWRITTEN, 0, "reads 4 bytes at element 0"),
    "race_read_after_write": (_RACE, 32, "reads 4 bytes at element 0 .* thread 0 wrote .* no __syncthreads"),
    "race_write_after_read": (_RACE, None, "writes 4 bytes at .* which thread .* read .* no __syncwarp or"),
    "race_write_after_write": (_RACE, 32, "writes 4 bytes at element 0 .* thread 0 wrote .* no __sync"),
    "race_of_warps": (_RACE, None, "reads .* which thread .* wrote .* no __syncthreads"),
    "race_in_warp": (_RACE, 1, "reads .* which thread 0 wrote .* no __syncwarp or __syncthreads"),
    "race_over_shuffle": (_RACE, None, "reads .* which thread .* wrote"),
    "race_of_half_warps": (_RACE, None, "reads .* which thread .* wrote .* no __syncwarp"),
    "race_after_half_barriers": (_RACE, None, "reads .* which thread .* wrote .* no __syncwarp"),
    "race_at_end_of_chain": (_RACE, 3, "which thread 0 wrote"),
    "race_with_far_reader": (_RACE, 0, "writes .* which thread 70 read .* no __syncthreads"),
    "race_with_other_reader": (_RACE, 31, "writes .* which thread 3 read .* no __syncwarp"),
    "race_with_own_warp": (_RACE, 31, "writes .* which thread .* read .* no __syncwarp"),
    "copy_without_wait": (_IN_FLIGHT, 0, "reads .* which thread 0 copies"),
    "copy_without_commit": (_IN_FLIGHT, 0, "reads .* which thread 0 copies"),
    "copy_of_pending_group": (_IN_FLIGHT, 0, "reads .* element 4 .* which thread 0 copies"),
    "copy_without_barrier": (_RACE, 32, "which thread 0 wrote .* no __syncthreads"),
    "copy_waited_for_too_late": (_IN_FLIGHT, 63, "which thread 0 copies"),
    "copy_never_waited_for": ("asynchronous copy unfinished", 0, "without a wait for 1 .* 1 of them comm"),
    "copy_overwritten": (_IN_FLIGHT, 0, "writes .* element 3 .* which thread 0 copies"),
    "copy_over_what_is_read": (_RACE, None, "writes 16 bytes at .* which thread .* read"),
    "copy_past_the_source": (_GLOBAL_BOUNDS, 63, "reads 16 bytes 0 bytes past the end of range 0 "),
    "copy_past_the_target": (_BOUNDS, 63, "16 bytes at element 256"),
    "copy_from_misaligned": (_GLOBAL_ALIGNMENT, 0, "reads 16 bytes at an address that is 4 more than"),
    "copy_to_misaligned": (_ALIGNMENT, 1, "address 8 is not a multiple of 16"),
    # The first thread whose source did not happen to hold the value already.
    "copy_of_a_moving_source": ("asynchronous copy of a source that changes", None, "was written before"),
    "matrix_unwritten": (_UNWRITTEN, 31, "reads 16 bytes at element 248"),
    "matrix_misaligned": (_ALIGNMENT, None, "16 bytes at .* is not a multiple of 16"),
    "matrix_past_the_end": (_BOUNDS, 31, "16 bytes at element 320 of the array of 320"),
    "matrix_race": (_RACE, 1, "reads 16 bytes at element 0 .* which thread 0 wrote"),
    "read_past_the_end": (_GLOBAL_BOUNDS, 61, r"reads 4 bytes 0 bytes past the end of range 0 \(1024 bytes"),
    "read_before_the_start": (_GLOBAL_BOUNDS, 0, "reads 4 bytes 4 bytes before the start of range 0 "),
    "read_across_the_end": (_GLOBAL_BOUNDS, 0, "reads 16 bytes at byte 992 of range 0 .1000 bytes"),
    "read_at_null": (_GLOBAL_BOUNDS, 0, "null"),
    "write_past_the_end": (
        _GLOBAL_BOUNDS,
        63,
        "writes 4 bytes 0 bytes past the end of range 2 .1024 bytes, wr",
    ),
    "write_to_read_only": ("global memory read-only", 0, "writes 4 bytes at byte 8 of range 0 "),
    "read_misaligned": (_GLOBAL_ALIGNMENT, 0, "reads 16 bytes at an address that is 8 more than a mul"),
    "write_misaligned": (_GLOBAL_ALIGNMENT, 0, "writes 4 bytes at an address that is 2 more than a mul"),
    "barrier_in_two_branches": (
        _DIVERGENCE,
        32,
        "another one: threads 0-31 in __sync.*; threads 32-63 on the",
    ),
    "barrier_after_an_exit": (_DIVERGENCE, 1, "after others have ended: thread 0 ended; threads 1-63 on"),
    "exit_before_a_barrier": (_DIVERGENCE, 40, "others wait for it in __syncthreads: threads 0-39 in"),
    "shuffle_without_a_lane": (_DIVERGENCE, 7, "others wait for it in __shfl_xor_sync: threads 0-6 in"),
    "shuffle_after_an_exit": (_DIVERGENCE, 1, "comes to __shfl_xor_sync with lane 0, which have ended"),
    "shuffle_against_barrier": (_DIVERGENCE, None, "waits for others: .*threads 4-31 in __shfl_xor_sync at"),
    "shuffle_and_vote": (_DIVERGENCE, 1, "to __any_sync while lane 0 .* wait for it in __shfl_xor_sync at"),
    "two_shuffles": (_DIVERGENCE, 1, "to __shfl_xor_sync while lane 0 .* in __shfl_xor_sync at"),
    "shuffle_with_two_masks": (_DIVERGENCE, 16, "while lanes 0-15 of its warp wait for it"),
    "shuffles_in_a_ring": (_DIVERGENCE, 31, "others: threads 0-2 in __syncwarp at .*; threads 3-31 ended"),
    "mask_without_the_caller": (_INVALID, 5, "leaves out the calling lane"),
    "shuffle_from_outside": (_INVALID, 0, "reads lane 16, which its mask leaves out"),
    "shuffle_of_odd_width": (_INVALID, 0, "width .* power of two up to 32: 12"),
}


def _find_kernels() -> dict[str, int]:
    """Threads of a block of every kernel in the sources."""
    found = {}
    for source in _SOURCES:
        for threads, name in re.findall(r"ASTRAI_GLOBAL\((\d+)\) (\w+)\(", source.read_text()):
            found[name] = int(threads)
    return found


def _find_marks(name: str) -> list[str]:
    """Places, "file:line", that a message about a kernel has to name."""
    return [
        f"{source.name}:{number}"
        for source in _SOURCES
        for number, line in enumerate(source.read_text().splitlines(), 1)
        if re.search(rf"// (FAULT|OTHER) {name}$", line)
    ]


def _run(minis, name: str, is_broken: bool, **options) -> np.ndarray:
    num_x = 250 if name == "read_across_the_end" else 256
    call = {
        "x": np.arange(num_x, dtype=np.float32),
        "out": np.zeros(256, np.float32),
        "n": 62,
        "threads": _find_kernels()[name],
        "shared_bytes": 1024,
        "grid": (2, 1, 1),
    }
    return minis.run(name, is_broken=is_broken, **{**call, **options})


def test_every_kernel_that_breaks_a_rule_is_tested() -> None:
    assert set(FAULTS) | {"vote_of_part_of_a_warp"} == set(_find_kernels())


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_keeps_the_rule_runs(minis, name: str) -> None:
    _run(minis, name, is_broken=False)


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_breaks_the_rule_is_reported_with_its_place(minis, name: str) -> None:
    fault, thread, words = FAULTS[name]
    block = "(1, 0, 0)" if name == "read_of_former_block" else "(0, 0, 0)"
    with pytest.raises(RuntimeError) as raised:
        _run(minis, name, is_broken=True)
    text = str(raised.value)
    found_out = "" if thread is None else f"{thread},"
    assert text.startswith(f"{fault}: kernel {name}, block {block}, thread {found_out}")
    assert re.search(words, text), text
    marks = _find_marks(name)
    assert marks
    assert all(mark in text for mark in marks), (marks, text)


def test_what_a_broken_kernel_left_behind_does_not_disturb_the_next(minis) -> None:
    for name in FAULTS:
        with pytest.raises(RuntimeError):
            _run(minis, name, is_broken=True)
        _run(minis, name, is_broken=False)


def test_a_block_has_to_fill_the_warps_it_names(minis) -> None:
    _run(minis, "vote_of_part_of_a_warp", is_broken=False, threads=64)
    with pytest.raises(
        RuntimeError, match=r"divergence.*thread 32.*with lanes 8-31, which have ended or are not"
    ):
        _run(minis, "vote_of_part_of_a_warp", is_broken=False, threads=40)


def test_without_ranges_addresses_are_not_checked_but_alignment_is(minis) -> None:
    _run(minis, "write_to_read_only", is_broken=True, is_scoped=False)
    with pytest.raises(RuntimeError, match="global memory misaligned"):
        _run(minis, "read_misaligned", is_broken=True, is_scoped=False)
    with pytest.raises(RuntimeError, match="null pointer"):
        _run(minis, "read_at_null", is_broken=True, is_scoped=False)
