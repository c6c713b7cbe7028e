"""The code predictor: for one codec frame, the 15 residual codes that follow the Talker's first code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from omni_lab.models.qwen3_omni import fused
from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.invariance import at_least

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [B, Vc], group 1..15) -> chosen codes [B] int64."""


class CodePredictor:
    """A small dense decoder that runs over positions 0..15 of every frame, for all rows of the batch together.

    Position 0 is the Talker's hidden state, position 1 the embedding of its code, position g + 1 the embedding of
    residual code g. Group g has its own head and embedding. Nothing outlives a frame, so keys and values simply grow
    from position to position.
    """

    def __init__(self, config: DecoderConfig, groups: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config, self.groups = config, groups
        self.decoder = Decoder(config, dtype, device)
        shape = (groups - 1, config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.head = torch.empty(groups - 1, config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        self.offsets = torch.arange(groups - 1, device=device) * config.vocab_size
        positions = torch.arange(groups, device=device)
        self.rotations = self.decoder.rotary.matrices(positions).unbind(0)
        self.turns = tuple(turn[:, 0] for turn in self.decoder.rotary.axes(positions.expand(3, -1)))

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
        if fused.is_fused(self.decoder):
            return fused.predict(self, hidden, embed0, pick)
        rows = hidden.shape[0]
        past: list[torch.Tensor | None] = [None] * len(self.decoder.layers)
        self._step(at_least(hidden), 0, past)
        x = self._step(at_least(embed0), 1, past)
        codes = [pick(torch.mm(self.decoder.norm(x), self.head[0])[:rows], 1)]
        for group in range(2, self.groups):
            x = self._step(at_least(self.embedding[group - 2].index_select(0, codes[-1])), group, past)
            codes.append(pick(torch.mm(self.decoder.norm(x), self.head[group - 1])[:rows], group))
        residual = torch.stack(codes, 1)
        embeds = F.embedding(residual + self.offsets, self.embedding.view(-1, embed0.shape[1]))
        return residual, embeds.sum(1).add_(embed0)

    def _step(self, x: torch.Tensor, position: int, past: list[torch.Tensor | None]) -> torch.Tensor:
        """One position for every row: [B, H] -> output of the last layer [B, H].

        `past` holds for each layer the keys and values of earlier positions [2, B * kv_heads, position, hd], and gets
        this one's too.
        """
        shape = (2, -1, 1, self.config.head_dim)
        for index, layer in enumerate(self.decoder.layers):
            qk, value = layer.project(x)
            query, key = torch.split_with_sizes(torch.matmul(qk, self.rotations[position]), layer.sizes, 1)
            new = torch.stack((key, value)).view(shape)
            past[index] = seen = new if past[index] is None else torch.cat((past[index], new), 2)
            keys, values = seen.unbind(0)
            x = layer.finish(x, layer.attend(query, keys.transpose(1, 2), values))
        return x
