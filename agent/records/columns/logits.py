"""Logits of attention and of the output, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

ATTENTION = ColumnFamily(
    name="attention",
    row="attention logits of a few heads and positions, of every rank's own part of the batch",
    columns=(
        sampled("elements", Algebra.SUM, "logits looked at, those that are masked left out"),
        sampled("nonfinite_elements", Algebra.SUM, "those that are NaN or Inf"),
        sampled("logit_max", Algebra.MAX, "the largest finite one", signed=True),
    ),
    key="elements",
    required=("elements", "logit_max"),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the largest leaves those out."""

LOGITS = ColumnFamily(
    name="logits",
    row="rows of the logits that the loss is of, a few of every rank's own part of the batch",
    columns=(
        sampled("rows", Algebra.SUM, "rows looked at, those with an ignored target left out"),
        sampled("nonfinite_rows", Algebra.SUM, "those whose log-sum-exp is NaN or Inf"),
        sampled("logit_max", Algebra.MAX, "the largest finite logit", signed=True),
        sampled("logsumexp_max", Algebra.MAX, "the largest finite log-sum-exp", signed=True),
        sampled("logsumexp_min", Algebra.MIN, "the smallest finite log-sum-exp", signed=True),
        sampled("logsumexp_sum", Algebra.SUM, "sum of the finite log-sum-exps", signed=True),
    ),
    key="rows",
    required=("rows",),
    size="rows",
    of_parameters=False,
)
"""Rows count with log-sum-exps that are not finite: the other columns leave those out."""
