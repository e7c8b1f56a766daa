"""What a rank knows of a step as a whole."""

from mp_agent.records.columns.column import Algebra, Column

GRADIENT_FACTOR = "gradient_factor"
GRADIENTS_REPLACED = "gradients_replaced"
LOSS_FACTOR = "loss_factor"
GRADIENTS_ADD_UP = "gradients_add_up"
BACKWARDS_DISCARDED = "backwards_discarded"
LATE_CLIPPING = "late_clipping"
LEFT_IN_EVALUATION = "left_in_evaluation"
AUTOCAST_FP32_SHARE = "autocast_fp32_share"
UNHELD_PARAMETERS = "unheld_parameters"
UNCHANGED_PARAMETERS = "unchanged_parameters"
CUT_OFF_PARAMETERS = "cut_off_parameters"
PARTED_PARAMETERS = "parted_parameters"
RESUMED_WITHOUT_STATE = "resumed_without_state"
SCHEDULE_BEHIND = "schedule_behind"
NOTHING_LOADED = "nothing_loaded"
ANOTHER_MODEL = "another_model"
STEP_REPEATED = "step_repeated"
STEP_SCALED = "step_scaled"
OPTIMIZER_NEVER_STEPS = "optimizer_never_steps"
ACCUMULATION_BYPASSED = "accumulation_bypassed"
CLIPS_NOTHING = "clips_nothing"
CLIPPED_APART = "clipped_apart"
CLIPPED_BY_SHARD = "clipped_by_shard"
SEED_REPEATED = "seed_repeated"
EPOCH_REPEATED = "epoch_repeated"
FP16_WITHOUT_LOSS_SCALE = "fp16_without_loss_scale"
LOSS_INPUT_MISMATCH = "loss_input_mismatch"
TARGETS_BROADCAST = "targets_broadcast"
LOSS_IN_16_BITS = "loss_in_16_bits"
TARGETS_MISALIGNED = "targets_misaligned"
PADDING_IN_TARGETS = "padding_in_targets"
TARGETS_SEEN = "targets_seen"
EVALUATED_IN_TRAINING = "evaluated_in_training"
BATCH_NORM_MOMENTUM = "batch_norm_momentum"
BETAS_SWAPPED = "betas_swapped"
LEARNING_RATES_ZERO = "learning_rates_zero"
LOWEST_LEARNING_RATE = "lowest_learning_rate"
ROUNDED_RATIO = "rounded_ratio"
ROUNDING_LOSS = "rounding_loss"
BATCH_DIGEST = "batch_digest"
BATCH_ROWS = "batch_rows"
BATCH_KEPT = "batch_kept"
BATCH_LOADED = "batch_loaded"
BATCH_INTERVAL_STEPS = 13
"""Steps whose number is a multiple of this are looked at, and those that follow them. Odd, so that
of batches that come in pairs a look has both, now and then."""
LOADED_BY_WORKERS = 2.0
"""Value of `batch_loaded` where several workers read the stream that the batch is of."""

COMMON_STEP_COLUMNS = (
    Column("loss", Algebra.MEAN, "sum over the backwards of the step; absent when not finite"),
    Column("loss_nonfinite", Algebra.MAX, "1 if the loss was NaN or Inf, else 0"),
    Column("loss_scale", Algebra.MAX, "GradScaler's scale in force during the step"),
    Column("skipped", Algebra.MAX, "1 if GradScaler skipped the update, else 0"),
    Column("clip_max_norm", Algebra.MAX, "limit given to gradient clipping"),
    Column("clip_norm", Algebra.MAX, "total norm that gradient clipping computed"),
    Column("learning_rate", Algebra.MAX, "learning rate of the first parameter group"),
    Column("tokens", Algebra.SUM, "tokens given to observe() for this step"),
    Column("step_seconds", Algebra.MAX, "wall time since the end of the previous step"),
    Column("compute_seconds", Algebra.OWN, "time before the rank's first collective of the step"),
    Column("probe_seconds", Algebra.OWN, "host time that the probe itself took in this step"),
    Column(
        "gradients_reduced",
        Algebra.MIN,
        "1 if wrappers reduced the gradients over all replicas before the step, 0 if each rank "
        "steps with its own; absent where no wrapper reduces any",
    ),
    Column(
        "weight_sample",
        Algebra.OWN,
        "bits of a few of this rank's weights before the step, summed modulo 2^32; on steps on "
        "which no wrapper is known to reduce the gradients, measured or not. Ranks whose "
        "tuples of (group, shard_index) over all shares are equal may hold the same weights",
    ),
    Column(
        "gradients_measured",
        Algebra.MIN,
        "1 if the gradients of the run were measured, 0 if they were left out: to stay within "
        "overhead_budget, in a CUDA graph, or since none can be measured. Where any rank left them "
        "out, the step has none",
    ),
    Column(
        "measuring_interval_steps", Algebra.MAX, "gradients are measured on every so many steps"
    ),
    Column("layer_interval_steps", Algebra.MAX, "layers are measured on every so many steps"),
    Column(
        "probe_device_seconds",
        Algebra.OWN,
        "device time between the beginning and the end of measuring the gradients of this step",
    ),
    Column(
        "host_overhead_ratio",
        Algebra.OWN,
        "share of the time of recent steps that the probe took on the host, and the device may "
        "have waited for",
    ),
    Column(
        "device_overhead_ratio",
        Algebra.OWN,
        "share of the time of recent steps that the probe took on the device",
    ),
    Column(
        "unmeasured_tensors",
        Algebra.SUM,
        "calls of watch_tensor() in the step that gave nothing to measure: no tensor with numbers, "
        "no name, or one call or name too many; absent without any",
    ),
    Column(
        "data_seconds",
        Algebra.MAX,
        "host time between the passes and before the first, as far as a forward of the model "
        "follows; absent where its forward is not seen",
    ),
    Column(
        "forward_seconds",
        Algebra.MAX,
        "host time from the beginning of the model's forward to that of backward; likewise",
    ),
    Column("backward_seconds", Algebra.MAX, "host time in backward; absent where none is seen"),
    Column(
        "optimizer_seconds",
        Algebra.MAX,
        "host time from the first of unscaling, clipping and the optimizer's step to its end",
    ),
    Column("other_seconds", Algebra.MAX, "what is left of step_seconds"),
    Column(
        GRADIENT_FACTOR,
        Algebra.MEAN,
        "norm of a few gradients as they were measured, divided by their norm when backward had "
        "made them, without a scaler; on some steps. 1 if nothing has changed them in between",
    ),
    Column(
        GRADIENTS_REPLACED,
        Algebra.MAX,
        "1 if any of them were NaN or Inf after backward and finite when they were measured, else "
        "0; on the same steps",
    ),
    Column(
        LOSS_FACTOR,
        Algebra.MAX,
        "constant by which the tensor that backward started from was multiplied last; on the same "
        "steps, where backward made none of the gradients that were measured",
    ),
    Column(
        GRADIENTS_ADD_UP,
        Algebra.MAX,
        "1 if an optimizer used, besides new gradients, those that its step before had used: they "
        "were not cleared; 0 or absent if none did",
    ),
    Column(
        BACKWARDS_DISCARDED,
        Algebra.MAX,
        "backwards before the step whose gradients were cleared before any optimizer had used "
        "them, made by the same line of code as one that was used; absent without any",
    ),
    Column(
        LATE_CLIPPING,
        Algebra.MAX,
        "1 if gradients were clipped that a step had used already, and nothing had changed since; "
        "absent if not",
    ),
    Column(
        LEFT_IN_EVALUATION,
        Algebra.MAX,
        "1 if an optimizer stepped a model that is in evaluation mode as a whole, and has layers "
        "that depend on it: after steps in training mode, or from the start where it has dropout "
        "and all of it is trained; absent if not",
    ),
    Column(
        AUTOCAST_FP32_SHARE,
        Algebra.MEAN,
        "share of FP32 among the results of the linear layers and convolutions that the loss was "
        "computed by, while autocast to 16 bits was on in the step; on some steps",
    ),
    Column(
        UNHELD_PARAMETERS,
        Algebra.MAX,
        "parameters of the model, in training mode, that get gradients, that no optimizer holds "
        "and that stayed as they were since the look before; on some steps, from the tenth on",
    ),
    Column(
        UNCHANGED_PARAMETERS,
        Algebra.MAX,
        "of the parameters of which a few elements were looked at nine steps ago or earlier, those "
        "whose elements are all as they were, although each had a gradient and a learning rate "
        "that change the weight by more than the spacing of its format; on some steps",
    ),
    Column(
        ROUNDED_RATIO,
        Algebra.MIN,
        "of those elements in formats of at most 16 bits, the share that are as they were although "
        "each had a gradient and a learning rate; on the same steps",
    ),
    Column(
        ROUNDING_LOSS,
        Algebra.MIN,
        "share of those elements that rounding kept from changing, of those that the updates were "
        "to change: as many at least as with stochastic rounding; on the same steps",
    ),
    Column(
        BATCH_DIGEST,
        Algebra.OWN,
        "digest, modulo 2^32, of a few elements of the tensors that the model got in its first "
        "forward, and of their shapes; on every 13th step and the one after",
    ),
    Column(BATCH_ROWS, Algebra.OWN, "size of the first of them along its first dimension"),
    Column(
        BATCH_KEPT,
        Algebra.MIN,
        "1 if it is the same memory as on the step before, else 0; on every 13th step plus one",
    ),
    Column(
        BATCH_LOADED,
        Algebra.MAX,
        "1 if a DataLoader with several batches has delivered one since the first forward of the "
        "step before, 2 if that is of an IterableDataset that several workers read, 0 if not since "
        "then; absent where none ever has. On the same steps",
    ),
    Column(LOWEST_LEARNING_RATE, Algebra.MIN, "learning_rate, where ranks have different ones"),
    Column(
        LEARNING_RATES_ZERO,
        Algebra.MIN,
        "1 if the learning rates of all parameter groups that were stepped are 0, else 0; where "
        "learning_rate is 0",
    ),
    Column(
        CUT_OFF_PARAMETERS,
        Algebra.MIN,
        "parameters without gradient of modules that ran, in training mode, before all modules "
        "that get gradients, where the first of these got a tensor of the shape that they "
        "returned, without gradient; on some steps, from the third look on",
    ),
    Column(
        STEP_REPEATED,
        Algebra.MAX,
        "1 if an optimizer's step, or its step before, used the gradients of the step before that "
        "again, unchanged, with no backward in between; absent if not",
    ),
    Column(
        STEP_SCALED,
        Algebra.MAX,
        "1 if an optimizer's last step used gradients of a loss that a GradScaler had scaled, by "
        "another factor than 1, and that nothing had unscaled; 0 or absent if not",
    ),
    Column(
        OPTIMIZER_NEVER_STEPS,
        Algebra.MAX,
        "1 if an optimizer has never stepped although its gradients were made and cleared within "
        "the last 16 steps, and its weights are what they were then; 0 or absent if not",
    ),
    Column(
        ACCUMULATION_BYPASSED,
        Algebra.MAX,
        "1 if an optimizer stepped after fewer micro-batches than a framework divides their losses "
        "by, where the data had not come to an end; absent if not",
    ),
    Column(
        CLIPS_NOTHING,
        Algebra.MAX,
        "1 if no call that clips gradients since the step before was given any that was there, 0 "
        "if one was; absent without a call",
    ),
    Column(
        CLIPPED_APART,
        Algebra.MAX,
        "1 if gradients were clipped, four times or more, by the norm of a single parameter each, "
        "outside of backward, and no others; absent without a limit and a norm",
    ),
    Column(
        CLIPPED_BY_SHARD,
        Algebra.MAX,
        "1 if a rank that has shards of gradients clipped them by a norm that is of its own shards "
        "alone; absent without shards, and where the norm is of all ranks by its making",
    ),
    Column(
        SEED_REPEATED,
        Algebra.MAX,
        "1 if the seed of torch's random numbers was set again to that of the step before, and as "
        "many of them were drawn until backward; absent if not",
    ),
    Column(
        EPOCH_REPEATED,
        Algebra.MAX,
        "1 if the batches came from a DistributedSampler that shuffles, in a pass over the data "
        "with the epoch of the two before; absent if not",
    ),
    Column(
        FP16_WITHOUT_LOSS_SCALE,
        Algebra.MAX,
        "1 if autocast to FP16 was on in the step, and nothing had scaled the loss; absent if not",
    ),
    Column(
        LOSS_INPUT_MISMATCH,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, a loss function that takes logits was "
        "given probabilities, or one that takes their logarithms probabilities or logits, or a "
        "cross-entropy was negative; 0 or absent if not",
    ),
    Column(
        TARGETS_BROADCAST,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, outputs [B, 1] and targets or weights "
        "[B], or the reverse, were broadcast to [B, B], or maps likewise; absent if not",
    ),
    Column(
        LOSS_IN_16_BITS,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, a loss function, or outside of "
        "autocast the mean or sum of one written by hand, had a result in BF16 or FP16; absent if "
        "not",
    ),
    Column(
        TARGETS_MISALIGNED,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, the targets of a cross-entropy were the "
        "tokens that the model embeds, or those after the next, and not the next ones; absent if "
        "not",
    ),
    Column(
        PADDING_IN_TARGETS,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, more than a tenth of the targets of a "
        "cross-entropy of the next tokens were padding, by the attention mask, by the padding "
        "index of the embedding, or as rows end in it alone; absent if not",
    ),
    Column(
        TARGETS_SEEN,
        Algebra.MAX,
        "1 if, at the last look at the graph of the loss, the targets of a cross-entropy were the "
        "next tokens, and all attention over the tokens went from each to the next; absent if not",
    ),
    Column(
        EVALUATED_IN_TRAINING,
        Algebra.MAX,
        "1 if the last evaluation, four passes of the model without gradients or more, between "
        "whose begin and that of the one before there were eight steps or more, was in training "
        "mode, with dropout or batch normalization; absent if not",
    ),
    Column(
        BATCH_NORM_MOMENTUM,
        Algebra.MAX,
        "1 if running statistics of the model have a momentum of 0.9 or more, so that they are "
        "those of the last batch; absent if not",
    ),
    Column(
        BETAS_SWAPPED,
        Algebra.MAX,
        "1 if an optimizer's first beta is greater than its second; absent if not",
    ),
    Column(
        PARTED_PARAMETERS,
        Algebra.MAX,
        "parameters that were one at an earlier look, or of which the model's configuration says "
        "that they are one, and that get gradients of their own; on some steps",
    ),
    Column(
        RESUMED_WITHOUT_STATE,
        Algebra.MAX,
        "steps that a schedule of the learning rate, or a framework's trainer, has counted before "
        "the first one, where the optimizer keeps state and began without any; on the fourth step",
    ),
    Column(
        SCHEDULE_BEHIND,
        Algebra.MAX,
        "steps that the optimizer's state has counted before the first one, and a schedule of the "
        "learning rate has not; on the fourth step",
    ),
    Column(
        NOTHING_LOADED,
        Algebra.MAX,
        "tensors that load_state_dict(strict=False) was given for the model, or most of it, none "
        "of which has a name of it, if nothing else was loaded into it; on the step that follows; "
        "0 where its weights have changed before that",
    ),
    Column(
        ANOTHER_MODEL,
        Algebra.MAX,
        "1 on the first or second step of another model, with an optimizer of its own, that "
        "follows the one before in the process, as folds and trials do; absent on others",
    ),
)
"""What every rank knows of a step as a whole."""

GUARD_COLUMNS = tuple(
    Column(
        f"guard_{action}",
        Algebra.MAX,
        f"1 if the guard {meaning}, 0.5 if it would have but for a dry run, 0 if not",
    )
    for action, meaning in (
        ("skip_update", "skipped the update"),
        ("clip_gradients", "scaled the gradients down"),
        ("hold_learning_rate", "held a learning rate that had jumped"),
        ("lower_learning_rate", "lowered the learning rate"),
        ("raise_loss_scale", "raised the loss scale"),
        ("reset_loss_scale", "set the loss scale back to the one that had held"),
        ("widen_precision", "switched modules to a wider precision"),
        ("request_checkpoint", "asked for a checkpoint"),
        ("request_stop", "asked the training to stop"),
        ("none_left", "was to act, and had acted too often to do so"),
    )
)
"""What a rank with a guard knows besides; rings and reports without one leave them out."""

LOCAL_GRAD_NORM = "local_grad_norm"
LOCAL_GRAD_NONFINITE_ELEMENTS = "local_grad_nonfinite_elements"
LOCAL_GRAD_NONFINITE_BACKWARD = "local_grad_nonfinite_backward"

LOCAL_GRADIENT_COLUMNS = (
    Column(
        LOCAL_GRAD_NORM,
        Algebra.OWN,
        "L2 norm over the finite elements of the rank's own gradients, before they were reduced "
        "over replicas, unscaled",
    ),
    Column(LOCAL_GRAD_NONFINITE_ELEMENTS, Algebra.OWN, "NaN and Inf elements of the same"),
    Column(
        LOCAL_GRAD_NONFINITE_BACKWARD,
        Algebra.OWN,
        "number, within the step, of the backward after which some of them were first NaN or Inf; "
        "absent where none was",
    ),
)
"""What a rank knows besides that measures its gradients before they are reduced."""

STEP_COLUMNS = (*COMMON_STEP_COLUMNS, *GUARD_COLUMNS, *LOCAL_GRADIENT_COLUMNS)
"""All that a rank may know of a step as a whole; what not every rank has comes last."""


def step_columns(*, guarded: bool, local_gradients: bool = False) -> tuple[str, ...]:
    """Return the names of the step columns of a rank with or without a guard.

    local_gradients: whether it measures gradients before they are reduced.
    """
    columns: tuple[Column, ...] = COMMON_STEP_COLUMNS
    columns += GUARD_COLUMNS if guarded else ()
    columns += LOCAL_GRADIENT_COLUMNS if local_gradients else ()
    return tuple(column.name for column in columns)
