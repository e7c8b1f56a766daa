"""Boards as Grafana's classic JSON, through Grafana's own builders."""

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
    VariableHide,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.boards import BOARDS
from grafana.panel import COLUMNS, Board, Column, Panel, Query, Step, View
from grafana.queries import series

DATASOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
TAG = "mp-agent"
_ROW_HEIGHT = 1


def rendered_dashboards() -> Mapping[str, str]:
    """Return the committed dashboards by path from the repository's root."""
    return {f"grafana/dashboards/{board.uid}.json": render(board) for board in BOARDS}


def render(board: Board) -> str:
    """Return a board as classic JSON, with a line per value so that differences read well."""
    with warnings.catch_warnings():
        # Classic JSON is meant: it is what provisioning, sidecar and operator take.
        warnings.simplefilter("ignore", DeprecationWarning)
        built = json.loads(JSONEncoder(sort_keys=True).encode(_dashboard(board).build()))
    built["panels"] = _laid_out(board, built["panels"])
    return json.dumps(built, indent=1, sort_keys=True) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("mp_agent")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(_alert_annotation())
    )
    for variable in _variables(board):
        made.with_variable(variable)
    for panel in board.panels:
        made.with_panel(_BUILDERS[panel.view](panel))
    return made


def _alert_annotation() -> dashboard.AnnotationQuery:
    selected = 'cluster=~"$cluster",namespace=~"$namespace",job=~"$job",run=~"$run"'
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f'ALERTS{{alertname=~"MpAgent.+",alertstate="firing",{selected}}}')
        .title_format("{{alertname}}")
        .text_format("{{severity}}: run {{run}}")
        .tag_keys("severity")
    )


def _variables(board: Board) -> list[Any]:
    """Return the variables; each narrows those after it, and ended runs stay in the list."""
    one_run = board.one_run
    made: list[Any] = [
        dashboard.DatasourceVariable("datasource").label("Data Source").type("prometheus"),
        _labels("cluster", "Cluster", (), all_value=".*"),
        _labels("namespace", "Namespace", ("cluster",), all_value=".*"),
        _labels("job", "Job", ("cluster", "namespace")),
        _labels("run", "Run", ("cluster", "namespace", "job"), many=not one_run),
    ]
    if board.layer_variable:
        query = f"label_values({series('mp_agent_layer_grad_norm')}, layer)"
        made.append(_variable("layer", "Layer", query))
    return made


def _labels(
    name: str, label: str, before: tuple[str, ...], *, all_value: str = ".+", many: bool = True
) -> dashboard.QueryVariable:
    matchers = ",".join(f'{earlier}=~"${earlier}"' for earlier in before)
    query = f"label_values(mp_agent_build_info{{{matchers}}}, {name})"
    return _variable(name, label, query, all_value=all_value, many=many)


def _variable(
    name: str, label: str, query: str, *, all_value: str = ".+", many: bool = True
) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .definition(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .hide(VariableHide.DONT_HIDE)
        .multi(many)
        .include_all(many)
    )
    return made.all_value(all_value) if many else made


def _target(query: Query, letter: str, *, table: bool = False) -> prometheus.Dataquery:
    made = (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .expr(query.expression)
        .legend_format(query.legend or "__auto")
        .ref_id(letter)
    )
    if query.instant:
        made.instant()
    else:
        made.range()
    return made.format(PromQueryFormat.TABLE) if table else made


def _common(made: Any, panel: Panel) -> Any:
    """Fill in what every kind of panel has."""
    made.title(panel.title).description(panel.description).id(panel.id).datasource(DATASOURCE)
    made.unit(panel.unit)
    if panel.most_points is not None:
        made.max_data_points(panel.most_points)
    for letter, query in zip("ABCDEFGHIJKLMNOP", panel.queries, strict=False):
        made.with_target(_target(query, letter, table=panel.view is View.TABLE))
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.minimum is not None:
        made.min(panel.minimum)
    if panel.maximum is not None:
        made.max(panel.maximum)
    made.thresholds(_thresholds(panel.steps or (Step(None, "text"),)))
    if panel.texts:
        made.mappings([_mapping(panel.texts)])
    return made


def _thresholds(steps: tuple[Step, ...]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=step.value, color=step.color) for step in steps])
    )


def _mapping(texts: Mapping[str, tuple[str, str]]) -> ValueMapping:
    return ValueMap(
        options={
            value: ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(texts.items())
        }
    )


def _stat(panel: Panel) -> Any:
    made = _common(stat.Panel(), panel)
    made.graph_mode(BigValueGraphMode.NONE).color_mode(BigValueColorMode.VALUE)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    made.no_value("–")
    if panel.label:
        made.text_mode(BigValueTextMode.NAME)
    return made


def _timeseries(panel: Panel) -> Any:
    made = _common(timeseries.Panel(), panel)
    made.line_width(1).fill_opacity(0)
    made.show_points(VisibilityMode.ALWAYS if panel.points else VisibilityMode.NEVER)
    made.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    made.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    if panel.log_base is not None:
        made.scale_distribution(
            common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(panel.log_base)
        )
    if panel.soft_maximum is not None:
        made.axis_soft_max(panel.soft_maximum)
    if panel.lines:
        made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    return made


def _heatmap(panel: Panel) -> Any:
    made = _common(heatmap.Panel(), panel)
    made.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
        .exponent(0.5)
        .reverse(False)
        .fill("dark-orange")
    )
    made.y_axis(heatmap.YAxisConfig().unit(panel.unit))
    made.cell_gap(0).show_legend()
    return made.tooltip(heatmap.HeatmapTooltip().mode(TooltipDisplayMode.SINGLE))


def _timeline(panel: Panel) -> Any:
    made = _common(statetimeline.Panel(), panel)
    made.merge_values(True).row_height(0.8).show_value(VisibilityMode.NEVER).fill_opacity(80)
    return made.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(bool(panel.texts))
    )


def _table(panel: Panel) -> Any:
    """Join instant queries by their labels; columns appear in the order they are listed."""
    made = _common(table.Panel(), panel)
    shown = {column.name: index for index, column in enumerate(panel.columns)}
    made.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    made.with_transformation(
        DataTransformerConfig(
            id_val="filterFieldsByName", options={"include": {"names": list(shown)}}
        )
    )
    made.with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {},
                "indexByName": shown,
                "renameByName": {column.name: column.title for column in panel.columns},
            },
        )
    )
    for column in panel.columns:
        made.override_by_name(column.title, _column_properties(column))
    return made


def _column_properties(column: Column) -> list[DynamicConfigValue]:
    properties = [DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.width is not None:
        properties.append(DynamicConfigValue(id_val="custom.width", value=column.width))
    if column.decimals is not None:
        properties.append(DynamicConfigValue(id_val="decimals", value=column.decimals))
    if column.steps:
        steps = [{"color": step.color, "value": step.value} for step in column.steps]
        properties.append(
            DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps})
        )
    if column.texts:
        options = {
            value: {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in enumerate(column.texts.items())
        }
        properties.append(
            DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}])
        )
    if column.steps or column.texts:
        properties.append(
            DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"})
        )
    if column.link:
        properties.append(
            DynamicConfigValue(id_val="links", value=[{"title": "Open", "url": column.link}])
        )
    return properties


_BUILDERS: Mapping[View, Callable[[Panel], Any]] = {
    View.STAT: _stat,
    View.TIMESERIES: _timeseries,
    View.HEATMAP: _heatmap,
    View.TIMELINE: _timeline,
    View.TABLE: _table,
}


def _laid_out(board: Board, built: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the panels with their places on the grid, each row under its title."""
    panels = iter(built)
    placed: list[dict[str, Any]] = []
    y = 0
    for number, row in enumerate(board.rows):
        children = []
        title = {
            "type": "row",
            "id": 1000 + number,
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"h": _ROW_HEIGHT, "w": COLUMNS, "x": 0, "y": y},
        }
        y += _ROW_HEIGHT
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            made = next(panels)
            made["gridPos"] = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            children.append(made)
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
        placed += [{**title, "panels": children if row.collapsed else []}]
        placed += [] if row.collapsed else children
    return placed
