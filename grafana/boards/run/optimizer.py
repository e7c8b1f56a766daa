"""The row of Run on the optimizer: what it does to the weights, and its state."""

from grafana.panel import Panel, Query, Row, above, help_of
from grafana.queries import by_run
from mp_agent.alerting.conditions.optimizer import (
    ADAM_EPSILON_UNSAFE,
    SECOND_MOMENT_STALE,
    UPDATES_LOST,
)
from mp_agent.alerting.conditions.parameters import (
    PARAMETERS_WITHOUT_OPTIMIZER,
    TIED_WEIGHTS_PARTED,
    WEIGHTS_UNCHANGED,
)

_NOTHING = "Needs measure_updates"

OPTIMIZER = Row(
    title="Optimizer",
    panels=(
        Panel(
            id=60,
            title="Size of updates",
            description=help_of("mp_agent_update_relative")
            + " Far above 1e-2 the learning rate is too high; far below 1e-5 little is learned.",
            log_base=10,
            many_decades=True,
            nothing=_NOTHING,
            queries=(Query(by_run("mp_agent_update_relative"), "update", optional=True),),
        ),
        Panel(
            id=61,
            title="Gradients against the second moment",
            description=help_of("mp_agent_moment_rms")
            + " The worst layer is judged: see the alert for its limit.",
            nothing=_NOTHING,
            queries=(
                Query(by_run("mp_agent_moment_rms"), "all elements", optional=True),
                Query(by_run("mp_agent_moment_rms_layer_max"), "worst layer", optional=True),
            ),
            runbooks=(SECOND_MOMENT_STALE,),
        ),
        Panel(
            id=62,
            title="Updates lost in rounding",
            nothing="Needs 16-bit weights, and a rate that neither rises nor has decayed",
            description="Over nine or more steps, of a few elements of each weight; and by one "
            "step, of all elements, with measure_updates. The updates are smaller than half the "
            "spacing of the weights' format.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            lines=True,
            steps=above(updates_lost="orange"),
            queries=(
                Query(by_run("mp_agent_updates_rounding_loss_ratio"), "nine steps", optional=True),
                Query(by_run("mp_agent_updates_lost_ratio"), "one step", optional=True),
            ),
            runbooks=(UPDATES_LOST,),
        ),
        Panel(
            id=63,
            title="Adam's epsilon",
            nothing="Needs measure_updates and second moments",
            description="Share of elements whose second moment is below epsilon, and of those "
            "whose state's format cannot hold epsilon. Both are near 0 in a healthy run.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            lines=True,
            steps=above(adam_below_epsilon="orange"),
            queries=(
                Query(by_run("mp_agent_adam_below_epsilon_ratio"), "below epsilon", optional=True),
                Query(by_run("mp_agent_adam_epsilon_lost_ratio"), "cannot hold it", optional=True),
            ),
            runbooks=(ADAM_EPSILON_UNSAFE,),
        ),
        Panel(
            id=66,
            title="Parameters that are not trained",
            description="Parameters that get gradients and are in no optimizer, parameters that "
            "stay as they are although the optimizer steps, and tied ones that are one no more. "
            "All are 0 in a healthy run.",
            minimum=0,
            lines=True,
            nothing="Not looked at yet",
            queries=(
                Query(by_run("mp_agent_parameters_unheld"), "in no optimizer", optional=True),
                Query(by_run("mp_agent_parameters_unchanged"), "unchanged", optional=True),
                Query(by_run("mp_agent_parameters_parted"), "tied no more", optional=True),
            ),
            runbooks=(PARAMETERS_WITHOUT_OPTIMIZER, WEIGHTS_UNCHANGED, TIED_WEIGHTS_PARTED),
        ),
    ),
)
