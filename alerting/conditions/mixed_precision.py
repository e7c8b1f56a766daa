"""Alerts on mixed precision: steps that a scaler skips, FP16 without one, idle autocast."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.conditions.loop import loop_mistake
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Count, Predicate, Series, Where, any_of, limit
from mp_agent.alerting.first_line import UPDATED, Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training

OVERFLOW_REMEDIES = (
    "Reduce the learning rate tenfold and check that the inputs are normalized.",
    "Check the initialization (Xavier weights, zero biases) and add LayerNorm to residual "
    "branches.",
    "Find the layer that overflows and run it in FP32, or train in BF16; a lower initial scale "
    "only shortens calibration.",
)
WHY_OVERFLOW_ENDS = (
    "GradScaler halves the scale whenever a scaled gradient overflows FP16; if that continues, "
    "no scale is suitable, and the values themselves must shrink."
)
OVERFLOW_CAUSES = (
    "The gradients have grown: check for a rising gradient norm in the hours before.",
    "A layer's activations grow towards 65 504: mostly the last residual blocks, an attention "
    "score without scaling, or a loss that is summed instead of averaged.",
    "The learning rate is too high, or its warm-up has just ended.",
    "Inputs that are not normalized, in some batches or on some ranks.",
)


def _above(bound: str) -> Predicate:
    where = (Where("bound", "=", limit(bound)),)
    window = duration("overflow_window")
    return happened(Count(metric=training.SKIPPED_EXCESS, window=window, where=where))


def _description(bound: str) -> str:
    return (
        f"Run {{run}} skips more than <{bound}> of its steps because gradients overflow: "
        "{value|count} step(s) in the last <overflow_window> came when that many of the last "
        "<overflow_share_steps> had been skipped; the healthy value is 0.05%."
    )


OVERFLOW_RATIO_HIGH = Condition(
    name="MpAgentOverflowRatioHigh",
    summary="Too many steps are skipped because gradients overflow FP16.",
    meaning="Each skipped step is compute without learning, and a high or rising share precedes "
    "a collapse of the loss scale.",
    confirm="Divide the increase of mp_agent_skipped_steps_total by that of mp_agent_steps_total.",
    remedies=OVERFLOW_REMEDIES,
    why=WHY_OVERFLOW_ENDS,
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="intact, since skipped steps do not change them",
                now="save a checkpoint, before the loss scale collapses",
                updated=UPDATED,
            ),
            when=_above("overflow_critical"),
            description=_description("overflow_critical"),
            reason="No delay: the share is that of overflow_share_steps steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=any_of(_above("overflow_warning"), _above("overflow_rising")),
            description=_description("overflow_rising"),
            reason="No delay: the share is that of overflow_share_steps steps.",
        ),
    ),
    quiet=(
        "GradScaler's healthy 1 in 2000",
        "two overflows among few steps",
        "calibration",
        "calibration of the next attempt",
        "a share that rises below 0.1 %",
        "a share that fell and rises again",
        "a scale close to overflow, with a random number of skips",
    ),
    follows_from=(
        "MpAgentLossScaleAtFloor",
        "MpAgentGradientNonFinite",
        "MpAgentLossScaleFarBelowInitial",
    ),
    needs=((Quantity.SKIPS,),),
    knobs=(less_above("overflow_warning", "overflow_critical", "overflow_rising"),),
    guidance=Guidance(
        harm="Every skipped step is compute without learning. Critical: more than a tenth is lost, "
        "and the scale is about to collapse. Warning: investigate within hours.",
        query='increase(mp_agent_skipped_steps_total{run="RUN"}[15m]) '
        '/ (increase(mp_agent_steps_total{run="RUN"}[15m]) > 0)',
        reading="The share of skipped steps in the last 15 minutes. The healthy value is 0.0005: "
        "one in 2000, because GradScaler doubles the scale until it overflows.",
        causes=(
            "A growth_interval far below 2000, so that the scaler increases the scale too often.",
            "A GradScaler that is made again in each iteration, or whose update() is never called: "
            "the scale never falls, and every step is skipped.",
            *OVERFLOW_CAUSES,
        ),
        false_positives=(
            "A scaler that is tuned to stay close to overflow (growth_interval of some hundred): "
            "raise overflow_rising and overflow_warning.",
        ),
        samples=("overflowing_layer", "clip_after_unscale"),
        panels=(panels.SKIPPED, panels.LOSS_SCALE, panels.GRADIENT_NORM),
    ),
)


FP16_WITHOUT_LOSS_SCALE = loop_mistake(
    "FP16 without a loss scale",
    name="MpAgentFp16WithoutLossScale",
    summary="The run trains under autocast to FP16, and nothing scales its loss.",
    meaning="Gradients of activations are FP16: those below 6e-8 become 0, and of those below "
    "6e-5 digits are lost. What depends on small gradients, mostly the first layers and late "
    "phases of a training, learns less or nothing.",
    confirm='mp_agent_run_info has precision="fp16" and an empty scaler; in the loop, '
    "loss.backward() is called without a GradScaler.",
    remedies=(
        "Use torch.amp.GradScaler: scaler.scale(loss).backward(), scaler.step(optimizer), "
        "scaler.update().",
        "Use BF16, which has the range of FP32 and needs no scaling, where the hardware has it.",
    ),
    why="The loss scale moves gradients up into the range that FP16 has, before they are made.",
    description="Run {run} has made {value|count} consecutive steps under autocast to FP16 "
    "without any scaling of the loss that mp_agent has seen.",
    quiet="a few steps under FP16 without a scaler",
    harm="No state is damaged, but a part of the gradients is lost on every step. Fix it within "
    "the day.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "autocast was added without a GradScaler, or with one that is not enabled.",
        "A script for BF16 that runs on hardware without it, where autocast was set to FP16.",
    ),
    false_positives=(
        "A loss that is scaled within a function of the script's own, which its graph does not "
        "show.",
        "A model whose gradients are large enough without it: compare mp_agent_grad_zero_ratio "
        "with that of a run in FP32.",
    ),
    samples=("clip_after_unscale",),
    panels=(panels.LOSS_SCALE, panels.GRADIENT_NORM),
)


LOSS_IN_16_BITS = loop_mistake(
    "loss in 16 bits",
    name="MpAgentLossIn16Bits",
    summary="The loss is computed in BF16 or FP16.",
    meaning="BF16 has 3 significant digits: the logarithms and sums of a loss are rounded to 0.4 "
    "% or more, and with them the gradients that start from it. The loss falls less far, and "
    "small differences between probabilities are lost. FP16 overflows above 65504 as well.",
    confirm="Print loss.dtype, and the dtype of what the loss function is given.",
    remedies=(
        "Cast the outputs to FP32 for the loss: cross_entropy(logits.float(), targets).",
        "Call the loss function under autocast, which computes it in FP32.",
    ),
    why="Logarithms, exponentials and sums of many terms need more digits than the products of a "
    "layer.",
    description="On {value|count} consecutive steps, run {run} computed its loss in 16 bits.",
    quiet="a few steps with a loss in 16 bits",
    harm="No state is damaged; the run loses accuracy. Fix it before the next start.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "A model that was cast to BF16 as a whole, and a loss function outside of autocast.",
        "An engine or wrapper whose outputs are in 16 bits.",
    ),
    false_positives=("A task whose loss needs no more digits, by a comparison with FP32.",),
    samples=("sum_in_float32",),
    panels=(panels.LOSS,),
)


AUTOCAST_WITHOUT_EFFECT = Condition(
    name="MpAgentAutocastWithoutEffect",
    summary="Autocast is on, but most linear layers and convolutions compute in FP32.",
    meaning="The training is as slow, and takes as much memory, as without autocast; its results "
    "are those of FP32, whatever the run is called.",
    confirm="mp_agent_autocast_fp32_ratio; print the dtype of the output of a linear layer.",
    remedies=(
        "Call the model, and not only the loss function, within the autocast context.",
        "Look for autocast(enabled=False), and for custom_fwd(cast_inputs=torch.float32), around "
        "the model, and give autocast the device type that the model is on.",
    ),
    why="Autocast acts on operations that run within its context, on its device type; what is "
    "computed outside of it keeps the format of its inputs.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(
                Series(metric=training.AUTOCAST_FP32_SAMPLES), ">=", limit("autocast_fp32_samples")
            ),
            description="In {value|count} consecutive samples, more than <autocast_fp32_share> of "
            "the linear layers and convolutions of run {run} gave FP32 results on steps under "
            "autocast to 16 bits.",
            reason="No delay: the condition already requires autocast_fp32_samples consecutive "
            "samples, 17 steps apart.",
        ),
    ),
    quiet=("a part of the model that is kept in FP32 on purpose",),
    needs=((Quantity.LOOP,),),
    knobs=(less_above("autocast_fp32_samples"),),
    guidance=Guidance(
        harm="No damage; time and memory are wasted, and a comparison of formats would compare "
        "nothing. Look during working hours.",
        query='mp_agent_autocast_fp32_ratio{run="RUN"}',
        reading="The share of FP32 among linear layers and convolutions at the last sample; near 0 "
        "where autocast works.",
        causes=(
            "The model is called outside of the autocast context, the loss function within.",
            "A nested autocast(enabled=False), or custom_fwd(cast_inputs=torch.float32).",
            "Autocast for another device type than that of the model.",
        ),
        false_positives=(
            "Another model, such as a frozen teacher, runs under autocast, with gradients on, and "
            "the one that is trained stays in FP32 on purpose.",
        ),
        samples=("call_under_autocast",),
        panels=(panels.STEPS_PER_SECOND, panels.LOSS),
    ),
)


CONDITIONS = (OVERFLOW_RATIO_HIGH, FP16_WITHOUT_LOSS_SCALE, LOSS_IN_16_BITS)
