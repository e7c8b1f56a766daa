"""Metrics of the batches of a run, and of ranks whose losses are unlike all others'."""

from mp_agent.catalog.metric import Reading, counter, gauge, info
from mp_agent.records.health import OddRank
from mp_agent.records.views import RunView

_NAMED_AT_MOST = 16


def _named(ranks: tuple[int, ...]) -> str:
    more = ", …" if len(ranks) > _NAMED_AT_MOST else ""
    return ", ".join(map(str, ranks[:_NAMED_AT_MOST])) + more


def _repeated(run: RunView) -> Reading:
    found = run.batches.repeated
    if found is None:
        return None
    return {("all" if found.of_all else _named(found.ranks), str(found.step)): 1.0}


def _shared(run: RunView) -> Reading:
    found = run.batches.shared
    return None if found is None else {(_named(found.ranks), str(found.step)): 1.0}


def _single(run: RunView) -> Reading:
    found = run.batches.single
    return None if found is None else {(_named(found.ranks), f"{found.usual_rows:.0f}"): 1.0}


def _odd(found: OddRank | None) -> Reading:
    if found is None:
        return None
    numbers = (found.loss, found.usual, found.highest)
    return {(str(found.rank), *(f"{number:.4g}" for number in numbers)): 1.0}


REPEATED_STEPS = gauge(
    "mp_agent.batch.repeated.steps",
    "{step}",
    help="Steps since the model first got the batch that it has got at every look since then, "
    "once it is sure that there are other batches; else 0. Two steps of every 16 are looked at.",
    read=lambda run: 0.0 if run.batches.repeated is None else float(run.batches.repeated.steps),
)
REPEATED = info(
    "mp_agent.repeated_batch.info",
    labels=("ranks", "step"),
    help="The ranks whose model gets one and the same batch, and the first step that is known.",
    read=_repeated,
)
SHARED_STEPS = gauge(
    "mp_agent.batch.shared.steps",
    "{step}",
    help="Steps since ranks that average their gradients have had the same batches at every "
    "look, once that is sure; else 0. Two steps of every 16 are looked at.",
    read=lambda run: 0.0 if run.batches.shared is None else float(run.batches.shared.steps),
)
SHARED = info(
    "mp_agent.shared_batch.info",
    labels=("ranks", "step"),
    help="The ranks that have the batch of another rank, and the first step that is known.",
    read=_shared,
)
SINGLE_ROW_RANKS = gauge(
    "mp_agent.batch.single_row.ranks",
    "{rank}",
    help="Ranks whose batches have a single row at every look, while those of the other ranks, or "
    "of the run's past, have four or more.",
    read=lambda run: 0.0 if run.batches.single is None else float(len(run.batches.single.ranks)),
)
SINGLE_ROW = info(
    "mp_agent.single_row_batch.info",
    labels=("ranks", "usual"),
    help="These ranks, and the number of rows that is usual.",
    read=_single,
)

BATCH_METRICS = (
    REPEATED_STEPS,
    REPEATED,
    SHARED_STEPS,
    SHARED,
    SINGLE_ROW_RANKS,
    SINGLE_ROW,
)

RANK_OUTLIER_STEPS = counter(
    "mp_agent.rank_loss.outlier.steps",
    "{step}",
    help="Steps at which three or more of the last 64 losses of one rank were far above all losses "
    "that the other ranks had within them.",
    count=lambda change: float(change.loss_outliers),
)
RANK_OUTLIER = info(
    "mp_agent.rank_loss_outlier.info",
    labels=("rank", "loss", "usual", "highest"),
    help="The rank, its highest loss, the usual loss, and the highest of all other ranks.",
    read=lambda run: _odd(run.loss_outliers),
)
RANK_LEVEL_STEPS = gauge(
    "mp_agent.rank_loss.level.steps",
    "{step}",
    help="Losses of one rank, of the last 32, by which its level is twice as high as that of all "
    "other ranks, or half as high; else 0.",
    read=lambda run: 0.0 if run.loss_level is None else float(run.loss_level.steps),
)
RANK_LEVEL = info(
    "mp_agent.rank_loss_level.info",
    labels=("rank", "loss", "usual", "highest"),
    help="The rank, its usual loss, that of the others, and the upper quartile of these.",
    read=lambda run: _odd(run.loss_level),
)

RANK_LOSS_METRICS = (RANK_OUTLIER_STEPS, RANK_OUTLIER, RANK_LEVEL_STEPS, RANK_LEVEL)
