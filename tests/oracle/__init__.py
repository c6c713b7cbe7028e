"""What transformers' own model generates on the `nano` checkpoint: the definition of a correct answer.

Fixtures are made by `python -m tests.oracle.make_oracle` (about five minutes on one core).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from omni_lab import zoo
from omni_lab.core import Request
from tests.oracle.requests import oracle_requests

CODES_FILE = Path(__file__).with_name("codes.npz")
WAVES_FILE = Path(__file__).with_name("waves.npz")


@dataclass(frozen=True)
class OracleCase:
    """One request and its answer: ids int64, `codes` [frames, 16] int64, `wave` float32 [samples] or None.

    `margins` are the smallest distances between the best and the second best logit of all greedy decisions of
    thinker, talker and predictor; a float32 implementation with other rounding is off by about 1e-5.
    """

    name: str
    request: Request
    prompt_ids: np.ndarray
    text_ids: np.ndarray
    codes: np.ndarray
    wave: np.ndarray | None
    margins: dict[str, float]


def load_oracle() -> list[OracleCase]:
    """All cases. Raises ValueError if the fixtures do not belong to the checkpoint or to the list of requests."""
    arrays, waves = np.load(CODES_FILE), np.load(WAVES_FILE)
    requests = oracle_requests()
    if str(arrays["weights"]) != weights_digest(zoo.path("nano")):
        raise ValueError("the oracle belongs to other weights of nano; run python -m tests.oracle.make_oracle")
    kept = {key.split("/")[0] for key in arrays.files if "/" in key}
    if kept != {case.request.id for case in requests}:
        raise ValueError("the oracle lacks requests or has too many; run python -m tests.oracle.make_oracle")
    return [
        OracleCase(
            name=name,
            request=case.request,
            prompt_ids=arrays[f"{name}/prompt_ids"].astype(np.int64),
            text_ids=arrays[f"{name}/text_ids"].astype(np.int64),
            codes=arrays[f"{name}/codes"].astype(np.int64),
            wave=waves[name] if case.wave else None,
            margins=dict(zip(("thinker", "talker", "predictor"), arrays[f"{name}/margins"].tolist(), strict=True)),
        )
        for case in requests
        for name in [case.request.id]
    ]


def weights_digest(directory: Path) -> str:
    """SHA-256 over the names and bytes of all tensors, in order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        digest.update(name.encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
