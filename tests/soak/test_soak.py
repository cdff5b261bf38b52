from __future__ import annotations

import pytest

from soak.faults import PLACES
from soak.life import live


@pytest.mark.timeout(900)
def test_twenty_thousand_operations_lose_no_page_no_task_and_no_character() -> None:
    """All ownership is checked after every operation; ``nox -s soak`` does a million, checked at times."""
    tally = live(20_000, seed=0, check_every=1)
    assert tally.differences == []
    assert tally.num_leaked_pages == 0
    assert tally.num_tasks == sum(tally.num_ended.values()) > 5000
    # Or it would have shown nothing.
    assert min(tally.num_preempted, tally.num_evicted, tally.num_refused) > 100
    assert min(tally.num_ended.values()) > 100
    assert min(tally.num_struck[place] for place in PLACES) > 50
