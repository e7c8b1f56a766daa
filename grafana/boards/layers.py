"""Layers: which layer it is."""

from grafana.panel import Board, Column, Panel, Query, Row, View, above, help_of
from grafana.queries import by_run, increase, series, worst, worst_over_range
from grafana.style import ANY_IS_NOTABLE

_LAYER = ("layer",)
_WORST = 10
_POINTS = 150
"""Enough for a picture; every one looks at all layers."""
_PICKED = 'layer=~"$layer"'

_OVERVIEW = Row(
    title="All layers",
    panels=(
        Panel(
            id=1,
            title="Layers by gradient norm over time",
            description="How many layers have a norm of which size: each column is a moment, "
            "brighter means more layers. A band that widens or wanders off is layers going their "
            "own way.",
            view=View.HEATMAP,
            width=24,
            height=9,
            most_points=_POINTS,
            queries=(
                Query(
                    f'count_values("le", 2 ^ ceil(log2({series("mp_agent_layer_grad_norm")} > 0)))',
                    "{{le}}",
                ),
            ),
        ),
        Panel(
            id=2,
            title="Largest layer norms",
            description="The ten layers whose gradient norm was largest at any moment shown.",
            width=12,
            log_base=10,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_layer_grad_norm", _WORST, keep=_LAYER), "{{layer}}"
                ),
            ),
        ),
        Panel(
            id=3,
            title="Largest layer elements",
            description="The ten layers with the largest single gradient element at any moment "
            "shown.",
            width=12,
            log_base=10,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_layer_grad_abs_max", _WORST, keep=_LAYER),
                    "{{layer}}",
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
        description=help_of(name) + " Empty is good.",
        view=View.TABLE,
        width=6,
        height=7,
        columns=(Column(name="layer", title="Layer"),),
        queries=(Query(worst(name, 10, keep=_LAYER), instant=True, optional=True),),
    )


_TROUBLE = Row(
    title="Layers that stop learning",
    panels=(
        Panel(
            id=30,
            title="Dead layers",
            description=help_of("mp_agent_layers_dead"),
            width=6,
            height=7,
            decimals=0,
            minimum=0,
            soft_maximum=2,
            steps=ANY_IS_NOTABLE,
            lines=True,
            queries=(Query(by_run("mp_agent_layers_dead"), "layers", optional=True),),
        ),
        _named(31, "Which are dead", "mp_agent_dead_layer_info"),
        Panel(
            id=32,
            title="Underflowing layers",
            description=help_of("mp_agent_layers_underflowing_ratio")
            + " Dashed: where the alert begins.",
            width=6,
            height=7,
            unit="percentunit",
            minimum=0,
            soft_maximum=0.1,
            steps=above(underflow_layers="orange"),
            lines=True,
            queries=(
                Query(by_run("mp_agent_layers_underflowing_ratio"), "of all layers", optional=True),
            ),
        ),
        _named(33, "Which underflow", "mp_agent_underflowing_layer_info"),
    ),
)

_TABLE = Row(
    title="Worst layers now",
    panels=(
        Panel(
            id=10,
            title="Worst layers",
            description="Layers with non-finite elements, with the most zeros and with the largest "
            "elements, as of the latest look. Click a column to sort by it.",
            view=View.TABLE,
            width=24,
            height=10,
            columns=(
                Column(name="run", title="Run", width=180),
                Column(name="layer", title="Layer"),
                Column(name="Value #A", title="Norm", width=110),
                Column(name="Value #B", title="Largest element", width=140),
                Column(name="Value #C", title="Zeros", unit="percentunit", width=110),
                Column(name="Value #D", title="Non-finite elements", unit="none", width=160),
            ),
            queries=(
                Query(worst("mp_agent_layer_grad_norm", 50, keep=_LAYER), instant=True),
                Query(worst("mp_agent_layer_grad_abs_max", 50, keep=_LAYER), instant=True),
                Query(
                    worst("mp_agent_layer_grad_zero_ratio", 50, keep=_LAYER),
                    instant=True,
                ),
                Query(
                    "topk(50, "
                    + by_run("mp_agent_layer_grad_nonfinite_elements_total", keep=_LAYER)
                    + " > 0)",
                    instant=True,
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=11,
            title="Most zeros",
            description="The ten layers with the largest share of zero gradient elements. Rows of "
            "an embedding that a batch does not touch are zeros by nature; a share that rises is "
            "underflow.",
            width=12,
            unit="percentunit",
            minimum=0,
            maximum=1,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_layer_grad_zero_ratio", _WORST, keep=_LAYER),
                    "{{layer}}",
                ),
            ),
        ),
        Panel(
            id=12,
            title="Non-finite elements",
            description=help_of("mp_agent_layer_grad_nonfinite_elements_total"),
            width=12,
            minimum=0,
            most_points=_POINTS,
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

_PICKED_LAYERS = Row(
    title="Chosen layers",
    panels=(
        Panel(
            id=20,
            title="Gradient norm of the chosen layers",
            description="Choose layers at the top of the page; of more than twenty, those with the "
            "largest norms are drawn.",
            log_base=10,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_layer_grad_norm", 20, keep=_LAYER, where=_PICKED),
                    "{{layer}}",
                ),
            ),
        ),
        Panel(
            id=21,
            title="Largest element of the chosen layers",
            description=help_of("mp_agent_layer_grad_abs_max"),
            log_base=10,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range("mp_agent_layer_grad_abs_max", 20, keep=_LAYER, where=_PICKED),
                    "{{layer}}",
                ),
            ),
        ),
        Panel(
            id=22,
            title="Zeros of the chosen layers",
            description=help_of("mp_agent_layer_grad_zero_ratio"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            most_points=_POINTS,
            queries=(
                Query(
                    worst_over_range(
                        "mp_agent_layer_grad_zero_ratio", 20, keep=_LAYER, where=_PICKED
                    ),
                    "{{layer}}",
                ),
            ),
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
