"""Which ranks are on which node, as launchers tell."""

import pytest

from mp_agent.probe.nodes import node_place
from tests.agent.probe.launchers import SRUN, TORCHRUN


def place(**environ: str) -> tuple[int, int, int]:
    found = node_place(int(environ["RANK"]), int(environ["WORLD_SIZE"]), environ)
    return (found.local_rank, found.local_world_size, found.node_rank)


class TestRanksThatSrunStarted:
    def test_belong_to_the_node_that_slurm_names(self):
        assert place(**SRUN) == (1, 2, 1)

    @pytest.mark.parametrize(
        ("told", "local_world_size"),
        [
            ({"SLURM_STEP_TASKS_PER_NODE": "1,4,1"}, 4),
            ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 2),
            ({"SLURM_TASKS_PER_NODE": "1,3,2"}, 3),
            ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_TASKS_PER_NODE": "3(x2)"}, 3),
            ({"SLURM_NNODES": "", "SLURM_STEP_NUM_NODES": "2"}, 3),
            ({"SLURM_NNODES": "", "SLURM_NTASKS_PER_NODE": "3"}, 3),
            ({"LOCAL_RANK": "1"}, 2),
        ],
    )
    def test_are_as_many_on_a_node_as_slurm_says(self, told, local_world_size):
        assert place(**{**SRUN, **told}) == (1, local_world_size, 1)

    @pytest.mark.parametrize(
        "told",
        [
            {"SLURM_PROCID": "0"},
            {"SLURM_NTASKS": "3"},
            {"SLURM_LOCALID": "x"},
            {"SLURM_NNODES": "", "SLURM_TASKS_PER_NODE": "6(x99999999999)"},
        ],
    )
    def test_are_on_one_node_where_slurm_speaks_of_something_else(self, told):
        assert place(**{**SRUN, **told}) == (3, 6, 0)

    def test_are_those_of_torchrun_where_srun_started_that(self):
        assert place(**{**SRUN, **TORCHRUN}) == (1, 4, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "2"}, (1, 2, 2)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, 2)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2, 2)),
        ({"LOCAL_WORLD_SIZE": "9"}, (5, 6, 0)),
        ({}, (5, 6, 0)),
    ],
)
def test_other_launchers_tell_of_nodes_too(environ, expected):
    assert place(RANK="5", WORLD_SIZE="6", **environ) == expected


def test_it_is_said_what_to_set_where_nodes_show_that_nobody_tells_of(caplog):
    assert place(RANK="4", WORLD_SIZE="6", LOCAL_RANK="0") == (0, 6, 0)
    assert "set LOCAL_WORLD_SIZE and GROUP_RANK" in caplog.text
