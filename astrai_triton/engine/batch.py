"""Tasks that decode together, as arrays: while they stay the same, a step costs little for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from astrai_triton.backend import ATTN_BACKEND
from astrai_triton.cache import Lease
from astrai_triton.engine.sample_plan import SamplePlan, can_plan
from astrai_triton.engine.task import Task


class DecodeBatch:
    """One token a step of each of these tasks, until one of them ends, waits, or others join them.

    Args:
        tasks: decoding, of one attention backend, each with a lease.
        vocab_size: of the model.
        device: of the model.
    """

    def __init__(self, tasks: Sequence[Task], vocab_size: int, device: torch.device) -> None:
        self.tasks = list(tasks)
        self.leases: list[Lease] = [task.lease for task in tasks if task.lease is not None]
        assert len(self.leases) == len(self.tasks), "a task without a lease cannot decode"
        self.backend: ATTN_BACKEND | None = tasks[0].backend
        self.rows = np.array([lease.row for lease in self.leases], dtype=np.intp)
        self.kv_lens = np.array([len(task.tokens) for task in tasks], dtype=np.intp)
        """K/V tokens of each once the next step has run; also the position of the token it samples."""
        self.token_ids = torch.tensor([task.tokens[-1] for task in tasks], dtype=torch.int64, device=device)
        """What the next step runs."""
        self.plan: SamplePlan | None = None
        """None: something about the sampling of a task changes from token to token."""
        if all(can_plan(task.params, task.num_generated) for task in tasks):
            self.plan = SamplePlan(
                [task.params for task in tasks], [task.seed for task in tasks], vocab_size, device
            )
        self._is_quiet = all(task.is_quiet for task in tasks)
        self._stop_ids = frozenset().union(*(task.stop_ids for task in tasks))
        self._appends = [(task.tokens.append, task.handle.post_token) for task in tasks]
        self._num_slots = np.array([lease.num_slots for lease in self.leases], dtype=np.intp)
        self._num_slotted_steps = int((self._num_slots - self.kv_lens).min())
        """Steps until a lease may need new slots; negative: one does."""
        self._num_free_steps = min(task.num_left for task in self.tasks) - 1
        """Steps until a task may reach its last token."""

    def find_growing(self) -> list[int]:
        """Indices of the leases without a slot for the next step."""
        if self._num_slotted_steps >= 0:
            return []
        return np.flatnonzero(self._num_slots < self.kv_lens).tolist()

    def note_growth(self, grown: Sequence[int]) -> None:
        """The leases at these indices have new slots."""
        for i in grown:
            self._num_slots[i] = self.leases[i].num_slots
        self._num_slotted_steps = int((self._num_slots - self.kv_lens).min())

    def advance(self, ids: Sequence[int]) -> bool:
        """Append a token to every task and tell its reader, if that is all there is to do.

        Args:
            ids: ``[B]`` sampled tokens.

        Returns:
            False, and nothing was done: a task ends with its token, or must look at it.
        """
        if (
            not self._is_quiet
            or self._num_free_steps <= 0
            or min(ids) < 0
            or not self._stop_ids.isdisjoint(ids)
        ):
            return False
        for (append, post), token_id in zip(self._appends, ids, strict=True):
            append(token_id)
            post(token_id)
        return True

    def step_forward(self, token_ids: torch.Tensor) -> None:
        """The next step runs these tokens, one of each task, at the next positions."""
        self.token_ids = token_ids
        self.kv_lens = self.kv_lens + 1
        self._num_free_steps -= 1
        self._num_slotted_steps -= 1
