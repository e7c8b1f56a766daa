"""Routers of layers with a mixture of experts, on sampled steps."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import sampled
from mp_agent.records.columns.family import ColumnFamily

ROUTERS = ColumnFamily(
    name="routers",
    row="tokens that a router distributes over experts, of every rank's own part of the batch",
    columns=(
        sampled("tokens", Algebra.SUM, "tokens routed, those of padding among them"),
        sampled(
            "nonfinite_tokens",
            Algebra.SUM,
            "tokens with a NaN or +Inf among their logits; absent where no logits are seen",
        ),
        sampled(
            "entropy_tokens",
            Algebra.SUM,
            "tokens of the next column; absent where no logits are seen, and with one expert",
        ),
        sampled(
            "entropy_sum",
            Algebra.SUM,
            "sum of the entropies of softmax over the logits of a token, each divided by the "
            "logarithm of the number of experts",
        ),
        sampled(
            "logit_abs_max",
            Algebra.MAX,
            "largest magnitude of a finite logit; absent where only probabilities are seen",
        ),
        sampled(
            "load_max",
            Algebra.MAX,
            "tokens that the most loaded expert is chosen for, divided by the mean over the "
            "experts, on the rank where that is largest",
        ),
        sampled("experts", Algebra.SUM, "experts to choose from, of all ranks together"),
        sampled("unused_experts", Algebra.SUM, "those that no token of their rank is routed to"),
        sampled(
            "limited_choices",
            Algebra.SUM,
            "choices of an expert by a token, where experts have a capacity; absent where the "
            "router does not show it",
        ),
        sampled("dropped_choices", Algebra.SUM, "those beyond the capacity of their expert"),
    ),
    key="tokens",
    required=("tokens", "load_max"),
    size="tokens",
    of_parameters=False,
)
"""Rows count with tokens whose logits are not finite: their entropy is left out, their choices are
not."""
