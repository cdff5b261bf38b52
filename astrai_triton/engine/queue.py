"""Who may start next: fair between keys, in order of arrival within one, and nobody waits for ever."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from astrai_triton.engine.task import Task

MAX_OVERTAKEN = 32
"""Starts of others that the longest waiting task lets pass; then it is the next one."""

_MAX_IDLE_KEYS = 1024


class WaitingQueue:
    """Tasks that were accepted and do not run.

    Every key (a tenant; None is one of them) has a meter of the tokens it was served. The key with the lowest
    reading is next, so that one with a hundred requests and one with a single request share the engine
    evenly. A key that comes back from idleness takes up at the lowest reading of those that are not idle, at
    least: nobody saves up. Tasks of one key are in order of arrival. Preempted tasks are put in front of all
    that have not started. A task that waits for its leader is held: it is not offered, is in nobody's way,
    and takes the place of its arrival once it is released.

    Bound: whenever another task than the longest waiting one starts, the latter counts it; at
    ``max_overtaken`` it alone is offered. So with p older tasks that have not ended, those held among them,
    and r preemptions of them, a task starts after at most ``(p + r + 1) * (max_overtaken + 1)`` starts,
    whatever arrives after it. A held task counts from its release. Its leader is older, so starts within the
    bound, and then moves in every step until it has computed the prompt or ends.

    Args:
        max_overtaken: see above; 0 is strictly in order of arrival.
    """

    def __init__(self, max_overtaken: int = MAX_OVERTAKEN) -> None:
        self._max_overtaken = max_overtaken
        self._by_key: dict[str | None, deque[Task]] = {}
        self._preempted: list[Task] = []
        self._held: list[Task] = []
        self._served: OrderedDict[str | None, float] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Task]:
        """All tasks, the preempted first."""
        yield from self._preempted
        for tasks in self._by_key.values():
            yield from tasks
        yield from self._held

    def push(self, task: Task, running: Mapping[str | None, int]) -> None:
        """Take a task that has just arrived.

        Args:
            task: later than any other that was pushed.
            running: key -> tokens that its running tasks were served and the meter does not show yet.
        """
        self._size += 1
        if task.is_held:
            # Its leader, of the same key, waits or runs: that key is no idle one.
            self._held.append(task)
            return
        if task.key not in self._by_key:
            self._wake_key(task.key, running)
        self._insert(task)

    def release(self) -> list[Task]:
        """Put held tasks whose leader has computed their prompt, or has ended, in their places.

        Returns:
            Those tasks, in the order of arrival.
        """
        if not self._held:
            return []
        released = [task for task in self._held if not task.is_held]
        if released:
            self._held = [task for task in self._held if task.is_held]
            for task in released:
                self._insert(task)
        return released

    def restore(self, task: Task) -> None:
        """Take back a preempted task: among those like it, at its place in the order of arrival."""
        at = next((i for i, other in enumerate(self._preempted) if other.arrival > task.arrival), None)
        self._preempted.insert(len(self._preempted) if at is None else at, task)
        self._size += 1

    def candidates(self, running: Mapping[str | None, int]) -> Iterator[Task]:
        """Tasks in the order in which they should start; only the first may have to, see the bound.

        Args:
            running: as for ``push``.
        """
        oldest = self._find_oldest()
        if oldest is not None and oldest.num_overtaken >= self._max_overtaken:
            yield oldest
            return
        yield from self._preempted
        order = sorted(self._by_key, key=lambda key: self._reading(key, running))
        # The first of every key, then the second: one key's backlog hides nobody else's first.
        for i in range(max(map(len, self._by_key.values()), default=0)):
            for key in order:
                if i < len(self._by_key[key]):
                    yield self._by_key[key][i]

    def take(self, task: Task) -> None:
        """Remove a task because it starts now."""
        oldest = self._find_oldest()
        if oldest is not None and oldest is not task:
            oldest.num_overtaken += 1
        task.num_overtaken = 0
        self._discard(task)

    def remove_done(self) -> list[Task]:
        """Remove the tasks that ended while they waited."""
        done = [task for task in self if task.is_done]
        for task in done:
            self._discard(task)
        return done

    def charge(self, key: str | None, num_tokens: int) -> None:
        """Put tokens that a key was served on its meter."""
        self._served[key] = self._served.pop(key, 0.0) + num_tokens
        while len(self._served) > _MAX_IDLE_KEYS + len(self._by_key):
            self._served.popitem(last=False)

    def clear(self) -> list[Task]:
        """Remove and return everything."""
        tasks = list(self)
        self._by_key.clear()
        self._preempted.clear()
        self._held.clear()
        self._size = 0
        return tasks

    def _insert(self, task: Task) -> None:
        """Put a task in the order of arrival among those of its key; nearly always it is the last."""
        tasks = self._by_key.setdefault(task.key, deque())
        at = len(tasks)
        while at and tasks[at - 1].arrival > task.arrival:
            at -= 1
        tasks.insert(at, task)

    def _reading(self, key: str | None, running: Mapping[str | None, int]) -> float:
        return self._served.get(key, 0.0) + running.get(key, 0)

    def _wake_key(self, key: str | None, running: Mapping[str | None, int]) -> None:
        """A key without waiting tasks gets one: an idle one must not have saved up."""
        if key in running:
            return
        busy = [other for other in {*self._by_key, *running} if other != key]
        if busy:
            least = min(self._reading(other, running) for other in busy)
            self._served[key] = max(self._served.get(key, 0.0), least)

    def _find_oldest(self) -> Task | None:
        heads = [tasks[0] for tasks in self._by_key.values()]
        if self._preempted:
            heads.append(self._preempted[0])
        return min(heads, key=lambda task: task.arrival, default=None)

    def _discard(self, task: Task) -> None:
        if task in self._preempted:
            self._preempted.remove(task)
        elif task in self._held:
            self._held.remove(task)
        else:
            tasks = self._by_key[task.key]
            tasks.remove(task)
            if not tasks:
                del self._by_key[task.key]
        self._size -= 1
