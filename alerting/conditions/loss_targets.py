"""Alerts on what a loss function is given: outputs of another kind, or other targets."""

from mp_agent.alerting import panels
from mp_agent.alerting.conditions.loop import loop_mistake

LOSS_INPUT_MISMATCH = loop_mistake(
    "loss input mismatch",
    name="MpAgentLossInputMismatch",
    summary="A loss function is given probabilities where it takes logits, or similar.",
    meaning="Cross-entropy of probabilities cannot fall to 0, and its gradients nearly vanish: "
    "the model learns slowly, and less. The negative log-likelihood of probabilities or logits, "
    "in place of their logarithms, is no likelihood at all, and falls without end. So does binary "
    "cross-entropy of targets beyond 1. After a softmax along the batch, samples compete with each "
    "other, and not the classes of a sample.",
    confirm="Print loss.grad_fn.next_functions: the loss function comes right after softmax, "
    "sigmoid or the last layer. Sum the probabilities along the classes: each sum is 1.",
    remedies=(
        "Give cross_entropy, CrossEntropyLoss and BCEWithLogitsLoss the outputs of the last layer "
        "as they are: leave the softmax or sigmoid out while training.",
        "Give nll_loss, and kl_div as its input, the result of log_softmax along the dimension of "
        "the classes: 1 for nll_loss, also of sequences and images.",
        "Bring the targets of a binary cross-entropy into 0 to 1: divide masks by 255.",
    ),
    why="cross_entropy applies log_softmax itself, BCEWithLogitsLoss the sigmoid; nll_loss and "
    "kl_div apply no logarithm to their input.",
    description="On {value|count} consecutive steps, run {run} computed its loss by a function "
    "that takes logits from probabilities, or by one that takes their logarithms from "
    "probabilities or logits, or its cross-entropy was negative, or its softmax was along another "
    "dimension than that of the classes.",
    quiet="a few steps with such a loss",
    harm="No state is damaged, but the model is trained for something else than was meant. Fix "
    "the loss, and start again, within the hour.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "A model that ends in softmax or sigmoid, for inference, and a loss that applies it.",
        "nll_loss where cross_entropy was meant, or without log_softmax before it.",
        "kl_div, whose input, unlike its target, is logarithms.",
        "softmax(dim=0), or a softmax without dim of a tensor with three dimensions, which is "
        "along the first.",
        "Masks or labels from 0 to 255 as targets of a binary cross-entropy.",
    ),
    false_positives=(
        "Scores that are bounded by a sigmoid on purpose, and go into cross-entropy without a "
        "temperature.",
        "A softmax along the batch on purpose, which compares the samples for each class, without "
        "one along the classes.",
    ),
    samples=("stable_operations",),
    panels=(panels.LOSS, panels.GRADIENT_NORM),
)


TARGETS_BROADCAST = loop_mistake(
    "targets broadcast",
    name="MpAgentTargetsBroadcast",
    summary="Each output meets all targets, or weights, of the batch: (B, 1) against (B).",
    meaning="Broadcasting makes B x B numbers of B outputs and B targets. Of differences the loss "
    "is smallest where every output is the mean of all targets, which is what the model learns; "
    "of products, as of losses and weights, each weight has the same effect on all of them.",
    confirm="Print output.shape and target.shape right before the loss. torch warns of it on the "
    "first call of mse_loss, and of nothing where the difference is written by hand.",
    remedies=("Give both the same shape: output.squeeze(-1), or target.unsqueeze(-1).",),
    why="A shape (B, 1) is broadcast against (B) along both dimensions.",
    description="On {value|count} consecutive steps, run {run} subtracted, multiplied or divided "
    "outputs and other tensors, one with a dimension of 1 that the other lacks, as (B, 1) and (B): "
    "broadcasting makes (B, B) of both.",
    quiet="a few steps with such a loss",
    harm="No state is damaged, but the model learns a constant. Fix the loss, and start again, "
    "within the hour.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "A last layer with one output, and targets that were loaded as a vector.",
        "squeeze() of the targets or of the outputs, and not of both.",
    ),
    false_positives=(
        "A distance between all pairs of two samples of numbers, without a term between the "
        "outputs themselves, where the shape comes from view or a transposition: give it by "
        "unsqueeze.",
    ),
    samples=("one_shape",),
    panels=(panels.LOSS,),
)


TARGETS_MISALIGNED = loop_mistake(
    "targets misaligned",
    name="MpAgentTargetsMisaligned",
    summary="A language model's targets are not the next tokens, but the same, or those after.",
    meaning="With each token as its own target, the model learns to copy what it is given: the "
    "loss falls to nearly 0 within a few steps, and what it generates repeats the prompt. With "
    "targets that were shifted twice, it learns to leave a token out.",
    confirm="Print the first tokens of the inputs and of the targets next to each other: targets "
    "are to be one token ahead, once.",
    remedies=(
        "Shift once: cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).",
        "Models of Transformers shift labels themselves: give them labels=input_ids, with -100 "
        "where nothing is to be learned.",
    ),
    why="The output at a position is to predict the token that follows, which the model has not "
    "seen there.",
    description="On {value|count} consecutive steps of run {run}, all targets of a cross-entropy "
    "were the tokens that the model embeds at the same positions, or nearly all of them the "
    "tokens after the next ones, and none of its losses had the next ones.",
    quiet="a few steps with such targets",
    harm="No state is damaged, but nothing useful is learned. Fix the targets, and start again, "
    "within the hour.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "labels = input_ids in a loop that computes the loss by itself.",
        "A data set that shifts its labels, and a model, or a loss, that shifts them again.",
    ),
    false_positives=(
        "An autoencoder of tokens that gets them as they are, and adds its noise to embeddings.",
        "A head that predicts the token after the next, trained by itself.",
    ),
    samples=("next_tokens",),
    panels=(panels.LOSS,),
)


PADDING_IN_TARGETS = loop_mistake(
    "padding in targets",
    name="MpAgentPaddingInTargets",
    summary="Padding counts as a target: it is more than a tenth of what the loss is the mean of.",
    meaning="The model soon predicts padding after padding without error: the loss is lower than "
    "that of the text, by a share that changes with the lengths in a batch, gradients of the text "
    "have less weight, and losses of runs with other lengths cannot be compared.",
    confirm="Count (labels != -100) where attention_mask is 0, or where the token is that of "
    "padding.",
    remedies=(
        "Set labels to -100 where the attention mask is 0: labels = input_ids.masked_fill("
        "attention_mask == 0, -100).",
        "Pass ignore_index to the loss that you compute by yourself.",
    ),
    why="cross_entropy leaves out targets that are ignore_index, -100 as a rule, and no others.",
    description="On {value|count} consecutive steps of run {run}, more than a tenth of the next "
    "tokens that count in a cross-entropy were padding: by the attention mask that the model is "
    "given, by the padding_idx of its embedding, or since rows end in it that have it nowhere "
    "else.",
    quiet="a few steps with such targets",
    harm="The run learns from the text with less weight than was meant, and its loss reads too "
    "low. Correct it with the next restart.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "labels = input_ids.clone() of padded sequences.",
        "cross_entropy without ignore_index on the output of pad_sequence.",
    ),
    false_positives=(
        "Sequences that are to end in several tokens of padding, all of which are to be learned.",
    ),
    samples=("next_tokens",),
    panels=(panels.LOSS,),
)


CONDITIONS = (
    LOSS_INPUT_MISMATCH,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    PADDING_IN_TARGETS,
)
