"""The Talker as a stage: text tokens in, codec frames out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omni_lab.core import Payload
from omni_lab.engine.clock import FORWARD, PAYLOAD, PREPARE, SAMPLE, StepClock
from omni_lab.engine.kv_cache import KVCache
from omni_lab.engine.rows import Rows
from omni_lab.engine.sampler import Sampler
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.families.qwen3_omni.prefill_steps import CapturedPrefill, EagerPrefill
from omni_lab.families.qwen3_omni.steps import RESIDUAL_TOP_K, RESIDUAL_TOP_P, CapturedFrame, EagerFrame
from omni_lab.models.qwen3_omni.talker import Talker

CODE2WAV = "code2wav"
ASSISTANT_ROWS = 9


@dataclass(slots=True)
class TalkerState:
    """The user turns, the spoken tokens that have arrived, and how far the answer has got.

    `text` are projected rows of the tokens after the first; row t goes into the step that makes frame t.
    """

    prompt: dict[str, torch.Tensor] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    text: list[torch.Tensor] = field(default_factory=list)
    closed: bool = False
    length: int = 0
    sampled: int = 0


class TalkerStage:
    """Makes one codec frame of 16 codes a step for every running request.

    A request starts when its first spoken token is there and then trails the Thinker by one token: the step of
    frame t needs token t + 1, or the end of the text. A sequence whose token is late keeps its row, and the
    batch goes on without it. n sampled codec tokens give n - 1 frames: the residual codes of a frame are made
    in the step after its codec token was sampled, and the last token gets none (transformers does the same).
    """

    name = "talker"

    def __init__(
        self,
        network: Talker,
        cache: KVCache,
        prefill: EagerPrefill | CapturedPrefill,
        frame: EagerFrame | CapturedFrame,
        rows: Rows,
        max_length: int,
        device: torch.device,
        clock: StepClock,
    ) -> None:
        config = network.config
        self.network = network
        self.cache = cache
        self.prefill = prefill
        self.frame = frame
        self.counters = frame.counters
        self.rows = rows
        self.device = device
        self.clock = clock
        codes = len(network.speakable)
        self.sampler = Sampler(len(rows), codes, network.stop_code, max_length, config.code_groups, device)

    def open(self, sequence: Sequence) -> None:
        sequence.state = TalkerState()

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        state, tensors = sequence.state, payload.tensors
        if "user_ids" in tensors:
            state.prompt = tensors
            state.length = len(tensors["user_ids"]) + ASSISTANT_ROWS
        if "token_ids" in tensors:
            state.token_ids += tensors["token_ids"].tolist()
        state.closed |= payload.final

    def next_step(self, sequence: Sequence) -> str | None:
        state = sequence.state
        if not state.sampled:
            return "prefill" if state.token_ids or state.closed else None
        frame = state.sampled - 1
        return "decode" if frame + 1 < len(state.token_ids) or state.closed else None

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
        """All prompts packed into one pass. An answer without a spoken token ends here, with no audio."""
        self.clock.enter(PREPARE)
        silent = [sequence for sequence in batch if not sequence.state.token_ids]
        spoken = [sequence for sequence in batch if sequence.state.token_ids]
        emissions = []
        for sequence in silent:
            self.rows.clear(sequence.row)
            emissions.append(self._finish(sequence, {}, "stop"))
        if not spoken:
            return emissions, 0
        embeds, positions, spans, start = [], [], [], 0
        for sequence in spoken:
            prompt = self._embed_prompt(sequence)
            embeds.append(prompt)
            positions.append(sequence.state.prompt["positions"].T)
            spans.append((sequence.row, start, start + len(prompt)))
            start += len(prompt)
        packed = torch.cat(positions, 1).to(self.device)
        self.clock.enter(FORWARD)
        hidden, logits = self.prefill(torch.cat(embeds), packed, spans)
        self.clock.enter(SAMPLE)
        for sequence, (row, first, last), hidden_row, logits_row in zip(spoken, spans, hidden, logits, strict=True):
            self.sampler.assign(row, sequence.sampling)
            token = self.sampler.pick(logits_row[None], row)
            self.sampler.commit([row], token)
            self.rows.enter(row, token[0], sequence.state.prompt["positions"].max() + 1, last - first, hidden_row)
            sequence.state.prompt = {}
            sequence.state.sampled = 1
            if reason := self._reason(sequence, int(token)):
                emissions.append(self._finish(sequence, {}, reason))
        return emissions, 0

    def _decode(self, batch: list[Sequence]) -> tuple[list[Emission], int]:
        """One frame for each sequence of the batch. Other rows are computed and discarded."""
        self.clock.enter(PREPARE)
        count = self.frame.width(max(sequence.row for sequence in batch) + 1)
        text = self._text_rows(batch, count)
        end = max(sequence.state.length + sequence.state.sampled for sequence in batch)
        state = self.rows.batch(count)
        self.clock.enter(FORWARD)
        codes, hidden, logits = self.frame(
            state.hidden,
            state.tokens,
            text,
            state.positions,
            state.lengths,
            end,
            self.sampler.residual(count, RESIDUAL_TOP_K, RESIDUAL_TOP_P),
        )
        self.clock.enter(SAMPLE)
        tokens = self.sampler.pick(logits)
        rows = [sequence.row for sequence in batch]
        if len(rows) < count:
            tokens, hidden = tokens[rows], hidden[rows]
        self.rows.advance(rows, tokens, hidden)
        self.sampler.commit(rows, tokens)
        picked = tokens.tolist()
        self.clock.enter(PAYLOAD)
        emissions, frames = [], codes.split(1)
        for sequence, token in zip(batch, picked, strict=True):
            frame = {"codes": frames[sequence.row]}
            sequence.state.sampled += 1
            if reason := self._reason(sequence, token):
                emissions.append(self._finish(sequence, frame, reason))
            else:
                emissions.append(Emission(sequence, CODE2WAV, frame))
        return emissions, len(batch)

    def _reason(self, sequence: Sequence, token: int) -> str | None:
        if token == self.sampler.stop_token:
            return "stop"
        return "length" if sequence.state.sampled == sequence.sampling.max_tokens else None

    def _finish(self, sequence: Sequence, tensors: dict[str, torch.Tensor], reason: str) -> Emission:
        sequence.finished = True
        return Emission(sequence, CODE2WAV, tensors, True, reason)

    def _embed_prompt(self, sequence: Sequence) -> torch.Tensor:
        """User turns and the nine rows of the assistant's header, [U + 9, H]."""
        prompt = sequence.state.prompt
        rows = self.network.project_text(prompt["user_ids"].to(self.device))
        if "media_hidden" in prompt:
            rows[prompt["user_media"].to(self.device)] = self.network.project_hidden(prompt["media_hidden"].to(rows))
        speaker = sequence.options["speaker"]
        return torch.cat([rows, self.network.assistant_rows(sequence.state.token_ids[0], speaker)])

    def _text_rows(self, batch: list[Sequence], count: int) -> torch.Tensor:
        """The text input of each row's frame, [count, H]; tokens that have arrived are projected first, all at once."""
        fresh = [(sequence, sequence.state.token_ids[len(sequence.state.text) + 1 :]) for sequence in batch]
        fresh_ids = [token for _, tokens in fresh for token in tokens]
        if fresh_ids:
            projected = iter(self.network.project_text(torch.tensor(fresh_ids, device=self.device)))
            for sequence, tokens in fresh:
                sequence.state.text += [next(projected) for _ in tokens]
        rows = [self.network.tts_pad] * count
        for sequence in batch:
            state = sequence.state
            frame = state.sampled - 1
            if frame < len(state.text):
                rows[sequence.row] = state.text[frame]
            elif frame == len(state.text):
                rows[sequence.row] = self.network.tts_eos
        return torch.stack(rows)
