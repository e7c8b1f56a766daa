import subprocess
import sys

import pytest

from mp_agent.probe.identity import make_identity, ranks_are_known

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
}


def test_torchrun_variables_give_the_whole_identity():
    identity = make_identity(environ=TORCHRUN)
    assert (identity.run, identity.attempt) == ("job-7", 2)
    assert (identity.rank, identity.world_size) == (5, 8)
    assert (identity.local_rank, identity.local_world_size, identity.node_rank) == (1, 4, 1)


def test_without_a_launcher_it_is_a_world_of_one():
    identity = make_identity(environ={})
    assert (identity.rank, identity.world_size) == (0, 1)
    assert (identity.local_rank, identity.attempt) == (0, 0)
    assert not ranks_are_known({})


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "9"}, "abc"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "9"}, "slurm-9"),
        ({"HOSTNAME": "train-llama-3", "JOB_COMPLETION_INDEX": "3"}, "train-llama"),
        ({"HOSTNAME": "train-llama-3-x7k2p", "JOB_COMPLETION_INDEX": "3"}, "train-llama"),
    ],
)
def test_run_is_named_by_rendezvous_then_scheduler(environ, run):
    assert make_identity(environ=environ).run == run


def test_the_setting_beats_every_derived_name():
    assert make_identity("mine", TORCHRUN).run == "mine"


def test_torchruns_default_rendezvous_id_is_no_name():
    run = make_identity(environ={**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).run
    assert run not in ("none", "")


def test_unparsable_launcher_variables_do_not_raise():
    identity = make_identity(environ={"RANK": "x", "WORLD_SIZE": "2"})
    assert (identity.rank, identity.world_size) == (0, 2)


_PRINT_LAUNCH = (
    "from mp_agent.probe.identity import make_identity;"
    "i = make_identity(environ={'RANK': '%d', 'WORLD_SIZE': '%d'}); print(i.run, i.launch)"
)


def _launches(rank: int, world_size: int) -> str:
    command = [sys.executable, "-c", _PRINT_LAUNCH % (rank, world_size)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_ranks_of_one_launch_share_a_name_and_two_single_jobs_do_not():
    assert _launches(0, 2) == _launches(1, 2)
    assert _launches(0, 1) != _launches(0, 1)
