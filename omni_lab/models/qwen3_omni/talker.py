"""The Talker: text and media vectors of a turn in, codec frames of 16 codes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from omni_lab.models.qwen3_omni.code_predictor import CodePredictor, Pick
from omni_lab.models.qwen3_omni.config import TalkerConfig
from omni_lab.models.qwen3_omni.decoder import Decoder
from omni_lab.models.qwen3_omni.invariance import at_least, project
from omni_lab.models.qwen3_omni.rotary import LinearRotation, Rotation
from omni_lab.models.qwen3_omni.spans import PackedSpans, PiecewiseSpans

SPECIAL_CODES = 1024
"""The last ids of the Talker's vocabulary are control codes, never sampled except the end code. So logits are made for
the codes before them and the end code alone: entry i belongs to `speakable[i]`, which is code i but for the end."""


class Predictor(Protocol):
    """How the Talker completes its frames: `CodePredictor`, or transformers' module in its place."""

    def slots(self, prefix: str) -> dict[str, torch.Tensor]: ...

    def prepare(self) -> None: ...

    def predict(self, hidden: torch.Tensor, embed0: torch.Tensor, pick: Pick) -> tuple[torch.Tensor, torch.Tensor]: ...


class Talker:
    """A decoder over codec frames with its code predictor, and its own copy of the Thinker's token embedding.

    Hm is the Thinker's width, Ht the Talker's, Vt the number of codes that can be spoken, the end code included.
    """

    def __init__(
        self,
        config: TalkerConfig,
        thinker_hidden: int,
        text_vocab: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        predictor: Callable[..., Predictor] = CodePredictor,
        rotation: type[Rotation] = LinearRotation,
    ) -> None:
        text = config.text
        self.config = config
        self.text_embedding = torch.empty(text_vocab, thinker_hidden, dtype=dtype, device=device)
        self.text_projection = Projection(thinker_hidden, text.intermediate_size, text.hidden_size, dtype, device)
        self.hidden_projection = Projection(thinker_hidden, text.intermediate_size, text.hidden_size, dtype, device)
        self.codec_embedding = torch.empty(text.vocab_size, text.hidden_size, dtype=dtype, device=device)
        self.decoder = Decoder(text, dtype, device, rotation)
        self.head = torch.empty(text.vocab_size, text.hidden_size, dtype=dtype, device=device)
        self.predictor = predictor(config.predictor, config.code_groups, dtype, device)
        codes = torch.arange(text.vocab_size)
        self.speakable = codes[(codes < text.vocab_size - SPECIAL_CODES) | (codes == config.codec_eos)].to(device)
        self.stop_code = int((self.speakable == config.codec_eos).nonzero())

    def slots(self, prefix: str = "talker.") -> dict[str, torch.Tensor]:
        """Checkpoint name -> the memory that its tensor fills; the text embedding is the Thinker's tensor."""
        return (
            {
                "thinker.model.embed_tokens.weight": self.text_embedding,
                f"{prefix}model.codec_embedding.weight": self.codec_embedding,
                f"{prefix}codec_head.weight": self.head,
            }
            | self.text_projection.slots(f"{prefix}text_projection.")
            | self.hidden_projection.slots(f"{prefix}hidden_projection.")
            | self.decoder.slots(f"{prefix}model.")
            | self.predictor.slots(f"{prefix}code_predictor.")
        )

    def prepare(self) -> None:
        """Call once after loading: derives weights, and the vectors that fill and end the text stream."""
        config = self.config
        self.decoder.prepare()
        self.predictor.prepare()
        self.speakable_head = self.head[self.speakable].t().contiguous()
        device = self.head.device
        self.tts_bos, self.tts_eos, self.tts_pad = self.project_text(
            torch.tensor([config.tts_bos, config.tts_eos, config.tts_pad], device=device)
        )
        self.turn_head = self.project_text(
            torch.tensor([config.im_start, config.assistant, config.newline], device=device)
        )

    def project_text(self, ids: torch.Tensor) -> torch.Tensor:
        """Text token ids [n] -> [n, Ht]."""
        return self.text_projection(self.text_embedding.index_select(0, ids))

    def project_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The Thinker's hidden states at media positions [n, Hm] -> [n, Ht]."""
        return self.hidden_projection(hidden)

    def assistant_rows(self, first_token: int, speaker: int) -> torch.Tensor:
        """The nine inputs that open the answer [9, Ht]: a text stream and a codec stream, added.

        text:  <|im_start|> assistant \\n pad pad pad pad bos first_token
        codec: -            -         -  nothink think_bos think_eos speaker pad bos
        """
        config, device = self.config, self.head.device
        first = self.project_text(torch.tensor([first_token], device=device))
        codes = (
            config.codec_nothink,
            config.codec_think_bos,
            config.codec_think_eos,
            speaker,
            config.codec_pad,
            config.codec_bos,
        )
        stream = torch.cat((self.turn_head, self.tts_pad.expand(4, -1), self.tts_bos[None], first))
        stream[3:] += self.codec_embedding[torch.tensor(codes, device=device)]
        return stream

    def prefill(
        self, embeds: torch.Tensor, positions: torch.Tensor, spans: PiecewiseSpans | PackedSpans, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed prompts [N, Ht] at positions [3, N] -> (hidden states [S, Ht], logits [S, Vt]) after each span."""
        hidden, _ = self.decoder.prefill(embeds, positions, spans, cache)
        return hidden, project(hidden, self.speakable_head)

    def frame(
        self,
        hidden: torch.Tensor,
        codes0: torch.Tensor,
        text: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        cache: Any,
        end: int,
        pick: Pick,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Complete the frames that begin with `codes0`, and take one step on.

        hidden [B, Ht] is the state whose logits gave codes0 [B]; text [B, Ht] the rows of the text stream that go
        with these frames; positions, lengths and `end` as in `Decoder.decode`. Returns (codes [B, 16], hidden
        [B, Ht], logits [B, Vt] of the next frame's first code).
        """
        residual, embeds = self.predictor.predict(hidden, self.codec_embedding.index_select(0, codes0), pick)
        hidden = self.decoder.decode(embeds.add_(text), positions, lengths, cache, end)
        return torch.cat((codes0.unsqueeze(1), residual), 1), hidden, project(hidden, self.speakable_head)


class Projection:
    """Two linear layers with a SiLU between them."""

    def __init__(self, size: int, inner: int, output: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.fc1 = torch.empty(inner, size, dtype=dtype, device=device)
        self.bias1 = torch.empty(inner, dtype=dtype, device=device)
        self.fc2 = torch.empty(output, inner, dtype=dtype, device=device)
        self.bias2 = torch.empty(output, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}linear_fc1.weight": self.fc1,
            f"{prefix}linear_fc1.bias": self.bias1,
            f"{prefix}linear_fc2.weight": self.fc2,
            f"{prefix}linear_fc2.bias": self.bias2,
        }

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(F.linear(at_least(x), self.fc1, self.bias1))
        return F.linear(hidden, self.fc2, self.bias2)[: x.shape[0]]
