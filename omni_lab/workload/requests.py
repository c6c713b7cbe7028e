"""Requests out of prompts: what a cell sends, with lengths, seeds and names."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from omni_lab.core import Request, Sampling
from omni_lab.experiment import Experiment
from omni_lab.workload.dataset import Prompt


def make_request(experiment: Experiment, prompt: Prompt, index: int, label: str) -> Request:
    """The request `index` of a cell. Its seeds depend on model.seed, stage and index alone: cells compare."""
    return Request(
        id=f"{label}-{index:04d}",
        messages=prompt.messages,
        modalities=prompt.modalities or tuple(experiment.workload.modalities),
        speaker=prompt.speaker,
        sampling={stage: _sampling(experiment, prompt, stage, index) for stage in experiment.stages},
        return_codes=experiment.results.save_tokens,
    )


def _sampling(experiment: Experiment, prompt: Prompt, stage: str, index: int) -> Sampling:
    values: dict[str, Any] = experiment.stages[stage].sampling.model_dump() | prompt.sampling.get(stage, {})
    sampling = Sampling(**values)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=derived_seed(experiment.model.seed, stage, index))
    length = _fixed_length(experiment, stage)
    return sampling if length is None else dataclasses.replace(sampling, min_tokens=length, max_tokens=length)


def _fixed_length(experiment: Experiment, stage: str) -> int | None:
    """Tokens that the stage has to sample: the last code of the talker gives no frame, so one more than frames."""
    output = experiment.workload.output
    if stage == "thinker":
        return output.text_tokens
    return output.codec_frames + 1 if stage == "talker" and output.codec_frames else None


def derived_seed(seed: int, stage: str, index: int) -> int:
    """A seed of 63 bits for one stage of one request, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}/{index}".encode()).digest()[:8]) >> 1
