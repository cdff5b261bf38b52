"""What the server under attack and its attackers agree on."""

from __future__ import annotations

import re
from collections.abc import Sequence

TRAPS = ("tokenizer", "forward", "memory", "nan", "detokenizer", "alloc")
"""Where a fault can be injected, by the mark ``@name@`` in the text of a request."""

SLOW = "@slow@"
"""A mark that makes every step with such a request take ``SLOW_STEP_S`` longer."""
SLOW_STEP_S = 0.02

MAX_BODY_BYTES = 64 << 10
HEADER_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 2.0
"""For bodies, and for streams that nobody reads. Short, but a busy machine must not trip an honest client."""

_MARK = re.compile(rb"@(%b)@" % "|".join((*TRAPS, SLOW.strip("@"))).encode())


def find_trap(token_ids: Sequence[int]) -> str | None:
    """The name in the first mark in ``token_ids``, one token a byte."""
    if 64 not in token_ids:
        return None
    match = _MARK.search(bytes(token_id & 255 for token_id in token_ids))
    return match[1].decode() if match is not None else None
