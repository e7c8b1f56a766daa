"""Metrics of the batches that the model gets."""

from mp_agent.catalog.metric import Reading, gauge, info
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


REPEATED_STEPS = gauge(
    "mp_agent.batch.repeated.steps",
    "{step}",
    help="Steps since the model first got the batch that it has got at every look since then, "
    "once it is sure that there are other batches; else 0. Two steps of every 13 are looked at.",
    read=lambda run: 0.0 if run.batches.repeated is None else float(run.batches.repeated.steps),
)
REPEATED = info(
    "mp_agent.repeated_batch.info",
    labels=("ranks", "step"),
    help="The ranks whose model gets one and the same batch, and the first step that is known.",
    read=_repeated,
)
DOUBLED_PAIRS = gauge(
    "mp_agent.batch.doubled.pairs",
    "{pair}",
    help="Of the last eight pairs of neighbouring steps that were looked at, those with the same "
    "batch, another one than at the look before, where the workers of a DataLoader over an "
    "IterableDataset had delivered one for each; 0 below two.",
    read=lambda run: float(run.batches.doubled),
)
SHARED_STEPS = gauge(
    "mp_agent.batch.shared.steps",
    "{step}",
    help="Steps since ranks that average their gradients have had the same batches at every "
    "look, once that is sure; else 0. Two steps of every 13 are looked at.",
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
    help="The ranks whose batches have a single row, and the number of rows that is usual.",
    read=_single,
)

BATCH_METRICS = (
    REPEATED_STEPS,
    REPEATED,
    DOUBLED_PAIRS,
    SHARED_STEPS,
    SHARED,
    SINGLE_ROW_RANKS,
    SINGLE_ROW,
)
