"""Break the kernels on purpose, one line at a time: every mutant must fail a test.

Run by ``nox -s mutants``, or ``python tests/mutants.py [NAME …]``. Works on copies; the sources stay as they
are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
PACKAGE = "astrai_triton"
TESTS_FAILED = 1
"""pytest's exit status; anything else but 0 means that it did not come to testing."""


@attrs.frozen
class Mutant:
    """One change of one line, and the tests that must notice it."""

    name: str
    file: str
    """Below the package."""
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: str


DECODE = "tests/ops/test_decode.py tests/ops/test_decode_memory.py"
MERGE = "tests/ops/test_merge.py"
PREFILL = "tests/ops/test_prefill.py tests/ops/test_prefill_cases.py tests/ops/test_prefill_split.py"
ROTARY = "tests/ops/test_rotary.py"
APPEND = "tests/ops/test_rotary_append.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "decode scores unmasked",
        "kernels/decode.py",
        'scores = tl.where(keep_n[None, :], scores, float("-inf"))',
        "scores = tl.where(keep_n[None, :], scores, scores)",
        DECODE,
    ),
    Mutant(
        "decode values of hidden keys",
        "kernels/decode.py",
        "mask=keep_n[:, None] & keep_v[None, :], other=0.0)",
        'mask=keep_n[:, None] & keep_v[None, :], other=float("nan"))',
        DECODE,
    ),
    Mutant(
        "decode without rescale",
        "kernels/decode.py",
        "        acc = acc * rescale[:, None]\n",
        "        acc = acc * 1.0\n",
        DECODE,
    ),
    Mutant(
        "decode values of head 0",
        "kernels/decode.py",
        "v_ptr + kv_head * v_stride_h",
        "v_ptr + 0 * v_stride_h",
        DECODE,
    ),
    Mutant(
        "decode loses a key of a split",
        "kernels/decode.py",
        "stop = tl.minimum(start + CHUNK, ",
        "stop = tl.minimum(start + CHUNK - 1, ",
        DECODE,
    ),
    Mutant(
        "decode does not store the new token",
        "kernels/decode.py",
        "target = tl.where(group_tile == 0, slot, -1)",
        "target = tl.where(group_tile == 1, slot, -1)",
        DECODE,
    ),
    Mutant(
        "decode window off by one",
        "kernels/decode.py",
        "tl.maximum(kv_len - 1 - window_left, 0)",
        "tl.maximum(kv_len - window_left, 0)",
        DECODE,
    ),
    Mutant(
        "merge with wrong weights",
        "kernels/merge.py",
        "weights = tl.exp2(part_max - shift)",
        "weights = tl.exp2((part_max - shift) * 0.5)",
        DECODE,
    ),
    Mutant(
        "merge of unweighted values",
        "kernels/merge.py",
        "tl.sum(values * weights[:, None], 0)",
        "tl.sum(values, 0)",
        DECODE,
    ),
    Mutant(
        "merge_states forgets a state",
        "kernels/merge.py",
        "total = weight_a + weight_b",
        "total = weight_a + weight_a",
        MERGE,
    ),
    Mutant(
        "sink not in the sum",
        "kernels/softmax.py",
        "tl.fma(score_sum, rescale, tl.exp2(sink - shift))",
        "score_sum * rescale",
        DECODE,
    ),
    Mutant("lse in base 2", "kernels/softmax.py", "* 0.6931471805599453", "* 1.0", DECODE),
    Mutant(
        "empty rows unguarded",
        "kernels/softmax.py",
        'return tl.where(score_max == float("-inf"), 0.0, score_max)',
        "return score_max",
        DECODE,
    ),
    Mutant(
        "bfloat16 truncated",
        "kernels/address.py",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) & -65536",
        "bits & -65536",
        ROTARY,
    ),
    Mutant(
        "causal off by one",
        "kernels/keys.py",
        "keys[None, :] <= positions[:, None] + window_right",
        "keys[None, :] < positions[:, None] + window_right",
        PREFILL,
    ),
    Mutant(
        "window off by one",
        "kernels/keys.py",
        "keys[None, :] >= positions[:, None] - window_left",
        "keys[None, :] > positions[:, None] - window_left",
        PREFILL,
    ),
    Mutant(
        "sum without rescale",
        "kernels/keys.py",
        "score_sum = score_sum * rescale + tl.sum(weights, 1)",
        "score_sum = score_sum + tl.sum(weights, 1)",
        PREFILL,
    ),
    Mutant(
        "hidden keys in the bulk",
        "kernels/prefill.py",
        "bulk_stop = tl.minimum(bulk_stop, first_position + window_right + 1)",
        "bulk_stop = tl.minimum(bulk_stop, last_position + window_right + 1)",
        PREFILL,
    ),
    Mutant(
        "prefill loses the last keys",
        "kernels/prefill.py",
        "last_key = tl.minimum(last_key, last_position + window_right + 1)",
        "last_key = tl.minimum(last_key, last_position + window_right)",
        PREFILL,
    ),
    Mutant(
        "prefill merge without weights",
        "kernels/split.py",
        "acc = acc * rescale[:, None] + values * weights[:, None]",
        "acc = acc * rescale[:, None] + values",
        PREFILL,
    ),
    Mutant(
        "rotary adjacent reaches beyond rotary_dim",
        "kernels/rotary.py",
        "keep_d = keep_h & (offs_d < ROTARY_DIM)[None, :]",
        "keep_d = keep_h",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary half reaches beyond rotary_dim",
        "kernels/rotary.py",
        "keep_p = keep_h & (offs_p < HALF)[None, :]",
        "keep_p = keep_h",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary heads beyond the last",
        "kernels/rotary.py",
        "keep_h = (offs_h < heads)[:, None]",
        "keep_h = (offs_h <= heads)[:, None]",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary adjacent turns the other way",
        "kernels/rotary.py",
        "tl.interleave(a * cos - b * sin, b * cos + a * sin)",
        "tl.interleave(a * cos + b * sin, b * cos - a * sin)",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary half without the sine",
        "kernels/rotary.py",
        "first = narrow(a * cos - b * sin,",
        "first = narrow(a * cos,",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary k has the head block of q",
        "kernels/rotary.py",
        "offs_h = (pid_h - q_blocks) * BLOCK_H",
        "offs_h = pid_h * BLOCK_H",
        ROTARY + " -k touched",
    ),
    Mutant(
        "rotary the rest starts at 0",
        "kernels/rotary.py",
        "offs_d = START + tl.arange(0, BLOCK_C)",
        "offs_d = tl.arange(0, BLOCK_C)",
        ROTARY + " -k written",
    ),
    Mutant(
        "rotary the rest is not copied to the end",
        "kernels/rotary.py",
        "(offs_d < STOP)[None, :]",
        "(offs_d < STOP - 1)[None, :]",
        ROTARY + " -k written",
    ),
    Mutant(
        "rotary a table row per batch only",
        "kernels/rotary.py",
        "pid_l * freqs_stride_t",
        "pid_b * freqs_stride_t",
        ROTARY + " -k written",
    ),
    Mutant(
        "append a negative slot is written",
        "kernels/append.py",
        "(slot >= 0) & (slot < num_slots)",
        "slot < num_slots",
        APPEND + " -k slices",
    ),
    Mutant(
        "append a slot beyond the pool is written",
        "kernels/append.py",
        "(slot >= 0) & (slot < num_slots)",
        "slot >= 0",
        APPEND + " -k slices",
    ),
    Mutant(
        "append k goes where v belongs",
        "kernels/append.py",
        "if pid_h < q_blocks + kv_blocks:",
        "if pid_h < q_blocks + 2 * kv_blocks:",
        APPEND + " -k slices",
    ),
    Mutant(
        "append the slot stride of q's tokens",
        "kernels/append.py",
        "slot * k_buffer_stride_n",
        "slot * k_stride_t",
        APPEND + " -k slices",
    ),
    Mutant(
        "fp8 pools without their range",
        "kernels/rotary.py",
        "tl.minimum(tl.maximum(x.to(tl.float32) * inverse_scale, -limit), limit)",
        "x.to(tl.float32) * inverse_scale",
        APPEND + " -k fp8",
    ),
    Mutant(
        "fp8 v with the scale of k",
        "kernels/append.py",
        "offs_h, heads, inverse_v_scale",
        "offs_h, heads, inverse_k_scale",
        APPEND + " -k fp8",
    ),
)


def run_tests(source: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` against the package below ``source``, interpreted, with the same Hypothesis cases every
    time."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile", "first_failure"]
    command = [sys.executable, "-m", "pytest", *options, *tests.split()]
    # The safe path leaves the working directory out, or the sources there would win over the copy.
    paths = {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    environment = os.environ | paths | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def try_mutant(mutant: Mutant) -> str | None:
    """Why the mutant counts as alive; None when a test killed it."""
    with tempfile.TemporaryDirectory() as directory:
        source = copy_package(Path(directory))
        path = source / PACKAGE / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return (
                f"{mutant.file} has {text.count(mutant.old)} times {mutant.old!r}, wanted 1: update the list"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
        return describe_unless(TESTS_FAILED, run_tests(source, mutant.tests))


def check_sound(tests: str) -> str | None:
    """Why ``tests`` fail without any mutant, so that a kill would mean nothing; None when they pass."""
    with tempfile.TemporaryDirectory() as directory:
        return describe_unless(0, run_tests(copy_package(Path(directory)), tests))


def copy_package(target: Path) -> Path:
    """Copy the package below ``target``, and return that."""
    shutil.copytree(ROOT / PACKAGE, target / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def describe_unless(wanted: int, result: subprocess.CompletedProcess[str]) -> str | None:
    """None if pytest ended as wanted, else how it ended."""
    if result.returncode == wanted:
        return None
    tail = "\n".join(result.stdout.splitlines()[-5:])
    return f"pytest ended with {result.returncode}, wanted {wanted}:\n{tail}"


def main(names: list[str]) -> int:
    """Try all mutants, or those named; the exit status is the number of survivors."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise SystemExit(
            f"no mutant {', '.join(sorted(unknown))}; there are: {', '.join(m.name for m in MUTANTS)}"
        )
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        unsound = [reason for reason in pool.map(check_sound, {mutant.tests for mutant in mutants}) if reason]
        if unsound:
            raise SystemExit("tests fail without a mutant: " + "\n".join(unsound))
        for mutant, alive in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            print(f"{'ALIVE ' if alive else 'killed'} {mutant.name}", alive or "", flush=True)  # noqa: T201
            survivors += alive is not None
    print(f"{len(mutants) - survivors} killed, {survivors} alive")  # noqa: T201
    return survivors


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
