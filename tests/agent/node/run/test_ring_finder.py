import pytest

from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import MERGE_DEADLINE_SECONDS, shown


@pytest.mark.parametrize("damage", [b"", b"MPAGRING", b"\0" * 8192, b"not a ring" * 1000])
def test_a_bad_ring_is_refused_once_counted_and_harms_nothing(
    start_rank: StartRank, open_run: OpenRun, caplog, damage
):
    good = start_rank(0, world_size=2)
    bad = good.path.with_name("rank1.ring")
    bad.write_bytes(damage)
    run = open_run()
    for _ in range(3):
        run.poll(0.0)
    good.steps()
    run.poll(MERGE_DEADLINE_SECONDS)
    run.poll(2 * MERGE_DEADLINE_SECONDS)

    values = shown(run)
    assert values["records_dropped_total{0}"] == 1
    assert values["steps_total"] == 1
    assert sum(str(bad) in record.getMessage() for record in caplog.records) == 1
