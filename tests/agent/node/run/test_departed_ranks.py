from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown


def test_a_dead_rank_keeps_its_series_for_the_linger_then_only_its_being_gone(
    start_rank: StartRank, open_run: OpenRun
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    run = open_run()
    ranks[1].kill()
    run.poll(0.0)
    assert shown(run, 59.0)["rank_step{1}"] == 1

    run.poll(60.0)
    values = shown(run, 60.0)
    assert "rank_step{1}" not in values
    assert values["rank_up{1}"] == 0
    assert values["rank_step{0}"] == 1
    assert values["run_active"] == 1


def test_a_rank_of_the_next_attempt_is_shown_however_long_its_forerunner_has_been_gone(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank().kill()
    run = open_run()
    run.poll(0.0)
    second = start_rank(attempt=1, created_unix_ns=9_000)
    second.steps(2)
    run.poll(100.0)
    second.kill()
    run.poll(101.0)

    assert shown(run, 101.0)["rank_step{0}"] == 2
