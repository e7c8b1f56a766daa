"""Alerts on the mode of a model, and on what depends on it: dropout and running statistics."""

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


CONDITIONS = (LEFT_IN_EVALUATION, EVALUATED_IN_TRAINING_MODE, BATCH_NORM_MOMENTUM)
