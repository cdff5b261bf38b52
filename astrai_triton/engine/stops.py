"""Stop strings, matched on text as it arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Cuts streamed text before the first stop string.

    Of all occurrences of stops in the text, the one that starts first wins; of two that start together, the
    shorter. What is released does not depend on how the text was cut into pieces, and no character is held
    back that cannot become part of a stop. So an occurrence has to wait while one that starts before it may
    still complete.

    An automaton of all stops reads each character once: time is linear in the text, whatever the stops are.

    Args:
        stops: the stop strings. Without any, text passes through.

    Attributes:
        matched: the stop that was found, None so far. Once there is one, nothing more is released.

    Raises:
        ValueError: an empty stop.

    Source: Aho, Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError(f"stops: wanted strings that are not empty, got {list(stops)!r}")
        self.matched: str | None = None
        self._first_chars = frozenset(stop[0] for stop in stops)
        # A node is a prefix of some stop: its length, the stop, and the next nodes by character.
        self._depth = [0]
        self._stop_of = [""]
        self._children: list[dict[str, int]] = [{}]
        # The longest stop that a node ends with, if any.
        self._ending: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        # The longest proper suffix of a node that is a node.
        self._suffix = [0] * len(self._depth)
        self._link()
        # The longest suffix of the text so far that is a node. This is what is held back.
        self._node = 0
        self._num_read = 0
        # An occurrence that waits, and where in the text it starts.
        self._candidate: str | None = None
        self._candidate_start = 0

    def push(self, text: str) -> str:
        """Take the next piece of text and give what is safe to release."""
        if self.matched is not None:
            return ""
        if not self._node and self._first_chars.isdisjoint(text):
            self._num_read += len(text)
            return text
        held = self._node
        released = self._num_read - self._depth[held]
        for char in text:
            self._advance(char)
            held_start = self._num_read - self._depth[self._node]
            if self._candidate is not None and held_start >= self._candidate_start:
                self.matched = self._candidate
                return self._take(held, text, self._candidate_start - released)
        return self._take(held, text, self._num_read - self._depth[self._node] - released)

    def flush(self) -> str:
        """Give what is held back: the text ends here. This may settle on an occurrence that waited."""
        if self.matched is not None:
            return ""
        held, self._node = self._node, 0
        num = self._depth[held]
        if self._candidate is not None:
            self.matched = self._candidate
            num -= self._num_read - self._candidate_start
        return self._take(held, "", num)

    def _take(self, held: int, text: str, num: int) -> str:
        """The first ``num`` characters of the text of node ``held`` followed by ``text``."""
        depth = self._depth[held]
        if num <= depth:
            return self._stop_of[held][:num]
        return self._stop_of[held][:depth] + text[: num - depth]

    def _advance(self, char: str) -> None:
        """Read one character."""
        node = self._node
        children = self._children
        while node and char not in children[node]:
            node = self._suffix[node]
        self._node = children[node].get(char, 0)
        self._num_read += 1
        ending = self._ending[self._node]
        if ending is not None:
            start = self._num_read - len(ending)
            if self._candidate is None or start < self._candidate_start:
                self._candidate, self._candidate_start = ending, start

    def _insert(self, stop: str) -> None:
        """Add the nodes of a stop."""
        node = 0
        for depth, char in enumerate(stop, start=1):
            child = self._children[node].get(char)
            if child is None:
                child = len(self._depth)
                self._children[node][char] = child
                self._depth.append(depth)
                self._stop_of.append(stop)
                self._children.append({})
                self._ending.append(None)
            node = child
        self._ending[node] = stop

    def _link(self) -> None:
        """Find the suffix of each node, shorter nodes first, and the stops that end in a suffix."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                suffix = self._suffix[node]
                while suffix and char not in self._children[suffix]:
                    suffix = self._suffix[suffix]
                self._suffix[child] = self._children[suffix].get(char, 0)
                self._ending[child] = self._ending[child] or self._ending[self._suffix[child]]
                queue.append(child)
