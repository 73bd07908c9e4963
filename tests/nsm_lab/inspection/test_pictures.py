"""Pages and pictures: whole by themselves, and text in them stays text."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.reading import Inspection, inspect
from nsm_lab.inspection.heatmap import data_uri, heatmap_png
from nsm_lab.inspection.page import inspection_page
from nsm_lab.inspection.plots import draw_inspection, draw_trace
from nsm_lab.inspection.trace import trace
from tests.support.models import random_model, small_config

NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=y>',
    "&amp;",
    "\x1b[31m",
    "é",
    "\U0001d538",
    " \n",
    "$\\frac{a}$",
    "a",
]


class Reader(HTMLParser):
    """The elements of a page, with what they point at, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    """Of every kind of layer, with an exchange."""
    config = small_config(
        64, layer_pattern="NCGW(NL)", num_layers=5, gate_chunk=8, communication_interval=64, num_memory_slots=16
    )
    ids = torch.randint(64, (66,), generator=torch.Generator().manual_seed(9)).tolist()
    return inspect(random_model(config), ids)


def labels_of(inspection: Inspection) -> list[str]:
    return [NASTY[index % len(NASTY)] for index in range(len(inspection.ids))]


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_a_page_loads_nothing_and_runs_nothing(inspection: Inspection) -> None:
    found = read(inspection_page(inspection, labels_of(inspection), title="a <b>title</b>"))
    assert not {"script", "link", "iframe", "object", "b", "a"} & set(found.tags)
    assert found.targets
    assert all(target.startswith("data:image/png;base64,") for target in found.targets)
    # a map of what is written, read and moved in each of the layers with states, and the exchange
    assert found.tags.count("img") == 4 * 3 + 1


def test_text_is_shown_as_it_is_and_is_never_html(inspection: Inspection) -> None:
    labels = labels_of(inspection)
    page = inspection_page(inspection, labels, title="a <b>title</b>")
    shown = read(page).text
    assert "a <b>title</b>" in shown
    assert "".join(labels).replace("\x1b", "\ufffd") in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)


def test_a_page_has_the_layers_and_the_traced_token(inspection: Inspection) -> None:
    page = inspection_page(inspection, labels_of(inspection), title="t", token=3)
    for name in (
        "Layer 0 (slots)",
        "Layer 1 (slots)",
        "Layer 2 (gated)",
        "Layer 4.0 (slots)",
        "Exchange after token 63",
    ):
        assert name in page
    assert page.count('class="here"') == 1
    assert 'title="3: layer 0:' in page.split('class="here"')[1]


def test_a_trace_names_the_states_that_were_read_and_who_wrote_to_them(inspection: Inspection) -> None:
    page = inspection_page(inspection, [f"token {index}" for index in range(66)], title="t", token=40)
    one = trace(inspection, 40)[0]
    state = int(one.states.argmax())
    writer = int(one.by_state[state].argmax())
    read, written = float(one.states[state]), float(one.by_state[state, writer])
    assert f"state {state} {read:.1%}: <code>token {writer}</code> {written:.1%}" in page


def test_a_token_that_is_not_there_is_refused(inspection: Inspection, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        inspection_page(inspection, labels_of(inspection), title="t", token=66)
    with pytest.raises(InvalidRequest):
        draw_inspection(inspection, labels_of(inspection), tmp_path / "a.png", title="t", token=66)
    assert not (tmp_path / "a.png").exists()


def test_a_heatmap_is_a_png_with_the_largest_brightest() -> None:
    image = Image.open(io.BytesIO(heatmap_png(torch.tensor([[0.0, 0.5, 1.0], [float("nan"), 2.0, 0.25]]))))
    image.load()
    assert image.size == (3, 2)
    pixels = image.convert("RGB")
    assert (pixels.getpixel((0, 0)), pixels.getpixel((1, 1))) == ((68, 1, 84), (253, 231, 36))
    assert pixels.getpixel((0, 1)) == (68, 1, 84)
    assert heatmap_png(torch.zeros(1, 1)).startswith(b"\x89PNG")
    assert data_uri(b"abc") == "data:image/png;base64,YWJj"


def test_a_picture_is_a_png_whatever_the_labels(inspection: Inspection, tmp_path: Path) -> None:
    path = tmp_path / "states.png"
    draw_inspection(inspection, labels_of(inspection), path, title="a $title$")
    with Image.open(path) as image:
        image.load()
        assert min(image.size) > 500
        assert image.format == "PNG"


def test_a_memory_shows_its_usage_and_baselines_are_named() -> None:
    config = small_config(64, layer_pattern="(NM)lr", num_layers=3, gate_chunk=8, memory_rows=12, memory_width=16)
    inspection = inspect(random_model(config), range(20))
    reader = Reader()
    reader.feed(inspection_page(inspection, ["a"] * 20, title="t"))
    assert "Layer 0.1 (memory)" in reader.text
    assert "Usage: how fully" in reader.text
    assert "No figures for layers 1, 2" in reader.text
    assert [one.layer for one in trace(inspection, 19)] == ["0.0"]


def test_the_legend_of_a_picture_lies_beside_its_points(inspection: Inspection, tmp_path: Path) -> None:
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    axes = figure_class(figsize=(14, 3), layout="constrained").subplots()
    draw_trace(axes, inspection, [""] * len(inspection.ids), len(inspection.ids) - 1)
    axes.figure.savefig(tmp_path / "trace.png")
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
