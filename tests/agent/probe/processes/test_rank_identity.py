import os
import time
from dataclasses import replace
from pathlib import Path

from mp_agent.probe.processes.rank_identity import is_helper, make_identity, ranks_are_known
from mp_agent.ring import locations
from mp_agent.ring.writer import RingWriter
from tests.agent.probe.processes.launchers import SRUN, TORCHRUN
from tests.agent.ring.children import child
from tests.waiting import wait_until


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


def test_the_setting_beats_every_derived_name():
    assert make_identity("mine", TORCHRUN).run == "mine"
    assert make_identity(" ", TORCHRUN).run == "job-7"


def test_a_name_cannot_change_the_direction_in_which_a_mail_is_read():
    assert make_identity(" a\u202eb\n\udcff ", {}).run == r"a\u202eb\n\udcff"
    environ = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "\u2066x"}
    assert make_identity(environ=environ).run == r"\u2066x"


def test_unparsable_launcher_variables_do_not_raise():
    identity = make_identity(environ={"RANK": "x", "WORLD_SIZE": "2"})
    assert (identity.rank, identity.world_size) == (0, 2)


def test_a_job_that_slurm_has_requeued_is_another_attempt():
    identity = make_identity(environ={**SRUN, "SLURM_RESTART_COUNT": "2"})
    assert (identity.run, identity.attempt) == ("slurm-9.1", 2)


def test_a_rank_of_another_container_is_not_above_although_its_number_is(tmp_path: Path) -> None:
    own = make_identity(environ=TORCHRUN)
    ring = locations.ring_path(locations.run_directory(tmp_path, own.run), own)
    parent = os.getppid()

    def rank() -> None:
        RingWriter.create(ring, replace(own, pid=parent))
        time.sleep(60)

    with child(rank):
        wait_until(lambda: locations.is_live(ring))
        assert not is_helper(own, tmp_path, asked_for=False, numbered_by_environment=True)
