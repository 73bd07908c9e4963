"""The kinds of panels that the dashboards are made of, and the frame around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    ScaleDistributionConfig,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    CustomVariable,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.heatmap import HeatmapColorOptions, YAxisConfig
from grafana_foundation_sdk.builders.heatmap import Panel as HeatmapPanel
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.generate.queries import quantile

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "nsm"
COLUMNS = 24  # of Grafana's grid
QUANTILES = (0.5, 0.95, 0.99)
ALL = VariableOption(selected=True, text="All", value="$__all")

Variable = CustomVariable | QueryVariable | TextBoxVariable
Panel = StatPanel | TimeseriesPanel | HeatmapPanel
Queries = dict[str, str]  # legend -> expression; a legend may hold {{label}}


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A row of a dashboard with the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def series(
    title: str,
    queries: Queries,
    unit: str,
    about: str,
    *,
    width: int = 8,
    is_stacked: bool = False,
    is_log: bool = False,
    top: float | None = None,
) -> TimeseriesPanel:
    """Values over time. `unit` is one of Grafana's; `top` is the upper end of the axis where it has one."""
    panel = _framed(TimeseriesPanel(), title, queries, unit=unit, about=about, width=width, height=8)
    panel.legend(
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    panel.tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    panel.show_points(VisibilityMode.NEVER).line_width(1).fill_opacity(40 if is_stacked else 8)
    if is_stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if is_log:
        panel.scale_distribution(ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    else:
        panel.axis_soft_min(0)
    return panel if top is None else panel.max(top)


def latency(title: str, histogram: str, about: str, *, width: int = 8, unit: str = "s") -> TimeseriesPanel:
    """Median, 95th and 99th percentile of a histogram."""
    queries = {f"p{q * 100:g}": quantile(q, histogram) for q in QUANTILES}
    return series(title, queries, unit, about, width=width)


def number(
    title: str, expr: str, unit: str, about: str, *, limits: tuple[float, float] | None = None, width: int = 4
) -> StatPanel:
    """The latest value, large, with its course behind it. `limits`: from where on it is yellow, and red."""
    panel = _framed(StatPanel(), title, {"": expr}, unit=unit, about=about, width=width, height=4)
    steps = [Threshold(value=None, color="green")]
    if limits is not None:
        steps += [Threshold(value=limit, color=color) for limit, color in zip(limits, ("yellow", "red"), strict=True)]
    panel.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    return panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))


def heatmap(title: str, expr: str, unit: str, about: str, *, width: int = 12) -> HeatmapPanel:
    """How a histogram's observations spread over its buckets, over time."""
    panel = _framed(HeatmapPanel(), title, {"{{le}}": expr}, unit="short", about=about, width=width, height=8)
    panel.calculate(False).y_axis(YAxisConfig().unit(unit))
    return panel.color(HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))


def dashboard(
    uid: str, title: str, about: str, sections: Sequence[Section], variables: Sequence[Variable] = ()
) -> Dashboard:
    """The frame: variables, links to the other dashboards, sections one below the other."""
    board = Dashboard(title).uid(uid).description(about).tags([TAG]).timezone("browser").readonly()
    board.time("now-30m", "now").refresh("10s").tooltip(DashboardCursorSync.CROSSHAIR)
    others = DashboardLink("Dashboards").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    board.link(others.as_dropdown(True).include_vars(True).keep_time(True))
    board.with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    for variable in (_instances(), *variables):
        board.with_variable(variable)
    numbers = iter(range(1, 1000))
    for section in sections:
        board.with_row(Row(section.title).id(next(numbers)))
        for panel in justified(section.panels):
            board.with_panel(panel.id(next(numbers)))
    return board


def justified(panels: Sequence[Panel]) -> list[Panel]:
    """The same panels in rows that are full: what would not fit begins the next row, what is left is shared out."""
    rows: list[list[tuple[Panel, int]]] = [[]]
    for panel in panels:
        width = int(panel.build().grid_pos.w)
        if _taken(rows[-1]) + width > COLUMNS:
            rows.append([])
        rows[-1].append((panel, width))
    return [panel.span(width * COLUMNS // _taken(row)) for row in rows for panel, width in row]


def _taken(row: Sequence[tuple[Panel, int]]) -> int:
    return sum(width for _, width in row)


def choice(name: str, label: str, values: Sequence[str], default: str) -> CustomVariable:
    """A variable with a closed set of values."""
    variable = CustomVariable(name).label(label).values(",".join(values))
    options = [VariableOption(selected=value == default, text=value, value=value) for value in values]
    return variable.options(options).current(VariableOption(selected=True, text=default, value=default))


def entry(name: str, label: str, default: str) -> TextBoxVariable:
    """A variable that is typed in."""
    option = VariableOption(selected=True, text=default, value=default)
    return TextBoxVariable(name).label(label).default_value(default).current(option).options([option])


def _instances() -> QueryVariable:
    query = {"query": "label_values(nsm_model_info, instance)", "refId": "instance"}
    variable = QueryVariable("instance").label("Gateway").datasource(SOURCE).query(query)
    variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True)
    return variable.include_all(True).all_value(".*").current(ALL)


def _framed(panel: Any, title: str, queries: Queries, *, unit: str, about: str, width: int, height: int) -> Any:
    panel.title(title).description(about).unit(unit).datasource(SOURCE).span(width).height(height)
    is_heatmap = isinstance(panel, HeatmapPanel)
    for letter, (legend, expr) in zip("ABCDEFGHIJ", queries.items(), strict=False):
        target = Dataquery().expr(expr).legend_format(legend).ref_id(letter).datasource(SOURCE).range()
        panel.with_target(target.format(PromQueryFormat.HEATMAP) if is_heatmap else target)
    return panel
