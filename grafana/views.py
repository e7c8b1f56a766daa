"""Panels as Grafana's own builders, one function for each way of drawing."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from string import ascii_uppercase
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
    xychart,
)
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
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    MatcherConfig,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.xychart import SeriesMapping, XYShowMode

from grafana.panel import COLUMNS, LOWEST_ON_LOG_AXIS, STEP, Column, Panel, Query, Step, View
from grafana.queries import RUN
from mp_agent.alerting.condition import Condition
from mp_agent.alerting.links import runbook_url
from mp_agent.catalog.thresholds import DEFAULTS

DATASOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
_XY_CHART_VERSION = "12.0.0"
"""Without it, Grafana takes an XY chart for one of before 11.1 and drops its options."""
_NAMED = re.compile(r"<(\w+)>")


def built_panel(panel: Panel) -> Any:
    """Return a panel's builder; it has no place on the grid yet."""
    return _BUILDERS[panel.view](panel)


def _mark(threshold: str) -> str:
    """Return what stands for a threshold until a site's value does. An unknown one: KeyError."""
    DEFAULTS[threshold]
    return f"@{threshold}@"


def _value(step: Step) -> Any:
    return _mark(step.threshold) if step.threshold else step.value


def _common(made: Any, panel: Panel) -> Any:
    """Fill in what every kind of panel has."""
    description = _NAMED.sub(lambda name: _mark(name[1]), panel.description)
    made.title(panel.title).description(description).id(panel.id).datasource(DATASOURCE)
    made.unit(panel.unit)
    if panel.runbooks:
        made.links([_runbook(condition) for condition in panel.runbooks])
    if panel.nothing:
        made.no_value(panel.nothing)
    if panel.most_points is not None:
        made.max_data_points(panel.most_points)
    for letter, query in zip(ascii_uppercase, asked(panel), strict=False):
        made.with_target(_target(drawn(panel, query), letter, table=panel.view is View.TABLE))
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.minimum is not None:
        made.min(panel.minimum)
    if panel.maximum is not None:
        made.max(panel.maximum)
    lines_have_their_own_colors = panel.view in (View.TIMESERIES, View.BY_STEP)
    if panel.steps or not lines_have_their_own_colors:
        made.thresholds(_thresholds(panel.steps or (Step(None, "text"),)))
    if panel.texts:
        made.mappings([_mapping(panel.texts)])
    return made


def asked(panel: Panel) -> tuple[Query, ...]:
    """Return the queries of a panel; those of a graph of two axes once for each.

    An axis without data is not drawn, and of each run one of the two queries has some.
    """
    if not panel.log_when:
        return panel.queries
    on = f"on ({', '.join(RUN)})"
    return tuple(
        replace(query, expression=f"({query.expression}) {among} {on} ({panel.log_when})")
        for among in ("unless", "and")
        for query in panel.queries
    )


def drawn(panel: Panel, query: Query) -> Query:
    """Return a query as a panel asks it: on a log axis, bounded below by what the axis can show."""
    if panel.log_base is None or panel.log_around_zero or panel.minimum is not None:
        return query
    if query.legend == STEP:  # on the other axis
        return query
    bounded = f"clamp_min({query.expression}, {LOWEST_ON_LOG_AXIS:g})"
    return replace(query, expression=bounded)


def _runbook(condition: Condition) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(f"Runbook of {condition.name}")
        .type(DashboardLinkType.LINK)
        .url(runbook_url("@runbook_base@", condition.name))
        .target_blank(True)
    )


def _target(query: Query, letter: str, *, table: bool = False) -> prometheus.Dataquery:
    made = (
        prometheus.Dataquery()
        .expr(query.expression)
        .legend_format(query.legend or "__auto")
        .ref_id(letter)
    )
    if query.instant:
        made.instant()
    else:
        made.range()
    return made.format(PromQueryFormat.TABLE) if table else made


def _thresholds(steps: tuple[Step, ...]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=_value(step), color=step.color) for step in steps])
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
    made.no_value(panel.nothing or "–")
    _color(made, panel)
    if panel.label:
        made.text_mode(BigValueTextMode.NAME)
    return made


def _color(made: Any, panel: Panel) -> None:
    for name, color in panel.colors.items():
        fixed = {"mode": "fixed", "fixedColor": color}
        made.override_by_name(name, [DynamicConfigValue(id_val="color", value=fixed)])


def _timeseries(panel: Panel) -> Any:
    made = _common(timeseries.Panel(), panel)
    made.show_points(VisibilityMode.AUTO if panel.sparse else VisibilityMode.NEVER)
    made.legend(_legend(shown=True, many=_has_many_series(panel)).calcs(["lastNotNull", "max"]))
    _color(made, panel)
    made.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    if panel.log_base is not None:
        made.scale_distribution(_log_scale(panel))
    if panel.log_when:
        _use_log_axis(made, panel)
    if panel.many_decades:
        made.axis_grid_show(False)
    if panel.soft_maximum is not None:
        made.axis_soft_max(panel.soft_maximum)
    for letter, threshold in zip(reversed(ascii_uppercase), panel.reaches, strict=False):
        _reach(made, panel, letter, threshold)
    if panel.lines:
        made.thresholds(_thresholds(tuple(map(_as_line, panel.steps))))
        made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    return made


def _by_step(panel: Panel) -> Any:
    """Join the step and the value of each run by their time; runs need not share any."""
    made = _common(xychart.Panel(), panel)
    for one_run in ("A|B", "C|D"):
        pair = MatcherConfig(id_val="byRefId", options=f"/^(?:{one_run})$/")
        # Where one of the two is missing there is no point: Grafana would draw it at 0.
        options = {"byField": "Time", "mode": "inner"}
        made.with_transformation(
            DataTransformerConfig(id_val="joinByField", filter_val=pair, options=options)
        )
    made.mapping(SeriesMapping.AUTO).show(XYShowMode.POINTS)
    made.point_size(xychart.XychartFieldConfigPointSize().fixed(4))
    made.axis_label(panel.title.lower())
    if panel.log_base is not None:
        made.scale_distribution(_log_scale(panel))
    if panel.many_decades:
        made.axis_grid_show(False)
    steps = {
        "unit": "none",
        "custom.axisLabel": STEP,
        "custom.axisGridShow": True,
        "custom.scaleDistribution": {"type": "linear"},
    }
    made.override_by_name(
        STEP, [DynamicConfigValue(id_val=name, value=value) for name, value in steps.items()]
    )
    made.legend(_legend(shown=True))
    made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.SINGLE))
    made.build().plugin_version = _XY_CHART_VERSION
    return made


def _use_log_axis(made: Any, panel: Panel) -> None:
    """Put the second half of a panel's queries on a log axis."""
    scale = {"type": "symlog", "log": 10, "linearThreshold": panel.log_around_zero}
    count = len(panel.queries)
    for letter in ascii_uppercase[count : 2 * count]:
        properties = {"custom.scaleDistribution": scale, "custom.axisGridShow": False}
        made.override_by_query(
            letter,
            [DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()],
        )


def _log_scale(panel: Panel) -> common.ScaleDistributionConfig:
    made = common.ScaleDistributionConfig().log(panel.log_base or 10)
    if panel.log_around_zero:
        return made.type(ScaleDistribution.SYMLOG).linear_threshold(panel.log_around_zero)
    return made.type(ScaleDistribution.LOG)


def _as_line(step: Step) -> Step:
    """Return a step without colour where all is well.

    Grafana then draws each line in the colour of that side of it which is further from there.
    """
    return Step(step.value, "transparent", step.threshold) if step.color == "green" else step


def _reach(made: Any, panel: Panel, letter: str, threshold: str) -> None:
    """Add an invisible series at a threshold, there whenever the panel has data.

    The soft limits of an axis would do, but Grafana leaves them out on log axes.
    """
    present = panel.queries[0].expression
    made.with_target(_target(Query(f"0 * max({present}) + {_mark(threshold)}"), letter))
    hidden = {"legend": True, "tooltip": True, "viz": False}
    properties = {"custom.hideFrom": hidden, "custom.lineWidth": 0}
    made.override_by_query(
        letter, [DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]
    )


def _has_many_series(panel: Panel) -> bool:
    """Return whether a query gives a series per rank, layer or alike, and there is room to list."""
    named = any("{{" in query.legend for query in panel.queries)
    return named and panel.width >= COLUMNS // 2


def _legend(*, shown: bool, many: bool = False) -> common.VizLegendOptions:
    """Return a list below; of many series, a table next to it, where ten lines have room."""
    made = common.VizLegendOptions().show_legend(shown)
    if many:
        return made.display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.RIGHT)
    return made.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)


def _heatmap(panel: Panel) -> Any:
    made = _common(heatmap.Panel(), panel)
    made.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
        .exponent(0.5)
        # A cell of one rank or layer, an outlier, is what has to be seen.
        .reverse(True)
        .fill("dark-orange")
    )
    made.y_axis(heatmap.YAxisConfig().unit(panel.unit))
    made.cell_gap(0).show_legend()
    return made.tooltip(heatmap.HeatmapTooltip().mode(TooltipDisplayMode.SINGLE))


def _timeline(panel: Panel) -> Any:
    made = _common(statetimeline.Panel(), panel)
    made.merge_values(True).row_height(0.8).show_value(VisibilityMode.NEVER).fill_opacity(80)
    return made.legend(_legend(shown=bool(panel.texts)))


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
    numbers = [column.title for column in panel.columns if column.number]
    if numbers:
        conversions = [{"targetField": title, "destinationType": "number"} for title in numbers]
        options = {"conversions": conversions, "fields": {}}
        made.with_transformation(DataTransformerConfig(id_val="convertFieldType", options=options))
    if panel.sort_by:
        made.sort_by(
            [
                common.TableSortByFieldState().display_name(title).desc(not panel.smallest_first)
                for title in panel.sort_by
            ]
        )
    for column in panel.columns:
        made.override_by_name(column.title, _column_properties(column))
    return made


def _column_properties(column: Column) -> list[DynamicConfigValue]:
    # A dash would have the colour of the lowest step.
    properties: dict[str, Any] = {"unit": column.unit, "noValue": "" if column.steps else "–"}
    if column.width is not None:
        properties["custom.width"] = column.width
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    if column.steps:
        steps = [{"color": step.color, "value": _value(step)} for step in column.steps]
        properties["thresholds"] = {"mode": "absolute", "steps": steps}
    if column.texts:
        options = {
            value: {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in enumerate(column.texts.items())
        }
        properties["mappings"] = [{"type": "value", "options": options}]
    if column.steps or column.texts:
        properties["custom.cellOptions"] = {"type": "color-text"}
    if column.link:
        properties["links"] = [{"title": column.link_title, "url": column.link}]
    return [DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


_BUILDERS: Mapping[View, Callable[[Panel], Any]] = {
    View.STAT: _stat,
    View.TIMESERIES: _timeseries,
    View.HEATMAP: _heatmap,
    View.TIMELINE: _timeline,
    View.TABLE: _table,
    View.BY_STEP: _by_step,
}
