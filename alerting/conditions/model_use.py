"""Alerts on how a model is used: its mode, and what its loss is computed from."""

from mp_agent.alerting import panels
from mp_agent.alerting.conditions.loop import loop_mistake

LEFT_IN_EVALUATION = loop_mistake(
    "evaluation mode",
    threshold="evaluation_mode_steps",
    name="MpAgentLeftInEvaluation",
    summary="The model was left in evaluation mode, and is trained in it.",
    meaning="Dropout drops nothing, and batch normalization uses and keeps its old statistics: "
    "the training loss falls, often faster than before, while the model overfits, or drifts away "
    "from the statistics that it will be used with.",
    confirm="Print model.training before backward(): it is False. The training loss may have "
    "dropped suddenly, after a validation.",
    remedies=(
        "Call model.train() after each validation, best right before the first batch that trains.",
        "Where the model is to be trained in evaluation mode from here on, raise "
        "evaluation_mode_steps; modules that are put into it alone, such as batch normalization "
        "with frozen statistics, are not counted.",
    ),
    why="eval() holds until train() is called; no_grad ends by itself, the mode does not.",
    description="Run {run} has made {value|count} consecutive steps with all of a model in "
    "evaluation mode: after steps in training mode, or since the start, although it has dropout.",
    quiet="a few steps in evaluation mode",
    harm="No state is damaged at once; the run trains without the regularization that was asked "
    "for. Fix it within the hour, and go on from a checkpoint of before the first such step.",
    reading="The number of consecutive steps in evaluation mode.",
    causes=(
        "model.eval() before a validation, and no model.train() after it.",
        "A model of Transformers as from_pretrained returns it, which is in evaluation mode.",
        "model.train() before the loop over epochs only, or of another model.",
        "eval() to sample from a GAN's generator, or to roll out a policy.",
    ),
    false_positives=(
        "A last phase, or a whole run, that is trained in evaluation mode on purpose, by the same "
        "optimizer.",
    ),
    samples=("back_to_training",),
    panels=(panels.LOSS,),
)


EVALUATED_IN_TRAINING_MODE = loop_mistake(
    "evaluation in training mode",
    name="MpAgentEvaluatedInTrainingMode",
    summary="The model is evaluated in training mode: with dropout, or batch normalization's own.",
    meaning="Dropout drops activations of the evaluation too, so that its loss is higher than that "
    "of the model, and another one each time. Batch normalization normalizes by the batch that is "
    "evaluated, and mixes it into its running statistics: the validation set gets into the model.",
    confirm="Print model.training in the evaluation: it is True. Evaluate twice in a row: the "
    "results differ.",
    remedies=(
        "Call model.eval() before each evaluation, or before samples are drawn, and model.train() "
        "after it.",
        "Where passes without gradients are meant to be in training mode, as for several samples "
        "of a prediction, call eval() on the model, and train() on its dropout layers alone.",
    ),
    why="no_grad and inference_mode switch gradients off, and change neither dropout nor batch "
    "normalization.",
    description="{value|count} steps ago or more, run {run} made four passes of the model or more "
    "in a row without gradients, in training mode, and none in evaluation mode since.",
    quiet="passes without gradients at every step",
    harm="Weights are trained as they should be, but choices by the validation loss (of a "
    "checkpoint, of when to stop) are made by a wrong number, and running statistics contain "
    "data that were to be unseen. Correct it with the next restart.",
    reading="The number of consecutive steps since an evaluation in training mode.",
    causes=(
        "A validation within `with torch.no_grad():` and without model.eval().",
        "model.train() at the beginning of a function that trains and validates.",
        "eval() of another model than the one that is evaluated.",
    ),
    false_positives=(
        "Rollouts, or targets for the model's own training, that are drawn with dropout on "
        "purpose, after eight steps or more.",
    ),
    samples=("back_to_training",),
    panels=(panels.LOSS,),
)


BATCH_NORM_MOMENTUM = loop_mistake(
    "batch norm momentum",
    name="MpAgentBatchNormMomentum",
    summary="Running statistics are those of the last batch: their momentum is 0.9 or more.",
    meaning="torch's momentum is the weight of the newest batch, 0.1 by default. With 0.99, which "
    "is TensorFlow's weight of the past, evaluation normalizes by the last batch alone: its "
    "results jump from one evaluation to the next, while the training loss is as it should be.",
    confirm="Print module.momentum of the normalization layers. Evaluate twice, with one training "
    "step in between: the results differ by more than the step explains.",
    remedies=(
        "Pass 1 minus TensorFlow's number: momentum=0.01 in place of 0.99.",
        "Run some hundred batches in training mode, without steps, to renew the statistics of "
        "weights that are to be kept (torch.optim.swa_utils.update_bn).",
    ),
    why="new = (1 - momentum) * old + momentum * batch, in torch; the reverse in TensorFlow.",
    description="Run {run} has made {value|count} consecutive steps that updated running "
    "statistics with a momentum of 0.9 or more.",
    quiet="a few steps with such a momentum",
    harm="Weights are trained as they should be; evaluations, and exported models, are not to be "
    "trusted. Correct it with the next restart, and renew the statistics.",
    reading="The number of consecutive steps with such a momentum.",
    causes=(
        "A model that was ported from TensorFlow or Keras with its numbers.",
        "A momentum that was taken for that of an optimizer.",
    ),
    false_positives=(
        "Statistics that are meant to follow the last batch, as for a single domain at test time.",
    ),
    samples=("weights_of_averages",),
    panels=(panels.LOSS,),
)


OF_MODE = (LEFT_IN_EVALUATION, EVALUATED_IN_TRAINING_MODE, BATCH_NORM_MOMENTUM)


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


TARGETS_SEEN = loop_mistake(
    "targets seen",
    name="MpAgentCausalMaskMissing",
    summary="A language model attends to the tokens that it is to predict: no causal mask.",
    meaning="At each position the model sees the token that is its target, and learns to copy it: "
    "the loss falls to nearly 0, far below what a text allows, and the model generates nothing of "
    "use, since there is nothing to copy then.",
    confirm="Change the last token of an input, and compare the outputs at the positions before "
    "it: they are to stay as they were.",
    remedies=(
        "Mask the tokens that follow: scaled_dot_product_attention(q, k, v, is_causal=True), or "
        "mask=nn.Transformer.generate_square_subsequent_mask(T) for torch's layers, for which True "
        "in a mask of booleans means what is not to be seen.",
    ),
    why="A mask of floats is added to the logits: one of 0 and 1 hides nothing.",
    description="On {value|count} consecutive steps of run {run}, the targets of a cross-entropy "
    "were the next of the tokens that the model embeds, and its self-attention went from each "
    "token to the next one as well, in every layer that was looked at.",
    quiet="a few steps with such attention",
    harm="No state is damaged, but nothing useful is learned. Add the mask, and start again, "
    "within the hour.",
    reading="The number of consecutive steps, as of the last look at the loss, on every 17th.",
    causes=(
        "scaled_dot_product_attention, or a TransformerEncoder, without a mask, or with one of "
        "padding alone.",
        "AutoModelForCausalLM of BERT, RoBERTa or another encoder without is_decoder=True, of "
        "which Transformers only warns.",
        "A mask of 0 and 1 as floats, or one for the other convention: torch's layers and its "
        "function of attention take booleans the other way round.",
    ),
    false_positives=(
        "An autoencoder that embeds its tokens once, and gives them back, shifted, through a "
        "bottleneck.",
    ),
    samples=("next_tokens",),
    panels=(panels.LOSS,),
)


OF_LOSS = (
    LOSS_INPUT_MISMATCH,
    TARGETS_BROADCAST,
    TARGETS_MISALIGNED,
    PADDING_IN_TARGETS,
    TARGETS_SEEN,
)
