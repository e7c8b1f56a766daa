from mp_agent.probe.processes.rank_identity import make_identity, ranks_are_known
from tests.agent.probe.processes.launchers import SRUN, TORCHRUN


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


def test_unparsable_launcher_variables_do_not_raise():
    identity = make_identity(environ={"RANK": "x", "WORLD_SIZE": "2"})
    assert (identity.rank, identity.world_size) == (0, 2)


def test_a_job_that_slurm_has_requeued_is_another_attempt():
    identity = make_identity(environ={**SRUN, "SLURM_RESTART_COUNT": "2"})
    assert (identity.run, identity.attempt) == ("slurm-9.1", 2)
