"""The dashboard panels that runbooks point at."""

from mp_agent.alerting.guidance.record import Panel


def _of(board: str, number: int, title: str) -> Panel:
    return Panel(board=f"mp-agent-{board}", id=number, title=title)


STATE = _of("run", 1, "State")
END = _of("run", 2, "End")
COVERAGE = _of("run", 8, "Coverage")
FIRST_NONFINITE = _of("run", 11, "First non-finite value")
NONFINITE_UPDATES = _of("run", 12, "Non-finite updates")
LOSS = _of("run", 20, "Loss")
LOSS_SCALE = _of("run", 21, "Loss scale")
SKIPPED = _of("run", 22, "Skipped steps and overflow ratio")
LOSS_SCALE_CHANGES = _of("run", 23, "Loss scale changes")
LOSS_SCALE_IN_A_ROW = _of("run", 25, "Loss scale lowered in a row")
LOSS_TREND = _of("run", 26, "Loss trend")
ODD_LOSSES = _of("run", 28, "Odd losses")
LEARNING_RATE = _of("run", 24, "Learning rate")
GRADIENT_NORM = _of("run", 30, "Gradient norm")
CLIPPING = _of("run", 31, "Clipping")
STEPS_BEYOND_LIMITS = _of("run", 35, "Steps beyond the limits")
ZERO_ELEMENTS = _of("run", 33, "Zero elements")
NONFINITE_ELEMENTS = _of("run", 34, "Non-finite elements and steps")
STEPS_PER_SECOND = _of("run", 41, "Steps per second")
RANKS_GONE = _of("ranks", 2, "Ranks gone")
LAGGING_RANKS = _of("ranks", 50, "Which lag")
WHICH_ARE_MISSING = _of("ranks", 51, "Which are missing")
WHICH_DIFFER = _of("ranks", 52, "Which differ")
SLOWDOWN = _of("ranks", 15, "Slowdown of the slowest rank")
SLOWEST_RANKS = _of("ranks", 13, "Slowest before the first collective")
NONFINITE_RANKS = _of("ranks", 21, "Ranks with a non-finite loss")
RANKS_BY_PHASE = _of("ranks", 22, "Ranks by phase")
REPLICAS = _of("ranks", 23, "Replicas")
XID_ERRORS = _of("ranks", 32, "XID errors")
DROPPED_RECORDS = _of("self", 10, "Dropped records")
DROPPED_SERIES = _of("self", 11, "Dropped series")
AGENT_ERRORS = _of("self", 12, "Errors")
DEAD_LAYERS = _of("layers", 31, "Which are dead")
UNDERFLOWING_LAYERS = _of("layers", 33, "Which underflow")
MOST_ZEROS = _of("layers", 11, "Most zeros")
