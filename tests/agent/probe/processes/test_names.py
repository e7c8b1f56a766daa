"""What runs and launches are called."""

import os
import subprocess
import sys

import pytest

from mp_agent.probe.processes.rank_identity import launcher_name, make_identity
from tests.agent.probe.processes.launchers import SRUN, TORCHRUN


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "9"}, "abc"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "9"}, "slurm-9"),
        ({"HOSTNAME": "train-llama-3", "JOB_COMPLETION_INDEX": "3"}, "train-llama"),
        ({"HOSTNAME": "train-llama-3-x7k2p", "JOB_COMPLETION_INDEX": "3"}, "train-llama"),
    ],
)
def test_run_is_named_by_rendezvous_then_scheduler(environ, run):
    assert make_identity(environ=environ).run == run


def test_torchruns_default_rendezvous_id_is_no_name():
    run = make_identity(environ={**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).run
    assert run not in ("none", "")


class TestRunsWithoutAName:
    def test_on_several_nodes_are_named_by_where_their_ranks_meet(self):
        """`torchrun --nnodes 2 --node-rank 0 --master-addr head`: no id was given."""

        def run(port: str, **environ: str) -> str:
            meeting = {"MASTER_ADDR": "head", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
            return make_identity(environ={**TORCHRUN, **meeting, **environ}).run

        assert run("29500") == run("29500", RANK="0", GROUP_RANK="0", LOCAL_RANK="0")
        assert run("29500") != run("29501")

    def test_on_one_node_are_told_apart_from_others_in_the_same_batch_script(self):
        batch = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
        assert make_identity(environ=batch).run == f"slurm-9-{launcher_name(1, None)}"


_LAUNCHER = """
import os
from mp_agent.probe.processes.rank_identity import launcher_name
from mp_agent.probe.processes.launchers import slurm_task
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(launcher_name(world_size, slurm_task(rank, world_size, os.environ)))
"""


def _launcher(rank: int, world_size: int) -> str:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return _output([sys.executable, "-c", _LAUNCHER], environ)


def _launcher_by_shell(environ: dict[str, str]) -> str:
    command = f"'{sys.executable}' -c '{_LAUNCHER}'; :"
    return _output(["sh", "-c", command], {**environ, "RANK": environ["SLURM_PROCID"]})


def _output(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=True
    ).stdout


def test_containers_that_start_in_the_same_moment_have_launchers_of_their_own():
    in_container = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*in_container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here")
    script = (
        "from mp_agent.probe.processes import rank_identity; rank_identity.start_ticks = str; "
        "print(rank_identity.launcher_name(1, None))"
    )
    names = {_output([*in_container, sys.executable, "-c", script], {}) for _ in range(2)}
    assert len(names) == 2


def test_ranks_of_srun_share_a_launcher_although_a_shell_of_its_own_started_each():
    ranks: tuple[dict[str, str], ...] = ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, {})
    names = {_launcher_by_shell({**SRUN, **rank}) for rank in ranks}
    assert len(names) == 1
    assert names != {_launcher_by_shell({**SRUN, "SLURM_STEP_ID": "2"})}


def test_ranks_of_one_launcher_share_a_name_and_two_single_jobs_do_not():
    assert _launcher(0, 2) == _launcher(1, 2)
    assert _launcher(0, 1) != _launcher(0, 1)


def test_ranks_that_an_elastic_launcher_restarts_at_an_equal_count_are_a_new_launch(tmp_path):
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
    first, second = (make_identity(environ={**environ, "WORLD_SIZE": n}) for n in ("8", "6"))
    assert first.launch != second.launch
    assert first.run == second.run
