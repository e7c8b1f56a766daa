"""The dashboard panels that runbooks point at."""

from mp_agent.alerting.guidance.record import Panel


def _of(board: str, number: int, title: str) -> Panel:
    return Panel(board=f"mp-agent-{board}", id=number, title=title)


STATE = _of("run", 1, "State")
ENDED = _of("run", 2, "Ended")
COVERAGE = _of("run", 8, "Coverage")
FIRST_NONFINITE = _of("run", 11, "First non-finite value")
NONFINITE_UPDATES = _of("run", 12, "Updates with non-finite gradients")
LOSS = _of("run", 20, "Loss")
LOSS_SCALE = _of("run", 21, "Loss scale")
SKIPPED = _of("run", 22, "Skipped steps and overflow ratio")
LOSS_SCALE_CHANGES = _of("run", 23, "Loss scale changes")
LEARNING_RATE = _of("run", 24, "Learning rate")
GRADIENT_NORM = _of("run", 30, "Gradient norm")
CLIPPING = _of("run", 31, "Clipping")
ZERO_ELEMENTS = _of("run", 33, "Zero elements")
NONFINITE_ELEMENTS = _of("run", 34, "Non-finite elements and steps")
STEP_TIME = _of("run", 40, "Step time")
STEPS_PER_SECOND = _of("run", 41, "Steps per second")
RANKS_GONE = _of("ranks", 2, "Ranks gone")
MISSING_RANKS = _of("ranks", 3, "Missing ranks")
STEP_LAG = _of("ranks", 10, "Ranks by step lag")
FURTHEST_BEHIND = _of("ranks", 11, "Furthest behind")
SLOWEST_RANKS = _of("ranks", 13, "Slowest before the first collective")
LOSS_SPREAD = _of("ranks", 20, "Spread of the ranks' losses")
NONFINITE_RANKS = _of("ranks", 21, "Ranks with a non-finite loss")
RANKS_BY_PHASE = _of("ranks", 22, "Ranks by phase")
XID_ERRORS = _of("ranks", 32, "XID errors")
DROPPED_RECORDS = _of("self", 10, "Dropped records")
DROPPED_SERIES = _of("self", 11, "Dropped series")
AGENT_ERRORS = _of("self", 12, "Errors")
