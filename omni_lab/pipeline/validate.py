"""What a request must be before any stage hears of it, so that no mistake of one request reaches the others."""

from __future__ import annotations

import math

from omni_lab.core import Request, RequestError, Sampling

LARGEST = 1 << 20
"""Of counts: tokens, and the k of top-k."""


def check_request(request: Request, stages: list[str], offered: set[str]) -> None:
    """Types and ranges of all fields but the messages, which the front-end checks.

    Raises RequestError naming the field. `stages` are the names that `sampling` may have, `offered` the modalities
    of the pipeline.
    """
    if not isinstance(request.id, str) or not request.id or not request.id.isprintable():
        raise RequestError(f"expected printable text, got {request.id!r}", "id")
    modalities = request.modalities
    if not isinstance(modalities, tuple | list) or not all(isinstance(one, str) for one in modalities):
        raise RequestError(f"expected some of {sorted(offered)}, got {modalities!r}", "modalities")
    if not modalities or not set(modalities) <= offered:
        raise RequestError(f"{list(modalities)} must name one or more of {sorted(offered)}", "modalities")
    if not isinstance(request.return_codes, bool):
        raise RequestError(f"expected true or false, got {request.return_codes!r}", "return_codes")
    if not isinstance(request.stop, tuple | list) or not all(isinstance(text, str) and text for text in request.stop):
        raise RequestError(f"expected texts that are not empty, got {request.stop!r}", "stop")
    if not isinstance(request.sampling, dict):
        raise RequestError(f"expected a Sampling for each of {stages}, got {request.sampling!r}", "sampling")
    for stage, sampling in request.sampling.items():
        if stage not in stages:
            raise RequestError(f"unknown stage; expected one of {stages}", f"sampling.{stage}")
        if not isinstance(sampling, Sampling):
            raise RequestError(f"expected a Sampling, got {type(sampling).__name__}", f"sampling.{stage}")
        _check_sampling(sampling, f"sampling.{stage}")


def _check_sampling(sampling: Sampling, field: str) -> None:
    _number(sampling.temperature, 0.0, 1e6, f"{field}.temperature")
    _number(sampling.top_p, 1e-6, 1.0, f"{field}.top_p")
    _number(sampling.repetition_penalty, 1e-3, 1e3, f"{field}.repetition_penalty")
    _count(sampling.top_k, 0, LARGEST, f"{field}.top_k")
    _count(sampling.max_tokens, 1, LARGEST, f"{field}.max_tokens")
    _count(sampling.min_tokens, 0, sampling.max_tokens, f"{field}.min_tokens")
    if sampling.seed is not None:
        _count(sampling.seed, -(2**63), 2**63 - 1, f"{field}.seed")


def _number(value: object, least: float, most: float, field: str) -> None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or not least <= value <= most:
        raise RequestError(f"expected a number from {least:g} to {most:g}, got {value!r}", field)


def _count(value: object, least: int, most: int, field: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(f"expected a whole number from {least} to {most}, got {value!r}", field)
