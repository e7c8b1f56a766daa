"""Layers: which layer it is."""

from grafana.panel import LOWEST_ON_LOG_AXIS, Board, Column, Panel, Query, Row, View, above, help_of
from grafana.queries import (
    by_run,
    chosen,
    increase,
    series,
    while_finite,
    worst,
    worst_over_range,
)
from grafana.style import ANY_IS_NOTABLE
from mp_agent.alerting.conditions.gradient_layers import GRADIENT_UNDERFLOW, LAYER_GRADIENT_DEAD

_LAYER = ("layer",)
_WORST = 10
_POINTS = 150
"""Enough for a picture; every one looks at all layers."""
_PICKED = 'layer=~"$layer"'
_PICK_LINK = (
    "/d/mp-agent-layers?${datasource:queryparam}&${__url_time_range}&${cluster:queryparam}"
    "&${namespace:queryparam}&${job:queryparam}&${run:queryparam}&var-layer=${__value.text}"
)

_NORMS = f"clamp_min({series('mp_agent_layer_grad_norm')}, {LOWEST_ON_LOG_AXIS:g}) > 0"


def _largest(name: str, count: int, *, where: str = "") -> str:
    """Return the layers with the largest values; curves end where gradients are NaN or Inf."""
    found = worst_over_range(name, count, keep=_LAYER, where=where)
    return while_finite(found, "gradients")


_OVERVIEW = Row(
    title="All layers",
    panels=(
        Panel(
            id=1,
            title="Layers by gradient norm over time",
            description="Distribution of the layers' norms over time, in powers of two; the "
            "color scale shows the number of layers. A band that widens or drifts away means "
            "that some layers diverge from the others.",
            view=View.HEATMAP,
            width=24,
            height=9,
            most_points=_POINTS,
            queries=(
                Query(
                    f'count_values("le", 2 ^ ceil(log2({while_finite(_NORMS, "gradients")})))',
                    "{{le}}",
                ),
            ),
        ),
        Panel(
            id=2,
            title="Largest layer norms",
            description="The ten layers with the largest gradient norm within the time range.",
            width=12,
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            most_points=_POINTS,
            queries=(Query(_largest("mp_agent_layer_grad_norm", _WORST), "{{layer}}"),),
        ),
        Panel(
            id=3,
            title="Largest layer elements",
            description="The ten layers with the largest single gradient element within the "
            "time range.",
            width=12,
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            most_points=_POINTS,
            queries=(Query(_largest("mp_agent_layer_grad_abs_max", _WORST), "{{layer}}"),),
        ),
    ),
)

_NONFINITE = by_run("mp_agent_layer_grad_nonfinite_elements_total", keep=_LAYER)
_WORST_NOW = " or ".join(
    (
        f"topk(15, {_NONFINITE} > 0)",
        worst("mp_agent_layer_grad_norm", 15, keep=_LAYER),
        worst("mp_agent_layer_grad_zero_ratio", 15, keep=_LAYER),
    )
)


def _of_the_worst(name: str, *, kept: bool = True) -> Query:
    """Return a metric of the layers in the table, so that no row has gaps.

    kept: whether it is of the last sample that counts, which is not of now while there are NaNs.
    """
    found = chosen(by_run(name, keep=_LAYER), f"({_WORST_NOW})", keep=_LAYER)
    return Query(while_finite(found, "gradients") if kept else found, instant=True)


_TABLE = Row(
    title="Worst layers now",
    panels=(
        Panel(
            id=10,
            title="Worst layers",
            description="The fifteen layers each with the most non-finite elements so far, the "
            "largest norms and the most zeros, as of the latest sample; no norms while gradients "
            "are NaN or Inf. Click a column to sort, and a layer to plot it below.",
            view=View.TABLE,
            width=24,
            height=10,
            sort_by=("Non-finite elements", "Norm"),
            columns=(
                Column(name="layer", title="Layer", link=_PICK_LINK, link_title="Choose the layer"),
                Column(name="Value #A", title="Norm", width=130),
                Column(name="Value #B", title="Largest element", width=150),
                Column(name="Value #F", title="Mean magnitude", width=150),
                Column(name="Value #C", title="Zeros", unit="percentunit", width=110),
                Column(
                    name="Value #D",
                    title="Non-finite elements",
                    unit="none",
                    width=180,
                    steps=ANY_IS_NOTABLE,
                ),
                Column(name="Value #E", title="Smallest element", width=150),
            ),
            queries=(
                _of_the_worst("mp_agent_layer_grad_norm"),
                _of_the_worst("mp_agent_layer_grad_abs_max"),
                _of_the_worst("mp_agent_layer_grad_zero_ratio"),
                _of_the_worst("mp_agent_layer_grad_nonfinite_elements_total", kept=False),
                _of_the_worst("mp_agent_layer_grad_abs_min"),
                _of_the_worst("mp_agent_layer_grad_abs_mean"),
            ),
        ),
        Panel(
            id=11,
            title="Most zeros",
            description="The ten layers with the largest share of zero gradient elements. "
            "Unused rows of an embedding are always zero; a rising share is underflow.",
            width=12,
            unit="percentunit",
            minimum=0,
            maximum=1,
            most_points=_POINTS,
            queries=(Query(_largest("mp_agent_layer_grad_zero_ratio", _WORST), "{{layer}}"),),
        ),
        Panel(
            id=12,
            title="Non-finite elements",
            description=help_of("mp_agent_layer_grad_nonfinite_elements_total"),
            width=12,
            minimum=0,
            most_points=_POINTS,
            nothing="All elements were finite",
            sparse=True,
            queries=(
                Query(
                    "topk(10, "
                    + increase("mp_agent_layer_grad_nonfinite_elements_total", keep=_LAYER)
                    + " > 0)",
                    "{{layer}}",
                    optional=True,
                ),
            ),
        ),
    ),
)


def _named(number: int, title: str, name: str) -> Panel:
    """Return a table of the layers that an info metric names."""
    return Panel(
        id=number,
        title=title,
        description=help_of(name) + " Empty if healthy.",
        view=View.TABLE,
        width=6,
        height=7,
        nothing="None",
        columns=(
            Column(name="layer", title="Layer", link=_PICK_LINK, link_title="Choose the layer"),
        ),
        queries=(Query(worst(name, 10, keep=_LAYER), instant=True, optional=True),),
    )


_TROUBLE = Row(
    title="Layers that stop learning",
    panels=(
        Panel(
            id=30,
            title="Dead layers",
            description=help_of("mp_agent_layers_dead")
            + " A layer is dead if its largest element is below <layer_dead_abs_max>. Dashed: "
            "limit of the alert.",
            width=6,
            height=7,
            decimals=0,
            minimum=0,
            soft_maximum=2,
            nothing="No layer sampled yet",
            steps=ANY_IS_NOTABLE,
            lines=True,
            queries=(Query(by_run("mp_agent_layers_dead"), "layers", optional=True),),
            runbooks=(LAYER_GRADIENT_DEAD,),
        ),
        _named(31, "Which are dead", "mp_agent_dead_layer_info"),
        Panel(
            id=32,
            title="Underflowing layers",
            description=help_of("mp_agent_layers_underflowing_ratio")
            + " Dashed: limit of the alert.",
            width=6,
            height=7,
            unit="percentunit",
            minimum=0,
            soft_maximum=0.1,
            nothing="Not enough layer samples yet",
            steps=above(underflow_layers="orange"),
            lines=True,
            queries=(
                Query(by_run("mp_agent_layers_underflowing_ratio"), "of all layers", optional=True),
            ),
            runbooks=(GRADIENT_UNDERFLOW,),
        ),
        _named(33, "Which underflow", "mp_agent_underflowing_layer_info"),
    ),
)


def _course(number: int, title: str, description: str, name: str, **more: object) -> Panel:
    """Return a graph of the layers that are chosen at the top of the page."""
    return Panel(
        id=number,
        title=title,
        description=description,
        most_points=_POINTS,
        queries=(Query(_largest(name, 20, where=_PICKED), "{{layer}}"),),
        **more,  # type: ignore[arg-type]
    )


_PICKED_LAYERS = Row(
    title="Chosen layers",
    panels=(
        _course(
            20,
            "Gradient norm of the chosen layers",
            "Select layers at the top of the page, or click one in a table; with more than "
            "twenty, those with the largest norms are shown.",
            "mp_agent_layer_grad_norm",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
        ),
        _course(
            21,
            "Largest element of the chosen layers",
            help_of("mp_agent_layer_grad_abs_max"),
            "mp_agent_layer_grad_abs_max",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
        ),
        _course(
            22,
            "Zeros of the chosen layers",
            help_of("mp_agent_layer_grad_zero_ratio"),
            "mp_agent_layer_grad_zero_ratio",
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
    ),
)

LAYERS = Board(
    uid="mp-agent-layers",
    title="mp_agent / Layers",
    description="Which layer explodes, vanishes or turns non-finite.",
    one_run=True,
    layer_variable=True,
    rows=(_OVERVIEW, _TABLE, _TROUBLE, _PICKED_LAYERS),
)
