"""Alerts on watched tensors, and on a policy: its sampler, and its entropy."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Joined,
    Limit,
    Predicate,
    Series,
    Where,
    all_of,
    limit,
    unless,
)
from mp_agent.alerting.first_line import Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import reinforcement, tensors


def _lasting(signal: Series, name: str) -> Joined:
    """Return in which tensors all samples of a while are beyond a limit."""
    lasting = Compare(_steps(name), ">=", limit("sustained_steps"))
    return all_of(Compare(signal, ">", limit(name)), lasting)


def _steps(name: str) -> Series:
    where = (Where("limit", "=", name),)
    return Series(metric=tensors.TENSOR_SUSTAINED_STEPS, where=where, keep=("tensor",))


_IMBALANCE = Series(metric=tensors.TENSOR_SLICE_IMBALANCE, keep=("tensor",))


DIMENSION_IMBALANCE = Condition(
    name="MpAgentDimensionImbalance",
    summary="Slices of a tensor differ in range by orders of magnitude.",
    meaning="Where slices of such ranges are added or share a loss scale, 16 bits keep little or "
    "nothing of the small ones: those features are hardly learned.",
    confirm="mp_agent_tensor_slice_imbalance by tensor; mp_agent_tensor_worst_slice is the index "
    "of the slice at fault along the dimension that the script watches.",
    remedies=(
        "Standardize each slice by itself (mean 0, standard deviation 1), in the data or by a "
        "normalization layer.",
        "Reduce in FP32, and slices of different meaning one by one.",
    ),
    why="FP16 keeps 11 significant bits and BF16 8: of two numbers whose ratio is above 1e4 a sum "
    "keeps the larger one only. Judged only of tensors that the script watches by "
    "mp_agent.watch_tensor with dim.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=_lasting(_IMBALANCE, "dimension_imbalance"),
            description="In tensor {tensor} of run {run}, the largest range of a slice along the "
            "watched dimension is {value|number} times the smallest."
            "{mp_agent_imbalanced_tensor_info| Worst of all is |tensor slice}",
            counted=_steps("dimension_imbalance"),
            reason="No delay: it takes all samples of sustained_steps steps, which spares a single "
            "unusual batch.",
        ),
    ),
    quiet=(
        "features of similar ranges",
        "a script that watches no tensor",
    ),
    needs=((Quantity.TENSORS,),),
    knobs=(less_above("dimension_imbalance"),),
    guidance=Guidance(
        harm="The run goes on and learns little from the slices with small ranges. Investigate "
        "during working hours.",
        query='mp_agent_tensor_slice_imbalance{run="RUN"}',
        reading="The largest range of a slice divided by the smallest, by tensor, on the last "
        "sampled step. mp_agent_tensor_worst_slice is the index of the slice at fault.",
        causes=(
            "Features in different units, such as a price and a rate, that are not standardized.",
            "Outlier features: a few channels whose activations grow far beyond the others.",
            "A slice that is almost constant, such as an unused feature with a little noise.",
        ),
        false_positives=(
            "Slices that are to differ and are never added or normalized together: watch them as "
            "tensors of their own.",
        ),
        samples=("standardize_features",),
        panels=(panels.RANGE_OF_TENSORS, panels.SWALLOWED_TERMS),
    ),
)


_SWALLOWED = Series(metric=tensors.TENSOR_REDUCTION_SWALLOWED, keep=("tensor",))


REDUCTION_SWALLOWS = Condition(
    name="MpAgentReductionSwallows",
    summary="A sum in 16 bits loses small terms.",
    meaning="Terms smaller than half the spacing of the format at the sum so far do not change it: "
    "the loss, the mean or the norm that is made of them is too small, and so are its gradients.",
    confirm="mp_agent_tensor_reduction_swallowed_ratio by tensor; mp_agent_tensor_dynamic_range "
    "shows how far its largest and smallest terms are apart.",
    remedies=(
        "Sum in FP32: tensor.float().sum(), or sum(dtype=torch.float32), also for means and norms.",
        "Sum in blocks and add those up, where the terms must stay in 16 bits.",
    ),
    why="FP16 keeps 11 significant bits and BF16 8: at a sum of 2048, or of 256, a term of 1 is "
    "half the spacing. FP32 keeps 24. Judged only of tensors that the script watches by "
    "mp_agent.watch_tensor with reduction=True.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=_lasting(_SWALLOWED, "reduction_swallowed"),
            description="A sum of tensor {tensor} of run {run} in its own dtype loses "
            "{value|percent} of the terms: they are smaller than half the spacing of the format at "
            "the sum.",
            counted=_steps("reduction_swallowed"),
            reason="No delay: it takes all samples of sustained_steps steps, which spares a single "
            "unusual batch.",
        ),
    ),
    quiet=(
        "a short sum that loses less than a hundredth",
        "large logits in BF16 that are watched, and that nothing sums",
    ),
    needs=((Quantity.TENSORS,),),
    knobs=(less_above("reduction_swallowed"),),
    guidance=Guidance(
        harm="The run goes on with a loss, mean or norm that is too small, and with gradients of "
        "some terms that are lost. Investigate during working hours.",
        query='mp_agent_tensor_reduction_swallowed_ratio{run="RUN"}',
        reading="The share of the sum of magnitudes that a running sum in the tensor's dtype does "
        "not get, by tensor, on the last sampled step. Below 0.01 it is rounding.",
        causes=(
            "A loop that adds losses up in 16 bits, such as total += loss under autocast.",
            "A kernel or collective that accumulates in 16 bits, such as a BF16 all-reduce.",
            "A batch or sequence that has grown: the more terms, the larger the sum they meet.",
            "A few terms that are far larger than the rest, such as outliers in the data.",
        ),
        false_positives=(
            "A sum by torch.sum or torch.mean: those accumulate in FP32 and round once. Watch it "
            "without reduction=True.",
        ),
        samples=("sum_in_float32", "stable_operations"),
        panels=(panels.SWALLOWED_TERMS, panels.RANGE_OF_TENSORS),
    ),
)


_WINDOW = duration("logprob_window")
_HIGH, _EXTREME = limit("logprob_k3_high"), limit("logprob_k3_extreme")


def _mismatch(bound: Limit) -> Predicate:
    count = Count(
        metric=reinforcement.LOGPROB_MISMATCH_STEPS,
        window=_WINDOW,
        where=(Where("bound", "=", bound),),
    )
    return Compare(count, ">=", limit("logprob_steps"))


def _described(bound: Limit, run: str, count: str) -> str:
    return (
        f"On {count} step(s) of run {run} in the last <logprob_window>, the k3 estimate of the KL "
        f"divergence of sampler and trainer was above <{bound.threshold.name}>, with more than one "
        "token in a thousand off by over <logprob_delta_tail>."
    )


TRAIN_INFERENCE_MISMATCH = Condition(
    name="MpAgentTrainInferenceMismatch",
    summary="Trainer and sampler give the same tokens different probabilities.",
    meaning="The policy gradient assumes that the trainer's policy drew the tokens. Where the "
    "sampler's differs, gradients are biased, and such runs collapse after a while.",
    confirm="mp_agent_logprobs_k3 and mp_agent_logprobs_delta_p999, how they have developed, and "
    "mp_agent_logprobs_effective_samples_ratio, the share of the tokens that still counts.",
    remedies=(
        "Use the same precision and the same settings on both sides: dtype, attention kernels, "
        "temperature and top-p, before or after which the engine reports its log-probabilities.",
        "Check that the sampler has the trainer's weights of this step.",
        "Compute in FP16 rather than in BF16 on both sides, which was reported to make the "
        "difference 24 times smaller.",
        "Correct by truncated importance weights, or leave out the tokens that differ most.",
    ),
    why="The same weights give the same probabilities only in the same arithmetic: BF16 keeps 8 "
    "significant bits, FP16 11. Truncated weights bound what single tokens contribute.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="trained on biased gradients since {since}",
                now="stop, and compare weights and sampling settings of trainer and sampler",
            ),
            when=_mismatch(_EXTREME),
            description=_described(_EXTREME, "{run}", "{value|count}"),
            reason="No delay: it takes logprob_steps steps, which in reinforcement learning are "
            "minutes.",
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(_mismatch(_HIGH), _mismatch(_EXTREME)),
            description=_described(_HIGH, "{run}", "{value|count}"),
            reason="As for the critical level, which replaces it.",
        ),
    ),
    quiet=(
        "two steps whose rollouts began before the last update",
        "a run without reinforcement learning",
    ),
    needs=((Quantity.LOGPROBS,),),
    knobs=(less_above("logprob_k3_high", "logprob_k3_extreme"),),
    guidance=Guidance(
        harm="Gradients are biased: the reward may rise for a while and then collapse. Critical: "
        "stop, since trainer and sampler are different policies. Warning: investigate within "
        "hours.",
        query='increase(mp_agent_logprobs_mismatch_steps_total{run="RUN"}[1h])',
        reading="On how many steps of the last hour trainer and sampler differed, by level. "
        "mp_agent_logprobs_k3 says by how much, in nats per token: 0 in the same arithmetic, and "
        "little where the two only round differently.",
        causes=(
            "The sampler computes in another precision or with other kernels, or is quantized.",
            "The sampler has older weights: their transfer failed, or rollouts are asynchronous.",
            "Temperature, top-k, top-p or a padding token is applied on one side only.",
            "Log-probabilities and mask are shifted by a token against each other.",
            "A router of experts chooses other experts on the two sides.",
        ),
        false_positives=(
            "Log-probabilities of the trainer after further updates on the same rollouts, as in "
            "later epochs of PPO: report those from before the first update.",
            "A model of a few thousand parameters in tests, whose probabilities jump about.",
        ),
        samples=("compare_logprobs",),
        panels=(panels.LOGPROB_KL, panels.LOGPROB_DELTA, panels.LOGPROB_WEIGHTS),
    ),
)


POLICY_ENTROPY_COLLAPSED = Condition(
    name="MpAgentPolicyEntropyCollapsed",
    summary="A policy has become certain of nearly all that it draws.",
    meaning="Next to nothing is left of the entropy that the policy has had. What it hardly ever "
    "draws is not rewarded either: samples of one prompt are alike, their advantages about 0, and "
    "the reward stays where it is.",
    confirm="mp_agent_policy_entropy and how it has fallen; next to it the reward: at its highest "
    "possible value, the task is solved. Print some samples of one prompt: they are the same.",
    remedies=(
        "Go back to a checkpoint from before the entropy fell: continued training seldom brings "
        "it back.",
        "Lower the learning rate, or scale the advantages down: normalize them by batch, and "
        "clip what is far above.",
        "Add an entropy bonus or a KL penalty to a reference policy, or raise its weight.",
        "Raise the upper bound of the ratio alone (0.28 for 0.2, clip-higher), so that rare tokens "
        "can become more probable.",
        "Check the temperature: sample at 1.0 while training.",
    ),
    why="The policy gradient of a token is weighted by how often it is drawn. Reward was seen to "
    "be bought with entropy, and to end where that does (Cui et al., arXiv:2505.22617); a higher "
    "upper bound keeps it (Yu et al., arXiv:2503.14476).",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(
                Series(metric=reinforcement.POLICY_COLLAPSED_STEPS),
                ">=",
                limit("policy_entropy_steps"),
            ),
            counts_steps=True,
            description="Of the highest entropy of the policy of run {run}, less than "
            "<policy_entropy_fallen> has remained for {value|count} steps.",
            reason="No delay: it already requires policy_entropy_steps steps in a row, by the "
            "median of eight.",
        ),
    ),
    quiet=(
        "a policy that learns to decide, and keeps a tenth of its entropy",
        "a run without reinforcement learning",
    ),
    needs=((Quantity.LOGPROBS,),),
    knobs=(less_above("policy_entropy_fallen"),),
    guidance=Guidance(
        harm="The policy stops learning where it is. Investigate within hours; the checkpoints "
        "from before are what can be gone on from.",
        query='mp_agent_policy_entropy{run="RUN"}',
        reading="Nats per token: ln n for a choice among n that are equally likely, 0 for one that "
        "is certain. What counts is how far below its highest it is.",
        causes=(
            "A learning rate that is too high, or advantages that are.",
            "No entropy bonus and no KL penalty, over many updates.",
            "A ratio that is clipped alike on both sides, so that rare tokens stay rare.",
            "A reward that one answer gets for every prompt.",
        ),
        false_positives=(
            "A task that is solved: the reward is at its highest, and one action is right.",
            "Log-probabilities of another kind of tokens than at the start, such as those of a "
            "fixed template.",
        ),
        samples=("entropy_of_policy",),
        panels=(panels.POLICY_ENTROPY, panels.LOGPROB_KL),
    ),
)


OF_LOGPROBS = (TRAIN_INFERENCE_MISMATCH, POLICY_ENTROPY_COLLAPSED)
OF_TENSORS = (
    REDUCTION_SWALLOWS,
    DIMENSION_IMBALANCE,
)
