"""Batches that repeat: a rank is stuck where ranks with the same part of the model are not."""

from dataclasses import replace

import pytest

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.batches import BatchTracker
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.columns import BATCH_INTERVAL_STEPS
from tests.agent.node.builders import merged_step

CONTEXT = AccountContext(resolve({}), 120.0, Progress())


@pytest.mark.parametrize(
    ("groups", "stuck"),
    [
        pytest.param(("0-1", "0-1"), (1,), id="ranks that average their gradients"),
        pytest.param(("0,2", "1,3"), None, id="stages, of which the second gets the same mask"),
        pytest.param(("", ""), None, id="ranks of which nothing is known"),
    ],
)
def test_a_batch_that_one_rank_repeats_while_another_has_new_ones(groups, stuck):
    tracker = BatchTracker()
    for look in range(1, 8):
        for sequence in (look * BATCH_INTERVAL_STEPS, look * BATCH_INTERVAL_STEPS + 1):
            batches: dict[str, dict[float, list[int]]] = {}
            batches.setdefault(groups[0], {})[float(sequence)] = [0]
            batches.setdefault(groups[1], {})[7.0] = [1]
            tracker.observe(replace(merged_step(sequence), batches=batches), CONTEXT)
    found = tracker.view().repeated
    assert (None if found is None else found.ranks) == stuck
