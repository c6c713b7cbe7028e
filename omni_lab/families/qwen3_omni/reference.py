"""The reference engine: transformers' own Qwen3-Omni and its `generate`, one request at a time.

It serves the same requests as the staged pipeline, so that both stand in one table, and it says what is right:
greedy answers of the pipeline must equal its answers. Three things are transformers' own and kept as they are:

- Nothing is streamed: text and audio of a request come when the whole request is done.
- Above 300 codec frames `chunked_decode` loses the end of each chunk (555 samples for the published structure),
  so the audio is shorter than one full decode of the same codes.
- Draws come from torch's global generator, seeded before each stage; other draws than those of the pipeline.

Where transformers crashes, the result is the pipeline's: an answer of fewer than two sampled text tokens, or
one whose first codec token is the end, has its text and no audio.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3OmniMoeForConditionalGeneration
from transformers.utils import logging

from omni_lab.core import CLIENT, Payload, Sampling, StageError
from omni_lab.engine.clock import FORWARD, PAYLOAD, StepClock
from omni_lab.engine.stage import Emission, Sequence

THINKER, TALKER, CODE2WAV = "thinker", "talker", "code2wav"
CODE_GROUPS = 16
FEATURES = ("input_features", "pixel_values", "pixel_values_videos")


class _NoSpeech(Exception):
    """Leaves transformers' `generate` at the point from which it could only crash: there is nothing to decode."""


@dataclass(slots=True)
class _Answer:
    """What one request has made so far. `codes` [16, frames], `audio` [samples]."""

    sampling: dict[str, Sampling]
    speaks: bool
    token_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    codes: torch.Tensor = field(default_factory=lambda: torch.empty(CODE_GROUPS, 0, dtype=torch.int64))
    audio: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    text_reason: str = "stop"
    audio_reason: str = "stop"


class TransformersStage:
    """All three stages in one, as transformers has them.

    A sequence's `options` hold the sampling of both autoregressive stages, the modalities and the speaker's
    codec id: `{"sampling": {"thinker": Sampling, "talker": Sampling}, "modalities": [...], "speaker": 2302}`, and
    "return_codes" if the client wants the codes too.
    The clock gets a row of kind "generate" for each of the stages inside (tokens: text tokens, frames, frames).
    Raises StageError for a prompt that transformers cannot answer aloud: one without a user turn.
    """

    name = "transformers"

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype, clock: StepClock) -> None:
        with _quiet():
            model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=dtype, local_files_only=True)
        self.counters: dict[str, int] = {}
        self.model = model.eval().to(device)
        self.config = model.config
        self.device = device
        self.dtype = dtype
        self.clock = clock
        self.speakers = {codec: speaker for speaker, codec in self.config.talker_config.speaker_id.items()}
        # with audio and an image in one prompt the Talker looks for the audio tower's window in its own config
        model.talker.config.audio_config = self.config.thinker_config.audio_config
        self.answer: _Answer | None = None
        self.generate_text, model.thinker.generate = model.thinker.generate, self._generate_text
        self.generate_codes, model.talker.generate = model.talker.generate, self._generate_codes
        self.decode_codes, model.code2wav.chunked_decode = model.code2wav.chunked_decode, self._decode_codes

    def open(self, sequence: Sequence) -> None:
        """Nothing to hold before the prompt arrives."""

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        sequence.state = payload.tensors

    def next_step(self, sequence: Sequence) -> str | None:
        return None if sequence.state is None else "generate"

    def step_tokens(self, sequence: Sequence) -> int:
        return 1  # one request a step, whatever its length

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        """The whole answer of the batch's one sequence; tokens are the sampled text tokens."""
        (sequence,) = batch
        sequence.finished = True
        self.clock.enter(FORWARD)
        answer = self._generate(sequence)
        self.clock.enter(PAYLOAD)
        emissions = []
        if "text" in sequence.options["modalities"]:
            emissions.append(Emission(sequence, CLIENT, {"token_ids": answer.token_ids}, True, answer.text_reason))
        if answer.speaks:
            frames = answer.codes.shape[1]
            tensors = {"audio": answer.audio, "frames": torch.tensor(frames)}
            if sequence.options.get("return_codes"):
                tensors["codes"] = answer.codes.T.contiguous()
            emissions.append(Emission(sequence, CLIENT, tensors, True, answer.audio_reason))
        return emissions, len(answer.token_ids)

    def close(self, sequence: Sequence) -> None:
        sequence.state = None

    def _generate(self, sequence: Sequence) -> _Answer:
        options = sequence.options
        speaks = "audio" in options["modalities"]
        sampling = msgspec.convert(options["sampling"], dict[str, Sampling])  # plain maps if they came over a wire
        self.answer = _Answer(sampling, speaks)
        arguments = self._inputs(sequence.state) | generation(THINKER, sampling[THINKER])
        arguments |= {
            "return_audio": speaks,
            "thinker_return_dict_in_generate": True,
            "thinker_eos_token_id": self.config.im_end_token_id,
        }
        if speaks:
            self._require_user_turn(sequence.state["input_ids"])
            arguments["speaker"] = self.speakers[options["speaker"]]
            arguments |= generation(TALKER, sampling[TALKER])
        devices = [self.device] if self.device.type == "cuda" else []
        with _quiet(), torch.random.fork_rng(devices), suppress(_NoSpeech):
            self.model.generate(**arguments)
        return self.answer

    def _inputs(self, prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The arguments of transformers' `generate` for the tensors of a `core.Prompt`, as a batch of one."""
        input_ids = prompt["input_ids"][None]
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if "audio_features" in prompt:
            lengths = prompt["audio_lengths"]
            clips = prompt["audio_features"].T.split(lengths.tolist())
            inputs["input_features"] = pad_sequence(clips, batch_first=True).transpose(1, 2)
            inputs["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if "image_pixels" in prompt:
            inputs["pixel_values"], inputs["image_grid_thw"] = prompt["image_pixels"], prompt["image_grid"]
        if "video_pixels" in prompt:
            inputs["pixel_values_videos"], inputs["video_grid_thw"] = prompt["video_pixels"], prompt["video_grid"]
            inputs["video_second_per_grid"] = self._video_seconds(prompt)
        return {
            name: tensor.to(self.device, self.dtype if name in FEATURES else tensor.dtype)
            for name, tensor in inputs.items()
        }

    def _video_seconds(self, prompt: dict[str, torch.Tensor]) -> torch.Tensor:
        """Seconds between two time steps of each clip, from the time positions of its placeholders."""
        thinker = self.config.thinker_config
        times = prompt["positions"][0, prompt["input_ids"] == thinker.video_token_id].float()
        grids = prompt["video_grid"]
        tokens = grids.prod(1) // thinker.vision_config.spatial_merge_size**2
        steps = [clip.unique() for clip in times.split(tokens.tolist())]
        gaps = [float(step[1] - step[0]) if len(step) > 1 else 0.0 for step in steps]
        return torch.tensor(gaps) / thinker.position_id_per_seconds

    def _require_user_turn(self, input_ids: torch.Tensor) -> None:
        starts = (input_ids[:-1] == self.config.im_start_token_id) & (input_ids[1:] == self.config.user_token_id)
        if not starts.any():
            raise StageError(
                "transformers cannot make audio for a prompt without a user turn: "
                "add a user message, or ask for text only, or use engine torch"
            )

    def _generate_text(self, **inputs: Any) -> Any:
        answer, start_ns = self.answer, time.monotonic_ns()
        seed(answer.sampling[THINKER])
        result = self.generate_text(**inputs)
        answer.token_ids = result.sequences[0, inputs["input_ids"].shape[1] :].cpu()
        answer.text_reason = "stop" if answer.token_ids[-1] == self.config.im_end_token_id else "length"
        self._record(THINKER, start_ns, len(answer.token_ids))
        if answer.speaks and len(answer.token_ids) < 2:
            raise _NoSpeech
        return result

    def _generate_codes(self, **inputs: Any) -> Any:
        answer, start_ns = self.answer, time.monotonic_ns()
        seed(answer.sampling[TALKER])
        result = self.generate_codes(**inputs)
        stopped = result.sequences[0, -1] == self.config.talker_config.codec_eos_token_id
        answer.audio_reason = "stop" if stopped else "length"
        frames = sum(hidden[-1] is not None for hidden in result.hidden_states)
        self._record(TALKER, start_ns, frames)
        if not frames:
            raise _NoSpeech
        return result

    def _decode_codes(self, codes: torch.Tensor, **options: Any) -> torch.Tensor:
        answer, start_ns = self.answer, time.monotonic_ns()
        wave = self.decode_codes(codes, **options)
        answer.codes, answer.audio = codes[0].cpu(), wave[0, 0].float().cpu()
        self._record(CODE2WAV, start_ns, codes.shape[2])
        return wave

    def _record(self, stage: str, start_ns: int, tokens: int) -> None:
        self.clock.add(stage, start_ns, time.monotonic_ns(), 1, tokens, "generate")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' notes and bars, of which every request would repeat some; errors still show."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def generation(stage: str, sampling: Sampling) -> dict[str, Any]:
    """A stage's sampling as prefixed arguments of transformers' `generate`."""
    samples = sampling.temperature > 0.0
    arguments = {
        "do_sample": samples,
        "temperature": sampling.temperature if samples else None,
        "top_k": sampling.top_k if samples else None,
        "top_p": sampling.top_p if samples else None,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens,
        "max_new_tokens": sampling.max_tokens,
    }
    return {f"{stage}_{name}": value for name, value in arguments.items()}


def seed(sampling: Sampling) -> None:
    """Start the stage's draws: torch's global generator, the only one that `generate` knows."""
    if sampling.seed is None:
        torch.seed()
    else:
        torch.manual_seed(sampling.seed)
