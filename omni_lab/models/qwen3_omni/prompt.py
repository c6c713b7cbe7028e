"""The front-end: a client's request to the tensors that the Thinker and the Talker start from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omni_lab.core import PipelineError, Prompt, Request, RequestError
from omni_lab.models.qwen3_omni import media
from omni_lab.models.qwen3_omni.audio_tower import audio_tokens
from omni_lab.models.qwen3_omni.config import parse_config
from omni_lab.models.qwen3_omni.messages import MediaPart, parse_messages
from omni_lab.models.qwen3_omni.positions import Grid, mrope_positions
from omni_lab.models.qwen3_omni.tokenizer import ChatTokenizer, TextDecoder
from omni_lab.models.qwen3_omni.weights import read_config

ASSISTANT_ROWS = 9
"""Rows that the Talker puts after the user turns: the header of the answer, its speaker, and the first token."""
MODALITIES = ("text", "audio")
DEFAULT_SPEAKER = "ethan"


@dataclass(slots=True)
class _Media:
    """The media of one request, decoded, with the size of each in the prompt."""

    recordings: list[Any] = field(default_factory=list)
    mel_frames: list[int] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    image_grids: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[media.Video] = field(default_factory=list)
    video_grids: list[tuple[int, int, int]] = field(default_factory=list)


class FrontEnd:
    """Prompts of one checkpoint: its chat template, tokenizer, and the preparation of media for its towers."""

    def __init__(self, directory: Path) -> None:
        values = read_config(directory)
        config = parse_config(values)
        self.thinker = config.thinker
        self.speakers = config.talker.speakers
        self.im_start = config.talker.im_start
        self.user = int(values.get("user_token_id", 872))
        self.tokenizer = ChatTokenizer(directory)
        preprocessor = _read_preprocessor(directory / "preprocessor_config.json")
        self.max_seconds = preprocessor.get("chunk_length", 300)
        limits = preprocessor.get("size", {})
        self.patches = media.Patches(
            patch=self.thinker.vision.patch_size,
            merge=self.thinker.vision.merge_size,
            temporal=self.thinker.vision.temporal_patch_size,
            min_pixels=preprocessor.get("min_pixels", limits.get("shortest_edge", 3136)),
            max_pixels=preprocessor.get("max_pixels", limits.get("longest_edge", 12845056)),
            mean=tuple(preprocessor.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(preprocessor.get("image_std", (0.5, 0.5, 0.5))),
        )

    def prepare(self, request: Request, max_prompt_tokens: int) -> Prompt:
        """Tensors of a request (see below) and the speaker's codec id. Raises RequestError naming the field to mend.

        Always: `input_ids` [P] int64, `positions` [3, P]. With media: `audio_features` [bins, sum of frames] float32
        and `audio_lengths` [A] int64; `image_pixels` [patches, values] float32 and `image_grid` [n, 3] int64 (time,
        rows, columns in patches); `video_pixels`, `video_grid` likewise. If audio is wanted, the Talker's plan:
        `talker_source` [U] int64, the prompt positions of the user turns; `talker_media` [U] bool, which of them
        are media placeholders; `talker_positions` [3, U + 9], rotary positions of those and of the nine rows after.
        """
        speaker = self._check(request)
        messages, parts = parse_messages(request.messages)
        loaded = self._load(parts)
        ids = self._expand(self.tokenizer.encode_chat(messages), loaded)
        if len(ids) > max_prompt_tokens:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the limit is {max_prompt_tokens}; send less text or media",
                "messages",
            )
        everything = list(range(len(ids)))
        tensors = {"input_ids": torch.tensor(ids), "positions": self._positions(ids, everything, loaded, 0)}
        tensors |= self._features(loaded)
        if "audio" not in request.modalities:
            return Prompt(len(ids), tensors, {"thinker": len(ids)}, self._options(request, speaker))
        source = self._user_turns(ids)
        placeholders = {self.thinker.audio_token, self.thinker.image_token, self.thinker.video_token}
        tensors["talker_source"] = torch.tensor(source, dtype=torch.int64)
        tensors["talker_media"] = torch.tensor([ids[index] in placeholders for index in source], dtype=torch.bool)
        tensors["talker_positions"] = self._positions(ids, source, loaded, ASSISTANT_ROWS)
        lengths = {"thinker": len(ids), "talker": len(source) + ASSISTANT_ROWS}
        return Prompt(len(ids), tensors, lengths, self._options(request, speaker))

    def _options(self, request: Request, speaker: int) -> dict[str, dict[str, Any]]:
        """The reference answers a whole request in one stage and needs to know all of it; a stop text is looked for in
        every token.
        """
        whole = {"speaker": speaker, "modalities": list(request.modalities), "sampling": request.sampling}
        return {"thinker": {"one_by_one": bool(request.stop)}, "talker": {"speaker": speaker}, "transformers": whole}

    def text_decoder(self) -> TextDecoder:
        return self.tokenizer.text_decoder()

    def _check(self, request: Request) -> int:
        modalities = request.modalities
        if isinstance(modalities, str) or not modalities or not set(modalities) <= set(MODALITIES):
            raise RequestError(f"expected text, audio or both, got {modalities!r}", "modalities")
        default = DEFAULT_SPEAKER if DEFAULT_SPEAKER in self.speakers else next(iter(self.speakers))
        speaker = default if request.speaker is None else request.speaker
        if not isinstance(speaker, str) or speaker.lower() not in self.speakers:
            raise RequestError(f"unknown speaker {speaker!r}; known: {', '.join(sorted(self.speakers))}", "speaker")
        return self.speakers[speaker.lower()]

    def _load(self, parts: list[MediaPart]) -> _Media:
        loaded = _Media()
        for part in parts:
            if part.kind == "audio":
                loaded.recordings.append(media.load_audio(part, self.max_seconds))
            elif part.kind == "image":
                loaded.images.append(media.load_image(part))
                loaded.image_grids.append(self.patches.image_grid(loaded.images[-1], part.field))
            else:
                loaded.videos.append(media.load_video(part))
                loaded.video_grids.append(self.patches.video_grid(loaded.videos[-1], part.field))
        if loaded.recordings:
            loaded.mel_frames = media.mel_frames(loaded.recordings)
        return loaded

    def _expand(self, ids: list[int], loaded: _Media) -> list[int]:
        """One placeholder for each medium becomes one for each of its vectors."""
        merged = self.patches.merge**2
        counts = {
            self.thinker.audio_token: [audio_tokens(frames) for frames in loaded.mel_frames],
            self.thinker.image_token: [steps * rows * columns // merged for steps, rows, columns in loaded.image_grids],
            self.thinker.video_token: [steps * rows * columns // merged for steps, rows, columns in loaded.video_grids],
        }
        for token, sizes in counts.items():
            if ids.count(token) != len(sizes):
                raise PipelineError(
                    f"the chat template wrote {ids.count(token)} placeholders (token {token}) for {len(sizes)} media; "
                    "use the template that belongs to the checkpoint"
                )
        remaining = {token: iter(sizes) for token, sizes in counts.items()}
        return [copy for token in ids for copy in [token] * (next(remaining[token]) if token in remaining else 1)]

    def _user_turns(self, ids: list[int]) -> list[int]:
        """Prompt positions of all user turns: those where the token after the last <|im_start|> is the user role."""
        positions, role = [], None
        for index, token in enumerate(ids):
            if token == self.im_start:
                role = ids[index + 1]
            if role == self.user:
                positions.append(index)
        return positions

    def _positions(self, ids: list[int], kept: list[int], loaded: _Media, rows: int) -> torch.Tensor:
        """Rotary positions of the kept tokens and of `rows` further ones; media all lie in kept turns."""
        merge = self.patches.merge
        images = iter([Grid(t, h // merge, w // merge) for t, h, w in loaded.image_grids])
        videos = iter(
            [
                Grid(t, h // merge, w // merge, self.patches.temporal / video.fps)
                for (t, h, w), video in zip(loaded.video_grids, loaded.videos, strict=True)
            ]
        )
        tokens = [ids[index] for index in kept]
        vision = {self.thinker.image_token: images, self.thinker.video_token: videos}
        starts = [token for before, token in zip([None, *tokens], tokens, strict=False) if token != before]
        grids = [next(vision[token]) for token in starts if token in vision]
        flags = [token in vision for token in tokens] + [False] * rows
        return mrope_positions(flags, grids, self.thinker.position_ids_per_second)

    def _features(self, loaded: _Media) -> dict[str, torch.Tensor]:
        tensors = {}
        if loaded.recordings:
            tensors["audio_features"] = media.log_mel(loaded.recordings, self.thinker.audio.mel_bins)
            tensors["audio_lengths"] = torch.tensor(loaded.mel_frames)
        if loaded.images:
            pairs = zip(loaded.images, loaded.image_grids, strict=True)
            tensors["image_pixels"] = torch.cat([self.patches.cut([image], grid) for image, grid in pairs])
            tensors["image_grid"] = torch.tensor(loaded.image_grids)
        if loaded.videos:
            pairs = zip(loaded.videos, loaded.video_grids, strict=True)
            tensors["video_pixels"] = torch.cat([self.patches.cut(video.frames, grid) for video, grid in pairs])
            tensors["video_grid"] = torch.tensor(loaded.video_grids)
        return tensors


def _read_preprocessor(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} cannot be read: {error}") from None
