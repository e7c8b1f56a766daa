"""A run read from real rings that other processes write."""

from collections.abc import Callable

import pytest

from mp_agent.catalog.snapshot import HistogramValue, Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.run import Run
from mp_agent.node.snapshot_builder import SnapshotBuilder
from mp_agent.records.schema import Share
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from tests.agent.node.conftest import StartRank

OpenRun = Callable[[], Run]

DEADLINE_SECONDS = 10.0


def snapshot_of(run: Run, now_seconds: float = 0.0) -> Snapshot:
    builder = SnapshotBuilder(resolve({}), 20_000)
    return builder.build([run.export(now_seconds, 1_000.0)], 1_000.0)


def shown(run: Run, now_seconds: float = 0.0) -> dict[str, float]:
    """Return what is exported, keyed like `name{value,value}` without the run's name."""
    found = {}
    for family in snapshot_of(run, now_seconds):
        for sample in family.samples:
            if isinstance(sample.value, HistogramValue):
                continue
            optional = len(family.metric.optional_labels)
            names = zip(family.metric.label_names, sample.labels, strict=True)
            labels = ",".join(
                label
                for place, (_, label) in enumerate(names)
                if place and (label or place < len(sample.labels) - optional)
            )
            key = family.metric.prometheus_name.removeprefix("mp_agent_")
            found[f"{key}{{{labels}}}" if labels else key] = sample.value
    return found


def test_the_ranks_steps_are_merged_into_one_run(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    ranks[0].steps(3, loss=1.0, gradients={"sum_squares": 4.0})
    ranks[1].steps(2, loss=3.0, gradients={"sum_squares": 4.0})
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 2
    assert values["step"] == 2
    assert values["loss"] == 2.0
    assert values["grad_norm"] == 2.0
    assert values["coverage_ratio"] == 1.0
    assert values["rank_step{0}"] == 3
    assert values["rank_step{1}"] == 2
    assert values["run_active"] == 1
    assert values["run_info{0,ddp,2,1,fp16,,,2.13.0}"] == 1


def test_before_the_first_step_the_run_is_active_and_all_counters_stand_at_zero(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["run_active"] == 1
    assert values["steps_total"] == 0
    assert values["rank_up{0}"] == 1
    assert "step" not in values
    assert "grad_norm" not in values


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


def test_at_the_end_nobody_is_waited_for(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank(0, world_size=2)
    rank.steps(3)
    run = open_run()
    run.poll(0.0)
    assert shown(run)["steps_total"] == 0, "the other rank has yet to appear"

    rank.end(EndReason.FAILED)
    run.poll(0.0)
    assert shown(run)["steps_total"] == 3
    assert shown(run)["coverage_ratio"] == 0.5


def test_parameters_that_change_in_one_look_before_a_death_are_all_read(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank(layers=("a",))
    rank.steps(3)
    rank.layer_table(sum_squares=1.0)
    rank.new_schema("a", "b")
    rank.steps(2)
    rank.layer_table(sum_squares=9.0)
    rank.open_step()
    rank.kill()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 6
    assert values["layer_grad_norm{a}"] == 3.0
    assert values["layer_grad_norm{b}"] == 3.0
    assert values["records_dropped_total{0}"] == 0


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

    run.poll(DEADLINE_SECONDS)
    values = shown(run)
    assert values["layer_grad_nonfinite_elements_total{weight}"] == 1
    assert values["nonfinite_updates_total"] == 1
    assert values["first_nonfinite_info{1,,weight,backward}"] == 1


def test_a_rank_that_hangs_costs_coverage_and_is_named(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    ranks[0].steps()
    run = open_run()
    run.poll(0.0)
    assert shown(run)["steps_total"] == 1

    run.poll(DEADLINE_SECONDS)
    values = shown(run)
    assert values["steps_total"] == 2
    assert values["coverage_ratio"] == 0.5
    assert values["missing_rank_info{1}"] == 1
    assert values["run_active"] == 1, "a hang is no end"


def test_records_that_come_after_the_deadline_are_counted_as_dropped(
    start_rank: StartRank, open_run: OpenRun
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    ranks[0].steps()
    run = open_run()
    run.poll(0.0)
    run.poll(DEADLINE_SECONDS)
    ranks[1].steps()
    run.poll(DEADLINE_SECONDS)

    values = shown(run)
    assert values["records_dropped_total{0}"] == 1
    assert values["steps_total"] == 1


def test_a_killed_rank_ends_the_run_and_its_open_step_is_told(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    run = open_run()
    rank.steps(4)
    rank.open_step(loss=7.0, gradients={"sum_squares": 2500.0})
    run.poll(0.0)
    assert shown(run)["steps_total"] == 4

    rank.kill()
    run.poll(0.0)
    values = shown(run)
    assert values["steps_total"] == 5
    assert values["grad_norm"] == 50.0
    assert values["run_active"] == 0
    assert values["run_end_info{killed}"] == 1
    assert values["rank_up{0}"] == 0


def test_an_interrupted_step_that_the_scaler_would_have_skipped_is_no_update(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps()
    rank.open_step(loss_scale=65536.0, skipped=float("nan"), gradients={"inf_elements": 3.0})
    rank.kill()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["skipped_steps_total"] == 1
    assert values["nonfinite_updates_total"] == 0


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ((EndReason.COMPLETED, EndReason.COMPLETED), "completed"),
        ((EndReason.FAILED, None), "failed"),
        ((None, EndReason.COMPLETED), "killed"),
    ],
)
def test_the_run_ends_as_its_gravest_rank(start_rank: StartRank, open_run: OpenRun, ends, reason):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    for rank, end in zip(ranks, ends, strict=True):
        if end is not None:
            rank.end(end)
        else:
            rank.kill()
    run.poll(0.0)

    assert shown(run)[f"run_end_info{{{reason}}}"] == 1
    assert shown(run)["run_active"] == 0


def test_the_end_marker_is_the_end_while_the_process_waits_for_its_scrape(
    start_rank: StartRank, open_run: OpenRun
):
    rank = start_rank()
    rank.steps(3)
    rank.end(EndReason.COMPLETED)
    run = open_run()
    run.poll(0.0)

    assert rank.running
    assert run.end is EndReason.COMPLETED
    assert shown(run)["steps_total"] == 3
    assert shown(run)["rank_up{0}"] == 0


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


def test_the_next_attempt_takes_the_run_over_and_counters_go_on(
    start_rank: StartRank, open_run: OpenRun
):
    first = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in first:
        rank.steps(3)
        rank.count(probe_errors=1)
    run = open_run()
    run.poll(0.0)
    first[0].end(EndReason.FAILED)
    first[1].kill()
    run.poll(0.0)
    assert shown(run)["run_active"] == 0

    second = start_rank(0, attempt=1, created_unix_ns=9_000)
    second.steps(2)
    run.poll(0.0)
    values = shown(run)
    assert values["run_active"] == 1
    assert values["steps_total"] == 5
    assert values["step"] == 2
    assert values["probe_errors_total{0}"] == 2
    assert values["run_info{1,ddp,1,1,fp16,,,2.13.0}"] == 1
    assert "rank_up{1}" not in values
    assert not any(name.startswith("run_end_info") for name in values)
    assert not first[0].path.exists(), "what is over is removed"


def test_steps_of_the_old_attempt_that_were_not_read_yet_still_count(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0)
    run = open_run()
    run.poll(0.0)
    old.steps(3)
    old.kill()
    start_rank(0, attempt=1, created_unix_ns=9_000).steps(2)
    run.poll(0.0)

    assert shown(run)["steps_total"] == 5


def test_ranks_that_come_back_under_other_numbers_are_the_next_attempt(
    start_rank: StartRank, open_run: OpenRun
):
    """As an elastic launcher starts them when a node has left; the agent looks only afterwards."""
    old = [
        start_rank(rank, launch="a", world_size=4, local_world_size=2, local_rank=rank - 2)
        for rank in (2, 3)
    ]
    run = open_run()
    run.poll(0.0)
    for rank in old:
        rank.steps(3)
    for rank in old:
        rank.kill()
    for rank in (0, 1):
        start_rank(rank, launch="b", world_size=2, created_unix_ns=9_000 + rank).steps(2)
    run.poll(0.0)

    values = shown(run)
    assert {name for name in values if name.startswith("rank_up")} == {"rank_up{0}", "rank_up{1}"}
    assert values["coverage_ratio"] == 1.0
    assert values["step"] == 2


def test_the_next_attempt_is_taken_up_although_the_clock_was_set_back(
    start_rank: StartRank, open_run: OpenRun
):
    old = start_rank(0, created_unix_ns=9_000)
    old.steps(3)
    run = open_run()
    run.poll(0.0)
    old.kill()
    start_rank(0, attempt=1, created_unix_ns=1_000).steps(2)
    run.poll(0.0)

    assert shown(run)["steps_total"] == 5
    assert shown(run)["rank_up{0}"] == 1


def test_rings_of_a_launch_that_is_over_are_removed_unread(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank(0, attempt=1, created_unix_ns=9_000).steps()
    run = open_run()
    run.poll(0.0)
    stale = start_rank(0, launch="earlier", created_unix_ns=500)
    stale.steps(7)
    stale.kill()
    run.poll(0.0)

    assert shown(run)["steps_total"] == 1
    assert not stale.path.exists()


def test_two_nodes_on_one_machine_are_one_run(start_rank: StartRank, open_run: OpenRun):
    """`torchrun --nnodes=2` twice on one host: two launchers, one run directory."""
    node = {"world_size": 2, "local_world_size": 1, "local_rank": 0}
    start_rank(0, launch="a", node_rank=0, **node).steps()
    start_rank(1, launch="b", node_rank=1, created_unix_ns=5_000, **node).steps()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["coverage_ratio"] == 1.0
    assert values["run_info{0,ddp,2,2,fp16,,,2.13.0}"] == 1


def test_a_node_without_rank_0_shows_its_own_ranks_alone(start_rank: StartRank, open_run: OpenRun):
    start_rank(1, world_size=2, local_world_size=1, local_rank=0, node_rank=1).steps()
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values["rank_step{1}"] == 1
    assert "run_active" not in values
    assert values["build_info{1,0.1.0}"] == 1


def test_a_successor_continues_the_counters_exactly(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    for rank in ranks:
        rank.steps(5, loss_scale=64.0)
    run.poll(0.0)
    run.commit()
    for rank in ranks:
        rank.steps(2, loss_scale=32.0)
    run.poll(0.0)
    before = shown(run)
    ranks[0].steps(1, loss_scale=16.0)
    run.poll(0.0)

    successor = open_run()
    successor.poll(0.0)
    after = shown(successor)
    assert after == {
        **before,
        "rank_step{0}": 8.0,
        "rank_last_step_timestamp_seconds{0}": 100.0,
        "ranks_lagging": 1.0,
        "lagging_rank_info{1,optimizer}": 1.0,
    }
    assert after["steps_total"] == 7
    assert after["loss_scale_decreases_total"] == 1

    ranks[1].steps(1, loss_scale=16.0)
    successor.poll(0.0)
    assert shown(successor)["loss_scale_decreases_total"] == 2


def test_a_successor_after_the_end_tells_the_same_end(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank()
    rank.steps(5, loss=1.5)
    rank.end(EndReason.COMPLETED)
    rank.exit()
    run = open_run()
    run.poll(0.0)
    run.commit()
    successor = open_run()
    successor.poll(0.0)

    assert shown(successor) == shown(run)


def test_a_successor_counts_an_ended_attempts_probes_once(start_rank: StartRank, open_run: OpenRun):
    start_rank(0).count(probe_errors=3)
    run = open_run()
    run.poll(0.0)
    start_rank(0, attempt=1, created_unix_ns=9_000).count(probe_errors=1)
    run.poll(0.0)
    run.commit()
    successor = open_run()
    successor.poll(0.0)

    assert shown(run)["probe_errors_total{0}"] == 4
    assert shown(successor)["probe_errors_total{0}"] == 4


@pytest.mark.parametrize("damage", [b"", b"MPAGRING", b"\0" * 8192, b"not a ring" * 1000])
def test_a_bad_ring_is_refused_once_counted_and_harms_nothing(
    start_rank: StartRank, open_run: OpenRun, caplog, damage
):
    good = start_rank(0, world_size=2)
    bad = good.path.with_name("rank1.ring")
    bad.write_bytes(damage)
    run = open_run()
    for _ in range(3):
        run.poll(0.0)
    good.steps()
    run.poll(DEADLINE_SECONDS)
    run.poll(2 * DEADLINE_SECONDS)

    values = shown(run)
    assert values["records_dropped_total{0}"] == 1
    assert values["steps_total"] == 1
    assert sum(str(bad) in record.getMessage() for record in caplog.records) == 1


def test_a_ring_that_is_truncated_while_it_is_read_ends_its_rank_alone(
    start_rank: StartRank, open_run: OpenRun, caplog
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps()
    run = open_run()
    run.poll(0.0)
    ranks[1].path.open("r+b").truncate(100)
    run.poll(0.0)
    ranks[0].steps()
    run.poll(0.0)

    values = shown(run)
    assert values["steps_total"] == 2
    assert values["rank_up{1}"] == 0
    assert values["rank_up{0}"] == 1
    assert "rank 1 is given up" in caplog.text


def test_a_full_directory_costs_the_ledger_but_not_the_run(
    start_rank: StartRank, open_run: OpenRun, monkeypatch, caplog
):
    rank = start_rank()
    run = open_run()
    run.poll(0.0)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mp_agent.node.ledger.replace_atomically", full)
    rank.steps()
    run.poll(0.0)
    run.commit()

    assert "No space left" in caplog.text
    assert shown(run)["steps_total"] == 1


def test_remove_leaves_no_ring(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank()
    rank.kill()
    run = open_run()
    run.poll(0.0)
    run.remove_rings()

    assert locations.find_rings(run.run_dir) == []
    assert not run.anything_new()
