"""Makes the oracle's fixtures: what transformers' own model generates for every request of `requests.py`.

    python -m tests.oracle.make_oracle [NAME ...]

runs Qwen3OmniMoeForConditionalGeneration on the `nano` checkpoint, float32, one thread, batch of one, greedy, and
writes `codes.npz` and `waves.npz` beside this file. With names it prints those requests and writes nothing.
Prompts, features and pixels come from transformers' tokenizer, WhisperFeatureExtractor and Qwen2VLImageProcessor.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from omni_lab import zoo
from omni_lab.core import Request
from tests.oracle import CODES_FILE, WAVES_FILE, weights_digest
from tests.oracle.requests import oracle_requests

STOP_TOKEN = 1002
VIDEO_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""Pixels of a video frame in Qwen3OmniMoeProcessor. Its video processor needs torchvision, so clips are made here."""


class Reference:
    """transformers' classes on one checkpoint, and the hand-offs of a run that `generate` does not return."""

    def __init__(self, directory: os.PathLike[str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory)
        self.image_processor = Qwen2VLImageProcessor.from_pretrained(directory)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        # get_rope_index of the talker reads this and the configuration lacks it: audio beside pictures would crash.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Keyword arguments of `generate` for a chat with raw media."""
        chat, recordings, images, videos = [], [], [], []
        for message in messages:
            parts = message["content"] if isinstance(message["content"], list) else [text_part(message["content"])]
            chat.append(
                {"role": message["role"], "content": [self._part(p, recordings, images, videos) for p in parts]}
            )
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs: dict[str, torch.Tensor] = {}
        if recordings:
            features = self.extractor(
                recordings,
                sampling_rate=16000,
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            mask = features["attention_mask"]
            inputs |= {"input_features": features["input_features"], "feature_attention_mask": mask}
            prompt = expand(prompt, "<|audio_pad|>", _get_feat_extract_output_lengths(mask.sum(-1)).tolist())
        if images:
            pixels = self.image_processor(images, return_tensors="pt")
            inputs |= {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
            prompt = expand(prompt, "<|image_pad|>", (pixels["image_grid_thw"].prod(-1) // 4).tolist())
        if videos:
            clips = [self._video(frames) for frames, _ in videos]
            inputs["pixel_values_videos"] = torch.cat([pixels for pixels, _ in clips])
            inputs["video_grid_thw"] = torch.stack([grid for _, grid in clips])
            inputs["video_second_per_grid"] = torch.tensor([2 / fps for _, fps in videos])
            prompt = expand(prompt, "<|video_pad|>", (inputs["video_grid_thw"].prod(-1) // 4).tolist())
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}

    def _part(self, part: dict[str, Any], recordings: list, images: list, videos: list) -> dict[str, Any]:
        kind = part["type"]
        if kind == "audio":
            recordings.append(part["audio"])
        elif kind == "input_audio":
            samples, _ = soundfile.read(io.BytesIO(base64.b64decode(part[kind]["data"])), dtype="float32")
            recordings.append(samples)
        elif kind == "image":
            images.append(Image.fromarray(part["image"]))
        elif kind == "image_url":
            images.append(Image.open(io.BytesIO(base64.b64decode(part[kind]["url"].partition(",")[2]))))
        elif kind == "video":
            videos.append((part["video"], part.get("fps", 2.0)))
        else:
            return part
        return {"type": kind.removeprefix("input_").removesuffix("_url")}

    def _video(self, frames: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches and grid of a clip: two frames a step, the last one twice if it is alone.

        The image processor repeats a picture to fill its step of two; the first half of one frame's patches and
        the second half of the next one's are the patches of the pair.
        """
        frames = frames + frames[-1:] * (len(frames) % 2)
        done = self.image_processor([Image.fromarray(f) for f in frames], size=VIDEO_SIZE, return_tensors="pt")
        _, rows, columns = done["image_grid_thw"][0].tolist()
        pixels = done["pixel_values"].view(len(frames) // 2, 2, rows * columns, 3, 2, 16 * 16)
        pairs = torch.stack([pixels[:, 0, :, :, 0], pixels[:, 1, :, :, 1]], dim=3)
        return pairs.reshape(-1, 3 * 2 * 16 * 16), torch.tensor([len(frames) // 2, rows, columns])

    def run(self, request: Request) -> dict[str, Any]:
        """Prompt ids, text ids, codes [frames, 16], waveform, and the smallest margin of each part's decisions."""
        model, thinker, talker = self.model, request.sampling["thinker"], request.sampling["talker"]
        inputs = self.inputs(request.messages)
        results: dict[str, list[Any]] = {"thinker": [], "talker": [], "predictor": []}
        codes: list[torch.Tensor] = []
        parts = (("thinker", model.thinker), ("talker", model.talker), ("predictor", model.talker.code_predictor))
        for name, part in parts:
            part.generate = recording(part.generate, results[name])
        original = model.code2wav.chunked_decode
        model.code2wav.chunked_decode = lambda frames, **options: (codes.append(frames), original(frames, **options))[1]
        try:
            ids, wave = model.generate(
                **inputs,
                speaker=request.speaker or "ethan",
                thinker_max_new_tokens=thinker.max_tokens,
                thinker_min_new_tokens=thinker.min_tokens or None,
                thinker_eos_token_id=STOP_TOKEN,
                thinker_do_sample=False,
                talker_max_new_tokens=talker.max_tokens,
                talker_min_new_tokens=talker.min_tokens or None,
                talker_do_sample=False,
            )
        finally:
            for _, part in parts:
                del part.generate
            del model.code2wav.chunked_decode
        length = inputs["input_ids"].shape[1]
        return {
            "prompt_ids": inputs["input_ids"][0].numpy().astype(np.int32),
            "text_ids": ids[0, length:].numpy().astype(np.int32),
            "codes": codes[0][0].T.numpy().astype(np.int16),
            "wave": wave[0, 0].numpy(),
            "margins": np.array([smallest_margin(results[name]) for name in results], dtype=np.float32),
        }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def expand(prompt: str, placeholder: str, counts: list[int]) -> str:
    head, *tails = prompt.split(placeholder)
    return head + "".join(placeholder * count + tail for count, tail in zip(counts, tails, strict=True))


def recording(generate: Any, results: list[Any]) -> Any:
    """`generate` that also keeps the scores of every step, after the logits processors."""

    def wrapped(*args: Any, **options: Any) -> Any:
        results.append(generate(*args, **options, output_scores=True))
        return results[-1]

    return wrapped


def smallest_margin(results: list[Any]) -> float:
    """Smallest distance between the best and the second best logit of all steps."""
    scores = [step[0].float().topk(2).values for result in results for step in result.scores]
    return min((best - second).item() for best, second in scores)


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    directory = zoo.path("nano")
    reference = Reference(directory)
    arrays: dict[str, np.ndarray] = {"weights": np.array(weights_digest(directory))}
    waves: dict[str, np.ndarray] = {}
    for case in oracle_requests():
        name = case.request.id
        if names and name not in names:
            continue
        started = time.monotonic()
        with torch.no_grad():
            result = reference.run(case.request)
        wave = result.pop("wave")
        arrays |= {f"{name}/{key}": value for key, value in result.items()}
        if case.wave:
            waves[name] = wave
        print(
            f"{name:26} prompt {len(result['prompt_ids']):5}  text {len(result['text_ids']):4}"
            f"{'.' if result['text_ids'][-1] == STOP_TOKEN else ' '} frames {len(result['codes']):4}"
            f"  margins {' '.join(f'{margin:.1e}' for margin in result['margins'])}"
            f"  peak {abs(wave).max():.2f}  {time.monotonic() - started:.1f} s",
            flush=True,
        )
    if not names:
        np.savez_compressed(CODES_FILE, **arrays)
        np.savez_compressed(WAVES_FILE, **waves)
        print(f"{CODES_FILE} {CODES_FILE.stat().st_size} bytes, {WAVES_FILE} {WAVES_FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
