"""Runs that should wake no one: routine, and what looks like trouble but is none."""

from collections.abc import Iterator
from math import cos, exp, pi
from random import Random

from mp_agent.records.steps import EndReason, Phase
from tests.alerting.noise.events import (
    LAYERS,
    End,
    Event,
    Pause,
    Relaunch,
    Scenario,
    Unreachable,
)
from tests.alerting.noise.training import Scaler, Training

Events = Iterator[Event]

FP16 = {"precision": "fp16", "scaler": "gradscaler"}
FP32 = {"precision": "fp32"}
LONG_AGO = 90_000
EXPERT_LAYERS = (
    *LAYERS,
    "blocks.1.attention.key.bias",
    *(f"blocks.0.expert{number}.weight" for number in range(6)),
)


def _bf16(random: Random) -> Events:
    yield from Training(random=random, norm=0.9, seconds=2.0).forever()


def _fp32(random: Random) -> Events:
    yield from Training(random=random, norm=3.0, norm_spread=0.4, clip=None).forever()


def _fp16(random: Random) -> Events:
    training = Training(random=random, first_step=LONG_AGO, scaler=Scaler(), seconds=2.0)
    yield from training.forever()


def _calibrating(random: Random) -> Events:
    """The first steps overflow until the scale fits: 65536 down to 64."""
    yield from Training(random=random, scaler=Scaler(), largest=600.0).forever()


def _sawtooth(random: Random) -> Events:
    scaler = Scaler(scale=64.0, growth_interval=300)
    yield from Training(random=random, scaler=scaler, largest=600.0, seconds=2.0).forever()


def _low_on_purpose(random: Random) -> Events:
    scaler = Scaler(scale=4096.0, growth_interval=10**9)
    yield from Training(random=random, first_step=LONG_AGO, scaler=scaler, largest=0.5).forever()


def _restarted(random: Random) -> Events:
    """Preempted and back within a minute, from a checkpoint some steps back, with a new scaler."""
    first = Training(random=random, first_step=LONG_AGO, scaler=Scaler())
    yield from first.minutes(25)
    yield Relaunch(60)
    step = LONG_AGO + first.made - 200
    second = Training(random=random, first_step=step, scaler=Scaler(), largest=30.0, loss=2.1)
    yield from second.forever()


def _resumed(random: Random) -> Events:
    """Begins at step 90 000 with a scaler that has to find its scale."""
    training = Training(
        random=random, first_step=LONG_AGO, scaler=Scaler(), largest=300.0, loss=1.95
    )
    yield from training.forever()


def _evaluating(random: Random) -> Events:
    training = Training(random=random)
    while True:
        yield from training.minutes(8)
        yield Pause(phase=Phase.EVAL, seconds=35 * 60)


def _warming_up(random: Random) -> Events:
    """Large norms and a steep loss while the learning rate rises."""
    training = Training(random=random, loss=10.8, final_loss=3.0, steps_to_learn=400, seconds=2.0)
    for step in range(10**6):
        warmth = min(1.0, step / 1000)
        training.norm = 1.0 + 70 * exp(-step / 150)
        training.learning_rate = 3e-4 * warmth
        yield training.step()


def _clipped_spikes(random: Random) -> Events:
    """Once in a while a batch with a norm of hundreds, which clipping takes care of."""
    training = Training(random=random)
    yield from training.minutes(7)
    while True:
        yield from training.minutes(9)
        yield training.step(norm=random.uniform(120, 600))


def _one_extreme_clipped_spike(random: Random) -> Events:
    training = Training(random=random)
    yield from training.minutes(40)
    yield training.step(norm=4000.0)
    yield from training.forever()


def _checkpoint_in_a_step(random: Random) -> Events:
    """A checkpoint that is not marked as a phase stalls a step for four minutes."""
    training = Training(random=random)
    while True:
        yield from training.minutes(15)
        yield training.step(seconds=240.0)


def _marked_checkpoint(random: Random) -> Events:
    training = Training(random=random)
    while True:
        yield from training.minutes(10)
        yield Pause(phase=Phase.CHECKPOINT, seconds=15 * 60)


def _slow_steps(random: Random) -> Events:
    yield from Training(random=random, seconds=200.0, steps_to_learn=50).forever()


def _converging(random: Random) -> Events:
    """A small fine-tune: loss and norms fall towards nothing."""
    training = Training(
        random=random,
        seconds=2.0,
        loss=1.2,
        final_loss=0.02,
        loss_noise=0.004,
        steps_to_learn=900,
        clip=None,
    )
    while True:
        training.norm = 0.008 + 2.0 * exp(-training.made / 250)
        yield training.step()


def _cosine(random: Random) -> Events:
    """The learning rate decays to zero and everything becomes still; then the run completes."""
    training = Training(random=random, first_step=LONG_AGO, loss=1.95, loss_noise=0.01, seconds=2.0)
    for step in range(1200):
        training.learning_rate = 3e-4 * (1 + cos(pi * step / 1200)) / 2
        yield training.step()
    yield End(EndReason.COMPLETED)
    yield Pause(phase=Phase.ENDED, seconds=3600)


def _brief(random: Random) -> Events:
    """A smoke test of two minutes."""
    yield from Training(random=random, scaler=Scaler(), largest=600.0).minutes(2)
    yield End(EndReason.COMPLETED)
    yield Pause(phase=Phase.ENDED, seconds=3600)


def _unreachable(random: Random) -> Events:
    training = Training(random=random)
    yield from training.minutes(20)
    yield Unreachable(6 * 60)
    yield from training.forever()


def _noisy_loss(random: Random) -> Events:
    """A small batch of uneven texts: the loss jumps by a third of itself, sometimes by more."""
    training = Training(random=random, norm_spread=0.5, seconds=2.0)
    while True:
        tail = random.gauss(0, 1) / max(0.3, abs(random.gauss(0, 1)))
        yield training.step(loss=max(0.5, 2.2 + 0.15 * tail))


def _jitter(random: Random) -> Events:
    """Ranks whose batches differ widely in length: some rank is always slow, never the same."""
    training = Training(random=random)
    while True:
        of_rank = {
            rank: {
                "compute_seconds": 1.2 * random.lognormvariate(0, 0.8),
                "loss": 2.0 + random.gauss(0, 0.1),
            }
            for rank in range(8)
        }
        yield training.step(of_rank=of_rank)


def _two_nodes(random: Random) -> Events:
    yield from Training(random=random).forever()


def _slow_loader(random: Random) -> Events:
    """Every few minutes one rank waits a minute and a half for its data."""
    training = Training(random=random)
    while True:
        yield from training.minutes(6)
        of_rank = {rank: {"compute_seconds": 90.0 if rank == 1 else 1.2} for rank in range(4)}
        yield training.step(seconds=91.0, of_rank=of_rank)


def _sparse_layers(random: Random) -> Events:
    """An embedding whose untouched rows have no gradient, and ReLU layers with many zeros."""
    of_layer = {
        "embed.weight": {"zero_elements": 960.0},
        "blocks.0.mlp.weight": {"zero_elements": 480.0},
    }
    yield from Training(random=random, scaler=Scaler()).forever(of_layer=of_layer)


def _first_compilation(random: Random) -> Events:
    """The first step compiles for eight minutes."""
    training = Training(random=random)
    yield training.step(seconds=480.0)
    yield from training.forever()


def _summed_loss(random: Random) -> Events:
    """A loss that is a sum: norms of thousands since the first step, not clipped."""
    training = Training(random=random, norm=4000.0, norm_spread=0.4, clip=None, loss=9000.0,
                        final_loss=3000.0, loss_noise=200.0)  # fmt: skip
    yield from training.forever()


def _tiny_units(random: Random) -> Events:
    """A loss in tiny units: norms of 3e-7 since the first step."""
    training = Training(random=random, norm=3e-7, clip=None, loss=4e-6, final_loss=1e-6,
                        loss_noise=1e-7)  # fmt: skip
    yield from training.forever()


def _policy(random: Random) -> Events:
    """PPO: a loss about 0 with heavy tails, norms that jump."""
    training = Training(random=random, norm_spread=0.6, clip=0.5, seconds=2.0)
    while True:
        tail = random.gauss(0, 1) / max(0.15, abs(random.gauss(0, 1)))
        yield training.step(loss=0.02 + 0.05 * tail)


def _diffusion(random: Random) -> Events:
    """Diffusion: the loss depends on the drawn noise level more than on the model."""
    training = Training(random=random, norm_spread=0.5, seconds=2.0)
    while True:
        yield training.step(loss=random.lognormvariate(-2.5, 1.1))


def _curriculum(random: Random) -> Events:
    """Harder data after a while: the loss rises at once and falls again from there."""
    training = Training(random=random, loss=6.0, final_loss=2.0, steps_to_learn=400)
    yield from training.steps(600)
    training.made, training.loss, training.final_loss = 0, 3.4, 2.4
    yield from training.forever()


def _adversarial(random: Random) -> Events:
    """The generator's loss falls at first, and creeps up again as the critic learns."""
    training = Training(random=random, seconds=1.0, loss=2.4, final_loss=1.4, steps_to_learn=100)
    yield from training.steps(600)
    for _ in training.steps(4800):
        training.final_loss += 0.8 / 4800
        yield training.step()
    yield from training.forever()


def _unmarked_pauses(random: Random) -> Events:
    """Rollouts of 14 minutes, then an evaluation of 31, none of which anything marks."""
    training = Training(random=random, seconds=2.0)
    yield from training.minutes(6)
    yield Pause(phase=Phase.FORWARD, seconds=14 * 60)
    yield from training.minutes(6)
    yield Pause(phase=Phase.FORWARD, seconds=31 * 60)
    yield from training.forever()


def _experts(random: Random) -> Events:
    """Experts that no token is routed to at times, and key biases that softmax cancels."""
    training = Training(random=random, seconds=2.0)
    step = 0
    while True:
        step += 1
        noise = 10 ** random.uniform(-14, -9)
        bias = {"abs_max": noise, "sum_squares": noise**2, "zero_elements": 0.0}
        zeros = {"abs_max": 0.0, "sum_squares": 0.0, "zero_elements": 1000.0}
        idle = {"embed.weight": {"zero_elements": 700.0 if step < 900 else 960.0}}
        if step // 300 % 2:
            idle["blocks.0.expert3.weight"] = zeros
        yield training.step(of_layer={"blocks.1.attention.key.bias": bias, **idle})


_LOW_BY_NATURE = {"MpAgentLossScaleLow": "warning"}
"""A scale below 1024 after calibration is what that alert is about, whatever the reason."""


def _fp8(random: Random) -> Events:
    """Tensors are beyond the scales of earlier steps now and then, by far at times."""
    training = Training(random=random, seconds=0.5)
    while True:
        beyond = 200.0 if random.random() < 0.1 else random.lognormvariate(0, 0.3)
        yield training.step(fp8_range_used=(random.uniform(0.001, 0.9), max(beyond, 0.9)))


HEALTHY = (
    Scenario(name="bf16", what="BF16 with clipping", script=_bf16),
    Scenario(name="fp32", what="FP32 without clipping", script=_fp32, facts=FP32),
    Scenario(name="fp16", what="FP16 long past calibration", script=_fp16, facts=FP16, minutes=90),
    Scenario(
        name="calibrating",
        what="FP16 from its first step: 65536 down to 64",
        script=_calibrating,
        facts=FP16,
        minutes=90,
        tolerated=_LOW_BY_NATURE,
    ),
    Scenario(name="sawtooth", what="scale between 64 and 128", script=_sawtooth, facts=FP16),
    Scenario(
        name="low-on-purpose",
        what="scaler that begins and stays at 4096",
        script=_low_on_purpose,
        facts=FP16,
    ),
    Scenario(
        name="restarted",
        what="preempted and back in a minute, 200 steps earlier",
        script=_restarted,
        facts=FP16,
    ),
    Scenario(
        name="resumed",
        what="resumed at step 90 000 with a new scaler",
        script=_resumed,
        facts=FP16,
        tolerated=_LOW_BY_NATURE,
    ),
    Scenario(name="evaluating", what="35 minutes of evaluation", script=_evaluating, minutes=100),
    Scenario(name="warming-up", what="learning-rate warm-up", script=_warming_up),
    Scenario(
        name="clipped-spikes",
        what="norms of hundreds that clipping handles",
        script=_clipped_spikes,
        tolerated={"MpAgentGradientExplosion": "info"},
    ),
    Scenario(
        name="one-clipped-spike",
        what="one clipped norm of 4000",
        script=_one_extreme_clipped_spike,
        tolerated={"MpAgentGradientExplosion": "warning"},
    ),
    Scenario(
        name="checkpoint-in-a-step",
        what="unmarked checkpoints that stall a step for 4 minutes",
        script=_checkpoint_in_a_step,
    ),
    Scenario(name="marked-checkpoint", what="checkpoints of 15 minutes", script=_marked_checkpoint),
    Scenario(name="slow-steps", what="steps of 200 seconds", script=_slow_steps, minutes=120),
    Scenario(
        name="converging",
        what="a small fine-tune that converges",
        script=_converging,
        facts=FP32,
        minutes=90,
        tolerated={"MpAgentGradientVanishing": "info"},
    ),
    Scenario(name="cosine", what="decay to zero, then completion", script=_cosine, minutes=75),
    Scenario(name="brief", what="a run of two minutes", script=_brief, facts=FP16),
    Scenario(name="unreachable", what="scrapes fail for 6 minutes", script=_unreachable),
    Scenario(name="noisy-loss", what="a loss with heavy tails", script=_noisy_loss),
    Scenario(
        name="jitter", what="batches of uneven length on eight ranks", script=_jitter, ranks=8
    ),
    Scenario(
        name="two-nodes", what="two ranks on each of two nodes", script=_two_nodes, ranks=4, nodes=2
    ),
    Scenario(name="slow-loader", what="90-second waits for data", script=_slow_loader, ranks=4),
    Scenario(name="sparse-layers", what="layers full of zeros", script=_sparse_layers, facts=FP16),
    Scenario(name="summed-loss", what="a loss that is a sum", script=_summed_loss),
    Scenario(
        name="tiny-units",
        what="a loss in tiny units",
        script=_tiny_units,
        tolerated={"MpAgentGradientVanishing": "info"},
    ),
    Scenario(name="policy", what="PPO's loss about 0 with heavy tails", script=_policy),
    Scenario(name="diffusion", what="a loss of diffusion", script=_diffusion),
    Scenario(
        name="curriculum",
        what="harder data after some minutes",
        script=_curriculum,
        minutes=75,
        tolerated={"MpAgentLossSpike": "warning", "MpAgentLossDiverging": "warning"},
    ),
    Scenario(
        name="adversarial",
        what="a generator's loss that creeps from 1.4 to 2.2",
        script=_adversarial,
        minutes=110,
        tolerated={"MpAgentLossDiverging": "warning"},
    ),
    Scenario(
        name="unmarked-pauses",
        what="14 minutes of rollouts and 31 of evaluation that nothing marks",
        script=_unmarked_pauses,
        minutes=75,
    ),
    Scenario(
        name="experts",
        what="experts without tokens, key biases, a sparse embedding",
        script=_experts,
        facts=FP16,
        minutes=60,
        layers=EXPERT_LAYERS,
    ),
    Scenario(name="compiling", what="a first step of 8 minutes", script=_first_compilation),
    Scenario(
        name="fp8",
        what="FP8 tensors that jump beyond their scales now and then",
        script=_fp8,
        modules=("embed", "blocks.0.mlp", "blocks.1.mlp", "head"),
    ),
)
