"""Families of what is measured on request, from activations to log-probabilities."""

from mp_agent.records.columns.column import Algebra, Column, ColumnFamily, sampled

ACTIVATIONS = ColumnFamily(
    name="activations",
    row="elements of the outputs of modules, of every rank's own part of the batch",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("sum", Algebra.SUM, "sum of the finite elements", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of squares of the finite elements"),
        sampled("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
        sampled("zero_elements", Algebra.SUM, "elements equal to zero (either sign)"),
        sampled("nan_elements", Algebra.SUM, "elements that are NaN"),
        sampled("inf_elements", Algebra.SUM, "elements that are +Inf or -Inf"),
        sampled(
            "near_overflow_elements",
            Algebra.SUM,
            "finite elements of FP16 outputs with a magnitude above `fp16_near_overflow`",
        ),
        sampled(
            "nonfinite_call",
            Algebra.MIN,
            "which call of a module in the step, counted from 0, was the first with an output that "
            "is not finite; absent without any",
        ),
        sampled(
            "nonfinite_gradient_call",
            Algebra.MIN,
            "which gradient of an output or input of a module was the first in backward, counted "
            "from 0, that is not finite, if it is that of this module's output",
        ),
        sampled(
            "nonfinite_backward_call",
            Algebra.MIN,
            "the same number, if it is the gradient of this module's input and not of its output: "
            "then it arose in this module",
        ),
    ),
    key="elements",
    required=("elements", "abs_max"),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""


EXPONENTS = tuple(range(-48, 16, 4))
"""Lower bounds of the bins of a gradient's magnitudes, as powers of two; each is 4 binades wide.
The first bin has all smaller numbers but zero as well, the last all larger ones."""


def exponent_column(exponent: int) -> str:
    """Return the name of the column of a bin, by its lower bound."""
    return f"from_2_to_{'minus_' if exponent < 0 else ''}{abs(exponent)}"


DISTRIBUTION = ColumnFamily(
    name="distribution",
    row="gradient elements",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("nonfinite_elements", Algebra.SUM, "elements that are NaN or Inf"),
        sampled("sum", Algebra.SUM, "sum of the finite elements, unscaled", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of their squares, unscaled"),
        sampled("nonzero_elements", Algebra.SUM, "finite elements that are not zero"),
        sampled(
            "fp16_elements",
            Algebra.SUM,
            "all of these where there is a loss scale, what the next six columns are parts of; "
            "absent without one",
        ),
        sampled("flushed_elements", Algebra.SUM, "those that FP16 rounds to zero when scaled"),
        sampled("flushed_at_half_elements", Algebra.SUM, "the same at half the loss scale"),
        sampled("flushed_at_double_elements", Algebra.SUM, "the same at twice the loss scale"),
        sampled("subnormal_elements", Algebra.SUM, "those that are subnormal in FP16 when scaled"),
        sampled("near_overflow_elements", Algebra.SUM, "those above 60 000 when scaled"),
        sampled(
            "overflow_at_double_elements",
            Algebra.SUM,
            "those that FP16 rounds to Inf at twice the loss scale",
        ),
        *(
            sampled(
                exponent_column(exponent),
                Algebra.SUM,
                f"unscaled magnitudes from 2^{exponent} to below 2^{exponent + 4}",
            )
            for exponent in EXPONENTS
        ),
    ),
    key="sum_squares",
    required=("sum_squares", "elements"),
    size="elements",
    nonfinite=("nonfinite_elements",),
    counts_when_skipped=False,
)


FP8 = ColumnFamily(
    name="fp8",
    row="operands of linear layers, of every rank's own part of the batch and of the weights",
    columns=(
        sampled("tensors", Algebra.SUM, "tensors looked at: inputs, weights, gradients of outputs"),
        sampled("nonfinite_elements", Algebra.SUM, "elements of those that are NaN or Inf"),
        sampled("input_elements", Algebra.SUM, "finite elements of inputs that are not zero"),
        sampled(
            "input_flushed_elements",
            Algebra.SUM,
            "those that E4M3 rounds to zero, when the largest becomes E4M3's largest number",
        ),
        sampled("weight_elements", Algebra.SUM, "finite elements of weights that are not zero"),
        sampled("weight_flushed_elements", Algebra.SUM, "those that E4M3 rounds to zero, likewise"),
        sampled(
            "gradient_elements",
            Algebra.SUM,
            "finite elements of the outputs' gradients that are not zero",
        ),
        sampled(
            "gradient_flushed_elements", Algebra.SUM, "those that E5M2 rounds to zero, likewise"
        ),
        sampled(
            "cast_tensors",
            Algebra.SUM,
            "inputs and weights of layers that cast each to FP8 by its own amax; absent of others",
        ),
        sampled(
            "scaled_tensors",
            Algebra.SUM,
            "tensors cast with a scale from an earlier step, whose amax was recorded; absent "
            "without delayed scaling",
        ),
        sampled("saturated_tensors", Algebra.SUM, "those whose amax was beyond the format's range"),
        sampled(
            "range_used_max",
            Algebra.MAX,
            "amax times scale divided by the format's largest number, of the tensor where it is "
            "largest; above 1 it was saturated",
        ),
        sampled("range_used_min", Algebra.MIN, "the same where it is smallest"),
        sampled("scale_min", Algebra.MIN, "the smallest scale in force"),
        sampled("scale_max", Algebra.MAX, "the largest scale in force"),
        sampled("amax_max", Algebra.MAX, "the largest amax"),
    ),
    key="tensors",
    required=("tensors",),
    size="tensors",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""


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
        _logprobs(
            "density_tokens",
            Algebra.SUM,
            "tokens whose log-probability by the trainer is above 0.1: of a density, as of "
            "continuous actions",
        ),
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


TENSOR_EXPONENTS = tuple(range(-64, 32))
"""Lower bounds of the bins of a tensor's magnitudes, as powers of two; each is one binade. The
first bin has all smaller numbers but zero as well, the last all larger ones."""

TENSORS = ColumnFamily(
    name="tensors",
    row="elements of a tensor that the script watches, of every rank's own part of the batch",
    columns=(
        sampled("elements", Algebra.SUM, "elements looked at"),
        sampled("nonfinite_elements", Algebra.SUM, "elements that are NaN or Inf"),
        sampled("sum", Algebra.SUM, "sum of the finite elements", signed=True),
        sampled("sum_squares", Algebra.SUM, "sum of squares of the finite elements"),
        sampled("abs_sum", Algebra.SUM, "sum of magnitudes of the finite elements"),
        sampled("abs_max", Algebra.MAX, "largest magnitude among the finite elements"),
        sampled(
            "abs_min",
            Algebra.MIN,
            "smallest magnitude among the finite elements that are not zero; absent without any",
        ),
        sampled(
            "swallowed_sum",
            Algebra.SUM,
            "sum of the magnitudes that a running sum in the tensor's dtype, element after element "
            "on each rank, does not change by; absent for integers, whose sums are exact",
        ),
        sampled("reduction", Algebra.MAX, "1 if the script sums the elements in that dtype"),
        sampled(
            "range_ratio",
            Algebra.MAX,
            "largest range of a slice along the watched dimension, from its smallest to its "
            "largest finite element, divided by the smallest that is not zero, on the rank where "
            "that is largest; its low bits are the index of the slice at fault, see "
            "`records.slice_ratio`; absent without two such slices",
        ),
        *(
            sampled(
                exponent_column(exponent),
                Algebra.SUM,
                f"finite magnitudes from 2^{exponent} to below 2^{exponent + 1}",
            )
            for exponent in TENSOR_EXPONENTS
        ),
    ),
    key="elements",
    required=("elements",),
    size="elements",
    of_parameters=False,
)
"""Rows count with elements that are not finite: the other statistics leave those out."""
