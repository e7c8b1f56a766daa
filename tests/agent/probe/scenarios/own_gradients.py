"""What rings of ranks must say of the ranks' own gradients, each in `rank{N}.ring`."""

from pathlib import Path

import numpy as np
import pytest

from mp_agent.records.columns import by_name
from tests.agent.probe.rings import merge_rings, read_rings


def assert_equal_to_references(directory: Path, ranks: int, steps: int) -> None:
    """Compare norms and counts with `expected{rank}.npy` [steps, 2], but those of step 1.

    The first optimizer is known once it has stepped.
    """
    for rank, ring in read_rings(directory, ranks).items():
        expected = np.load(directory / f"expected{rank}.npy")
        records = {record.sequence: record for record in ring.records}
        for step in range(2, steps + 1):
            found = by_name(ring.schema.step_columns, records[step].values)
            norm, nonfinite = expected[step - 1]
            assert found["local_grad_norm"] == pytest.approx(norm, rel=1e-6), (rank, step)
            assert found["local_grad_nonfinite_elements"] == nonfinite


def assert_rank_1_is_named(
    directory: Path, ranks: int, *, nodes: int, steps: int, poisoned_step: int | None
) -> None:
    """Compare what all ranks, on one node or two, say once merged.

    poisoned_step: at which the backward of rank 1 made NaN, while its loss was finite; None for
    no step.
    """
    all_steps = merge_rings(read_rings(directory, ranks), nodes=nodes)
    assert len(all_steps) == steps
    for merged in all_steps[1:]:
        poisoned = merged.sequence == poisoned_step
        assert merged.nonfinite_gradient_ranks == ((1,) if poisoned else ())
        assert merged.nonfinite_loss_ranks == ()
        assert (merged.gradient_nonfinite_elements > 0) == poisoned
