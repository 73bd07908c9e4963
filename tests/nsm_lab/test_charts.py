"""Line charts of results."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from nsm_lab.charts import COLOURS, Line, line_chart, line_figure

LINES = (Line("one", ((64.0, 1.0), (256.0, 2.0), (1024.0, 1.5))), Line("none", ()))
LABELS = {"x_ticks": [(64.0, "64"), (1024.0, "1K")], "x_label": "x", "y_label": "y"}


def test_every_line_has_its_points_its_colour_and_its_name() -> None:
    (axes,) = line_figure(LINES, **LABELS).axes
    first, second = axes.lines
    assert first.get_xydata().tolist() == [[64.0, 1.0], [256.0, 2.0], [1024.0, 1.5]]
    assert (first.get_color(), second.get_color()) == COLOURS[:2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "none"]


def test_lengths_are_on_a_logarithmic_axis_with_the_given_ticks() -> None:
    (axes,) = line_figure(LINES, **LABELS).axes
    low, middle, high = (axes.transData.transform((x, 1.0))[0] for x in (64.0, 256.0, 1024.0))
    assert middle == pytest.approx((low + high) / 2)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "1K"]


def test_the_y_axis_begins_where_it_is_told() -> None:
    (axes,) = line_figure(LINES, **LABELS, y_low=0.0).axes
    assert axes.get_ylim()[0] == 0.0


def test_equal_charts_have_equal_bytes_and_names_stay_text() -> None:
    lines = (Line("a <b> $x$", LINES[0].points),)
    text = line_chart(lines, **LABELS)
    assert line_chart(lines, **LABELS) == text
    assert "a <b> $x$" in {part.text for part in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize("points", [((100.0, 1.0),), ()])
def test_a_line_with_one_point_or_none_is_drawn(points: tuple[tuple[float, float], ...]) -> None:
    ET.fromstring(line_chart([Line("one", points)], x_ticks=[(100.0, "100")], x_label="x", y_label="y"))
