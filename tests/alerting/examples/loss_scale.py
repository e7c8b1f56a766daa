"""Examples of alerts on the loss scale: low, falling, at its floor."""

from collections.abc import Iterable
from itertools import pairwise

from mp_agent.alerting.conditions.loss_scale import _DESCRIPTION, _description
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.loss_scale import LossScaleTracker
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from tests.agent.node.builders import merged_step
from tests.alerting.examples.example import Example, Examples, Track, halving, ramp

LATE = 5000
"""Steps of a run that is long past its calibration."""
_LOW = (
    "loss_scale_reduced",
    "loss_scale_very_low",
    "loss_scale_low",
    "loss_scale_share_of_initial",
)


def flat(scale: float, minutes: int) -> tuple[float, ...]:
    """Return the same scale for so many minutes."""
    return (scale,) * minutes


def scaled(
    *scales: float,
    after: int = LATE,
    initial: float = 65536,
    calibrated: float | None = None,
    steps: int = 60,
) -> tuple[Track, ...]:
    """Return what the node agent makes of a scale, given by the minute.

    after: steps of the attempt before minute 0. calibrated: the scale then, if it was another.
    steps: so many a minute.
    """
    first = calibrated or scales[0]
    tracker = LossScaleTracker(initial=initial, scale=scales[0])
    if after >= 500:
        tracker.calibrated, tracker.changes = first, [(500, first), (501, scales[0])]
    context = AccountContext(resolve({}), 120.0, Progress())
    counts, in_row, known = [0.0], list[float](), list[float | None]()
    low: dict[str, list[float | None]] = {name: [] for name in _LOW}
    for minute, scale in enumerate(scales):
        for step in range(steps):
            sequence = after + minute * steps + step
            tracker.observe(merged_step(sequence, loss_scale=scale), context)
            counts[-1] += tracker.lowered_again
        counts.append(counts[-1])
        known.append(tracker.calibrated)
        in_row.append(tracker.consecutive_decreases)
        for name, values in low.items():
            values.append(tracker.low_steps.get(name))
    moves = [0.0, *(after - before for before, after in pairwise(scales))]
    return (
        Track(training.LOSS_SCALE, scales),
        Track(training.LOSS_SCALE_INITIAL, (initial,)),
        Track(training.LOSS_SCALE_CALIBRATED, tuple(known)),
        Track(training.LOSS_SCALE_DECREASES, _counted(move < 0 for move in moves)),
        Track(training.LOSS_SCALE_INCREASES, _counted(move > 0 for move in moves)),
        Track(training.LOSS_SCALE_CONSECUTIVE_DECREASES, tuple(in_row)),
        Track(training.LOSS_SCALE_LOWERED_AGAIN, tuple(counts[:-1])),
        *(
            Track(training.LOSS_SCALE_LOW_STEPS, tuple(values), {"limit": name})
            for name, values in low.items()
        ),
    )


def _counted(events: Iterable[bool]) -> tuple[float, ...]:
    total, found = 0.0, list[float]()
    for event in events:
        total += event
        found.append(total)
    return tuple(found)


def _falling_fires(scale: int) -> str:
    return _DESCRIPTION.replace("{run}", "demo").replace("{value|number}", str(scale))


def _low_fires(bound: str, scale: str) -> str:
    return _description(bound).replace("{run}", "demo").replace("{value|number}", scale)


Severities = dict[str, tuple[Severity, ...]]

_STAYS_LOW: Severities = {"MpAgentLossScaleLow": (Severity.INFO, Severity.WARNING)}
_FAR_BELOW: Severities = {"MpAgentLossScaleFarBelowInitial": (Severity.CRITICAL,)}
_FALLING: Severities = {"MpAgentLossScaleLowAndFalling": (Severity.WARNING,)}
_IN_ROW: Severities = {"MpAgentLossScaleConsecutiveDecreases": (Severity.WARNING,)}

_COLLAPSE = Example(
    title="the scale collapses long after calibration; the alert lasts longer",
    minutes=48,
    tracks=scaled(*flat(65536, 20), *halving(32768, 14), *flat(512, 15)),
    fires={Severity.WARNING: _falling_fires(4)},
    at=40,
    not_yet=(28, 47),
    also=_STAYS_LOW | _FAR_BELOW | _IN_ROW,
)

_SLOWLY = Example(
    title="a run calibrated to 512 whose scale is halved every twenty minutes",
    minutes=66,
    tracks=scaled(*flat(512, 20), *flat(256, 20), *flat(128, 20), *flat(64, 7), initial=512),
    fires={Severity.WARNING: _falling_fires(64)},
    at=64,
    not_yet=(59,),
)

_AT_ONCE = Example(
    title="three decreases within minutes, to a quarter of the calibrated value",
    minutes=28,
    tracks=scaled(*flat(512, 20), 256, 128, *flat(64, 7), initial=512, calibrated=256),
    fires={Severity.WARNING: _falling_fires(64)},
    at=25,
    not_yet=(21,),
)

_SETTLED = Example(
    title="a scale that fell long ago, and has stayed at 64",
    minutes=15,
    tracks=scaled(*flat(64, 16), initial=512, after=90_000, calibrated=512),
)

_CALIBRATED_LOW = Example(
    title="a scale of 64 after calibration from 512",
    minutes=15,
    tracks=scaled(512, *flat(64, 15), after=0, initial=512),
)

_SAWTOOTH = Example(
    title="a sawtooth between 64 and 128",
    minutes=30,
    tracks=scaled(*(64, 64, 128, 64) * 7, *flat(64, 3), initial=128),
)

_CALIBRATION = Example(
    title="calibration from 65536 to 64",
    minutes=40,
    tracks=scaled(65536, *halving(32768, 6), *flat(64, 34), after=0),
    also=_STAYS_LOW,
)

_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt",
    minutes=30,
    tracks=(
        *scaled(*flat(65536, 6), *halving(32768, 5), *flat(64, 20), after=0, steps=40),
        Track(training.LOSS_SCALE_DECREASES, (*flat(40, 7), *ramp(41, 1, 10))),
    ),
    also={"MpAgentLossScaleLow": (Severity.WARNING,)},
)

_HUNG = Example(
    title="a run that hung while the scale was falling",
    minutes=9,
    tracks=scaled(*flat(256, 3), 16, initial=512, calibrated=512, steps=20),
)

_LOW_ON_PURPOSE = Example(
    title="a run that starts below the limit on purpose",
    minutes=30,
    tracks=scaled(*flat(64, 20), *halving(32, 4), initial=64),
)


_STUCK = Example(
    title="steps overflow at a scale that stays at 1; the alert lasts longer",
    minutes=20,
    tracks=(
        Track(training.LOSS_SCALE, (*flat(4, 10), *flat(1, 6), 2)),
        Track(training.LOSS_SCALE_INITIAL, (16,)),
        Track(training.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 11), *ramp(30, 60, 10))),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo is down to 1 and gradients still overflow: "
        "GradScaler skips its steps."
    },
    at=20,
    not_yet=(10,),
)

_STORM = Example(
    title="overflow from the first step on, first scraped when the scale is below 1",
    minutes=6,
    tracks=(
        Track(training.LOSS_SCALE, (None, None, 0.25)),
        Track(training.LOSS_SCALE_DECREASES, (None, None, 18)),
        Track(training.SKIPPED_STEPS, (None, None, 18)),
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo is down to 0.25 and gradients still "
        "overflow: GradScaler skips its steps."
    },
    at=2,
    not_yet=(1,),
)

_ONE_DIP = Example(
    title="one dip to 1, where the scale stays for 2000 steps without overflow",
    minutes=40,
    tracks=scaled(*flat(2, 5), *flat(1, 33), 2, initial=16),
)

_ENDED_AT_FLOOR = Example(
    title="a burst of overflows that has ended, with the scale recovering",
    minutes=20,
    tracks=(
        Track(training.LOSS_SCALE, (4,)),
        Track(training.LOSS_SCALE_INITIAL, (16,)),
        Track(training.LOSS_SCALE_FLOOR_STALLS, (*flat(0, 10), 1, 2, 3, 4)),
    ),
)

_NO_SCALER = Example(
    title="a run without a scaler",
    minutes=10,
    without=(training.LOSS_SCALE, training.LOSS_SCALE_INITIAL),
)


_FIVE = Example(
    title="five decreases, one per minute, and no increase; the alert lasts longer",
    minutes=50,
    tracks=scaled(*flat(65536, 20), *halving(32768, 5), *flat(65536, 26)),
    fires={
        Severity.WARNING: "The loss scale of run demo was lowered <loss_scale_decreases_in_row> or "
        "more consecutive times within <loss_scale_change_steps> steps."
    },
    at=36,
    not_yet=(23, 50),
)

_FOUR_AND_UP = Example(
    title="four decreases, then one growth",
    minutes=40,
    tracks=scaled(*flat(65536, 20), *halving(32768, 4), 8192, *halving(4096, 4)),
)

_FAR_APART = Example(
    title="five decreases, far apart",
    minutes=60,
    tracks=scaled(*(65536 * 0.5 ** (min(minute, 44) // 9) for minute in range(61))),
    also={"MpAgentLossScaleLow": (Severity.INFO,)},
)

_IN_ROW_CALIBRATION = Example(
    title="calibration from 65536 to 1024",
    minutes=25,
    tracks=scaled(*halving(65536, 7), *flat(16384, 19), after=0),
)

_UP_AND_DOWN = Example(
    title="a scale of short growth intervals that goes up and down every minute",
    minutes=30,
    tracks=scaled(*(65536, 32768) * 15),
)


_COLLAPSED = Example(
    title="a scale that falls from 65536 to 512 over an afternoon; the alert lasts longer",
    minutes=165,
    tracks=scaled(
        *(65536 * 0.5 ** (minute // 18) for minute in range(132)),
        *flat(512, 10),
        *flat(65536, 24),
        calibrated=16384,
    ),
    fires={
        Severity.CRITICAL: "The loss scale of run demo has fallen to 512, less than "
        "<loss_scale_share_of_initial> of its initial value, for "
        "<loss_scale_share_of_initial_steps> steps or more."
    },
    at=148,
    not_yet=(128, 164),
    also=_STAYS_LOW,
)

_CALIBRATING = Example(
    title="calibration that overshoots to 512 and recovers",
    minutes=30,
    tracks=scaled(*halving(65536, 8), *flat(512, 4), *flat(16384, 19), after=0, steps=40),
)

_ENDS_LOW = Example(
    title="calibration that ends at 64: low, but no collapse",
    minutes=45,
    tracks=scaled(65536, *flat(64, 45), after=0),
    also=_STAYS_LOW,
)

_AT_THE_BORDER = Example(
    title="one halving of a scale that was just above the limit after calibration",
    minutes=9,
    tracks=scaled(1024, *flat(512, 9)),
)

_FELL_ON = Example(
    title="a scale that falls from 512, where calibration had left it, to 64",
    minutes=80,
    tracks=scaled(*flat(512, 20), *flat(256, 20), *flat(128, 20), *flat(64, 21)),
    also=_STAYS_LOW | _FALLING,
)

_COLLAPSED_FROM_LOW = Example(
    title="a scale that collapses from 512, where calibration had left it, to 4",
    minutes=40,
    tracks=scaled(*flat(512, 20), *halving(256, 7), *flat(4, 14)),
    fires={
        Severity.CRITICAL: "The loss scale of run demo has fallen to 4, less than "
        "<loss_scale_share_of_initial> of its initial value, for "
        "<loss_scale_share_of_initial_steps> steps or more."
    },
    at=38,
    not_yet=(25,),
    also=_STAYS_LOW | _FALLING | _IN_ROW,
)

_FAR_BELOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt",
    minutes=15,
    tracks=scaled(*flat(65536, 5), *flat(64, 7), *flat(16384, 4), after=0, steps=40),
)

_BRIEF = Example(
    title="a dip of some steps",
    minutes=30,
    tracks=scaled(*flat(65536, 20), *flat(512, 3), *flat(16384, 8)),
)

_FAR_BELOW_HUNG = Example(
    title="a run that hung right after its scale fell",
    minutes=18,
    tracks=scaled(*flat(65536, 10), 512),
)


_BOTH = Example(
    title="a scale that settles at 512; the alert lasts beyond the next increase",
    minutes=62,
    tracks=scaled(*flat(8192, 20), *flat(512, 30), *flat(65536, 13)),
    fires={
        Severity.WARNING: _low_fires("loss_scale_very_low", "512"),
        Severity.INFO: _low_fires("loss_scale_reduced", "512"),
    },
    at=54,
    not_yet=(13, 61),
    also=_FAR_BELOW,
)

_REDUCED_ONLY = Example(
    title="a scale of 8192 for a long time",
    minutes=35,
    tracks=scaled(*flat(65536, 10), *flat(8192, 26)),
    fires={Severity.INFO: _low_fires("loss_scale_reduced", "8192")},
    at=30,
    not_yet=(23,),
)

_PASSING = Example(
    title="dips below both limits for some hundred steps",
    minutes=50,
    tracks=scaled(
        *flat(65536, 10), *flat(8192, 13), *flat(65536, 12), *flat(1000, 8), *flat(65536, 8)
    ),
)

_ON_PURPOSE = Example(
    title="an initial scale of 4096 that stays",
    minutes=25,
    tracks=scaled(*flat(4096, 26), initial=4096),
)

_LOWER_ON_PURPOSE = Example(
    title="an initial scale of 512 that stays",
    minutes=25,
    tracks=scaled(*flat(512, 26), initial=512),
)

_LONG_CALIBRATION = Example(
    title="a long calibration that ends high",
    minutes=60,
    tracks=scaled(65536, *flat(512, 45), *flat(32768, 15), after=0, steps=10),
)

_LOW_CALIBRATION_AGAIN = Example(
    title="calibration of the next attempt",
    minutes=35,
    tracks=scaled(*flat(65536, 10), *flat(512, 10), *flat(32768, 16), after=0, steps=24),
)

_LOW_HUNG = Example(
    title="a run that hung with a low scale",
    minutes=29,
    tracks=scaled(*flat(65536, 8), 1000, 1000),
)


EXAMPLES = {
    "MpAgentLossScaleLowAndFalling": Examples(
        firing=(_COLLAPSE, _SLOWLY, _AT_ONCE),
        quiet=(
            _SAWTOOTH,
            _CALIBRATION,
            _CALIBRATION_AGAIN,
            _HUNG,
            _SETTLED,
            _CALIBRATED_LOW,
            _LOW_ON_PURPOSE,
        ),
    ),
    "MpAgentLossScaleAtFloor": Examples(
        firing=(_STUCK, _STORM),
        quiet=(_ONE_DIP, _ENDED_AT_FLOOR, _NO_SCALER),
    ),
    "MpAgentLossScaleConsecutiveDecreases": Examples(
        firing=(_FIVE,),
        quiet=(
            _FOUR_AND_UP,
            _FAR_APART,
            _UP_AND_DOWN,
            _IN_ROW_CALIBRATION,
            _CALIBRATION_AGAIN,
        ),
    ),
    "MpAgentLossScaleFarBelowInitial": Examples(
        firing=(_COLLAPSED, _COLLAPSED_FROM_LOW),
        quiet=(
            _CALIBRATING,
            _ENDS_LOW,
            _FELL_ON,
            _AT_THE_BORDER,
            _FAR_BELOW_CALIBRATION_AGAIN,
            _BRIEF,
            _FAR_BELOW_HUNG,
        ),
    ),
    "MpAgentLossScaleLow": Examples(
        firing=(_BOTH, _REDUCED_ONLY),
        quiet=(
            _PASSING,
            _ON_PURPOSE,
            _LOWER_ON_PURPOSE,
            _LONG_CALIBRATION,
            _LOW_CALIBRATION_AGAIN,
            _LOW_HUNG,
        ),
    ),
}
