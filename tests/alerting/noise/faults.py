"""Runs with a planted fault, and the alerts that must report it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import exp
from random import Random

from mp_agent.lint.rules.scaling import CLIP_WITHOUT_UNSCALE
from mp_agent.records.columns import (
    ACCUMULATION_BYPASSED,
    AUTOCAST_FP32_SHARE,
    BACKWARDS_DISCARDED,
    BATCH_INTERVAL_STEPS,
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    EPOCH_REPEATED,
    EVALUATED_IN_TRAINING,
    FP16_WITHOUT_LOSS_SCALE,
    GRADIENTS_ADD_UP,
    LATE_CLIPPING,
    LEFT_IN_EVALUATION,
    LOSS_IN_16_BITS,
    LOSS_INPUT_MISMATCH,
    NOTHING_LOADED,
    OPTIMIZER_NEVER_STEPS,
    PADDING_IN_TARGETS,
    SEED_REPEATED,
    STEP_REPEATED,
    STEP_SCALED,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    TARGETS_SEEN,
)
from mp_agent.records.steps import EndReason, Phase
from mp_agent.records.tensor_collections import packed
from tests.alerting.noise.events import (
    LAYERS,
    Count,
    CutOff,
    End,
    Event,
    Fault,
    Kill,
    Pause,
    Relaunch,
    Scenario,
    ScriptCheck,
    Step,
    Vanish,
)
from tests.alerting.noise.healthy import FP16, LONG_AGO
from tests.alerting.noise.training import Scaler, Training

Events = Iterator[Event]

_WITHOUT_END = 10 * 3600.0
_HEALTHY_MINUTES = 25
MODULES = ("embed", "blocks.0.mlp", "blocks.1.mlp", "head")


def _trained(random: Random, **settings: object) -> tuple[Training, list[Event]]:
    """Return a training in good health, and its first minutes with the fault's mark at the end."""
    settings = {"seconds": 2.0, **settings}
    training = Training(random=random, first_step=LONG_AGO, loss=1.95, **settings)  # type: ignore
    return training, [*training.minutes(_HEALTHY_MINUTES), Fault()]


def _explosion(random: Random) -> Events:
    training, before = _trained(random, clip=None)
    yield from before
    for _ in training.steps(40):
        yield training.step(norm=random.uniform(2000, 9000), loss=random.uniform(5, 9))
    while True:
        yield training.step(norm=random.uniform(35, 45), loss=random.uniform(6.8, 7.2))


def _high_norms(random: Random) -> Events:
    training, before = _trained(random, clip=None)
    yield from before
    while True:
        yield from training.steps(7)
        yield training.step(norm=random.uniform(150, 400), loss=2.6)


def _vanishing(random: Random) -> Events:
    training, before = _trained(random, clip=None)
    yield from before
    yield from training.forever(norm=3e-8)


def _nan_update(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield training.step(nan_elements=4000.0)
    yield from training.forever(nan_elements=4000.0, loss=None)


def _nan_loss_of_a_rank(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    of_rank = {2: {"loss": float("nan"), "loss_nonfinite": 1.0}}
    yield training.step(of_rank=of_rank, nan_elements=4000.0)
    yield from training.steps(20, of_rank=of_rank, nan_elements=4000.0)
    yield from training.forever(loss=None, nan_elements=4000.0)


def _nonfinite_output(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_output={"inf_elements": 3.0, "nonfinite_call": 2.0})


def _near_overflow(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_output={"abs_max": 63_000.0, "near_overflow_elements": 2.0})


def _attention_growth(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    for step in range(300):
        yield training.step(attention_logit=15.0 * 1.01**step)
    yield from training.forever(attention_logit=300.0)


def _output_drift(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    for step in range(300):
        yield training.step(logsumexp=-11.0 - step)
    yield from training.forever(logsumexp=-310.0)


def _router_collapse(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    for step in range(300):
        yield training.step(router_load=1.3 + step * 0.01, router_entropy=0.8 - step * 0.0025)
    yield from training.forever(router_load=4.3, router_entropy=0.05)


def _outgrown_scale(random: Random) -> Events:
    """A scale stands still while its tensor grows by 1 % a step."""
    training, before = _trained(random)
    yield from before
    for step in range(300):
        yield training.step(fp8_range_used=(0.4, 1.01**step))
    yield from training.forever(fp8_range_used=(0.4, 20.0))


def _unused_range(random: Random) -> Events:
    """Gradients are cast with the scale of 1 that the layer began with."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(fp8_range_used=(2e-8, 1.0))


def _flushed_input(random: Random) -> Events:
    """An outlier in the input leaves zeros in place of the rest once it is cast."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(fp8_flushed=0.83)


def _other_policy(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(logprob_delta=0.6)


def _certain_policy(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(policy_entropy=0.05)


def _swallowed_terms(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_tensor={"swallowed_sum": 300.0})


def _raw_feature(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_tensor={"range_ratio": packed(5e4, 7)})


def _collapse(random: Random) -> Events:
    """No scale fits any more: it is halved every other step, down to a floor of 1."""
    training, before = _trained(random, scaler=Scaler(floor=1.0), seconds=1.0)
    yield from before
    while True:
        training.largest = 1e6
        yield training.step()
        training.largest = 1e-6
        yield training.step()


def _overflows(random: Random) -> Events:
    """Three steps in a hundred overflow; a quick growth brings the scale back each time."""
    scaler = Scaler()
    training, before = _trained(random, scaler=scaler, seconds=1.0)
    yield from before
    scaler.growth_interval = 32
    while True:
        training.largest = 1e9
        yield training.step()
        training.largest = 1e-9
        yield from training.steps(32)


def _drifting_down(random: Random) -> Events:
    """The gradients grow a hundredfold and more over ten minutes; the scale follows them down."""
    training, before = _trained(random, scaler=Scaler())
    yield from before
    for _ in training.steps(300):
        training.largest *= 1.0178
        yield training.step(norm=0.5)
    yield from training.forever()


def _lower_scale(random: Random) -> Events:
    """A few bursts of overflow take the scale to 4096, where it stays for long."""
    training, before = _trained(random, scaler=Scaler(growth_interval=10**6))
    yield from before
    for _ in range(4):
        yield training.step()
        training.largest *= 2.2
        yield from training.minutes(4)
    training.largest = 1e-3
    yield from training.forever()


def _dead_layer(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    dead = {"abs_max": 1e-13, "sum_squares": 1e-26, "zero_elements": 0.0}
    yield from training.forever(of_layer={"blocks.1.mlp.weight": dead})


def _adapters(random: Random) -> Events:
    """Three layers in four never get a gradient."""
    training = Training(random=random, seconds=2.0)
    none = {"elements": 0.0, "zero_elements": 0.0, "abs_max": 0.0, "sum_squares": 0.0}
    yield Fault()
    yield from training.forever(of_layer=dict.fromkeys(LAYERS[:3], none))


def _unlike(random: Random) -> Events:
    """From the first step on, a layer is trained that was frozen in good runs."""
    training = Training(random=random, seconds=2.0)
    yield Fault()
    yield from training.forever()


def _looked_at(training: Training, changed: Callable[[int], Mapping[str, float]]) -> Step:
    """Return the next step; of each rank that has a batch of its own, with what is `changed`."""
    number = training.made + 1
    if number % BATCH_INTERVAL_STEPS > 1:
        return training.step()
    own = {"batch_rows": 8.0, "batch_kept": 0.0, "batch_loaded": 1.0}
    return training.step(
        of_rank={
            rank: {**own, "batch_digest": float(4 * number + rank), **changed(rank)}
            for rank in range(4)
        }
    )


def _other_batches(changed: Callable[[int, int], Mapping[str, float]], random: Random) -> Events:
    """At the fault batches change. changed: by step and rank."""
    training = Training(random=random, seconds=2.0, first_step=LONG_AGO, loss=1.95)
    while training.made < _HEALTHY_MINUTES * 30:
        yield _looked_at(training, lambda rank: {})
    yield Fault()
    while True:
        yield _looked_at(training, lambda rank: changed(training.made, rank))


def _one_batch(step: int, rank: int) -> Mapping[str, float]:
    return {"batch_digest": float(rank)}


def _shared_batches(step: int, rank: int) -> Mapping[str, float]:
    return {"batch_digest": float(4 * step)}


def _doubled_batches(step: int, rank: int) -> Mapping[str, float]:
    return {"batch_digest": float(4 * ((step + 1) // 2) + rank), "batch_loaded": 2.0}


def _single_rows(step: int, rank: int) -> Mapping[str, float]:
    return {"batch_rows": 1.0} if rank == 2 else {}


def _bad_records(random: Random) -> Events:
    """One batch in ten of rank 2 has records that are damaged."""
    training, before = _trained(random)
    yield from before
    while True:
        yield from training.steps(9)
        yield training.step(of_rank={2: {"loss": random.uniform(6, 9)}})


def _bad_shard(random: Random) -> Events:
    """The labels of rank 2 are wrong."""
    training, before = _trained(random)
    yield from before
    while True:
        yield training.step(of_rank={2: {"loss": random.uniform(6, 6.4)}})


def _underflow(random: Random) -> Events:
    """Most elements of three layers in four become zero."""
    training, before = _trained(random, scaler=Scaler())
    yield from before
    zeros = {"zero_elements": 700.0}
    yield from training.forever(of_layer=dict.fromkeys(LAYERS[:3], zeros))


def _spike(random: Random) -> Events:
    """The loss doubles within some steps and heals within minutes."""
    training, before = _trained(random)
    yield from before
    for step in range(150):
        yield training.step(loss=1.9 + 2.0 * exp(-step / 40), norm=4.0)
    yield from training.forever()


def _diverging(random: Random) -> Events:
    """The loss creeps upward, from 1.9 to 4 in an hour."""
    training, before = _trained(random)
    yield from before
    while True:
        training.final_loss += 2.1 / 1800
        yield training.step()


def _destroyed(random: Random) -> Events:
    """The learning rate is suddenly 3000 times what it was; the loss goes up for good.

    Steps are fast and clipped, and norms and loss stay where the jump has brought them.
    """
    training = Training(random=random, seconds=0.4, loss=10.0, final_loss=2.6, steps_to_learn=300)
    yield from training.steps(1500)
    yield Fault()
    training.learning_rate *= 3000
    yield training.step()
    training.norm = 4000.0
    while True:
        yield training.step(loss=300.0 + random.gauss(0, 20))


def _crept_back(random: Random) -> Events:
    """The loss creeps up to where it had begun, with norms that are hardly larger than usual."""
    training = Training(random=random, seconds=0.5, loss=10.0, final_loss=3.0, steps_to_learn=400)
    yield from training.steps(2500)
    yield Fault()
    while True:
        training.final_loss = min(10.4, training.final_loss + 7.4 / 4000)
        yield training.step()


def _doubled(random: Random) -> Events:
    """As in pure BF16: within 300 steps the loss more than triples, for good, at usual norms."""
    training = Training(random=random, seconds=0.5, loss=10.0, final_loss=2.1, steps_to_learn=300)
    yield from training.steps(1800)
    yield Fault()
    for _ in training.steps(300):
        training.final_loss += 5.4 / 300
        yield training.step()
    yield from training.forever()


def _early_divergence(random: Random) -> Events:
    """The loss explodes before there are enough losses for a usual level."""
    training = Training(random=random, seconds=1.0, loss=30.0, final_loss=16.0, steps_to_learn=100)
    yield from training.steps(60, clip=None)
    yield Fault()
    yield training.step(loss=612.0, clip=None)
    yield training.step(loss=4022.0, clip=None)
    while True:
        yield training.step(loss=random.gauss(55.0, 3.0), clip=None)


def _loss_vanished(random: Random) -> Events:
    """The loss falls to exactly 0, and the norm is that to which gradients are clipped."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(loss=0.0, norm=1.0)


def _guesses(random: Random) -> Events:
    """The model answers two classes alike from the first step on: ln 2."""
    training = Training(random=random, seconds=1.0)
    yield Fault()
    while True:
        yield training.step(loss=0.693147 + random.uniform(-1e-6, 1e-6))


def _high_after_restart(random: Random) -> Events:
    """A restart of the schedule sets the loss back, and it stays there."""
    training = Training(random=random, seconds=1.0, loss=3.0, final_loss=0.9, steps_to_learn=200)
    yield from training.steps(900)
    yield from training.steps(100, learning_rate=1e-5)
    yield Fault()
    training.final_loss = 2.6
    yield from training.forever()


def _low_scale_falls_on(random: Random) -> Events:
    """Calibration ends at 512; within an hour the scale is 64."""
    training = Training(random=random, scaler=Scaler(growth_interval=10**6), largest=80.0)
    yield from training.minutes(45)
    yield Fault()
    for _ in range(3):
        training.largest *= 2.0
        yield from training.minutes(18)
    yield from training.forever()


def _hung_before_backward(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield Pause(phase=Phase.FORWARD, seconds=_WITHOUT_END)


def _nothing_trained(random: Random) -> Events:
    """All labels are masked: loss and gradients are exactly 0."""
    training, before = _trained(random)
    yield from before
    zeros = {"zero_elements": 1000.0, "abs_max": 0.0, "sum_squares": 0.0}
    yield from training.forever(loss=0.0, norm=0.0, of_layer=dict.fromkeys(LAYERS, zeros))


def _rate_zero(random: Random) -> Events:
    """The schedule has ended, the run has not."""
    training, before = _trained(random)
    yield from before
    training.learning_rate = 0.0
    yield from training.forever()


def _rate_fallen(random: Random) -> Events:
    """A schedule made for epochs is stepped at every batch."""
    training, before = _trained(random)
    yield from before
    for _ in range(50):
        training.learning_rate *= 0.8
        yield training.step()
    yield from training.forever()


def _layers_cut_off(random: Random) -> Events:
    """A `detach` in the forward pass leaves the first layers without gradient."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_rank={0: {"cut_off_parameters": 2.0}})


def _clipped_scaled(random: Random) -> Events:
    """unscale_ is forgotten: clipping sees the norm times the loss scale, at every step."""
    training, before = _trained(random, scaler=Scaler())
    yield from before
    while True:
        step = training.step()
        seen = {"clip_max_norm": 1.0, "clip_norm": step.norm * (step.scale or 1.0)}
        yield replace(step, of_rank={0: seen})


def _in_the_loop(random: Random, column: str, value: float = 1.0) -> Events:
    """The probe sees at every step that the loop does something wrong; no number looks odd."""
    training, before = _trained(random)
    yield from before
    while True:
        yield replace(training.step(), of_rank={0: {column: value}})


def _mistake_in_code(random: Random) -> Events:
    """The bad example of a rule is the main script; the run itself is healthy."""
    training, before = _trained(random, scaler=Scaler())
    yield from before
    yield ScriptCheck(CLIP_WITHOUT_UNSCALE.bad)
    yield from training.forever()


def _left_out(random: Random) -> Events:
    """Without a scaler every step is non-finite from now on, and the trainer leaves it out."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(nan_elements=400.0, skipped=True)


def _one_layer(random: Random) -> Events:
    """A layer's gradient grows a thousandfold; next to the others it is still small."""
    training, before = _trained(random)
    small = {"sum_squares": 1e-8, "abs_max": 1e-5}
    yield from (replace(s, of_layer={"head.weight": small}) if isinstance(s, Step) else s
                for s in before)  # fmt: skip
    large = {"sum_squares": 1e-2, "abs_max": 1e-2}
    yield from training.forever(of_layer={"head.weight": large})


def _flushed(random: Random) -> Events:
    """Two fifths of all gradients are below FP16's smallest number at the loss scale."""
    training, before = _trained(random, scaler=Scaler())
    yield from before
    yield from training.forever(distribution={"flushed_elements": 0.4})


def _wide_range(random: Random) -> Events:
    """Some gradients are lost while the largest are at FP16's limit."""
    training, before = _trained(random, scaler=Scaler(), norm=14.0, norm_spread=0.05)
    yield from before
    yield from training.forever(distribution={"flushed_elements": 0.1})


def _outgrown(random: Random) -> Events:
    """Gradients grow by 1 % a step, twentyfold in all, and Adam's beta2 is 0.999."""
    training, before = _trained(random, clip=None)
    yield from before
    for step in range(300):
        yield training.step(norm=1.01**step)
    yield from training.forever(norm=20.0)


def _rounded_away(random: Random) -> Events:
    """The weights are in BF16, and the learning rate has decayed below their spacing."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(optimizer={"rounded_elements": 1.0, "lost_updates": 0.9})


def _rounded_from_the_start(random: Random) -> Events:
    """The weights are in BF16, and the learning rate is that of a fine-tuning."""
    training, before = _trained(random)
    yield from before
    compared = {"unchanged_parameters": 0.0, "rounded_ratio": 0.85, "rounding_loss": 0.65}
    yield from training.forever(of_rank={0: compared})


def _replaced_head(random: Random) -> Events:
    """A new head, which the optimizer does not hold."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_rank={0: {"unheld_parameters": 2.0}})


def _parted_weights(random: Random) -> Events:
    """A checkpoint has given a tied output layer a weight of its own."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_rank={0: {"parted_parameters": 2.0}})


def _schedule_begun_again(random: Random) -> Events:
    """The optimizer goes on with the state of 5000 steps, and its schedule is new."""
    training, before = _trained(random)
    yield from before
    yield training.step(of_rank={0: {"schedule_behind": 5000.0}})
    yield from training.forever()


def _resumed_without_state(random: Random) -> Events:
    """The schedule goes on after 5000 steps, and the optimizer's state is new."""
    training, before = _trained(random)
    yield from before
    yield training.step(of_rank={0: {"resumed_without_state": 5000.0}})
    yield from training.forever()


def _nothing_loaded(random: Random) -> Events:
    """Of a checkpoint that is loaded nothing fits."""
    training, before = _trained(random)
    yield from before
    yield training.step(of_rank={0: {NOTHING_LOADED: 148.0}})
    yield from training.forever()


def _updated_copies(random: Random) -> Events:
    """The step updates copies of the weights."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(of_rank={0: {"unchanged_parameters": 8.0}})


def _half_state(random: Random) -> Events:
    """Adam's state is in FP16 with an epsilon of 1e-8."""
    training, before = _trained(random)
    yield from before
    yield from training.forever(optimizer={"lost_epsilon_elements": 1.0})


def _straggler(random: Random) -> Events:
    """Rank 2 needs twice as long as the others before it can reduce."""
    training, before = _trained(random)
    yield from before
    while True:
        times = {rank: random.lognormvariate(0, 0.05) for rank in range(4)}
        times[2] *= 2.0
        of_rank = {rank: {"compute_seconds": 1.2 * time} for rank, time in times.items()}
        yield training.step(seconds=3.2, of_rank=of_rank)


def _lost_ranks(random: Random) -> Events:
    """Two of four ranks are gone, and the others go on without them."""
    training, before = _trained(random)
    yield from before
    yield Kill((2, 3))
    yield from training.forever()


def _diverged(random: Random) -> Events:
    """Rank 3's reduced gradients are no longer those of the others."""
    training, before = _trained(random)
    yield from before
    while True:
        step = training.step()
        yield replace(step, norm_of_rank={3: step.norm * 1.0001})


def _unreduced(random: Random) -> Events:
    """The last micro-batch of every step is under `no_sync`, and nothing averages weights."""
    training, before = _trained(random)
    yield from before
    while True:
        step = training.step()
        norms = {rank: step.norm * random.uniform(0.9, 1.1) for rank in range(4)}
        values = {rank: {"weight_sample": random.random()} for rank in norms}
        values[0]["gradients_reduced"] = 0.0
        yield replace(step, of_rank=values, norm_of_rank=norms)


def _cut_off(random: Random) -> Events:
    """A node's agent cannot reach the root any more; its ranks train on."""
    training, before = _trained(random)
    yield from before
    yield CutOff(1)
    yield from training.forever()


def _lost_node(random: Random) -> Events:
    """One of two nodes is gone; the ranks of the other wait for it in backward."""
    _, before = _trained(random)
    yield from before
    yield Vanish((1,))
    yield Pause(phase=Phase.BACKWARD, seconds=_WITHOUT_END)


def _probe_errors(random: Random) -> Events:
    training, before = _trained(random)
    yield from before
    while True:
        yield from training.steps(30)
        yield Count({"probe_errors": 1, "records_dropped": 3})


def _hang(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield Pause(phase=Phase.BACKWARD, seconds=_WITHOUT_END)


def _laggard(random: Random) -> Events:
    """Three ranks wait in backward for one that is still in its forward pass."""
    _, before = _trained(random)
    yield from before
    yield Pause(phase=Phase.BACKWARD, seconds=_WITHOUT_END, of_rank={3: Phase.FORWARD})


def _exception(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield End(EndReason.FAILED)
    yield Pause(phase=Phase.ENDED, seconds=_WITHOUT_END)


def _killed(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield Kill((0, 1))
    yield Pause(phase=Phase.ENDED, seconds=_WITHOUT_END)


def _crash_loop(random: Random) -> Events:
    """Each attempt ends at the same step, and a launcher starts the next."""
    yield Fault()
    while True:
        yield from Training(random=random, seconds=2.0).minutes(1.5)
        yield Relaunch(30)


def _dead_but_listed(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield Vanish(listed=True)
    yield Pause(phase=Phase.FORWARD, seconds=_WITHOUT_END)


def _hung_start(random: Random) -> Events:
    """A rank never gets beyond its start."""
    yield Fault()
    yield Pause(phase=Phase.STARTING, seconds=_WITHOUT_END)


def _hung_evaluation(random: Random) -> Events:
    """Evaluations of two minutes, of which one never ends."""
    training = Training(random=random)
    for _ in range(3):
        yield from training.minutes(6)
        yield Pause(phase=Phase.EVAL, seconds=120)
    yield from training.minutes(6)
    yield Fault()
    yield Pause(phase=Phase.EVAL, seconds=_WITHOUT_END)


def _vanished(random: Random) -> Events:
    _, before = _trained(random)
    yield from before
    yield Vanish()
    yield Pause(phase=Phase.FORWARD, seconds=_WITHOUT_END)


FAULTS = (
    Scenario(
        name="explosion",
        what="unclipped norms of thousands, the loss soars",
        script=_explosion,
        expected={
            "MpAgentGradientExplosion": "critical",
            "MpAgentGradientNormGrown": "warning",
            "MpAgentLossSpike": "warning",
            "MpAgentLossDiverging": "critical",
        },
    ),
    Scenario(
        name="destroyed",
        what="the learning rate jumps, and the loss goes from 2.6 to 300 for good",
        script=_destroyed,
        expected={
            "MpAgentGradientExplosion": "critical",
            "MpAgentLossDiverging": "critical",
            "MpAgentLossRelapsed": "warning",
            "MpAgentLearningRateJump": "warning",
        },
        tolerated={"MpAgentLossSpike": "warning"},
        minutes=40,
    ),
    Scenario(
        name="crept-back",
        what="the loss creeps from 3 back to 10, the norms as usual",
        script=_crept_back,
        expected={"MpAgentLossDiverging": "critical"},
        tolerated={"MpAgentLossSpike": "warning"},
        minutes=70,
    ),
    Scenario(
        name="nothing-trained",
        what="loss and gradients are exactly 0",
        script=_nothing_trained,
        expected={"MpAgentNothingTrained": "critical"},
        tolerated={
            "MpAgentGradientVanishing": "critical",
            "MpAgentLayerGradientDead": "warning",
            "MpAgentGradientUnderflow": "warning",
        },
        minutes=75,
    ),
    Scenario(
        name="without-gradient",
        what="three layers in four never get a gradient",
        script=_adapters,
        expected={"MpAgentLayersWithoutGradient": "warning"},
        minutes=30,
    ),
    Scenario(
        name="unlike-baseline",
        what="a layer is trained that was frozen in the good runs of the baseline",
        script=_unlike,
        expected={"MpAgentUnlikeBaseline": "warning"},
        minutes=30,
        good_layers=LAYERS[1:],
    ),
    Scenario(
        name="bad-records",
        what="one batch in ten of one rank has a loss four times as high as the others'",
        script=_bad_records,
        ranks=4,
        expected={"MpAgentRankLossOutliers": "warning"},
        tolerated={"MpAgentLossSpike": "warning"},
    ),
    Scenario(
        name="bad-shard",
        what="one rank's losses are three times as high as the others'",
        script=_bad_shard,
        ranks=4,
        expected={"MpAgentRankLossUnlike": "warning"},
        tolerated={
            "MpAgentLossSpike": "warning",
            "MpAgentLossDiverging": "critical",
            "MpAgentRankLossOutliers": "warning",
        },
    ),
    Scenario(
        name="one-batch",
        what="all ranks are trained on one batch each, again and again",
        script=partial(_other_batches, _one_batch),
        ranks=4,
        facts={"data_ranks": "0-3"},
        expected={"MpAgentSameBatch": "warning"},
    ),
    Scenario(
        name="doubled-batches",
        what="two workers of each rank deliver every batch",
        script=partial(_other_batches, _doubled_batches),
        ranks=4,
        facts={"data_ranks": "0-3"},
        expected={"MpAgentWorkersRepeatBatches": "warning"},
    ),
    Scenario(
        name="shared-batches",
        what="all ranks read the same data",
        script=partial(_other_batches, _shared_batches),
        ranks=4,
        facts={"data_ranks": "0-3"},
        expected={"MpAgentRanksShareBatches": "warning"},
    ),
    Scenario(
        name="single-rows",
        what="the batches of one rank have one row instead of eight",
        script=partial(_other_batches, _single_rows),
        ranks=4,
        facts={"data_ranks": "0-3"},
        expected={"MpAgentSingleRowBatch": "warning"},
    ),
    Scenario(
        name="rate-zero",
        what="the learning rate is 0, and steps go on",
        script=_rate_zero,
        expected={"MpAgentNothingTrained": "warning"},
        minutes=60,
    ),
    Scenario(
        name="loss-vanished",
        what="a loss that falls to exactly 0 for good",
        script=_loss_vanished,
        expected={"MpAgentNothingTrained": "warning"},
    ),
    Scenario(
        name="guesses",
        what="a loss of ln 2 for ever",
        script=_guesses,
        expected={"MpAgentNothingTrained": "warning"},
        minutes=30,
    ),
    Scenario(
        name="doubled",
        what="a loss that triples at usual norms",
        script=_doubled,
        expected={"MpAgentLossDiverging": "critical"},
        tolerated={"MpAgentLossSpike": "warning"},
    ),
    Scenario(
        name="early-divergence",
        what="a loss that explodes on step 61",
        script=_early_divergence,
        expected={"MpAgentLossDiverging": "critical", "MpAgentLossSpike": "warning"},
        minutes=20,
    ),
    Scenario(
        name="high-after-restart",
        what="a loss that a restart of the schedule set back for good",
        script=_high_after_restart,
        expected={"MpAgentLossSpike": "warning", "MpAgentLossDiverging": "warning"},
    ),
    Scenario(
        name="low-scale-falls-on",
        what="a scale of 512 after calibration that falls to 64",
        script=_low_scale_falls_on,
        facts=FP16,
        expected={"MpAgentLossScaleLowAndFalling": "warning"},
        tolerated={
            "MpAgentLossScaleLow": "warning",
            "MpAgentLossScaleConsecutiveDecreases": "warning",
        },
        minutes=130,
    ),
    Scenario(
        name="hung-before-backward",
        what="all ranks stand before their backward",
        script=_hung_before_backward,
        expected={"MpAgentRunStalled": "critical"},
        minutes=85,
    ),
    Scenario(
        name="clipped-scaled",
        what="clipping before unscale_",
        script=_clipped_scaled,
        facts=FP16,
        expected={"MpAgentClippingBeforeUnscale": "warning"},
    ),
    Scenario(
        name="gradients-add-up",
        what="zero_grad is forgotten",
        script=partial(_in_the_loop, column=GRADIENTS_ADD_UP),
        expected={"MpAgentGradientsAddUp": "warning"},
        minutes=35,
    ),
    Scenario(
        name="gradients-discarded",
        what="zero_grad comes at every micro-batch",
        script=partial(_in_the_loop, column=BACKWARDS_DISCARDED, value=3.0),
        expected={"MpAgentGradientsDiscarded": "warning"},
        minutes=35,
    ),
    Scenario(
        name="clipped-late",
        what="clipping after the step",
        script=partial(_in_the_loop, column=LATE_CLIPPING),
        expected={"MpAgentClippingAfterStep": "warning"},
        minutes=35,
    ),
    Scenario(
        name="step-repeated",
        what="a callback steps again with the same gradients",
        script=partial(_in_the_loop, column=STEP_REPEATED),
        expected={"MpAgentStepRepeated": "warning"},
        minutes=35,
    ),
    Scenario(
        name="left-scaled",
        what="optimizer.step() is called in place of scaler.step(optimizer)",
        script=partial(_in_the_loop, column=STEP_SCALED),
        expected={"MpAgentGradientsLeftScaled": "warning"},
        minutes=35,
    ),
    Scenario(
        name="clipped-nothing",
        what="gradients are clipped before backward has made them",
        script=partial(_in_the_loop, column=CLIPS_NOTHING),
        expected={"MpAgentClippingWithoutGradients": "warning"},
        minutes=35,
    ),
    Scenario(
        name="fp16-unscaled",
        what="autocast to FP16, and no GradScaler",
        script=partial(_in_the_loop, column=FP16_WITHOUT_LOSS_SCALE),
        expected={"MpAgentFp16WithoutLossScale": "warning"},
        minutes=35,
    ),
    Scenario(
        name="probabilities-as-logits",
        what="the model ends in softmax, and the loss applies it again",
        script=partial(_in_the_loop, column=LOSS_INPUT_MISMATCH),
        expected={"MpAgentLossInputMismatch": "warning"},
        minutes=35,
    ),
    Scenario(
        name="targets-broadcast",
        what="outputs [B, 1] are compared with targets [B]",
        script=partial(_in_the_loop, column=TARGETS_BROADCAST),
        expected={"MpAgentTargetsBroadcast": "warning"},
        minutes=35,
    ),
    Scenario(
        name="clipped-one-by-one",
        what="each parameter is clipped by the norm of its own gradient",
        script=partial(_in_the_loop, column=CLIPPED_APART),
        expected={"MpAgentClippingOneByOne": "warning"},
        minutes=35,
    ),
    Scenario(
        name="clipped-by-shard",
        what="each rank clips its shards by their own norm",
        script=partial(_in_the_loop, column=CLIPPED_BY_SHARD),
        expected={"MpAgentClippingByShard": "warning"},
        minutes=35,
    ),
    Scenario(
        name="targets-unshifted",
        what="the targets of a language model are its inputs",
        script=partial(_in_the_loop, column=TARGETS_MISALIGNED),
        expected={"MpAgentTargetsMisaligned": "warning"},
        minutes=35,
    ),
    Scenario(
        name="padding-in-targets",
        what="padding counts as a target",
        script=partial(_in_the_loop, column=PADDING_IN_TARGETS),
        expected={"MpAgentPaddingInTargets": "warning"},
        minutes=35,
    ),
    Scenario(
        name="targets-seen",
        what="a language model has no causal mask",
        script=partial(_in_the_loop, column=TARGETS_SEEN),
        expected={"MpAgentCausalMaskMissing": "warning"},
        minutes=35,
    ),
    Scenario(
        name="evaluated-in-training-mode",
        what="a validation is made in training mode",
        script=partial(_in_the_loop, column=EVALUATED_IN_TRAINING),
        expected={"MpAgentEvaluatedInTrainingMode": "warning"},
        minutes=35,
    ),
    Scenario(
        name="momentum-of-batch-norm",
        what="batch normalization has the momentum of TensorFlow",
        script=partial(_in_the_loop, column=BATCH_NORM_MOMENTUM),
        expected={"MpAgentBatchNormMomentum": "warning"},
        minutes=35,
    ),
    Scenario(
        name="accumulation-bypassed",
        what="an optimizer steps at each micro-batch, not through accelerate",
        script=partial(_in_the_loop, column=ACCUMULATION_BYPASSED),
        expected={"MpAgentAccumulationBypassed": "warning"},
        minutes=35,
    ),
    Scenario(
        name="betas-swapped",
        what="the betas of Adam are in the wrong order",
        script=partial(_in_the_loop, column=BETAS_SWAPPED),
        expected={"MpAgentBetasSwapped": "warning"},
        minutes=35,
    ),
    Scenario(
        name="loss-in-16-bits",
        what="the model was cast to BF16, and its loss with it",
        script=partial(_in_the_loop, column=LOSS_IN_16_BITS),
        expected={"MpAgentLossIn16Bits": "warning"},
        minutes=35,
    ),
    Scenario(
        name="epoch-not-set",
        what="set_epoch of the sampler is never called",
        script=partial(_in_the_loop, column=EPOCH_REPEATED),
        expected={"MpAgentEpochRepeated": "warning"},
        minutes=35,
    ),
    Scenario(
        name="seeded-at-every-step",
        what="the seed is set to the same number at every step",
        script=partial(_in_the_loop, column=SEED_REPEATED),
        expected={"MpAgentSeedRepeated": "warning"},
        minutes=35,
    ),
    Scenario(
        name="never-steps",
        what="step() of one of several optimizers is missing",
        script=partial(_in_the_loop, column=OPTIMIZER_NEVER_STEPS),
        expected={"MpAgentOptimizerNeverSteps": "warning"},
        minutes=35,
    ),
    Scenario(
        name="left-in-evaluation",
        what="train() is forgotten after a validation",
        script=partial(_in_the_loop, column=LEFT_IN_EVALUATION),
        expected={"MpAgentLeftInEvaluation": "warning"},
        minutes=35,
    ),
    Scenario(
        name="autocast-without-effect",
        what="the model is called outside of autocast",
        script=partial(_in_the_loop, column=AUTOCAST_FP32_SHARE),
        expected={"MpAgentAutocastWithoutEffect": "warning"},
        minutes=35,
    ),
    Scenario(
        name="mistake-in-code",
        what="a script that clips before unscale_ is checked",
        script=_mistake_in_code,
        facts=FP16,
        expected={"MpAgentPrecisionLint": "info"},
        minutes=35,
    ),
    Scenario(
        name="left-out",
        what="every step is non-finite and left out, without a scaler",
        script=_left_out,
        expected={"MpAgentGradientNonFinite": "critical"},
        tolerated={"MpAgentOverflowRatioHigh": "critical"},
    ),
    Scenario(
        name="one-layer",
        what="one layer's gradient grows a thousandfold",
        script=_one_layer,
        expected={"MpAgentLayerGradientExplosion": "warning"},
        minutes=60,
    ),
    Scenario(
        name="high-norms",
        what="every eighth norm above 100, unclipped",
        script=_high_norms,
        expected={"MpAgentGradientExplosion": "warning"},
    ),
    Scenario(
        name="vanishing",
        what="norms of 3e-8",
        script=_vanishing,
        expected={"MpAgentGradientVanishing": "critical"},
        minutes=75,
    ),
    Scenario(
        name="nan-update",
        what="the optimizer steps on NaN gradients",
        script=_nan_update,
        expected={"MpAgentNonFiniteUpdate": "critical", "MpAgentLossNonFinite": "critical"},
    ),
    Scenario(
        name="nan-loss-of-a-rank",
        what="rank 2's loss becomes NaN first",
        script=_nan_loss_of_a_rank,
        ranks=4,
        expected={
            "MpAgentNonFiniteUpdate": "critical",
            "MpAgentLossNonFinite": "critical",
            "MpAgentRankNonFinite": "critical",
        },
    ),
    Scenario(
        name="collapse",
        what="the loss scale falls to its floor",
        script=_collapse,
        facts=FP16,
        expected={
            "MpAgentLossScaleLowAndFalling": "warning",
            "MpAgentLossScaleAtFloor": "critical",
            "MpAgentOverflowRatioHigh": "critical",
            "MpAgentLossScaleConsecutiveDecreases": "warning",
            "MpAgentLossScaleFarBelowInitial": "critical",
            "MpAgentLossScaleLow": "warning",
        },
    ),
    Scenario(
        name="overflows",
        what="3 % of steps overflow",
        script=_overflows,
        facts=FP16,
        expected={"MpAgentOverflowRatioHigh": "warning"},
    ),
    Scenario(
        name="hang",
        what="all ranks stand in backward",
        script=_hang,
        expected={"MpAgentRunStalled": "critical"},
        minutes=75,
    ),
    Scenario(
        name="laggard",
        what="rank 3 stands in forward, the others wait",
        script=_laggard,
        ranks=4,
        expected={"MpAgentRunStalled": "critical", "MpAgentRankStalled": "critical"},
        minutes=75,
    ),
    Scenario(
        name="exception",
        what="an exception ends the run",
        script=_exception,
        expected={"MpAgentRunFailed": "critical"},
    ),
    Scenario(
        name="killed",
        what="both ranks are killed",
        script=_killed,
        ranks=2,
        expected={"MpAgentRunFailed": "critical"},
    ),
    Scenario(
        name="vanished",
        what="the node is gone",
        script=_vanished,
        expected={"MpAgentRunVanished": "warning"},
    ),
    Scenario(
        name="dead-but-listed",
        what="the node is gone, and its target still listed",
        script=_dead_but_listed,
        expected={"MpAgentRunVanished": "warning"},
    ),
    Scenario(
        name="crash-loop",
        what="each attempt ends after a minute and a half",
        script=_crash_loop,
        expected={"MpAgentRunRestarting": "critical"},
        minutes=25,
    ),
    Scenario(
        name="hung-start",
        what="a start that never comes to training",
        script=_hung_start,
        expected={"MpAgentRunStalled": "critical"},
        minutes=65,
    ),
    Scenario(
        name="hung-evaluation",
        what="an evaluation that never ends, after some of two minutes",
        script=_hung_evaluation,
        expected={"MpAgentRunStalled": "critical"},
        minutes=95,
    ),
    Scenario(
        name="drifting-down",
        what="the scale follows growing gradients down to 256 and less",
        script=_drifting_down,
        facts=FP16,
        minutes=90,
        expected={
            "MpAgentLossScaleFarBelowInitial": "critical",
            "MpAgentLossScaleConsecutiveDecreases": "warning",
            "MpAgentLossScaleLow": "warning",
        },
        tolerated={"MpAgentOverflowRatioHigh": "warning"},
    ),
    Scenario(
        name="lower-scale",
        what="bursts of overflow take the scale to 4096",
        script=_lower_scale,
        facts=FP16,
        minutes=75,
        expected={"MpAgentLossScaleLow": "info"},
    ),
    Scenario(
        name="dead-layer",
        what="a layer's gradient falls to 1e-13",
        script=_dead_layer,
        expected={"MpAgentLayerGradientDead": "warning"},
    ),
    Scenario(
        name="underflow",
        what="70 % zeros in three layers of four",
        script=_underflow,
        facts=FP16,
        expected={"MpAgentGradientUnderflow": "warning", "MpAgentGradientAtFloor": "info"},
        minutes=75,
    ),
    Scenario(
        name="spike",
        what="the loss doubles and heals",
        script=_spike,
        expected={"MpAgentLossSpike": "warning"},
    ),
    Scenario(
        name="diverging",
        what="the loss creeps from 1.9 to 4 in an hour",
        script=_diverging,
        expected={"MpAgentLossDiverging": "warning"},
        minutes=100,
    ),
    Scenario(
        name="straggler",
        what="rank 2 computes twice as long",
        script=_straggler,
        ranks=4,
        expected={"MpAgentRankStraggler": "warning"},
    ),
    Scenario(
        name="lost-ranks",
        what="two of four ranks are gone",
        script=_lost_ranks,
        ranks=4,
        expected={"MpAgentCoverageLow": "warning"},
    ),
    Scenario(
        name="probe-errors",
        what="errors and lost records, again and again",
        script=_probe_errors,
        expected={"MpAgentTelemetryDegraded": "warning"},
    ),
    Scenario(
        name="cut-off",
        what="a node's agent cannot reach the root agent",
        script=_cut_off,
        ranks=4,
        nodes=2,
        expected={"MpAgentCoverageLow": "warning"},
    ),
    Scenario(
        name="lost-node",
        what="one of two nodes is gone, the other waits for it",
        script=_lost_node,
        ranks=4,
        nodes=2,
        expected={"MpAgentRunStalled": "critical", "MpAgentRankStalled": "critical"},
        minutes=75,
    ),
    Scenario(
        name="diverged",
        what="rank 3's reduced gradients differ from the others'",
        script=_diverged,
        ranks=4,
        expected={"MpAgentReplicaDivergence": "critical"},
    ),
    Scenario(
        name="unreduced",
        what="no step reduces its gradients any more, and nothing averages the weights",
        script=_unreduced,
        ranks=4,
        expected={"MpAgentGradientsNotReduced": "critical"},
    ),
    Scenario(
        name="flushed",
        what="two fifths of all gradients below FP16's smallest number",
        script=_flushed,
        facts=FP16,
        expected={"MpAgentGradientUnderflow": "warning", "MpAgentGradientAtFloor": "info"},
        minutes=60,
    ),
    Scenario(
        name="wide-range",
        what="small gradients are lost while the largest are at FP16's limit",
        script=_wide_range,
        facts=FP16,
        expected={"MpAgentHeadroomVanishing": "info"},
        minutes=60,
    ),
    Scenario(
        name="outgrown",
        what="gradients grow by 1 % a step, which Adam's second moment follows slowly",
        script=_outgrown,
        expected={"MpAgentSecondMomentStale": "warning"},
        minutes=60,
    ),
    Scenario(
        name="rounded-away",
        what="nine in ten updates of BF16 weights change nothing",
        script=_rounded_away,
        expected={"MpAgentUpdatesLost": "warning"},
        minutes=60,
    ),
    Scenario(
        name="rounded-by-comparison",
        what="two thirds of what updates were to change in BF16 weights stay as they were",
        script=_rounded_from_the_start,
        expected={"MpAgentUpdatesLost": "warning"},
        minutes=40,
    ),
    Scenario(
        name="replaced-head",
        what="two parameters of a new head are in no optimizer",
        script=_replaced_head,
        expected={"MpAgentParametersWithoutOptimizer": "warning"},
        minutes=40,
    ),
    Scenario(
        name="layers-cut-off",
        what="two parameters of the first layers are cut off from the loss",
        script=_layers_cut_off,
        expected={"MpAgentLayersCutOff": "warning"},
        minutes=40,
    ),
    Scenario(
        name="rate-fallen",
        what="the learning rate collapses within fifty steps",
        script=_rate_fallen,
        expected={"MpAgentLearningRateFallen": "warning"},
        minutes=40,
    ),
    Scenario(
        name="parted-weights",
        what="tied weights that a checkpoint has parted",
        script=_parted_weights,
        expected={"MpAgentTiedWeightsParted": "warning"},
        minutes=40,
    ),
    Scenario(
        name="resumed-without-state",
        what="a run that resumes with its weights and schedule and without its optimizer's state",
        script=_resumed_without_state,
        expected={"MpAgentOptimizerStateLost": "warning"},
        minutes=40,
    ),
    Scenario(
        name="schedule-begun-again",
        what="a run that resumes with its optimizer's state, and with a new schedule",
        script=_schedule_begun_again,
        expected={"MpAgentScheduleBegunAgain": "warning"},
        minutes=40,
    ),
    Scenario(
        name="nothing-loaded",
        what="a checkpoint whose names have a prefix that those of the model have not",
        script=_nothing_loaded,
        expected={"MpAgentNothingLoaded": "warning"},
        minutes=40,
    ),
    Scenario(
        name="updated-copies",
        what="the optimizer's step updates copies of the weights",
        script=_updated_copies,
        expected={"MpAgentWeightsUnchanged": "critical"},
        minutes=40,
    ),
    Scenario(
        name="half-state",
        what="Adam's state in FP16 with an epsilon of 1e-8",
        script=_half_state,
        expected={"MpAgentAdamEpsilonUnsafe": "warning"},
        minutes=60,
    ),
    Scenario(
        name="nonfinite-output",
        what="modules return Inf that no loss shows",
        script=_nonfinite_output,
        modules=MODULES,
        expected={"MpAgentActivationNonFinite": "critical"},
    ),
    Scenario(
        name="near-overflow",
        what="FP16 outputs of modules reach 63 000",
        script=_near_overflow,
        modules=MODULES,
        expected={"MpAgentActivationNearOverflow": "warning"},
    ),
    Scenario(
        name="attention-growth",
        what="attention logits grow by 1 % a step, twentyfold in all",
        script=_attention_growth,
        modules=MODULES,
        expected={"MpAgentAttentionLogitGrowth": "warning"},
        minutes=60,
    ),
    Scenario(
        name="output-drift",
        what="the log-sum-exp of the output logits falls by 1 a step, to -310",
        script=_output_drift,
        modules=MODULES,
        expected={"MpAgentOutputLogitDivergence": "warning"},
        minutes=60,
    ),
    Scenario(
        name="router-collapse",
        what="a router sends ever more of the tokens to one of 8 experts",
        script=_router_collapse,
        modules=MODULES,
        expected={"MpAgentRouterCollapse": "warning"},
        minutes=60,
    ),
    Scenario(
        name="outgrown-scale",
        what="an FP8 tensor grows by 1 % a step, and its scale does not follow",
        script=_outgrown_scale,
        modules=MODULES,
        expected={"MpAgentFp8Saturation": "warning"},
        minutes=60,
    ),
    Scenario(
        name="unused-range",
        what="FP8 gradients are cast with a scale of 1",
        script=_unused_range,
        modules=MODULES,
        expected={"MpAgentFp8Saturation": "warning"},
        minutes=60,
    ),
    Scenario(
        name="flushed-input",
        what="the cast to FP8 rounds most of a layer's input to zero",
        script=_flushed_input,
        modules=MODULES,
        expected={"MpAgentFp8Underflow": "warning"},
        minutes=60,
    ),
    Scenario(
        name="other-policy",
        what="the rollout engine has other weights than the trainer",
        script=_other_policy,
        logprobs=True,
        expected={"MpAgentTrainInferenceMismatch": "critical"},
    ),
    Scenario(
        name="certain-policy",
        what="a policy becomes certain of all that it draws",
        script=_certain_policy,
        logprobs=True,
        expected={"MpAgentPolicyEntropyCollapsed": "warning"},
    ),
    Scenario(
        name="swallowed-terms",
        what="a sum in FP16 loses a third of its terms",
        script=_swallowed_terms,
        tensors=("token losses",),
        expected={"MpAgentReductionSwallows": "warning"},
    ),
    Scenario(
        name="raw-feature",
        what="an input feature has 50 000 times the range of another",
        script=_raw_feature,
        tensors=("inputs",),
        expected={"MpAgentDimensionImbalance": "warning"},
    ),
)
