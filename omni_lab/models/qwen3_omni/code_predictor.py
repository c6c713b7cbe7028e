"""The code predictor: for one codec frame, the 15 residual codes that follow the Talker's first code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.invariance import at_least

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [B, Vc], group 1..15) -> chosen codes [B] int64."""


class CodePredictor:
    """A small dense decoder that runs over positions 0..15 of every frame, for all rows of the batch together.

    Position 0 is the Talker's hidden state, position 1 the embedding of its code, position g + 1 the embedding of
    residual code g. Group g has its own head and embedding. Nothing outlives a frame, so keys and values live in a
    scratch of 16 positions, and rotations and views of it are made once for each batch size.
    """

    def __init__(self, config: DecoderConfig, groups: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config, self.groups = config, groups
        self.decoder = Decoder(config, dtype, device)
        shape = (groups - 1, config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.head = torch.empty(groups - 1, config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        self.offsets = torch.arange(groups - 1, device=device) * config.vocab_size
        self.rotations = self.decoder.rotary.matrices(torch.arange(groups, device=device))
        self.scratch: list[torch.Tensor] = []
        self.steps: dict[int, list[_Step]] = {}

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        slots = self.decoder.slots(f"{prefix}model.")
        for group in range(self.groups - 1):
            slots[f"{prefix}model.codec_embedding.{group}.weight"] = self.embedding[group]
            slots[f"{prefix}lm_head.{group}.weight"] = self.head[group].t()
        return slots

    def prepare(self) -> None:
        """Call once after the weights are loaded."""
        self.decoder.prepare()

    def predict(self, hidden: torch.Tensor, embed0: torch.Tensor, pick: Pick) -> tuple[torch.Tensor, torch.Tensor]:
        """Talker's hidden states and embeddings of its codes [B, H] -> (residual codes [B, 15] int64, sum of the 16
        codes' embeddings [B, H])."""
        rows = hidden.shape[0]
        hidden = at_least(hidden)
        steps = self._steps(hidden.shape[0])
        self._step(hidden, steps[0])
        x = self._step(at_least(embed0), steps[1])
        codes = [pick(torch.mm(self.decoder.norm(x), self.head[0])[:rows], 1)]
        for group in range(2, self.groups):
            x = self._step(at_least(self.embedding[group - 2].index_select(0, codes[-1])), steps[group])
            codes.append(pick(torch.mm(self.decoder.norm(x), self.head[group - 1])[:rows], group))
        residual = torch.stack(codes, 1)
        embeds = F.embedding(residual + self.offsets, self.embedding.view(-1, embed0.shape[1]))
        return residual, embeds.sum(1).add_(embed0)

    def over(self, scratch: Sequence[torch.Tensor]) -> CodePredictor:
        """This predictor with other scratch memory: a traced step gets it as inputs."""
        other = copy.copy(self)
        other.scratch, other.steps = list(scratch), {}
        return other

    def reserve(self, rows: int) -> list[torch.Tensor]:
        """Scratch for `rows` rows: for each layer keys and values [2, rows * kv_heads, 16, hd]."""
        config = self.config
        if not self.scratch or self.scratch[0].shape[1] < rows * config.kv_heads:
            shape = (2, rows * config.kv_heads, self.groups, config.head_dim)
            self.scratch = [
                torch.zeros(shape, dtype=self.head.dtype, device=self.head.device) for _ in range(config.layers)
            ]
            self.steps.clear()
        return self.scratch

    def _step(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        """One position for every row: [B, H] -> output of the last layer [B, H]."""
        views = zip(self.decoder.layers, step.key_targets, step.value_targets, step.keys, step.values, strict=True)
        for layer, key_target, value_target, keys, values in views:
            qk, value = layer.project(x)
            query, key = torch.split_with_sizes(torch.matmul(qk, step.rotation), layer.sizes, 1)
            key_target.copy_(key)
            value_target.copy_(value)
            x = layer.finish(x, layer.attend(query, keys, values))
        return x

    def _steps(self, rows: int) -> list[_Step]:
        """The constant parts of the 16 positions for a batch of `rows`; the scratch grows to the largest batch."""
        if torch.compiler.is_compiling():
            return [self._views(rows, position) for position in range(self.groups)]
        self.reserve(rows)
        if rows not in self.steps:
            self.steps[rows] = [self._views(rows, position) for position in range(self.groups)]
        return self.steps[rows]

    def _views(self, rows: int, position: int) -> _Step:
        heads = self.config.kv_heads
        used = [scratch[:, : rows * heads] for scratch in self.scratch]
        targets = [layer[:, :, position].unflatten(1, (rows, heads)).unbind(0) for layer in used]
        seen = [layer[:, :, : position + 1].unbind(0) for layer in used]
        return _Step(
            self.rotations[position],
            [key for key, _ in targets],
            [value for _, value in targets],
            [keys.transpose(1, 2) for keys, _ in seen],
            [values for _, values in seen],
        )


@dataclass(slots=True)
class _Step:
    """What is constant at one position: its rotation [hd, hd], and for each layer where its keys and values go
    [B, kv_heads, hd] and the keys [B * kv_heads, hd, n] and values [B * kv_heads, n, hd] that it sees."""

    rotation: torch.Tensor
    key_targets: list[torch.Tensor]
    value_targets: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
