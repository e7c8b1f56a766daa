"""Runs under adverse conditions: alerts that must still arrive, and those that must not."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from mp_agent.records.steps import Phase
from tests.alerting.noise.events import Event, Fault, Pause, Relaunch, Scenario
from tests.alerting.noise.healthy import FP16, LONG_AGO
from tests.alerting.noise.scrape_effects import Effect, away, begun, doubled, every, missed, moved
from tests.alerting.noise.training import Scaler, Training

Events = Iterator[Event]


@dataclass(frozen=True, slots=True)
class AdverseRun:
    """A scenario, and what lies between it and the rules, from the agent outwards."""

    scenario: Scenario
    effects: tuple[Effect, ...]


def _healthy(random: Random) -> Events:
    yield from Training(random=random, first_step=LONG_AGO, scaler=Scaler()).forever()


def _old_incident(random: Random) -> Events:
    """Explodes, is stepped with NaN and heals, within five minutes; all is well ever since."""
    training = Training(random=random, clip=None, seconds=2.0)
    yield from training.minutes(3)
    yield from training.steps(20, norm=5000.0, loss=9.0)
    of_rank = {1: {"loss": float("nan"), "loss_nonfinite": 1.0}}
    yield from training.steps(3, of_rank=of_rank, nan_elements=4000.0)
    training.seconds = 6.0
    yield from training.forever()


def _low_scale(random: Random) -> Events:
    scaler = Scaler(scale=16384.0, growth_interval=10**9)
    training = Training(random=random, scaler=scaler, seconds=1.0, largest=0.5)
    yield from training.minutes(12)
    yield Fault()
    scaler.scale = 512.0
    yield from training.forever()


def _straggler(random: Random) -> Events:
    training = Training(random=random)
    yield from training.minutes(5)
    yield Fault()
    yield from training.forever(of_rank={2: {"compute_seconds": 4.9}}, seconds=5.3)


def _preempted(random: Random) -> Events:
    """Five times within an hour."""
    while True:
        yield from Training(random=random, first_step=LONG_AGO).minutes(9)
        yield Relaunch(45)


def _rollouts(random: Random) -> Events:
    """Fast updates, and between them rollouts that nothing marks and that grow longer."""
    training = Training(random=random, seconds=0.5)
    yield from training.steps(32)
    for minutes in (5, 8, 11, 14, 9):
        yield Pause(phase=Phase.FORWARD, seconds=60 * minutes)
        yield from training.steps(32)


def _epochs(random: Random) -> Events:
    """The trainer gives its epoch as the step."""
    training = Training(random=random, scaler=Scaler())
    while True:
        yield training.step(step=3)


def _hangs(random: Random) -> Events:
    yield from Training(random=random).minutes(6)
    yield Fault()
    yield Pause(phase=Phase.BACKWARD, seconds=10 * 3600)


_SETTLED_LOW = {"MpAgentLossScaleLow": "warning"}
_IN_FIRST_MINUTES = {"MpAgentLossScaleFarBelowInitial": "critical"}

ADVERSE_RUNS = (
    AdverseRun(
        Scenario(
            name="an-old-incident-in-an-empty-store",
            what="an incident of an hour ago, a Prometheus that starts empty, a target that moves",
            script=_old_incident,
            ranks=2,
            minutes=80,
        ),
        (begun(62), moved(70, "elsewhere:9464")),
    ),
    AdverseRun(
        Scenario(
            name="away-for-half-an-hour",
            what="a Prometheus that is away for 12 and for 33 minutes while a run trains",
            script=_healthy,
            minutes=75,
            # The tool that judges goes on while the Prometheus is away, which no Prometheus does.
            tolerated={"MpAgentRunVanished": "warning"},
        ),
        (away(8, 20), away(35, 68)),
    ),
    AdverseRun(
        Scenario(
            name="low-scale-and-failing-scrapes",
            what="a scale that settles at 512, and every third scrape fails",
            script=_low_scale,
            facts=FP16,
            expected=_SETTLED_LOW,
            minutes=35,
        ),
        (missed(0.3),),
    ),
    AdverseRun(
        Scenario(
            name="low-scale-scraped-once-a-minute",
            what="a scale that settles at 512, a scrape a minute, of which every tenth fails",
            script=_low_scale,
            facts=FP16,
            expected=_SETTLED_LOW,
            minutes=35,
        ),
        (missed(0.1), every(60)),
    ),
    AdverseRun(
        Scenario(
            name="straggler-and-failing-scrapes",
            what="rank 2 computes longer than the others, and every third scrape fails",
            script=_straggler,
            ranks=4,
            expected={"MpAgentRankStraggler": "warning"},
            minutes=25,
        ),
        (missed(0.3),),
    ),
    AdverseRun(
        Scenario(
            name="hang-and-failing-scrapes",
            what="a run that hangs, and every third scrape fails",
            script=_hangs,
            expected={"MpAgentRunStalled": "critical"},
            minutes=40,
        ),
        (missed(0.3),),
    ),
    AdverseRun(
        Scenario(
            name="hang-seen-by-two",
            what="a run that hangs, scraped by two Prometheis once a minute",
            script=_hangs,
            expected={"MpAgentRunStalled": "critical"},
            minutes=40,
        ),
        (every(60), doubled(replica="b")),
    ),
    AdverseRun(
        Scenario(
            name="preempted-and-scraped-twice",
            what="five pre-emptions within an hour, the target scraped under two addresses",
            script=_preempted,
            minutes=60,
        ),
        (doubled(instance="twin:9464", pod="twin"),),
    ),
    AdverseRun(
        Scenario(
            name="healthy-and-failing-scrapes",
            what="a healthy run of which every third scrape fails, under changing addresses",
            script=_healthy,
            minutes=40,
        ),
        (missed(0.3), moved(15, "b:9464"), moved(30, "c:9464")),
    ),
    AdverseRun(
        Scenario(
            name="rollouts",
            what="rollouts of up to fourteen minutes between fast updates, which nothing marks",
            script=_rollouts,
            minutes=49,
        ),
        (),
    ),
    AdverseRun(
        Scenario(
            name="epochs-as-steps",
            what="a trainer that gives its epoch as the step",
            script=_epochs,
            facts=FP16,
            minutes=40,
        ),
        (),
    ),
)
