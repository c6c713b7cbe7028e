"""The Thinker's text model: token ids and media vectors in, next-token logits out."""

from __future__ import annotations

from typing import Any

import torch

from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.invariance import project
from omni_lab.models.qwen3_omni.spans import PackedSpans, PiecewiseSpans


class Thinker:
    """A mixture-of-experts decoder with interleaved M-RoPE, embedding [V, H] and untied head [V, H]."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.decoder = Decoder(config, dtype, device)
        self.head = torch.empty(config.hidden_size, config.vocab_size, dtype=dtype, device=device)

    def slots(self, prefix: str = "thinker.") -> dict[str, torch.Tensor]:
        """Checkpoint name -> the memory that its tensor fills."""
        return {
            f"{prefix}model.embed_tokens.weight": self.embedding,
            f"{prefix}lm_head.weight": self.head.t(),
        } | self.decoder.slots(f"{prefix}model.")

    def prepare(self) -> None:
        """Call once after the weights are loaded."""
        self.decoder.prepare()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [N] -> vectors [N, H]."""
        return self.embedding.index_select(0, ids)

    def prefill(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        spans: PiecewiseSpans | PackedSpans,
        cache: Any,
        capture: int | None = None,
        deepstack: tuple[torch.Tensor, list[torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed prompts [N, H] at positions [3, N] -> (logits [S, V] after each span, captured states [N, H] or None).

        `capture` is an index into transformers' tuple of hidden states, see `Decoder.prefill`.
        """
        hidden, captured = self.decoder.prefill(embeds, positions, spans, cache, capture, deepstack)
        return project(hidden, self.head), captured

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, cache: Any, end: int
    ) -> torch.Tensor:
        """One token for each of cache rows 0..B-1 -> logits [B, V], see `Decoder.decode`."""
        hidden = self.decoder.decode(self.embedding.index_select(0, ids), positions, lengths, cache, end)
        return project(hidden, self.head)
