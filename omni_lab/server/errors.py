"""What goes wrong, as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from omni_lab.core import DeadlineError, PipelineError, RequestError, StageError, Unavailable
from omni_lab.server.bodies import AudioForm, ChatBody, ProfileBody, SpeechBody, StreamOptions
from omni_lab.settings import did_you_mean

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Of 4xx statuses; the others are `invalid_request_error`, and 5xx are `server_error`."""

FIELDS = {name for body in (ChatBody, AudioForm, StreamOptions, SpeechBody, ProfileBody) for name in body.model_fields}

BODY_FIELDS = {"speaker": "voice", "thinker prompt": "messages", "talker prompt": "messages"}
"""Fields of a `core.Request` that a request's body has under another name."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every answer that is no success; `param` names the field to mend."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer that is no success."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        status = self.status_code
        kind = TYPES.get(status, "invalid_request_error") if status < 500 else "server_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": status}}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. Those that are no one's fault outside are not shown in detail."""
    match error:
        case ApiError():
            return error
        case RequestError():
            field = error.field.removeprefix("sampling.thinker.")
            field = BODY_FIELDS.get(field, field)
            return ApiError(400, f"{field}: {str(error).removeprefix(f'{error.field}: ')}", field)
        case DeadlineError():
            return ApiError(504, f"{error} (server.deadline_s)")
        case Unavailable() | PipelineError():
            return ApiError(503, str(error), headers={"Retry-After": "1"})
        case StageError():
            return ApiError(500, str(error))
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            param = "body" if error.status_code in (400, 413) else None
            return ApiError(error.status_code, f"{param or 'request'}: {error.detail}", param, error.headers)
    return ApiError(500, f"internal error: {type(error).__name__}")


def _invalid(error: RequestValidationError) -> ApiError:
    """The first mistake in a body: its field as messages[0].content, and what was expected there."""
    mistake = error.errors()[0]
    if mistake["type"] == "json_invalid":
        cause, place = mistake["ctx"]["error"], mistake["loc"][-1]
        return ApiError(400, f"body: no valid JSON: {cause} at character {place}", "body")
    if mistake["loc"] == ("body",) and mistake["type"] in (
        "missing",
        "model_attributes_type",
        "model_type",
        "dict_type",
    ):
        found = "nothing" if mistake["type"] == "missing" else "something else"
        return ApiError(400, f"body: expected a JSON object with Content-Type application/json, got {found}", "body")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in mistake["loc"][1:])
    context = mistake.get("ctx", {})
    field = ".".join(filter(None, [field.removeprefix("."), context.get("key")])) or "body"
    match mistake["type"]:
        case "extra_forbidden":
            message = f"unknown field{did_you_mean(mistake['loc'][-1], FIELDS)}"
        case "too_short":
            message = f"expected at least {context['min_length']}, got {context['actual_length']}"
        case "too_long":
            message = f"expected at most {context['max_length']}, got {context['actual_length']}"
        case _:
            message = mistake["msg"].replace("Input should be", "expected")
    return ApiError(400, f"{field}: {message[0].lower()}{message[1:]}", field)


def error_response(error: Exception) -> JSONResponse:
    told = as_api_error(error)
    return JSONResponse(told.body, told.status_code, told.headers)


def handle_errors(app: FastAPI) -> None:
    """Every error of the application is answered in the one form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
