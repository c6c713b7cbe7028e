"""The endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response

from omni_lab.server.bodies import ChatBody, ProfileBody, SpeechBody
from omni_lab.server.chat import chat_reply
from omni_lab.server.errors import ErrorBody, handle_errors
from omni_lab.server.limits import Gate
from omni_lab.server.page import page_routes
from omni_lab.server.service import Service
from omni_lab.server.speech import speech_reply

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request cannot be served as it is; `param` names the field"},
    "5XX": {"model": ErrorBody, "description": "the server cannot answer now"},
}


def build_app(service: Service, key: str | None = None) -> FastAPI:
    """The application. `key` is what clients have to send as `Authorization: Bearer`, None for nothing."""
    limits = service.limits
    app = FastAPI(
        title="omni_lab", description="Text and speech from one staged pipeline.", docs_url=None, redoc_url=None
    )
    handle_errors(app)
    app.add_middleware(Gate, key=key, max_body_mb=limits.max_body_mb, body_timeout_s=limits.slow_reader_s)
    if limits.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=limits.cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.include_router(page_routes())

    @app.post(
        "/v1/chat/completions",
        responses=_answers("application/json", "text/event-stream") | ERRORS,
        response_class=Response,
    )
    async def chat_completions(body: ChatBody) -> Response:
        """A chat: the answer in text, speech or both, whole or as server-sent events."""
        return chat_reply(service, body)

    @app.post(
        "/v1/audio/speech",
        responses=_answers("audio/wav", "audio/flac", "audio/mpeg", "audio/ogg", "audio/pcm", "text/event-stream")
        | ERRORS,
        response_class=Response,
    )
    async def audio_speech(body: SpeechBody) -> Response:
        """A text, spoken: a file, raw audio as it is made, or server-sent events."""
        return speech_reply(service, body)

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "omni_lab"}
        return {"object": "list", "data": [model]}

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """200 while every stage answers, else 503 with the reason."""
        if reason := service.unready:
            return JSONResponse({"status": "unready", "reason": reason}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "healthy"})

    @app.post("/start_profile", responses=ERRORS)
    async def start_profile(body: ProfileBody | None = None) -> dict[str, Any]:
        """The stages begin to record; they end after `steps` steps, and write their traces at /stop_profile."""
        return await service.start_profile(body or ProfileBody())

    @app.post("/stop_profile", responses=ERRORS)
    async def stop_profile() -> list[dict[str, Any]]:
        """Writes the traces; for each worker its file, or why there is none."""
        return await service.stop_profile()

    @app.get("/metrics", responses=ERRORS)
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(await service.metrics.scrape(service.pipeline), media_type="text/plain; version=0.0.4")

    return app


def _answers(*media_types: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "the answer", "content": {kind: {} for kind in media_types}}}
