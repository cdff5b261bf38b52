"""Counters of the step loop."""

from __future__ import annotations

import attrs


@attrs.define
class StepStats:
    """Counters of the scheduler. Written by its thread, read by any."""

    total_tasks: int = 0
    total_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    step_us: float = 0.0
    """Moving average over about 50 steps, the model's time included."""
    task_s: float = 0.0
    """Moving average of the time a task spends in the engine once it runs."""

    def record_step(self, seconds: float) -> None:
        """Fold the duration of one step into the averages."""
        self.num_steps += 1
        weight = max(0.02, 1.0 / self.num_steps)
        self.step_us += weight * (seconds * 1e6 - self.step_us)

    def record_task(self, seconds: float) -> None:
        """Fold the running time of a task that ended into the average."""
        self.task_s += 0.1 * (seconds - self.task_s) if self.task_s else seconds
