import os
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


def test_ranks_that_an_elastic_launcher_starts_again_at_the_same_count_are_another_launch(tmp_path):
    attempt = tmp_path / "llama_x" / "attempt_0"
    (attempt / "0").mkdir(parents=True)
    (attempt / "1").mkdir()

    def launch(local_rank: int, **environ: str) -> str:
        error_file = attempt / str(local_rank) / "error.json"
        variables = {**TORCHRUN, "TORCHELASTIC_ERROR_FILE": str(error_file), **environ}
        return make_identity(environ=variables).launch

    first = launch(0, RANK="4", LOCAL_RANK="0")
    (attempt / "0" / "error.json").touch()
    assert launch(1) == first, "also when the other one has failed already"
    assert launch(1, WORLD_SIZE="4") != first
    os.utime(attempt, ns=(0, 1))
    assert launch(1) != first


def test_a_launcher_that_keeps_no_logs_has_a_name_of_its_launch_all_the_same():
    """`torchrun --log-dir /dev/null` sets the variable, and leaves it empty."""
    launches = {
        make_identity(environ={**TORCHRUN, "TORCHELASTIC_ERROR_FILE": file}).launch
        for file in ("", "/does/not/exist/error.json")
    }
    assert len(launches) == 1


def test_the_name_of_a_run_that_has_none_stays_when_its_launcher_starts_it_again():
    environ = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    first, second = (make_identity(environ={**environ, "WORLD_SIZE": n}) for n in ("8", "4"))
    assert first.launch != second.launch
    assert first.run == second.run
