"""What happens in the canonical runs: between them, every metric of the catalog has a value.

`everything_measured` trains on two nodes; `trouble` goes wrong in every way that has a metric, and
its last rank dies; `long` is as long as the trend of the loss takes; `over` has ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path

from mp_agent.node.run.views import ServiceCounts
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.baseline import Baseline
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.steps import EndReason, Phase
from mp_agent.records.views import ExportAccount, ScriptFindings, TrackerLink, TransportView
from tests.outputs.runs import LAYERS, MODULES, Clock, Player, Script, Values, simulated_clock


def _everything_measured(rank: int, sequence: int) -> Values:
    match sequence:
        case 20 | 21:
            return {"skipped": 1.0, "gradients.inf_elements": 2.0}
        case 22:
            return {"loss_scale": 512.0, "guard_skip_update": 0.5, "guard_request_checkpoint": 1.0}
        case 30:
            return {"clip_norm": 128.0, "gradients_replaced": 1.0}
        case 40:
            return {"learning_rate": 1.0, "fp8.range_used_max": 8.0}
        case 32 | 44 | 56 if rank == 3:
            return {"loss": 64.0}
        case _:
            return {"tokens": 512.0} if rank else {}


def _evaluate(player: Player) -> None:
    """Let all ranks evaluate for a minute, and begin to once more."""
    for phase in (Phase.EVAL, Phase.FORWARD, Phase.EVAL):
        for ring in player.rings.values():
            ring.stamp(phase)
        player.poll()
        player.pass_time(60.0)
    player.rings[0].count(probe_errors=1, setting_errors=2, records_dropped=3, probe_seconds=0.25)
    player.rings[0].note_unsupported("complex gradients")
    player.pass_time(5.0)
    player.poll()


def _trouble(rank: int, sequence: int) -> Values:
    unused = f"@{LAYERS[2]}"
    changes: dict[str, float] = {
        "loss": 8.0 if rank else 2.0,
        "batch_digest": 7.0,
        "batch_rows": 1.0 if rank else 8.0,
        "batch_kept": 0.0,
        "batch_loaded": 1.0,
        "loss_scale": nan,
        "state.bits@queue": 64.0 + rank,
        f"gradients.elements{unused}": 0.0,
        f"gradients.sum_squares{unused}": 0.0,
        f"gradients.abs_max{unused}": 0.0,
    }
    if sequence >= 8 and rank == 1:
        changes["compute_seconds"] = 2.0
    if sequence >= 48:
        changes |= {
            "learning_rate": 0.0,
            "lowest_learning_rate": 0.0,
            "gradients_add_up": 1.0,
            "backwards_discarded": 3.0,
            "unheld_parameters": 2.0,
            "unchanged_parameters": 1.0,
            "parted_parameters": 2.0,
            "resumed_without_state": 512.0,
            "schedule_behind": 512.0,
            "clips_nothing": 1.0,
            "seed_repeated": 1.0,
            "epoch_repeated": 1.0,
            "fp16_without_loss_scale": 1.0,
            "loss_input_mismatch": 1.0,
            "targets_broadcast": 1.0,
            "clipped_apart": 1.0,
            "clipped_by_shard": 1.0,
            "targets_misaligned": 1.0,
            "padding_in_targets": 1.0,
            "targets_seen": 1.0,
            "evaluated_in_training": 1.0,
            "batch_norm_momentum": 1.0,
            "accumulation_bypassed": 1.0,
            "betas_swapped": 1.0,
            "loss_in_16_bits": 1.0,
            "step_scaled": 1.0,
            "optimizer_never_steps": 1.0,
            "nothing_loaded": 148.0,
            f"gradients.sum_squares@{LAYERS[0]}": 2.0**24,
            f"gradients.abs_max@{LAYERS[1]}": 2.0**-40,
            f"gradients.zero_elements@{LAYERS[1]}": 1000.0,
            "distribution.flushed_elements": 1000.0,
            "optimizer.squared_ratio_sum": 2.0**14,
            "optimizer.active_elements": 1000.0,
            "optimizer.below_epsilon_elements": 750.0,
            "attention.logit_max": 256.0,
            "routers.load_max": 8.0,
            "routers.entropy_sum": 16.0,
            "routers.entropy_tokens": 1024.0,
            "fp8.range_used_max": 8.0,
            "tensors.range_ratio": nan,
        }
    if sequence >= 72 and rank == 1:
        changes |= {"gradients.sum_squares": 9.0, "weights.bits": 1.0, "state.bits": 2.0}
    if sequence >= 80:
        changes |= {
            "loss": nan,
            "loss_nonfinite": 1.0,
            "gradients.nan_elements": 5.0,
            "local_grad_nonfinite_elements": 5.0,
            "local_grad_nonfinite_backward": 1.0,
        }
    if sequence == 80:
        changes[f"activations.nonfinite_call@{MODULES[1]}"] = 3.0
    if sequence == 88:
        changes |= {
            "loss": 2.0,
            "loss_nonfinite": 0.0,
            f"activations.nonfinite_backward_call@{MODULES[0]}": 2.0,
        }
    return changes


def _lose_a_rank(player: Player) -> None:
    player.kill(1)
    player.write(0, player.script.steps + 1)
    player.pass_time(300.0)
    player.poll()


SCRIPTS = (
    Script(
        name="everything-measured",
        steps=80,
        changes=_everything_measured,
        ranks=4,
        nodes=2,
        shards=2,
        first_step=1001,
        findings=ScriptFindings(files=3, counts={"MP101": 2}),
        after=_evaluate,
    ),
    Script(
        name="trouble",
        steps=96,
        changes=_trouble,
        first_step=1001,
        baseline=Baseline(
            runs=("good",),
            world_sizes=(2,),
            layers=dict.fromkeys(LAYERS[1:], 0.0),
            facts={"precision": ("fp16",)},
        ),
        facts={
            "precision": "bf16",
            "scaler": "none",
            "strategy": "ddp",
            "unheld_parameters": "head.weight, head.bias",
            "unchanged_parameters": "embed.weight",
            "parted_parameters": "embed.weight, head.weight",
            "data_ranks": "0-1",
        },
        after=_lose_a_rank,
    ),
    Script(
        name="long",
        steps=1040,
        changes=lambda rank, sequence: {},
        ranks=1,
        families=(GRADIENTS,),
        judged=False,
    ),
    Script(
        name="over",
        steps=3,
        changes=lambda rank, sequence: {},
        ranks=1,
        judged=False,
        after=lambda player: player.end(EndReason.FAILED),
    ),
)

_SERVICES = ServiceCounts(
    scrape_duration_seconds=0.25,
    transport=TransportView(
        push_failures=1,
        pushed_bytes=2,
        reports_dropped=3,
        last_push_unix_seconds=4.5,
        pushes_put_off=8,
        push_interval_seconds=0.5,
        received_bytes=5,
        requests_refused=6,
        nodes_known=2,
    ),
    exports=(
        ExportAccount(exporter="otlp", failures=1, rejected=2, last_success_unix_seconds=3.5),
    ),
    trackers=(TrackerLink(tracker="mlflow", name="run 7", url="http://tracker/7"),),
    flight_records=7,
    flight_errors=8,
)


@contextmanager
def played(directory: Path) -> Iterator[tuple[Clock, dict[str, Player]]]:
    """Yield the clock and the players of all canonical runs, by name, which have been played."""
    with simulated_clock() as (clock, alive):
        players = {}
        try:
            for script in SCRIPTS:
                players[script.name] = player = Player(script, directory, clock, alive)
                player.play()
            yield clock, players
        finally:
            for player in players.values():
                player.close()


def exports(clock: Clock, players: dict[str, Player]) -> list[RunExport]:
    """Return the views of all runs of all node agents."""
    return [
        run.export(clock.seconds, clock.unix_seconds, services=_SERVICES)
        for player in players.values()
        for run in player.runs
    ]
