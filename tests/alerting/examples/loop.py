"""Examples of alerts on the order of a training loop's calls, on modes, and on autocast."""

from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import training
from tests.alerting.examples.example import Example, Examples, Track, Value, flat


def _mistake(mistake: str, *values: Value) -> Track:
    return Track(training.LOOP_MISTAKE_STEPS, values, {"mistake": mistake})


def _lasting(title: str, mistake: str, text: str) -> Example:
    """Return a run that makes a mistake at every step from minute 5 on."""
    return Example(
        title=title,
        minutes=8,
        tracks=(_mistake(mistake, *flat(None, 5), 31, 91),),
        fires={Severity.WARNING: text},
        at=6,
        not_yet=(5,),
    )


def _brief(title: str, mistake: str) -> Example:
    return Example(title=title, minutes=5, tracks=(_mistake(mistake, 31),))


_ADD_UP = _lasting(
    "zero_grad that was lost in the loop",
    "gradients add up",
    "On 91 consecutive steps, an optimizer of run demo used the gradients of its step before "
    "again: they were not cleared before the next backward added to them.",
)
_DISCARDED = _lasting(
    "zero_grad at every micro-batch",
    "gradients discarded",
    "On 91 consecutive steps of run demo, gradients of whole backwards were cleared before any "
    "optimizer used them. The same line of code made those that were used.",
)
_CLIPPED_LATE = _lasting(
    "clipping below the step",
    "clipping after the step",
    "On 91 consecutive steps, run demo clipped gradients that its step had used already.",
)
_REPEATED = _lasting(
    "a callback that steps again",
    "step repeated",
    "On 91 consecutive steps of run demo, an optimizer stepped again, or had just done so, with "
    "gradients that its step before had used: there was no backward in between.",
)
_SCALED = _lasting(
    "optimizer.step() in place of scaler.step(optimizer)",
    "scaled gradients",
    "On 91 consecutive steps, an optimizer of run demo used gradients of a scaled loss that "
    "nothing had unscaled.",
)
_NEVER_STEPS = _lasting(
    "a discriminator whose optimizer is forgotten",
    "optimizer never steps",
    "Over 91 steps of run demo, or as many backwards and more if it makes no step at all, "
    "gradients were made for an optimizer that has not stepped once.",
)
_EVALUATION = _lasting(
    "eval() for a validation, and no train() after it",
    "evaluation mode",
    "Run demo has made 91 consecutive steps with all of a model in evaluation mode: after steps in "
    "training mode, or since the start, although it has dropout.",
)
_MOMENTUM = _lasting(
    "a momentum of batch normalization from TensorFlow",
    "batch norm momentum",
    "Run demo has made 91 consecutive steps that updated running statistics with a momentum of "
    "0.9 or more.",
)
_BYPASSED = _lasting(
    "an optimizer that accelerate has not prepared",
    "accumulation bypassed",
    "On 91 consecutive steps, an optimizer of run demo stepped after fewer micro-batches than "
    "gradient_accumulation_steps, by which each loss is divided.",
)
_BETAS = _lasting(
    "betas in the other order",
    "betas swapped",
    "Run demo has made 91 consecutive steps with a first beta that is greater than the second.",
)

_ALL_FP32 = Example(
    title="a model that is called outside of autocast",
    minutes=5,
    tracks=(
        Track(training.AUTOCAST_FP32_SHARE, (1,)),
        Track(training.AUTOCAST_FP32_SAMPLES, (1, 2, 5)),
    ),
    fires={
        Severity.WARNING: "In 5 consecutive samples, more than <autocast_fp32_share> of the linear "
        "layers and convolutions of run demo gave FP32 results on steps under autocast to 16 bits."
    },
    at=2,
    not_yet=(1,),
)
_SOME_FP32 = Example(
    title="a part of the model that is kept in FP32 on purpose",
    minutes=5,
    tracks=(
        Track(training.AUTOCAST_FP32_SHARE, (0.4,)),
        Track(training.AUTOCAST_FP32_SAMPLES, (0,)),
    ),
)
_CLIPPED_NOTHING = _lasting(
    "clip_grad_norm_ before backward",
    "clipping without gradients",
    "On 91 consecutive steps, no clipping of run demo was given a parameter that had a gradient.",
)
_CLIPPED_APART = _lasting(
    "clip_grad_norm_ in a loop over parameters",
    "clipping one by one",
    "On 91 consecutive steps, run demo clipped four parameters or more, each by the norm of its "
    "own gradient, and none together.",
)
_CLIPPED_BY_SHARD = _lasting(
    "torch's clip_grad_norm_ under FullyShardedDataParallel",
    "clipping by shard",
    "On 91 consecutive steps of run demo, a rank that has shards of the gradients clipped them by "
    "a norm that is that of its own shards alone.",
)
_UNSCALED = _lasting(
    "autocast to FP16 without a GradScaler",
    "FP16 without a loss scale",
    "Run demo has made 91 consecutive steps under autocast to FP16 without any scaling of the "
    "loss that mp_agent has seen.",
)
_MISMATCH = _lasting(
    "softmax before cross_entropy",
    "loss input mismatch",
    "On 91 consecutive steps, run demo computed its loss by a function that takes logits from "
    "probabilities, or by one that takes their logarithms from probabilities or logits, or its "
    "cross-entropy was negative, or its softmax was along another dimension than that of the "
    "classes.",
)
_BROADCAST = _lasting(
    "outputs with a dimension that their targets lack",
    "targets broadcast",
    "On 91 consecutive steps, run demo subtracted, multiplied or divided outputs and other "
    "tensors, one with a dimension of 1 that the other lacks, as (B, 1) and (B): broadcasting "
    "makes (B, B) of both.",
)
_MISALIGNED = _lasting(
    "labels that are the inputs, unshifted",
    "targets misaligned",
    "On 91 consecutive steps of run demo, all targets of a cross-entropy were the tokens that the "
    "model embeds at the same positions, or nearly all of them the tokens after the next ones, and "
    "none of its losses had the next ones.",
)
_PADDING = _lasting(
    "labels that are a copy of padded inputs",
    "padding in targets",
    "On 91 consecutive steps of run demo, more than a tenth of the next tokens that count in a "
    "cross-entropy were padding: by the attention mask that the model is given, by the padding_idx "
    "of its embedding, or since rows end in it that have it nowhere else.",
)
_SEEN = _lasting(
    "attention without a causal mask",
    "targets seen",
    "On 91 consecutive steps of run demo, the targets of a cross-entropy were the next of the "
    "tokens that the model embeds, and its self-attention went from each token to the next one as "
    "well, in every layer that was looked at.",
)
_EVALUATED = _lasting(
    "a validation without eval()",
    "evaluation in training mode",
    "91 steps ago or more, run demo made four passes of the model or more in a row without "
    "gradients, in training mode, and none in evaluation mode since.",
)
_EPOCH = _lasting(
    "a loop over epochs without set_epoch",
    "epoch repeated",
    "On 91 consecutive steps, run demo trained on batches of a loader that shuffles, in the order "
    "of the two passes before.",
)
_SEED = _lasting(
    "torch.manual_seed in the loop",
    "seed repeated",
    "On 91 consecutive steps, run demo set the seed of torch's random numbers to the same value, "
    "and drew the same numbers from it before backward.",
)
_IN_16_BITS = _lasting(
    "a model that was cast to BF16, and its loss with it",
    "loss in 16 bits",
    "On 91 consecutive steps, run demo computed its loss in 16 bits.",
)


EXAMPLES = {
    "MpAgentGradientsAddUp": Examples(
        firing=(_ADD_UP,),
        quiet=(_brief("a few steps with gradients that were used before", "gradients add up"),),
    ),
    "MpAgentGradientsDiscarded": Examples(
        firing=(_DISCARDED,),
        quiet=(_brief("a bad batch that is skipped now and then", "gradients discarded"),),
    ),
    "MpAgentClippingAfterStep": Examples(
        firing=(_CLIPPED_LATE,),
        quiet=(_brief("clipping after a step now and then", "clipping after the step"),),
    ),
    "MpAgentStepRepeated": Examples(
        firing=(_REPEATED,),
        quiet=(_brief("a step that is repeated now and then", "step repeated"),),
    ),
    "MpAgentGradientsLeftScaled": Examples(
        firing=(_SCALED,),
        quiet=(_brief("a few steps with scaled gradients", "scaled gradients"),),
    ),
    "MpAgentOptimizerNeverSteps": Examples(
        firing=(_NEVER_STEPS,),
        quiet=(
            _brief(
                "an optimizer that begins to step a little later than another",
                "optimizer never steps",
            ),
        ),
    ),
    "MpAgentLeftInEvaluation": Examples(
        firing=(_EVALUATION,),
        quiet=(_brief("a few steps in evaluation mode", "evaluation mode"),),
    ),
    "MpAgentClippingWithoutGradients": Examples(
        firing=(_CLIPPED_NOTHING,),
        quiet=(_brief("a few steps whose clipping finds nothing", "clipping without gradients"),),
    ),
    "MpAgentClippingOneByOne": Examples(
        firing=(_CLIPPED_APART,),
        quiet=(_brief("a few steps that clip so", "clipping one by one"),),
    ),
    "MpAgentClippingByShard": Examples(
        firing=(_CLIPPED_BY_SHARD,),
        quiet=(_brief("a few steps whose norm is that of one rank's shards", "clipping by shard"),),
    ),
    "MpAgentFp16WithoutLossScale": Examples(
        firing=(_UNSCALED,),
        quiet=(_brief("a few steps under FP16 without a scaler", "FP16 without a loss scale"),),
    ),
    "MpAgentLossInputMismatch": Examples(
        firing=(_MISMATCH,),
        quiet=(_brief("a few steps with such a loss", "loss input mismatch"),),
    ),
    "MpAgentTargetsBroadcast": Examples(
        firing=(_BROADCAST,),
        quiet=(_brief("a few steps with such a loss", "targets broadcast"),),
    ),
    "MpAgentTargetsMisaligned": Examples(
        firing=(_MISALIGNED,),
        quiet=(_brief("a few steps with such targets", "targets misaligned"),),
    ),
    "MpAgentPaddingInTargets": Examples(
        firing=(_PADDING,),
        quiet=(_brief("a few steps with such targets", "padding in targets"),),
    ),
    "MpAgentCausalMaskMissing": Examples(
        firing=(_SEEN,),
        quiet=(_brief("a few steps with such attention", "targets seen"),),
    ),
    "MpAgentEvaluatedInTrainingMode": Examples(
        firing=(_EVALUATED,),
        quiet=(_brief("passes without gradients at every step", "evaluation in training mode"),),
    ),
    "MpAgentEpochRepeated": Examples(
        firing=(_EPOCH,),
        quiet=(_brief("passes that are begun again, or made twice", "epoch repeated"),),
    ),
    "MpAgentSeedRepeated": Examples(
        firing=(_SEED,),
        quiet=(_brief("a seed that is set a few times", "seed repeated"),),
    ),
    "MpAgentBatchNormMomentum": Examples(
        firing=(_MOMENTUM,),
        quiet=(_brief("a few steps with such a momentum", "batch norm momentum"),),
    ),
    "MpAgentAccumulationBypassed": Examples(
        firing=(_BYPASSED,),
        quiet=(
            _brief(
                "the end of the data, where fewer micro-batches are left", "accumulation bypassed"
            ),
        ),
    ),
    "MpAgentBetasSwapped": Examples(
        firing=(_BETAS,),
        quiet=(_brief("a few steps with such betas", "betas swapped"),),
    ),
    "MpAgentLossIn16Bits": Examples(
        firing=(_IN_16_BITS,),
        quiet=(_brief("a few steps with a loss in 16 bits", "loss in 16 bits"),),
    ),
    "MpAgentAutocastWithoutEffect": Examples(firing=(_ALL_FP32,), quiet=(_SOME_FP32,)),
}
