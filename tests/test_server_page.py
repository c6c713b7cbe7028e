"""What the server's page consists of: the notebooks' modules, plotly.js, and the library's figure of an answer."""

from __future__ import annotations

import json

import httpx
import pandas as pd
import pytest

from omni_lab.server.page import SHARED
from omni_lab.views import theme
from omni_lab.views.request import playback_buffer
from omni_lab.workbench.module import HERE
from tests.pipelines import experiment
from tests.serving import served

KEY = "a secret"
SIGNED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(nano):
    with served(experiment(nano, "executor=inline"), KEY) as running:
        yield running


def test_the_page_shares_the_widgets_modules(server):
    for name in SHARED:
        assert httpx.get(f"{server.url}/page/{name}").text == (HERE / name).read_text("utf-8")
    assert httpx.get(f"{server.url}/page/plotly.js").headers["content-type"].startswith("text/javascript")
    missing = httpx.get(f"{server.url}/page/live.py")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_the_page_shows_the_librarys_figure(server):
    answer = {"audio_times_ms": [50.0, 400.0], "audio_chunk_samples": [2400, 4800], "sample_rate": 24000}
    found = httpx.post(f"{server.url}/figure", json=answer, headers=SIGNED).json()
    row = pd.Series(answer | {"audio_duration_s": 0.3})
    assert found == json.loads(playback_buffer(row).to_json())
    dark = httpx.post(f"{server.url}/figure", json=answer | {"dark": True}, headers=SIGNED).json()
    assert dark["layout"]["template"]["layout"]["paper_bgcolor"] == theme.template(dark=True).layout.paper_bgcolor
    wrong = httpx.post(f"{server.url}/figure", json=answer | {"audio_chunk_samples": [2400]}, headers=SIGNED)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "audio_chunk_samples")
    assert httpx.post(f"{server.url}/figure", json=answer).status_code == 401
