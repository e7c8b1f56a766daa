import pytest

from mp_agent.node.cluster.reports import is_troubled
from mp_agent.records.rows import NodeRow, NodeStep

COLUMNS = ("sum_squares", "nan_elements", "inf_elements")


def step(*columns: tuple[float, ...], loss: tuple[int, ...] = ()) -> NodeStep:
    rows = tuple(
        NodeRow(share=0, shards=(0,), replicas=(0,), ranks=(2,), columns=row) for row in columns
    )
    return NodeStep(
        sequence=1,
        step=1,
        time_unix_seconds=1.0,
        holding=0,
        ranks=(2, 3),
        values=(),
        rows=rows,
        compute_seconds=(0.1, 0.1),
        nonfinite_loss_ranks=loss,
    )


@pytest.mark.parametrize(
    ("seen", "troubled"),
    [
        (step((1.0, 0.0, 0.0)), False),
        (step((1e30, 0.0, 0.0), (0.0, 0.0, 0.0)), False),
        (step((1.0, 3.0, 0.0)), True),
        (step((1.0, 0.0, 0.0), (1.0, 0.0, 1.0)), True),
        (step((1.0, 0.0, 0.0), loss=(3,)), True),
        (step(), False),
    ],
)
def test_what_is_not_finite_is_trouble(seen, troubled):
    assert is_troubled(seen, COLUMNS) is troubled


def test_a_node_that_does_not_count_them_has_no_trouble():
    assert not is_troubled(step((1.0,)), ("sum_squares",))
