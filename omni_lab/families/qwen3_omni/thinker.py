"""The Thinker as a stage: a prompt of text and media in, text tokens out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_lab.core import CLIENT, Payload
from omni_lab.engine.clock import FORWARD, PAYLOAD, PREPARE, SAMPLE, StepClock
from omni_lab.engine.kv_cache import KVCache
from omni_lab.engine.rows import Rows
from omni_lab.engine.sampler import Sampler
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.families.qwen3_omni.prefill_steps import CapturedPrefill, EagerPrefill
from omni_lab.families.qwen3_omni.steps import CapturedDecode, EagerDecode
from omni_lab.models.qwen3_omni.audio_tower import AudioTower
from omni_lab.models.qwen3_omni.config import OmniConfig
from omni_lab.models.qwen3_omni.thinker import Thinker
from omni_lab.models.qwen3_omni.vision_tower import VisionTower

TALKER = "talker"


@dataclass(slots=True)
class ThinkerState:
    """A prompt (tensors of `core.Prompt`), then the number of tokens sampled so far."""

    prompt: dict[str, torch.Tensor]
    length: int
    sampled: int = 0


class ThinkerStage:
    """Samples text and hands every token that is spoken to the Talker, the prompt's user turns with the first.

    The Talker needs token ids alone where the prompt is text; at media positions it gets the Thinker's hidden
    state after `accept_hidden_layer` layers. The token that ends the answer is never spoken: it is shown to the
    client, and the Talker sees only the end of its input.
    """

    name = "thinker"

    def __init__(
        self,
        config: OmniConfig,
        network: Thinker,
        audio_tower: AudioTower,
        vision_tower: VisionTower,
        cache: KVCache,
        prefill: EagerPrefill | CapturedPrefill,
        decode: EagerDecode | CapturedDecode,
        rows: Rows,
        max_length: int,
        device: torch.device,
        clock: StepClock,
    ) -> None:
        self.config = config
        self.network = network
        self.audio_tower = audio_tower
        self.vision_tower = vision_tower
        self.cache = cache
        self.prefill = prefill
        self.decode = decode
        self.counters = decode.counters
        self.rows = rows
        self.device = device
        self.clock = clock
        self.sampler = Sampler(len(rows), config.thinker.text.vocab_size, config.im_end, max_length, device=device)

    def open(self, sequence: Sequence) -> None:
        """Nothing to hold before the prompt arrives."""

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        sequence.state = ThinkerState(payload.tensors, len(payload.tensors["input_ids"]))

    def next_step(self, sequence: Sequence) -> str | None:
        if sequence.state is None:
            return None
        return "decode" if sequence.state.sampled else "prefill"

    def step_tokens(self, sequence: Sequence) -> int:
        return sequence.state.length

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        return self._prefill(batch) if kind == "prefill" else self._decode(batch)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target, self.rows.length(source))
        self.sampler.move(source, target)
        self.rows.move(source, target)

    def close(self, sequence: Sequence) -> None:
        sequence.state = None

    def _prefill(self, batch: list[Sequence]) -> tuple[list[Emission], int]:
        """All prompts of the batch packed into one pass; their rows are the next free ones, in order."""
        self.clock.enter(PREPARE)
        prompts = [sequence.state.prompt for sequence in batch]
        ids = torch.cat([prompt["input_ids"] for prompt in prompts]).to(self.device)
        positions = torch.cat([prompt["positions"] for prompt in prompts], 1).to(self.device)
        spans, start = [], 0
        for sequence in batch:
            spans.append((sequence.row, start, start + sequence.state.length))
            start += sequence.state.length
        embeds = self.network.embed(ids)
        deepstack = self._scatter_media(prompts, ids, embeds)
        self.clock.enter(FORWARD)
        logits, hidden = self.prefill(embeds, positions, spans, deepstack=deepstack)
        self.clock.enter(SAMPLE)
        for sequence, prompt in zip(batch, prompts, strict=True):
            self.sampler.assign(sequence.row, sequence.sampling, prompt["input_ids"])
        tokens = self.sampler.pick(logits, batch[0].row)
        for prompt, token, (row, first, last) in zip(prompts, tokens, spans, strict=True):
            self.rows.enter(row, token, prompt["positions"].max() + 1, last - first)
        self.sampler.commit([sequence.row for sequence in batch], tokens)
        tokens = tokens.cpu()
        self.clock.enter(PAYLOAD)
        emissions = []
        for sequence, prompt, token, (_, first, _) in zip(batch, prompts, tokens.split(1), spans, strict=True):
            handed = talker_prompt(prompt, hidden, first) if TALKER in sequence.targets else {}
            emissions += self._emit(sequence, token, handed)
            sequence.state.prompt = {}
        return emissions, len(batch)

    def _decode(self, batch: list[Sequence]) -> tuple[list[Emission], int]:
        self.clock.enter(PREPARE)
        count = len(batch)
        state = self.rows.batch(self.decode.width(count))
        end = max(sequence.state.length + sequence.state.sampled for sequence in batch)
        self.clock.enter(FORWARD)
        logits = self.decode(state.tokens, state.positions, state.lengths, end)
        self.clock.enter(SAMPLE)
        tokens = self.sampler.pick(logits[:count])
        rows = list(range(count))
        self.rows.advance(rows, tokens)
        self.sampler.commit(rows, tokens)
        tokens = tokens.cpu()
        self.clock.enter(PAYLOAD)
        emissions = []
        for sequence, token in zip(batch, tokens.split(1), strict=True):
            emissions += self._emit(sequence, token, {})
        return emissions, count

    def _emit(self, sequence: Sequence, token: torch.Tensor, handed: dict[str, torch.Tensor]) -> list[Emission]:
        """What `token` [1], on the host, means to the client and the Talker."""
        state = sequence.state
        state.sampled += 1
        reason = None
        if token.item() == self.sampler.stop_token:
            reason = "stop"
        elif state.sampled >= sequence.sampling.max_tokens:
            reason = "length"
        sequence.finished = reason is not None
        emissions = []
        if CLIENT in sequence.targets:
            emissions.append(Emission(sequence, CLIENT, {"token_ids": token}, sequence.finished, reason))
        if TALKER in sequence.targets:
            spoken = {} if sequence.finished else {"token_ids": token}
            emissions.append(Emission(sequence, TALKER, spoken | handed, sequence.finished, reason))
        return emissions

    def _scatter_media(
        self, prompts: list[dict[str, torch.Tensor]], ids: torch.Tensor, embeds: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Put audio, image and video features in the place of their placeholders in `embeds`, for all prompts at once.

        Returns the visual positions and their deepstack features, or None without images and videos.
        """
        config = self.config.thinker
        audio = [prompt for prompt in prompts if "audio_features" in prompt]
        if audio:  # request by request: a recording of less than a second is padded to the longest beside it
            features = [self.audio_tower(p["audio_features"].to(self.device), p["audio_lengths"]) for p in audio]
            embeds[ids == config.audio_token] = torch.cat(features).to(embeds.dtype)
        indices, deepstacks = [], []
        for kind, token in (("image", config.image_token), ("video", config.video_token)):
            visual = [prompt for prompt in prompts if f"{kind}_pixels" in prompt]
            if visual:
                pixels = torch.cat([prompt[f"{kind}_pixels"] for prompt in visual]).to(self.device)
                grid = torch.cat([prompt[f"{kind}_grid"] for prompt in visual])
                features, deepstack = self.vision_tower(pixels, grid)
                index = (ids == token).nonzero()[:, 0]
                embeds[index] = features.to(embeds.dtype)
                indices.append(index)
                deepstacks.append(deepstack)
        if not indices:
            return None
        return torch.cat(indices), [torch.cat(layer) for layer in zip(*deepstacks, strict=True)]


def talker_prompt(prompt: dict[str, torch.Tensor], hidden: torch.Tensor | None, first: int) -> dict[str, torch.Tensor]:
    """What the Talker needs of a prompt: ids and positions of the user turns, and hidden states at media positions.

    `hidden` [N, H] are the captured states of the packed prefill, in which this prompt begins at `first`.
    """
    source, media = prompt["talker_source"], prompt["talker_media"]
    handed = {"user_ids": prompt["input_ids"][source], "user_media": media, "positions": prompt["talker_positions"].T}
    if media.any():
        handed["media_hidden"] = hidden[first + source[media].to(hidden.device)]
    return handed
