"""How the log-probabilities of trainer and sampler differ."""

from mp_agent.records.algebra import Algebra
from mp_agent.records.columns.column import Column
from mp_agent.records.columns.family import ColumnFamily

DELTA_EDGES: tuple[float, ...] = tuple(2.0 ** (quarter / 4) for quarter in range(-56, 25))
"""Upper edges of the bins of |Δ|, from 2^-14 to 2^6 in steps of 2^(1/4), each within its bin; the
first bin begins at 0, and after the last edge comes one more bin."""


def delta_column(place: int) -> str:
    """Return the name of the column of a bin of |Δ|, by its place from 0 on."""
    return f"delta_bin_{place}"


def _logprobs(name: str, algebra: Algebra, meaning: str, *, signed: bool = False) -> Column:
    return Column(name, algebra, meaning, signed=signed)


LOGPROBS = ColumnFamily(
    name="logprobs",
    row="tokens of which a rank reported log-probabilities by trainer and sampler; Δ is the "
    "trainer's less the sampler's",
    columns=(
        _logprobs("tokens", Algebra.SUM, "tokens compared"),
        _logprobs(
            "nonfinite_tokens",
            Algebra.SUM,
            "tokens left out, of which a log-probability is NaN, Inf or beyond ±1e100",
        ),
        _logprobs("refused_calls", Algebra.SUM, "calls with what cannot be compared"),
        _logprobs(
            "clipped_tokens", Algebra.SUM, "tokens with a Δ above 300, whose weight is exp(300)"
        ),
        _logprobs("delta_sum", Algebra.SUM, "sum of Δ", signed=True),
        _logprobs("delta_sum_squares", Algebra.SUM, "sum of Δ²"),
        _logprobs("k3_sum", Algebra.SUM, "sum of exp(Δ) - 1 - Δ"),
        _logprobs("weight_sum", Algebra.SUM, "sum of the importance weights exp(Δ)"),
        _logprobs("weight_sum_squares", Algebra.SUM, "sum of their squares"),
        _logprobs(
            "trainer_sum", Algebra.SUM, "sum of the trainer's log-probabilities", signed=True
        ),
        _logprobs("trainer_sum_squares", Algebra.SUM, "sum of their squares"),
        _logprobs("trainer_delta_sum", Algebra.SUM, "sum of their products with Δ", signed=True),
        *(
            _logprobs(
                delta_column(place),
                Algebra.SUM,
                "tokens whose |Δ| is "
                + (
                    f"up to {DELTA_EDGES[place]:.6g}, above the edge before"
                    if place < len(DELTA_EDGES)
                    else f"above {DELTA_EDGES[-1]:.6g}"
                ),
            )
            for place in range(len(DELTA_EDGES) + 1)
        ),
        _logprobs("delta_abs_max", Algebra.MAX, "largest |Δ|; absent without any token"),
    ),
    key="tokens",
    required=("tokens",),
    size="tokens",
    of_parameters=False,
    of_some_ranks=True,
)
"""Without layers: on the steps on which a rank reported any, one row of its share."""
