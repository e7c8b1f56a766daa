"""Which ranks are on which node, according to launchers' variables."""

import os
from typing import ClassVar

import pytest

from mp_agent.probe.processes import rank_identity
from mp_agent.probe.processes.launchers import NodePlace, node_place
from mp_agent.probe.processes.rank_identity import make_identity
from tests.agent.probe.processes.launchers import SRUN, TORCHRUN
from tests.subtests import each


def place(**environ: str) -> tuple[int, int, int]:
    found = node_place(int(environ["RANK"]), int(environ["WORLD_SIZE"]), environ)
    return (found.local_rank, found.local_world_size, found.node_rank)


class TestRanksThatSrunStarted:
    def test_belong_to_the_node_that_slurm_names(self):
        assert place(**SRUN) == (1, 2, 1)

    @each(
        ("variables", "local_world_size"),
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
    def test_are_as_many_on_a_node_as_slurm_says(self, variables, local_world_size):
        assert place(**{**SRUN, **variables}) == (1, local_world_size, 1)

    @pytest.mark.parametrize(
        "variables",
        [
            {"SLURM_PROCID": "0"},
            {"SLURM_NTASKS": "3"},
            {"SLURM_LOCALID": "x"},
            {"SLURM_NNODES": "", "SLURM_TASKS_PER_NODE": "6(x99999999999)"},
        ],
    )
    def test_are_on_one_node_where_slurm_speaks_of_something_else(self, variables):
        assert place(**{**SRUN, **variables}) == (3, 6, 0)

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
def test_other_launchers_describe_nodes_too(environ, expected):
    assert place(RANK="5", WORLD_SIZE="6", **environ) == expected


def test_a_warning_says_what_to_set_where_nodes_cannot_be_distinguished(caplog):
    assert place(RANK="4", WORLD_SIZE="6", LOCAL_RANK="0") == (0, 6, 0)
    assert "set LOCAL_WORLD_SIZE and GROUP_RANK" in caplog.text


class TestAPodPerRank:
    """PyTorchJob without torchrun: nothing but rank, number of ranks and where they meet."""

    WORKER: ClassVar = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }
    MASTER: ClassVar = {
        **WORKER,
        "RANK": "0",
        "MASTER_ADDR": "localhost",
        "HOSTNAME": "job-master-0",
    }

    def test_whose_trainer_is_the_first_process_is_a_node_of_its_own(self, monkeypatch):
        monkeypatch.setattr(os, "getppid", lambda: 0)
        worker, master = make_identity(environ=self.WORKER), make_identity(environ=self.MASTER)
        assert (worker.local_rank, worker.local_world_size, worker.node_rank) == (0, 1, 1)
        assert (master.local_rank, master.local_world_size, master.node_rank) == (0, 1, 0)
        assert worker.run == master.run

    def test_with_a_shell_in_between_is_one_too(self):
        pod = {**self.WORKER, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        assert node_place(1, 2, pod) == NodePlace(0, 1, 1)
        together = {**pod, "MASTER_ADDR": "127.0.0.1"}
        assert node_place(1, 2, together) == NodePlace(1, 2, 0)
        assert node_place(1, 2, {**pod, "LOCAL_RANK": "1"}) == NodePlace(1, 2, 0)


def test_without_proc_there_is_an_identity_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_identity, "Path", lambda path: tmp_path / path.lstrip("/"))
    for environ in ({}, TORCHRUN):
        assert make_identity(environ=environ).run
    assert list(rank_identity.ancestors()) == [os.getppid()]
