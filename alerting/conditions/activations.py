"""Alerts on activations: near overflow, growing logits, FP8 and routers."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above, less_below
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Count, Series, all_of, limit
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.remedies import GoBack
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import activations, fp8, routers

_ELEMENTS = Count(metric=activations.ACTIVATION_NEAR_OVERFLOW, window=duration("incident_window"))


ACTIVATION_NEAR_OVERFLOW = Condition(
    name="MpAgentActivationNearOverflow",
    summary="FP16 outputs of modules are close to overflow.",
    meaning="FP16 ends at 65 504: a little more, and the output is Inf and the step is lost.",
    confirm="mp_agent_layer_activation_abs_max shows which modules have the largest outputs, and "
    "since when.",
    remedies=(
        "Run the modules with the largest outputs in FP32, or the whole model in BF16.",
        "Normalize before them, or lower the learning rate if their outputs keep growing.",
    ),
    why="The loss scale does not help: it multiplies gradients and not the outputs of the forward "
    "pass. FP32 and BF16 reach to 3e38.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_ELEMENTS),
            description="{value|count} element(s) of FP16 outputs of run {run} were above "
            "<fp16_near_overflow> on the steps that were sampled in the last <incident_window>.",
            reason="No delay: samples are far apart, and the next step may overflow.",
        ),
    ),
    quiet=(
        "larger outputs in BF16 or FP32, which are not counted",
        "a run that does not measure outputs",
    ),
    needs=((Quantity.ACTIVATIONS,),),
    guidance=Guidance(
        harm="Nothing is lost yet; a slightly larger output overflows and its step is lost. "
        "Investigate within hours.",
        query='increase(mp_agent_activation_near_overflow_elements_total{run="RUN"}[10m])',
        reading="The elements of the last ten minutes, of the steps that were sampled. "
        "mp_agent_layer_activation_abs_max shows the modules with the largest outputs.",
        causes=(
            "Residual streams that grow with depth and with training, without normalization.",
            "Attention logits or output logits that grow, as with a learning rate too high.",
            "Sums over many elements in FP16, such as a mean over a long sequence.",
        ),
        false_positives=("Outputs that are large by design and bounded, such as masks of -65504.",),
        samples=("overflowing_layer", "stable_operations"),
        panels=(panels.ACTIVATIONS_NONFINITE, panels.ACTIVATIONS),
    ),
)


_LARGEST = Series(metric=activations.ATTENTION_LOGIT_MAX)
_ATTENTION_LOGIT_GROWTH_GROWTH = Series(metric=activations.ATTENTION_LOGIT_GROWTH)


ATTENTION_LOGIT_GROWTH = Condition(
    name="MpAgentAttentionLogitGrowth",
    summary="Attention logits are growing.",
    meaning="Softmax of such logits picks a single position, hardly any gradient comes through, "
    "and in BF16 they are rounded to steps of 0.5 and more. The loss often diverges later.",
    confirm="mp_agent_attention_logit_max over the whole run, and "
    "mp_agent_layer_attention_logit_max of the layers that "
    "mp_agent_attention_high_layer_info names.",
    remedies=(
        "Normalize queries and keys (QK-norm), or clip the weights that make them (QK-clip).",
        "Lower the learning rate, or extend its warm-up.",
        GoBack(
            "Resume from a checkpoint from before the growth, if the loss has already suffered."
        ),
    ),
    why="Logits grow with the norms of the query and key weights, which a learning rate that is "
    "too high raises together; a normalization bounds them. Judged only if the setting "
    "measure_attention is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_LARGEST, ">", limit("attention_logit_high")),
                Compare(_ATTENTION_LOGIT_GROWTH_GROWTH, ">", limit("logit_growth")),
            ),
            keep=duration("layer_keep"),
            description="The largest attention logit of run {run} is {value|number}, more than "
            "<logit_growth> times what it was earlier in the run."
            "{mp_agent_attention_high_layer_info| Largest in |layer}",
            reason="No delay: the growth is already a median of three samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    quiet=(
        "large attention logits that were so from the beginning",
        "attention logits that grow from almost nothing, as in every young run",
        "a run that does not measure attention",
    ),
    follows_from=("MpAgentLearningRateJump", "MpAgentSecondMomentStale"),
    needs=((Quantity.LOGITS,),),
    knobs=(less_above("attention_logit_high"), less_above("logit_growth")),
    guidance=Guidance(
        harm="No damage yet; runs with such growth often diverge hundreds of steps later. "
        "Investigate within hours.",
        query='mp_agent_attention_high_layer_info{run="RUN"}',
        reading="The modules whose largest attention logit was above the limit in the latest "
        "sample; mp_agent_layer_attention_logit_max shows how each has grown. Other heads and "
        "positions are looked at in each sample, so the curve scatters.",
        causes=(
            "A learning rate that is too high for attention without QK-norm.",
            "No weight decay on the query and key weights, whose norms grow.",
            "Second moments that are out of date, so that updates of these weights are too large.",
        ),
        false_positives=(
            "A fine-tuning whose model has large logits by design: they are high, but not growing.",
        ),
        samples=("weights_of_averages",),
        panels=(panels.ATTENTION_LOGITS, panels.LOSS, panels.LEARNING_RATE),
    ),
)


_MISSCALED = Series(metric=fp8.LAYERS_FP8_MISSCALED)


FP8_SATURATION = Condition(
    name="MpAgentFp8Saturation",
    summary="FP8 scales from earlier steps do not fit their tensors.",
    meaning="Delayed scaling casts a tensor with the amax of earlier steps. Beyond FP8's largest "
    "number (448 in E4M3, 57344 in E5M2) elements are cut off: the largest activations or "
    "gradients are too small by that factor. Far below it, most of the range is unused, and "
    "small elements become zero.",
    confirm="mp_agent_layer_fp8_range_used_max of the layers that "
    "mp_agent_fp8_misscaled_layer_info names with the reason saturated, and "
    "mp_agent_layer_fp8_range_used_min of those with the reason unused.",
    remedies=(
        'Compute scales from the largest of a longer history (amax_compute_algo="max", '
        "amax_history_len=1024), with a margin of a few binades.",
        "Check that every step enters and leaves autocast once, so that scales are updated, and "
        "that amax is reduced over all ranks.",
        "Scale by what each tensor has now (current or block scaling), or keep the layer in BF16.",
    ),
    why="The largest of a long history bears what the latest value does not, and each step of "
    "margin halves the scale. An amax at FP8's largest number is what scales aim at, and one "
    "beyond it is followed by the next pass, so that neither is judged alone. Judged only if the "
    "setting measure_fp8 is on, of layers with delayed scaling.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_MISSCALED),
            keep=duration("layer_keep"),
            description="In {value|count} layer(s) of run {run}, a tensor used more than "
            "<fp8_range_used_high> times FP8's range, or less than <fp8_range_used_low> of it, in "
            "each of the last <fp8_scaling_samples> samples."
            "{mp_agent_fp8_misscaled_layer_info| Among them: |layer reason}",
            reason="No delay: the condition already requires consecutive samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    quiet=(
        "a single saturation, which the scale follows",
        "dynamic scaling, a model that is not in FP8, or nothing measured",
    ),
    follows_from=(
        "MpAgentLearningRateJump",
        "MpAgentGradientExplosion",
        "MpAgentActivationNonFinite",
        "MpAgentGradientNonFinite",
        "MpAgentGradientVanishing",
        "MpAgentNothingTrained",
    ),
    needs=((Quantity.FP8,),),
    knobs=(
        less_above("fp8_range_used_high"),
        less_below("fp8_range_used_low"),
        less_above("fp8_scaling_samples"),
    ),
    guidance=Guidance(
        harm="No damage to the weights at once; forward and backward passes compute with wrong "
        "numbers, and the loss learns more slowly, drifts or diverges. Investigate within hours.",
        query='mp_agent_fp8_misscaled_layer_info{run="RUN"}',
        reading="The layers whose scales do not fit. Reason saturated: "
        "mp_agent_layer_fp8_range_used_max says by which factor elements are cut off. Reason "
        "unused: mp_agent_layer_fp8_range_used_min says by which factor a scale is too small, and "
        "every halving is a binade lost at the lower end.",
        causes=(
            "Scales that are not updated any more: layers called outside the autocast region, "
            "or an amax of NaN or Inf that stays in the history.",
            "A tensor whose amax jumps from step to step, with a history that is short or of which "
            "the latest value alone is used.",
            "A state of scales that was not restored, or restored from another run, with a "
            "checkpoint.",
            "Activations or gradients that explode from pass to pass.",
        ),
        false_positives=(
            "Batches of very different data in turn, with a history shorter than one turn: scales "
            "are wrong for some, and few elements may be concerned.",
        ),
        samples=("scale_from_history",),
        panels=(panels.FP8_RANGE, panels.FP8_FLUSHED, panels.LOSS),
    ),
)


_LOST_MOST = Series(metric=fp8.LAYERS_FP8_FLUSHED)


FP8_UNDERFLOW = Condition(
    name="MpAgentFp8Underflow",
    summary="FP8 rounds most of a layer's input or weight to zero.",
    meaning="The layer casts a whole tensor by its largest element. E4M3 holds no more than 2^18 "
    "between its largest and its smallest number: a few outliers leave zeros in place of the rest, "
    "and the layer computes without it.",
    confirm="mp_agent_fp8_flushed_layer_info names the layers; "
    "mp_agent_layer_fp8_input_flushed_ratio and mp_agent_layer_fp8_weight_flushed_ratio have their "
    "shares.",
    remedies=(
        "Scale by rows or blocks instead of whole tensors (recipe rowwise or MXFP8), so that an "
        "outlier costs its own row only.",
        "Leave the layer in BF16: layers behind attention or an activation, and the last ones, "
        "have the largest outliers.",
        "Find the outliers: a missing normalization before the layer, or a few channels that grow.",
    ),
    why="What is more than 2^18 below the largest element of its scale is zero in E4M3; fewer "
    "elements to a scale mean fewer that an outlier can cost. Judged only if the setting "
    "measure_fp8 is on, of layers that cast whole tensors.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_LOST_MOST),
            keep=duration("layer_keep"),
            description="In {value|count} layer(s) of run {run}, the cast to FP8 rounded more than "
            "<fp8_flushed> of the non-zero elements of the input or the weight to zero in each of "
            "the last <fp8_scaling_samples> samples."
            "{mp_agent_fp8_flushed_layer_info| Among them: |layer operand}",
            reason="No delay: the condition already requires consecutive samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    quiet=(
        "a few per cent of small elements that a cast rounds to zero",
        "layers that do not cast to FP8, or nothing measured",
    ),
    follows_from=("MpAgentActivationNearOverflow", "MpAgentGradientExplosion"),
    needs=((Quantity.FP8,),),
    knobs=(less_above("fp8_flushed"), less_above("fp8_scaling_samples")),
    guidance=Guidance(
        harm="No damage to the weights at once, but the layer computes with a part of its input: "
        "the loss is higher than in BF16. Investigate during working hours.",
        query='mp_agent_fp8_flushed_layer_info{run="RUN"}',
        reading="The layers and operands that lose most of their non-zero elements; "
        "mp_agent_fp8_flushed_layer_max_ratio is the largest share of any layer.",
        causes=(
            "Outliers in the input: a few channels or tokens that are far larger than the rest.",
            "An input without a normalization before it, such as a product of gates.",
            "Weights of which a few have grown by far, for lack of weight decay.",
        ),
        false_positives=(
            "Inputs of which the small elements do not matter, as probabilities that are nearly 0.",
        ),
        samples=("scale_from_history",),
        panels=(panels.FP8_FLUSHED, panels.FP8_RANGE, panels.LOSS),
    ),
)


_SIZE = Series(metric=activations.OUTPUT_LOGSUMEXP_SIZE)
_OUTPUT_LOGIT_DIVERGENCE_GROWTH = Series(metric=activations.OUTPUT_LOGSUMEXP_GROWTH)


OUTPUT_LOGIT_DIVERGENCE = Condition(
    name="MpAgentOutputLogitDivergence",
    summary="Output logits are drifting away from zero.",
    meaning="The loss does not depend on a number that is added to all logits of a row, so nothing "
    "holds them near zero. Far away from it, BF16 rounds them to steps of 0.5 and more, the loss "
    "becomes noisy, and the run often diverges.",
    confirm="mp_agent_output_logsumexp_mean, _max and _min over the whole run show the direction "
    "of the drift.",
    remedies=(
        "Add a z-loss: 1e-4 times the square of the log-sum-exp.",
        "Compute the logits and the loss in FP32.",
        "Lower the learning rate of the output layer, or let weight decay act on it.",
    ),
    why="A z-loss pulls the log-sum-exp back to zero and changes nothing else. Judged only if the "
    "setting measure_attention is on.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=all_of(
                Compare(_SIZE, ">", limit("logsumexp_high")),
                Compare(_OUTPUT_LOGIT_DIVERGENCE_GROWTH, ">", limit("logit_growth")),
            ),
            keep=duration("layer_keep"),
            description="The log-sum-exp of the output logits of run {run} has reached a magnitude "
            "of {value|number}, more than <logit_growth> times what it was earlier in the run.",
            reason="No delay: the growth is already a median of three samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    quiet=(
        "a large log-sum-exp that was so from the beginning",
        "a log-sum-exp that grows with what the model learns",
        "a run that does not measure output logits",
    ),
    follows_from=("MpAgentLearningRateJump",),
    needs=((Quantity.LOGITS,),),
    knobs=(less_above("logsumexp_high"), less_above("logit_growth")),
    guidance=Guidance(
        harm="No damage yet; the loss loses precision as the logits drift, and may diverge. "
        "Investigate within hours.",
        query='mp_agent_output_logsumexp_size{run="RUN"}',
        reading="The largest magnitude of a log-sum-exp at the latest sample. Near the logarithm "
        "of the number of classes is usual for a model that has learned little.",
        causes=(
            "A long training without a z-loss or weight decay on the output layer.",
            "A learning rate that is too high for the output layer.",
        ),
        false_positives=("A loss with logits that are multiplied by a temperature on purpose.",),
        samples=("stable_operations",),
        panels=(panels.OUTPUT_LOGITS, panels.LOSS, panels.LEARNING_RATE),
    ),
)


_COLLAPSED = Series(metric=routers.ROUTERS_COLLAPSED)


ROUTER_COLLAPSE = Condition(
    name="MpAgentRouterCollapse",
    summary="Routers send most tokens to few experts.",
    meaning="The other experts get hardly any tokens, so they learn nothing and are chosen even "
    "less. Where experts have a capacity, tokens beyond it are dropped.",
    confirm="mp_agent_layer_router_load_max, mp_agent_layer_router_entropy_ratio and "
    "mp_agent_layer_router_unused_experts_ratio of the routers that "
    "mp_agent_collapsed_router_info names.",
    remedies=(
        "Add the load-balancing loss to the loss, or raise its weight.",
        "Add a z-loss on the router's logits, and compute the router in FP32.",
        GoBack("Resume from a checkpoint from before the collapse: it does not undo itself."),
    ),
    why="The balancing loss pushes tokens towards unused experts, and a z-loss keeps logits small, "
    "so that the router can change its mind. Judged only if the setting measure_routers is on, and "
    "the router shows its logits; with N experts of which a token gets k, the load is N/k at most.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_COLLAPSED),
            keep=duration("layer_keep"),
            description="{value|count} router(s) of run {run} sent more than <router_load_high> "
            "times the even share to one expert, at an entropy below <router_entropy_low>, in the "
            "last <router_collapse_samples> samples."
            "{mp_agent_collapsed_router_info| Among them: |layer}",
            reason="No delay: the condition already requires consecutive samples; the alert lasts "
            "beyond some samples.",
        ),
    ),
    quiet=(
        "routers that use all their experts",
        "a run that does not measure routers",
    ),
    follows_from=("MpAgentLearningRateJump", "MpAgentGradientExplosion"),
    needs=((Quantity.ROUTERS,),),
    knobs=(
        less_above("router_load_high"),
        less_below("router_entropy_low"),
        less_above("router_collapse_samples"),
    ),
    guidance=Guidance(
        harm="No damage to the weights; experts that get no tokens learn nothing, and the model "
        "trains as if it were smaller. Investigate within hours.",
        query='mp_agent_collapsed_router_info{run="RUN"}',
        reading="The routers that send most tokens to few experts and are sure of it; "
        "mp_agent_layer_router_load_max and mp_agent_layer_router_entropy_ratio show since when.",
        causes=(
            "No load-balancing loss, one whose weight is too small, or one that is computed but "
            "not added to the loss (output_router_logits in Transformers).",
            "Router logits that grow without a z-loss, in 16 bits above all.",
            "A learning rate that is too high for the router.",
        ),
        false_positives=(
            "A fine-tuning on data of one kind, for which few experts are enough.",
            "Batches that are mostly padding, which one expert gets.",
        ),
        samples=("balance_experts",),
        panels=(panels.ROUTER_LOAD, panels.ROUTER_ENTROPY, panels.LOSS),
    ),
)


CONDITIONS = (
    ACTIVATION_NEAR_OVERFLOW,
    ATTENTION_LOGIT_GROWTH,
    OUTPUT_LOGIT_DIVERGENCE,
    ROUTER_COLLAPSE,
    FP8_SATURATION,
    FP8_UNDERFLOW,
)
