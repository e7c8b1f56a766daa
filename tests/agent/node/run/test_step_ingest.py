"""Steps and layers of real rings, as they get into a run's account."""

from mp_agent.records.schema import Share
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import MERGE_DEADLINE_SECONDS, shown


def test_layers_come_after_their_step_and_are_judged_by_it(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank(layers=("a", "b"))
    rank.steps()
    rank.layer_table(sum_squares=9.0)
    rank.steps(skipped=1.0, gradients={"inf_elements": 2.0})
    rank.layer_table(inf_elements=2.0, sum_squares=1.0)
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["layer_grad_norm{a}"] == 3.0
    assert values["layer_grad_norm{b}"] == 3.0
    assert values["layer_grad_nonfinite_elements_total{a}"] == 2


def test_layers_that_are_read_before_their_step_is_complete_wait_for_it(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.open_step()
    rank.layer_table(sum_squares=9.0)
    run = open_run()
    run.poll(0.0)
    assert "layer_grad_norm{weight}" not in shown(run)

    rank.finish_step()
    run.poll(0.0)
    assert shown(run)["layer_grad_norm{weight}"] == 3.0


def test_one_shards_table_alone_waits_no_longer_than_the_deadline(
    start_rank: StartRank, open_run: OpenRun
):
    """Of sharded parameters only the rank that holds the bad element notices and writes it."""
    shares = [Share(group="fsdp", shard_index=rank, shard_count=2) for rank in range(2)]
    ranks = [start_rank(rank, world_size=2, share=shares[rank]) for rank in range(2)]
    ranks[0].steps()
    ranks[1].steps(gradients={"nan_elements": 1.0})
    ranks[1].layer_table(nan_elements=1.0)
    run = open_run()
    run.poll(0.0)
    assert "layer_grad_nonfinite_elements_total{weight}" not in shown(run)

    run.poll(MERGE_DEADLINE_SECONDS)
    values = shown(run)
    assert values["layer_grad_nonfinite_elements_total{weight}"] == 1
    assert values["nonfinite_updates_total"] == 1
    assert values["first_nonfinite_info{1,,weight,backward}"] == 1


def test_what_ranks_say_is_counted_from_the_first_step_of_every_attempt(
    start_rank: StartRank, open_run: OpenRun
):
    first = start_rank()
    first.steps(3, loss_nonfinite=1.0)
    run = open_run()
    run.poll(0.0)
    first.kill()
    start_rank(attempt=1, created_unix_ns=9_000).steps(2, loss_nonfinite=1.0)
    run.poll(0.0)

    assert shown(run)["rank_loss_nonfinite_steps_total{0}"] == 5
