"""The sampler for a batch that stays the same from step to step: everything but positions is decided once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from astrai_triton.engine.host import Cuts, draw_on_host, is_on_host, make_cuts
from astrai_triton.engine.noise import uniform_array
from astrai_triton.engine.params import SamplingParams
from astrai_triton.engine.sampling import Route, build_edits, build_steps, choose_route, draw_largest


class SamplePlan:
    """Draws as ``SamplingPipeline`` does, bit for bit, for rows whose parameters do not change.

    Args:
        params: ``[B]`` how each row is sampled; without penalties, log-probabilities, a grammar and
            ``min_tokens`` that still hold (see ``can_plan``).
        seeds: ``[B]`` seed of each row.
        vocab_size: columns of the logits.
        device: of the logits.
    """

    def __init__(
        self, params: Sequence[SamplingParams], seeds: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._num_rows = len(params)
        self._edits = build_edits(params, None, None)
        self._seeds = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
        self._cuts: list[Cuts] | None = None
        self._groups: list[_Group] = []
        if is_on_host(device):
            self._cuts = [make_cuts(row_params, vocab_size) for row_params in params]
            return
        members: dict[Route, list[int]] = {}
        for row_idx, row_params in enumerate(params):
            members.setdefault(choose_route(row_params, vocab_size), []).append(row_idx)
        self._groups = [
            _Group(route, rows, [params[i] for i in rows], self._seeds[rows], device)
            for route, rows in members.items()
        ]

    def draw(self, logits: Tensor, positions: npt.NDArray[np.intp]) -> Tensor:
        """One token a row.

        Args:
            logits: ``[B, V]`` float32. Written to in between, but on return as it was.
            positions: ``[B]`` index of the sampled token in its task's tokens.

        Returns:
            ``[B]`` int64; -1 for a row with NaN or +inf, or nothing above -inf. Nothing is read from the
            device.
        """
        undo = [edit.edit_(logits) for edit in self._edits]
        ids = self._draw(logits, positions)
        for restore in reversed(undo):
            restore()
        return ids

    def _draw(self, logits: Tensor, positions: npt.NDArray[np.intp]) -> Tensor:
        if self._cuts is not None:
            return draw_on_host(logits, self._cuts, uniform_array(self._seeds, positions).tolist())
        if len(self._groups) == 1:
            return self._groups[0].draw(logits, positions)
        ids = torch.empty(self._num_rows, dtype=torch.int64, device=logits.device)
        for group in self._groups:
            ids[group.index] = group.draw(logits.index_select(0, group.index), positions[group.rows])
        return ids


class _Group:
    """Rows of one route."""

    def __init__(
        self,
        route: Route,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: npt.NDArray[np.uint64],
        device: torch.device,
    ) -> None:
        self.rows = np.array(rows, dtype=np.intp)
        self.index = torch.tensor(rows, device=device)
        self._pipeline = None if route is Route.LARGEST else build_steps(route, params)
        self._seeds = seeds

    def draw(self, logits: Tensor, positions: npt.NDArray[np.intp]) -> Tensor:
        if self._pipeline is None:
            return draw_largest(logits)
        noise = torch.from_numpy(uniform_array(self._seeds, positions)).to(logits.device)
        return self._pipeline.draw(logits, noise)


def can_plan(params: SamplingParams, num_generated: int) -> bool:
    """Whether the row's next tokens are all drawn alike."""
    return params.grammar is None and not (
        params.has_penalties or params.logprobs or num_generated < params.min_tokens
    )
