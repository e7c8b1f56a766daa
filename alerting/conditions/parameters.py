"""Alerts on parameters that are not trained, or not as they were to be."""

from mp_agent.alerting import panels
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import happened
from mp_agent.alerting.expressions import Compare, Series, limit
from mp_agent.alerting.first_line import Triage
from mp_agent.alerting.panels import Guidance
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import optimizer

_UNHELD = Series(metric=optimizer.PARAMETERS_UNHELD)


PARAMETERS_WITHOUT_OPTIMIZER = Condition(
    name="MpAgentParametersWithoutOptimizer",
    summary="Parameters get gradients, and no optimizer holds them.",
    meaning="These parameters keep the values that they have: nothing uses their gradients. The "
    "loss may fall all the same, by what the other parameters learn.",
    confirm="mp_agent_unheld_parameters_info names the parameters. In the script, compare the ids "
    "of model.parameters() with those in optimizer.param_groups.",
    remedies=(
        "Create the optimizer after the model is complete: after layers are replaced, adapters "
        "are added, and the model is copied, sharded or wrapped; or add the parameters by "
        "optimizer.add_param_group.",
        "Put layers of a list into an nn.ModuleList, so that model.parameters() has theirs.",
        "Give the parameters of a loss, such as a temperature, to the optimizer as well.",
        "Set requires_grad to False for what is not to be trained, such as a target network or a "
        "teacher, or compute its outputs under torch.no_grad(): its gradients cost memory and "
        "time.",
    ),
    why="An optimizer keeps the parameter objects that it was given; those that replace them later "
    "get gradients and no steps.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_UNHELD),
            description="{value|count} parameter(s) of run {run} get gradients, are in no "
            "optimizer, and keep their values.{mp_agent_unheld_parameters_info| Among them: "
            "|parameters}",
            reason="No delay: the metric requires that two looks, nine or more steps apart, find "
            "the same.",
        ),
    ),
    quiet=("a run whose optimizers hold all parameters that get gradients",),
    needs=((Quantity.LAYERS,),),
    guidance=Guidance(
        harm="What is not trained is missing from the result, and the run has to be repeated: "
        "look before it is long.",
        query='mp_agent_unheld_parameters_info{run="RUN"}',
        reading="The first of the parameters by name, and how many more there are; "
        "mp_agent_parameters_unheld is their number. Names that begin with a class are of modules "
        "outside the model.",
        causes=(
            "The optimizer was created before a layer was replaced, such as the head of a "
            "pretrained model.",
            "The optimizer was created before the model was copied, sharded, or given adapters.",
            "Layers are kept in a plain list, which model.parameters() does not look into.",
            "Parameter groups were filtered by name or by type, and none takes these.",
            "A loss with parameters of its own, which no optimizer was given.",
        ),
        false_positives=(
            "A network that is meant to stay as it is, in training mode and without "
            "requires_grad_(False): call eval() and requires_grad_(False) on it.",
            "Parameters whose optimizer is only created later: until then the alert is right.",
        ),
        samples=("dead_parameters",),
        panels=(panels.TRAINED_PARAMETERS, panels.DEAD_LAYERS),
    ),
)


_CUT_OFF = Series(metric=optimizer.PARAMETERS_CUT_OFF)


LAYERS_CUT_OFF = Condition(
    name="MpAgentLayersCutOff",
    summary="The first layers run, and no gradient comes back to them.",
    meaning="These layers keep the weights that they began with, although an optimizer holds them "
    "and the others learn from what they compute.",
    confirm="mp_agent_cut_off_parameters_info names the parameters. In the script, look at "
    "requires_grad of what the named layers return, and of what the first layer after them gets.",
    remedies=(
        "Remove what cuts them off: detach(), .data, torch.tensor(x) of a tensor, a way through "
        "NumPy, or a part of the forward pass under no_grad.",
        "Let a torch.autograd.Function return a gradient for its input, not None.",
        "Set requires_grad to False for layers that are not to be trained.",
    ),
    why="Backward ends where a tensor does not say how it was computed, and an optimizer leaves "
    "out parameters without gradient.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_CUT_OFF),
            description="{value|count} parameter(s) of run {run} get no gradient: their layers "
            "ran, and the first layer with a gradient got such a tensor as they return, which "
            "requires none.{mp_agent_cut_off_parameters_info| Among them: |parameters}",
            reason="No delay: the metric requires that three looks in a row find the same.",
        ),
    ),
    quiet=("a head that the loss does not use, which comes after the layers with gradients",),
    needs=((Quantity.LAYERS,),),
    guidance=Guidance(
        harm="Nothing breaks, but what is not trained is missing from the result, and the run has "
        "to be repeated: look before it is long.",
        query='mp_agent_cut_off_parameters_info{run="RUN"}',
        reading="The first of the parameters by name, and how many more there are; "
        "mp_agent_parameters_cut_off is their number. Seen in models that are not compiled, and "
        "where the first layer with a gradient gets a tensor of as many elements, or of as many "
        "features, as the last one without returns.",
        causes=(
            "A detach() that was left from an experiment, or was meant for another branch.",
            "An operation that gives its result no history: .data, NumPy, torch.tensor, rounding "
            "without a straight-through estimate.",
            "A custom backward that returns None.",
        ),
        false_positives=(
            "Features that are detached on purpose, of layers that an optimizer holds: set "
            "requires_grad to False on them, or run them under no_grad.",
        ),
        samples=("dead_parameters",),
        panels=(panels.TRAINED_PARAMETERS, panels.DEAD_LAYERS),
    ),
)


_PARTED = Series(metric=optimizer.PARAMETERS_PARTED)


TIED_WEIGHTS_PARTED = Condition(
    name="MpAgentTiedWeightsParted",
    summary="Weights that were to be one parameter are trained as two.",
    meaning="Embeddings and output layer, or other layers that share a weight, have parameters of "
    "their own, with gradients of their own: the model has more parameters than it was to have, "
    "and what one of them learns the other does not.",
    confirm="mp_agent_parted_parameters_info names the parameters. In the script, compare them "
    "with `is`.",
    remedies=(
        "Tie them again, model.tie_weights() in Transformers, after the checkpoint is loaded and "
        "before the model is wrapped and the optimizer made.",
        "Load without assign=True, which gives each name a parameter of its own.",
        "If they are meant to be two, set tie_word_embeddings to False: a checkpoint that is "
        "loaded with True keeps one of them.",
    ),
    why="Tied weights are one object under two names; whatever replaces the object under one name "
    "ends that, and nothing fails.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(_PARTED),
            description="{value|count} parameters of run {run} get gradients of their own, and "
            "were one at an earlier step, or are one by the model's configuration."
            "{mp_agent_parted_parameters_info| Among them: |parameters}",
            reason="No delay: it is compared which objects the parameters are.",
        ),
    ),
    quiet=("a model whose weights are tied, or whose configuration ties none",),
    needs=((Quantity.LAYERS,),),
    guidance=Guidance(
        harm="The run trains another model than was meant, and its checkpoint may lose one of the "
        "weights when it is loaded: look before it is long.",
        query='mp_agent_parted_parameters_info{run="RUN"}',
        reading="The first of the parameters by name, and how many more there are; "
        "mp_agent_parameters_parted is their number. Weights that were two at the first step are "
        "found in Transformers models alone, by config.tie_word_embeddings.",
        causes=(
            "load_state_dict(assign=True), of a state with an entry for each name.",
            "A layer that was replaced or resized without tying it again.",
            "A conversion that makes new parameters, of each name its own.",
        ),
        false_positives=(
            "A script that unties weights on purpose in the middle of a run, or leaves "
            "tie_word_embeddings at True.",
        ),
        samples=("dead_parameters",),
        panels=(panels.TRAINED_PARAMETERS,),
    ),
)


_UNCHANGED = Series(metric=optimizer.PARAMETERS_UNCHANGED)
_ROUNDED = Series(metric=optimizer.UPDATES_ROUNDED)


WEIGHTS_UNCHANGED = Condition(
    name="MpAgentWeightsUnchanged",
    summary="Weights stay as they are although the optimizer steps.",
    meaning="The weights have gradients and a learning rate, the optimizer has stepped, and they "
    "are bit for bit what they were: these parameters, or the whole run, train nothing.",
    confirm="mp_agent_unchanged_parameters_info names the parameters; for 16-bit weights, "
    "mp_agent_updates_rounded_ratio. In the script, keep a copy of a weight and compare it after "
    "some steps.",
    remedies=(
        "Check that the optimizer steps the model's own parameters: an update of a copy, as of "
        "weight.contiguous() or weight.float(), does not reach the model.",
        "With FP32 master weights, copy them back to the model after each step.",
        "Clear gradients after optimizer.step(), not between clip_grad_norm_ and it: the norm is "
        "that of the gradients which are clipped, and the step then has none.",
        "Without torch.compile, CUDA graphs and fused kernels around optimizer.step(), see whether "
        "the weights change then.",
        "Where 16-bit weights round their updates away: keep the weights that the optimizer steps "
        "in FP32 and compute in 16 bits by autocast, or round stochastically.",
    ),
    why="Gradients and the loss look healthy whether or not the update arrives; only the weights "
    "themselves show it.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="not damaged, but not trained",
                now="stop, and correct what steps the weights",
            ),
            when=happened(_UNCHANGED),
            description="{value|count} parameter(s) of run {run} did not change over nine or more "
            "steps, although gradients and learning rate were to change them by more than the "
            "spacing of their format.{mp_agent_unchanged_parameters_info| Among them: |parameters}",
            reason="No delay: the comparison is exact, and spans nine or more steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=Compare(_ROUNDED, ">", limit("updates_rounded")),
            description="{value|percent} of the elements of 16-bit weights in run {run} that were "
            "looked at did not change over nine or more steps: each update is below half the "
            "spacing of the format.",
            reason="No delay: the comparison is exact, and of a time in which the learning rate "
            "did not rise.",
        ),
    ),
    quiet=(
        "weights that change, and 16-bit weights of which some do",
        "a learning rate of 0, skipped steps and a frozen model, of which nothing is compared",
    ),
    follows_from=("MpAgentParametersWithoutOptimizer",),
    needs=((Quantity.OPTIMIZER,),),
    knobs=(less_above("updates_rounded"),),
    guidance=Guidance(
        harm="The run computes and learns nothing, or not in these parameters: what it costs is "
        "lost. Stop it and correct the step.",
        query='mp_agent_parameters_unchanged{run="RUN"} or '
        'mp_agent_updates_rounded_ratio{run="RUN"}',
        reading="The number of parameters whose elements, as far as they are looked at, are what "
        "they were at the look before; or the share of the elements of 16-bit weights that are.",
        causes=(
            "A step that updates copies of the weights: of those that are not contiguous, of "
            "another format, or of a model that was replaced.",
            "FP32 master weights that are stepped and never copied back to the model.",
            "A compiled or captured optimizer step that leaves out some parameters.",
            "Weights in BF16 or FP16 without FP32 copies, at a learning rate that is too small "
            "for the spacing of the format.",
        ),
        false_positives=(
            "A script that sets the weights back after every step, as for test-time training.",
            "An optimizer that collects gradients over more steps than lie between two looks.",
        ),
        samples=("master_weights", "dead_parameters"),
        panels=(panels.TRAINED_PARAMETERS, panels.UPDATE_SIZE, panels.LEARNING_RATE),
    ),
)


NOTHING_LOADED = Condition(
    name="MpAgentNothingLoaded",
    summary="A checkpoint was loaded, and none of its tensors has a name of the model.",
    meaning="load_state_dict(strict=False) leaves out what does not fit, which was everything: the "
    "model is trained from the weights that it had before, in place of those of the checkpoint.",
    confirm="Print what load_state_dict returns: all names are in unexpected_keys. Compare them "
    "with those of model.state_dict().",
    remedies=(
        "Remove the prefix that the names of one side have and those of the other have not: "
        "module. of DataParallel and DistributedDataParallel, _orig_mod. of torch.compile, model. "
        "of Lightning.",
        "Give it the part of the checkpoint that has the weights, such as checkpoint['model'].",
        "Load with strict=True wherever all is to fit: it raises.",
    ),
    why="A tensor is loaded into the parameter of the same name; strict=False lets the others pass "
    "without a word.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=happened(Series(metric=optimizer.NOTHING_LOADED)),
            description="{value|count} tensors were loaded into the model of run {run} with "
            "strict=False, and none of them has a name of the model.",
            reason="No delay: load_state_dict itself says what it has left out.",
        ),
    ),
    quiet=("a checkpoint of which a part fits",),
    needs=((Quantity.OPTIMIZER,),),
    guidance=Guidance(
        harm="The run begins from other weights than were meant. Stop it early.",
        query='mp_agent_unmatched_tensors{run="RUN"}',
        reading="The number of tensors of the checkpoint. It is shown for 1000 steps.",
        causes=(
            "A checkpoint of the wrapped model that is loaded into the one without wrapper, or the "
            "other way round.",
            "A checkpoint of a trainer, whose weights lie in a dictionary within it.",
            "Another architecture, or another version of it with other names.",
        ),
        false_positives=(
            "A model that is given, on purpose, a state of which nothing is meant for it.",
        ),
        samples=("save_and_resume",),
        panels=(panels.LOSS,),
    ),
)


CONDITIONS = (
    PARAMETERS_WITHOUT_OPTIMIZER,
    LAYERS_CUT_OFF,
    TIED_WEIGHTS_PARTED,
    WEIGHTS_UNCHANGED,
    NOTHING_LOADED,
)
