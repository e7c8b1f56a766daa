"""What a runbook says about an alert, and the panels that it shows."""

from dataclasses import dataclass

from mp_agent.errors import CatalogError

RUN_MARK = "RUN"
"""Stands for the run's name in a query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A dashboard panel that shows the condition; ids and uids are stable."""

    board: str
    id: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Runbook text for the person who handles the alert.

    harm: severity: what is lost while it lasts, and how soon to act.
    query: PromQL that confirms it, for the run named RUN; reading: how to interpret the result.
    causes: likely ones, most likely first. false_positives: cases in which the run is healthy.
    samples: names of the code samples for the fix, without `.py`; the first is the main one.
    panels: dashboard panels; the first shows the condition best.
    """

    harm: str
    query: str
    reading: str
    causes: tuple[str, ...]
    false_positives: tuple[str, ...]
    samples: tuple[str, ...]
    panels: tuple[Panel, ...]

    def __post_init__(self) -> None:
        texts = (self.harm, self.reading, *self.causes, *self.false_positives)
        if not (self.causes and self.false_positives and self.samples and self.panels):
            raise CatalogError("causes, false positives, samples and panels are never empty")
        for text in texts:
            if not text.endswith("."):
                raise CatalogError(f"{text!r} is not a complete sentence")
        if f'run="{RUN_MARK}"' not in self.query:
            raise CatalogError(f"{self.query!r} is not of one run")


def _of(board: str, number: int, title: str) -> Panel:
    return Panel(board=f"mp-agent-{board}", id=number, title=title)


STATE = _of("run", 1, "State")
END = _of("run", 2, "End")
COVERAGE = _of("run", 8, "Coverage")
FIRST_NONFINITE = _of("run", 11, "First non-finite value")
NONFINITE_UPDATES = _of("run", 12, "Non-finite updates")
CODE_FINDINGS = _of("run", 16, "Mistakes in the code")
LOSS = _of("run", 20, "Loss")
LOSS_SCALE = _of("run", 21, "Loss scale")
SKIPPED = _of("run", 22, "Skipped steps and overflow ratio")
LOSS_SCALE_CHANGES = _of("run", 23, "Loss scale changes")
LOSS_SCALE_IN_A_ROW = _of("run", 25, "Loss scale lowered in a row")
LOSS_TREND = _of("run", 26, "Loss trend")
BATCHES = _of("run", 29, "Batches that repeat")
ODD_LOSSES = _of("run", 28, "Odd losses")
LEARNING_RATE = _of("run", 24, "Learning rate")
GRADIENT_NORM = _of("run", 30, "Gradient norm")
CLIPPING = _of("run", 31, "Clipping")
STEPS_BEYOND_LIMITS = _of("run", 35, "Steps beyond the limits")
ZERO_ELEMENTS = _of("run", 33, "Zero elements")
NONFINITE_ELEMENTS = _of("run", 34, "Non-finite elements and steps")
FLUSHED = _of("run", 64, "Lost in FP16 at the loss scale")
GRADIENT_EXPONENTS = _of("run", 65, "Gradients by magnitude")
UPDATE_SIZE = _of("run", 60, "Size of updates")
SECOND_MOMENT = _of("run", 61, "Gradients against the second moment")
ROUNDED_UPDATES = _of("run", 62, "Updates lost in rounding")
TRAINED_PARAMETERS = _of("run", 66, "Parameters that are not trained")
ADAM_EPSILON = _of("run", 63, "Adam's epsilon")
STEPS_PER_SECOND = _of("run", 41, "Steps per second")
RANKS_GONE = _of("ranks", 2, "Ranks gone")
LAGGING_RANKS = _of("ranks", 50, "Which lag")
WHICH_ARE_MISSING = _of("ranks", 51, "Which are missing")
WHICH_DIFFER = _of("ranks", 52, "Which differ")
SLOWDOWN = _of("ranks", 15, "Slowdown of the slowest rank")
SLOWEST_RANKS = _of("ranks", 13, "Slowest before the first collective")
SLOW_PARTS = _of("ranks", 18, "Furthest from the mean, by part")
NONFINITE_RANKS = _of("ranks", 21, "Ranks with a non-finite loss")
RANKS_BY_PHASE = _of("ranks", 22, "Ranks by phase")
RANK_LOSSES = _of("ranks", 20, "Spread of the ranks' losses")
REPLICAS = _of("ranks", 23, "Replicas")
XID_ERRORS = _of("ranks", 32, "XID errors")
DROPPED_RECORDS = _of("self", 10, "Dropped records")
DROPPED_SERIES = _of("self", 11, "Dropped series")
AGENT_ERRORS = _of("self", 12, "Errors")
DEAD_LAYERS = _of("layers", 31, "Which are dead")
UNDERFLOWING_LAYERS = _of("layers", 33, "Which underflow")
MOST_ZEROS = _of("layers", 11, "Most zeros")
ACTIVATIONS = _of("run", 50, "Size of activations")
ATTENTION_LOGITS = _of("run", 52, "Attention logits")
OUTPUT_LOGITS = _of("run", 53, "Log-sum-exp of output logits")
ROUTER_LOAD = _of("run", 54, "Load of experts")
ROUTER_ENTROPY = _of("run", 55, "Entropy of routers")
FP8_FLUSHED = _of("run", 56, "Flushed to zero by FP8")
FP8_RANGE = _of("run", 57, "Range used by delayed scaling")
ACTIVATIONS_NONFINITE = _of("run", 51, "Non-finite activations")
LOGPROB_KL = _of("run", 80, "Divergence of sampler and trainer")
LOGPROB_DELTA = _of("run", 81, "Difference of log-probabilities")
LOGPROB_WEIGHTS = _of("run", 82, "Effective sample size")
POLICY_ENTROPY = _of("run", 85, "Entropy of the policy")
RANGE_OF_TENSORS = _of("run", 90, "Range of watched tensors")
SWALLOWED_TERMS = _of("run", 91, "Terms lost in sums")
