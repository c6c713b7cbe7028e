"""Controls over one picture, and the report's tables in a notebook."""

from __future__ import annotations

import math

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import pytest

from omni_lab.workbench import Dial, table
from omni_lab.workbench.plot import Plot


def bars(count: int, name: str = "a", many: bool = False) -> go.Figure:
    if count > 8:
        raise ValueError("expected at most <8> bars")
    return go.Figure([go.Bar(name=name, y=list(range(count)))] * (2 if many else 1), layout={"title": {"text": name}})


def test_moving_a_control_changes_the_figure_in_place():
    dial = Dial(bars, count=(1, 9), name={"first": "a", "second": "b"}, many=False)
    assert [type(one) for one in dial.controls.values()] == [
        ipywidgets.IntSlider, ipywidgets.Dropdown, ipywidgets.Checkbox
    ]  # fmt: skip
    assert [one.description for one in dial.controls.values()] == ["count", "name", "many"]
    shown = dial.children[-1]
    assert isinstance(shown, Plot) and len(shown.data) == 1
    dial.controls["count"].value = 3
    dial.controls["name"].label = "second"
    dial.controls["many"].value = True
    assert dial.children[-1] is shown
    assert len(shown.data) == 2 and list(shown.data[1].y) == [0, 1, 2] and shown.layout.title.text == "b"


def test_what_was_not_measured_travels_as_null():
    rows = pd.DataFrame({"low": [1.0, math.nan], "name": ["a", "b"]})
    shown = Dial(lambda: go.Figure(go.Scatter(y=[1.0, math.nan], customdata=rows))).shown
    assert shown.data[0].customdata.tolist() == [[1.0, "a"], [None, "b"]]


def test_what_cannot_be_drawn_is_said_and_the_last_picture_stays():
    dial = Dial(bars, count=(1, 9))
    dial.controls["count"].value = 9
    assert "at most &lt;8&gt; bars" in dial.note.value and dial.note.layout.display == ""
    assert len(dial.shown.data) == 1
    dial.controls["count"].value = 2
    assert dial.note.layout.display == "none" and list(dial.shown.data[0].y) == [0, 1]


def test_what_is_no_control_is_refused():
    with pytest.raises(ValueError, match=r"count: expected a widget, \(low, high\), .* got None"):
        Dial(bars, count=None)


def test_another_widget_takes_the_place_of_the_one_before_which_is_closed():
    dial = Dial(lambda text: ipywidgets.Label(text), text=["one", "two"])
    before = dial.children[-1]
    assert before.value == "one"
    dial.controls["text"].value = "two"
    assert dial.children[-1].value == "two" and before.comm is None


def test_a_table_keeps_its_texts_and_kinds():
    content = {
        "head": ["Rung", "RTF"],
        "rows": [["a<b", {"text": "0.5x", "kind": "better"}], ["c", {"text": "?", "kind": "missing"}]],
    }
    page = table(content).data
    assert "a&lt;b" in page and page.count("<tr>") == 3 and "font-weight:600" in page and "opacity:0.6" in page
    assert "not measured" in table(None).data
