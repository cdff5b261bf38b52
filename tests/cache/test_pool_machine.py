"""The pool against a model, with real K/V in its slots.

Every task writes into its slots what a model would: K names the token, V the whole prefix up to it, salt
included. A slot that is shared, freed, evicted or given away wrongly then shows wrong content to some task.
"""

from __future__ import annotations

import zlib
from typing import Any

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astrai_triton.cache import Lease, PagePool, ReqToTokenPool, Workspace
from astrai_triton.errors import OutOfPagesError, PageOwnershipError

MAX_BATCH, MAX_SEQ_LEN, MAX_STEP_TOKENS = 4, 22, 50
HEADS: dict[str, Any] = {"n_q_heads": 1, "n_kv_heads": 1, "head_dim": 1}
TOKENS = st.integers(0, 1)
SALTS = st.sampled_from([None, None, None, "a"])
# Prompts are cut from few texts, so that they share prefixes of all lengths.
TEXTS = ([0] * 22, [0] * 4 + [1] * 18, [0] * 8 + [1] * 14, [1] * 22)
PROMPTS = st.builds(lambda text, cut: text[:cut], st.sampled_from(TEXTS), st.integers(1, MAX_SEQ_LEN))


def prefix_value(salt: str | None, tokens: list[int]) -> int:
    """Stands for the K/V of the last token, which depends on all tokens before it."""
    return zlib.crc32(repr((salt, tokens)).encode())


@attrs.define(eq=False)
class ModelTask:
    lease: Lease
    salt: str | None
    tokens: list[int]
    num_computed: int
    num_recorded: int


def build_pool(page_size: int, n_tokens: int | None, prefix_cache: bool, staged: bool) -> PagePool:
    """A pool in float64, where every prefix value is exact."""
    pool = PagePool(
        n_layers=1,
        max_batch_size=MAX_BATCH,
        max_seq_len=MAX_SEQ_LEN,
        max_step_tokens=MAX_STEP_TOKENS,
        page_size=page_size,
        n_tokens=n_tokens,
        prefix_cache=prefix_cache,
        dtype=torch.float64,
        **HEADS,
    )
    if staged:
        # What a device other than the CPU would have.
        pool.req_to_token = ReqToTokenPool(MAX_BATCH, MAX_SEQ_LEN, staged=True)
        if n_tokens is None:
            pool.req_to_token.fill_linear()
        pool.workspace = Workspace(
            max_batch_size=MAX_BATCH,
            max_step_tokens=MAX_STEP_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
            staged=True,
            **HEADS,
        )
    return pool


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([4, 4, 2, 1]),
        n_tokens=st.sampled_from([80, 48, 24, None]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        staged=st.booleans(),
    )
    def start(self, page_size: int, n_tokens: int | None, prefix_cache: bool, staged: bool) -> None:
        self.pool = build_pool(page_size, n_tokens, prefix_cache, staged)
        self.shares = prefix_cache and page_size > 1 and n_tokens is not None
        self.page_size = page_size
        self.tasks: list[ModelTask] = []
        self.closed: Lease | None = None
        # Prefixes that were recorded and not reset; eviction may have taken any of them.
        self.recorded: set[tuple[str | None, tuple[int, ...]]] = set()

    def full_pages(self, salt: str | None, tokens: list[int]) -> list[tuple[str | None, tuple[int, ...]]]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(salt, tuple(tokens[:end])) for end in ends] if self.shares else []

    def draw_task(self, data: st.DataObject) -> ModelTask:
        return data.draw(st.sampled_from(self.tasks))

    @rule(prompt=PROMPTS, salt=SALTS)
    def open(self, prompt: list[int], salt: str | None) -> None:
        before = self.pool.stats()
        lease = self.pool.open(prompt, salt)
        if len(self.tasks) == MAX_BATCH:
            assert lease is None
            return
        assert lease is not None
        after = self.pool.stats()
        assert (after.free, after.owned + after.cached) == (
            before.free - self.is_contiguous,
            before.owned + before.cached + self.is_contiguous,
        )
        longest = 0
        for prefix in self.full_pages(salt, prompt[:-1]):
            if prefix not in self.recorded:
                break
            longest = len(prefix[1])
        assert lease.cached_len <= longest
        if not after.evicted_pages:
            assert lease.cached_len == longest
        num_recorded = lease.cached_len if self.shares else 0
        self.tasks.append(ModelTask(lease, salt, list(prompt), lease.cached_len, num_recorded))

    @property
    def is_contiguous(self) -> bool:
        return not self.pool.is_paged

    @rule(prompt=PROMPTS, salt=SALTS, count=st.integers(2, 3))
    def open_equal_ones(self, prompt: list[int], salt: str | None, count: int) -> None:
        for _ in range(count):
            self.open(prompt, salt)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), pace=st.sampled_from(["decode", "prefill", "prefill", "mixed"]))
    def compute(self, data: st.DataObject, pace: str) -> None:
        """One ragged step: chunks of prompts, single new tokens, or both."""
        steps: list[tuple[ModelTask, int]] = []
        num_rows = 0
        for task in data.draw(st.permutations(self.tasks)):
            missing = len(task.tokens) - task.num_computed
            if not missing and len(task.tokens) < MAX_SEQ_LEN:
                task.tokens.append(data.draw(TOKENS))
                missing = 1
            if pace == "decode" and not missing:
                continue
            length = {"decode": 1, "prefill": missing}.get(pace) or data.draw(st.integers(0, missing))
            length = min(length, MAX_STEP_TOKENS - num_rows)
            if self.extend(task, task.num_computed + length):
                steps.append((task, length))
                num_rows += length
        self.forward(steps)

    def forward(self, steps: list[tuple[ModelTask, int]]) -> None:
        """Bind a step and write what a model would."""
        ends = [task.num_computed + length for task, length in steps]
        cache = self.pool.bind_tasks([task.lease for task, _ in steps], [length for _, length in steps], ends)
        rows = [
            (task.tokens[position], prefix_value(task.salt, task.tokens[: position + 1]))
            for (task, _), end in zip(steps, ends, strict=True)
            for position in range(task.num_computed, end)
        ]
        loc = cache.out_cache_loc.long()
        assert (loc >= 0).all()
        assert len(set(loc.tolist())) == loc.numel() == len(rows)
        values = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        cache.k_buffer[0, loc, 0, 0] = values[:, 0]
        cache.v_buffer[0, loc, 0, 0] = values[:, 1]
        for (task, _), end in zip(steps, ends, strict=True):
            task.num_computed = end
        # The device has seen all changes now.
        assert (cache.req_to_token.numpy() == self.pool.req_to_token.table).all()

    def extend(self, task: ModelTask, num_tokens: int) -> bool:
        needed, available = self.pool.pages_needed(task.lease, num_tokens), self.pool.num_free_pages()
        before, pages = self.pool.stats(), list(task.lease.pages)
        if needed <= available or self.is_contiguous:
            self.pool.extend(task.lease, num_tokens)
            assert task.lease.num_slots >= num_tokens
            assert task.lease.pages[: len(pages)] == pages
            return True
        with pytest.raises(OutOfPagesError):
            self.pool.extend(task.lease, num_tokens)
        assert self.pool.stats() == before
        assert task.lease.pages == pages
        return False

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), records_all=st.booleans())
    def record(self, data: st.DataObject, records_all: bool) -> None:
        for task in self.tasks if records_all else [self.draw_task(data)]:
            self.record_task(task)

    def record_task(self, task: ModelTask) -> None:
        self.pool.record(task.lease, task.tokens[: task.num_computed])
        self.recorded.update(self.full_pages(task.salt, task.tokens[: task.num_computed]))
        if self.shares:
            task.num_recorded = task.num_computed // self.page_size * self.page_size

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), records=st.booleans())
    def close(self, data: st.DataObject, records: bool) -> None:
        task = self.draw_task(data)
        if records:
            self.record_task(task)
        self.pool.close(task.lease)
        self.tasks.remove(task)
        self.closed = task.lease

    @precondition(lambda self: self.closed is not None)
    @rule()
    def use_a_closed_lease(self) -> None:
        assert self.closed is not None
        with pytest.raises(PageOwnershipError):
            self.pool.close(self.closed)
        with pytest.raises(PageOwnershipError):
            self.pool.bind_tasks([self.closed], [1], [1])

    @precondition(lambda self: any(task.num_recorded for task in self.tasks))
    @rule(data=st.data())
    def write_to_a_recorded_page(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from([task for task in self.tasks if task.num_recorded]))
        start = data.draw(st.integers(0, task.num_recorded - 1))
        with pytest.raises(PageOwnershipError):
            self.pool.bind_tasks([task.lease], [1], [start + 1])

    @precondition(lambda self: self.pool.stats().cached > 6)
    @rule()
    def reset_prefixes(self) -> None:
        self.pool.reset_prefixes()
        assert self.pool.stats().cached == 0
        held = (self.full_pages(task.salt, task.tokens[: task.num_recorded]) for task in self.tasks)
        self.recorded = {prefix for prefixes in held for prefix in prefixes}

    @invariant()
    def ownership_is_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            stats = self.pool.stats()
            assert stats.free + stats.owned + stats.cached == stats.total
            assert self.tasks or stats.owned == 0

    @invariant()
    def every_task_reads_its_own_prefix(self) -> None:
        for task in getattr(self, "tasks", []):
            slots = torch.from_numpy(self.pool.req_to_token.table[task.lease.row, : task.num_computed]).long()
            assert self.pool.storage.k_buffer[0, slots, 0, 0].tolist() == task.tokens[: task.num_computed]
            assert self.pool.storage.v_buffer[0, slots, 0, 0].tolist() == [
                prefix_value(task.salt, task.tokens[: position + 1]) for position in range(task.num_computed)
            ]


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
