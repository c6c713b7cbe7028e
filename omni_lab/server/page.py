"""The page at `/`: what it shares with the notebooks' widgets, and the library's own figure of an answer."""

from __future__ import annotations

from importlib.resources import files
from typing import Self

import pandas as pd
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response
from plotly.offline import get_plotlyjs
from pydantic import Field, model_validator

from omni_lab.server.bodies import Body
from omni_lab.server.errors import ApiError
from omni_lab.server.limits import ASSETS
from omni_lab.settings import wrong
from omni_lab.views import theme
from omni_lab.views.request import playback_buffer

SHARED = {
    "arrivals.css": "text/css",
    "arrivals.js": "text/javascript",
    "playout.js": "text/javascript",
    "stream.js": "text/javascript",
}
"""Files of `omni_lab.workbench` that the page uses, with their media types."""


class AnswerBody(Body):
    """When the chunks of an answer arrived, ms since it was asked for, and how long they are."""

    audio_times_ms: list[float] = Field(max_length=10_000)
    audio_chunk_samples: list[int] = Field(max_length=10_000)
    sample_rate: int = Field(ge=1, le=1_000_000)
    dark: bool = False

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        times, chunks = len(self.audio_times_ms), len(self.audio_chunk_samples)
        if times != chunks:
            raise wrong("audio_chunk_samples", f"expected one for each of {times} times, got {chunks}")
        return self


def page_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    package = files("omni_lab")
    page = package.joinpath("server/page.html").read_text("utf-8").replace("{{ colours }}", theme.css())

    @routes.get("/", response_class=HTMLResponse)
    async def index() -> str:
        return page

    @routes.get(f"{ASSETS}plotly.js")
    def plotly() -> Response:
        return Response(get_plotlyjs(), media_type="text/javascript")

    @routes.get(f"{ASSETS}{{name}}")
    def shared(name: str) -> Response:
        if name not in SHARED:
            raise ApiError(404, f"{ASSETS}{name}: there is no such file; expected one of {', '.join(SHARED)}")
        return Response(package.joinpath("workbench", name).read_text("utf-8"), media_type=SHARED[name])

    @routes.post("/figure")
    def figure(body: AnswerBody) -> Response:
        """The figure of the listener's buffer, for plotly.js."""
        seconds = sum(body.audio_chunk_samples) / body.sample_rate
        drawn = playback_buffer(pd.Series(body.model_dump() | {"audio_duration_s": seconds}))
        drawn.update_layout(template=theme.DARK if body.dark else theme.LIGHT)
        return Response(drawn.to_json(), media_type="application/json")

    return routes
