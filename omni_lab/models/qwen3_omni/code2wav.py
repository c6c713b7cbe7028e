"""Code2Wav: codec frames (16 codes each, 12.5 a second) to the waveform, one pass, no randomness.

Mean of the 16 code embeddings -> transformer over a sliding causal window -> ConvNeXt upsampling -> convolutional
decoder with SnakeBeta activations (the BigVGAN form, arXiv 2206.04658) -> samples at 24 kHz. Layer sizes are those
of `code2wav_config`; frame-level tensors are [B, T, H], sample-level tensors [B, channels, T].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omni_lab.kernels.ops import snake_convolution
from omni_lab.models.qwen3_omni.code2wav_frames import ConvNeXt, PreTransformer, PreTransformerLayer, Upsample
from omni_lab.models.qwen3_omni.code2wav_samples import (
    CONV_KERNEL,
    DILATIONS,
    CausalConv,
    DecoderBlock,
    DecoderUpsample,
    ResidualUnit,
    SnakeBeta,
    fused,
    to_mono,
)
from omni_lab.models.qwen3_omni.config import Code2WavConfig
from omni_lab.models.qwen3_omni.past import Past
from omni_lab.models.qwen3_omni.weights import allocate


@dataclass(frozen=True, slots=True)
class Window:
    """Frames to decode for one chunk of a stream, and which samples of that decode are new."""

    start: int
    stop: int
    samples: slice


def window(done: int, new: int, context: int, samples_per_frame: int, tail: int) -> Window:
    """The window that adds `new` frames to a stream of which `done` frames were decoded before.

    Every decode lacks its last `tail` samples, so a stream is `tail` samples behind its frames until its end: a
    later chunk starts there, and needs at least the frames that these samples belong to as its left context.
    Chunks of any sizes add up to samples_per_frame * frames - tail samples, as one full decode gives.
    """
    left = min(done, max(context, math.ceil(tail / samples_per_frame)))
    first = samples_per_frame * left - tail if done else 0
    return Window(done - left, done + new, slice(first, samples_per_frame * (left + new) - tail))


class Code2Wav(nn.Module):
    """The vocoder. Call `prepare()` once after the weights are loaded."""

    def __init__(self, config: Code2WavConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.code_embedding = nn.Embedding.from_pretrained(
                torch.empty(config.codebook_size * config.quantizers, config.hidden_size)  # without an initialisation
            )
            self.pre_transformer = PreTransformer(config)
            self.upsample = nn.ModuleList(
                nn.ModuleList([Upsample(config.hidden_size, ratio), ConvNeXt(config.hidden_size)])
                for ratio in config.upsampling_ratios
            )
            widths = [config.decoder_dim // 2**block for block in range(len(config.upsample_rates) + 1)]
            self.decoder = nn.ModuleList(
                [
                    CausalConv(config.hidden_size, widths[0], CONV_KERNEL),
                    *(
                        DecoderBlock(widths[block], widths[block + 1], rate)
                        for block, rate in enumerate(config.upsample_rates)
                    ),
                    SnakeBeta(widths[-1]),
                    CausalConv(widths[-1], 1, CONV_KERNEL),
                ]
            )
        allocate(self, dtype, device)

    def slots(self, prefix: str = "code2wav.") -> dict[str, Tensor]:
        """Checkpoint tensor name -> where its values go."""
        slots = {prefix + name: tensor for name, tensor in self.named_parameters()}
        for name, module in self.named_modules():
            if isinstance(module, PreTransformerLayer):
                slots |= module.fused_slots(f"{prefix}{name}.")
                del slots[f"{prefix}{name}.qkv.weight"], slots[f"{prefix}{name}.gate_up.weight"]
        return slots

    def prepare(self) -> None:
        """Derive what the weights fix for good: offsets of the codebooks, Snake's constants, split kernels."""
        config, weight = self.config, self.code_embedding.weight
        self.offsets = torch.arange(config.quantizers, device=weight.device)[:, None] * config.codebook_size
        for module in self.modules():
            if isinstance(module, PreTransformer | Upsample | CausalConv | SnakeBeta | DecoderUpsample | ResidualUnit):
                module.prepare()

    @property
    def samples_per_frame(self) -> int:
        """1920 for the released model: 24000 samples a second / 12.5 frames a second."""
        return math.prod(self.config.upsample_rates + self.config.upsampling_ratios)

    @property
    def tail(self) -> int:
        """Samples that a decode lacks at its end: 555 for the released model.

        Each decoder block needs the next input step for its last `rate` outputs, so it leaves them out; at the
        final rate that is rate * (product of the rates of the blocks behind it): 480 + 60 + 12 + 3.
        """
        rates = self.config.upsample_rates
        return sum(math.prod(rates[block:]) for block in range(len(rates)))

    @property
    def receptive_frames(self) -> int:
        """Left context, in frames, with which a chunk equals the same stretch of the full decode exactly.

        The convolutions alone: go back from the first new sample of a chunk, index -tail where the chunk's frames
        begin at 0. A causal convolution reaches (kernel - 1) * dilation steps back, a transposed one divides the
        index by its rate (rounding down). With kernels of 7 and dilations 1, 3, 9: -555 -> -561, then per block
        -639 / 3 = -213, -291 / 4 -> -73, -151 / 5 -> -31, -109 / 8 -> -14, then -20, -26 / 2 = -13, -19 / 2 -> -10,
        so 10 frames. Each attention layer adds window - 1: 8 * 71 + 10 = 578 for the released model.
        """
        reach = CONV_KERNEL - 1
        index = -self.tail - reach
        for rate in reversed(self.config.upsample_rates):
            index = (index - reach * sum(DILATIONS)) // rate
        index -= reach
        for ratio in reversed(self.config.upsampling_ratios):
            index = (index - reach) // ratio
        return self.config.layers * (self.config.sliding_window - 1) - index

    def decode(self, codes: Tensor, starts: Tensor | None = None) -> Tensor:
        """codes [B, 16, T] int64 -> samples [B, samples_per_frame * T - tail] float32 in [-1, 1].

        `starts` [B] are the positions of the first frames in their streams (0 if not given). Attention sees only
        distances, so they change nothing but rounding: with them a chunk rounds as the full decode does. A prefix
        of the frames gives a prefix of the samples, so rows of unequal length can be padded on the right and cut
        afterwards.
        """
        starts = torch.zeros(len(codes), dtype=torch.int64, device=codes.device) if starts is None else starts
        return self.stream(codes, starts, None)[0]

    def stream(
        self, codes: Tensor, starts: Tensor, memory: Tensor | None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The samples that new frames [B, 16, T] add to streams, and what to remember of these.

        `memory` [B, S] is what the pass before gave for each row; without it the streams begin here. `starts` [B]
        are the numbers of frames before. Row b has lengths[b] frames (1 to T; T if not given), the rest is padding
        behind them. The first pass gives samples_per_frame * T - tail samples, a later one samples_per_frame * T;
        of a shorter row those of the padding, at the end, are to be cut. A pure function: memory is not changed.
        """
        past = Past(memory, codes.shape[-1], lengths)
        hidden = self.code_embedding(codes + self.offsets).mean(1)
        hidden = self.pre_transformer(hidden, starts, past)
        for upsample, convnext in self.upsample:
            hidden = convnext(upsample(hidden, past), past)
        signal = hidden.mT
        first, *blocks, snake, last = self.decoder
        padded = torch.cat((past.before(signal, first.padding), signal), 2)
        past.keep(padded, first.padding)
        signal = first(padded)
        for block in blocks:
            signal = block(signal, past)
        before = past.before(signal, last.padding)
        if fused(signal, signal.shape[1]):
            weights = snake.turns, snake.gain, last.kernel, last.conv.bias
            wave, kept = snake_convolution(signal, before.contiguous(), past.ends(signal), 1, *weights)
            past.take(kept)
            return wave[:, 0].clamp(-1, 1), past.memory()
        padded = snake(signal, before)
        past.keep(padded, last.padding)
        return to_mono(padded, last.conv).float().clamp_(-1, 1), past.memory()
