"""Code2Wav: codec frames (16 codes each, 12.5 a second) to the waveform, one pass, no randomness.

Mean of the 16 code embeddings -> transformer over a sliding causal window -> ConvNeXt upsampling -> convolutional
decoder with SnakeBeta activations (the BigVGAN form, arXiv 2206.04658) -> samples at 24 kHz. Layer sizes are those
of `code2wav_config`; frame-level tensors are [B, T, H], sample-level tensors [B, channels, T].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_lab.models.qwen3_omni.config import Code2WavConfig
from omni_lab.models.qwen3_omni.weights import allocate

CONV_KERNEL = 7
DILATIONS = (1, 3, 9)
ONEDNN_ELEMENTS = 20480
"""PyTorch gives convolutions on a CPU to oneDNN above this input size; below, one matrix product is faster."""


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
            if isinstance(module, PreTransformer | Upsample | SnakeBeta | DecoderUpsample):
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
        hidden = self.code_embedding(codes + self.offsets).mean(1)
        hidden = self.pre_transformer(hidden, starts)
        for upsample, convnext in self.upsample:
            hidden = convnext(upsample(hidden))
        first, *blocks, snake, last = self.decoder
        hidden = first(F.pad(hidden.transpose(1, 2), (first.padding, 0)))
        for block in blocks:
            hidden = block(hidden)
        return to_mono(snake(hidden, last.padding), last.conv).float().clamp_(-1, 1)


class PreTransformer(nn.Module):
    """Decoder layers over frames [B, T, H] with RoPE and a causal window of `sliding_window` frames, self included."""

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(PreTransformerLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def prepare(self) -> None:
        exponent = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=self.norm.weight.device)
        self.frequencies = 1.0 / self.config.rope_theta ** (exponent / self.config.head_dim)

    def forward(self, hidden: Tensor, starts: Tensor | None) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        streams = positions[None] if starts is None else positions + starts[:, None]
        angles = (streams[..., None].float() * self.frequencies).repeat(1, 1, 2)[:, :, None]
        rope = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        mask = None
        if hidden.shape[1] > self.config.sliding_window:
            distance = positions[:, None] - positions
            mask = (distance >= 0) & (distance < self.config.sliding_window)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask)
        return self.norm(hidden)


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (arXiv 2103.17239)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))


class PreTransformerLayer(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        size, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.qkv = nn.Linear(size, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.self_attn = nn.ModuleDict({"o_proj": nn.Linear(config.heads * config.head_dim, size, bias=False)})
        self.self_attn_layer_scale = LayerScale(size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * inner, bias=False)
        self.mlp = nn.ModuleDict({"down_proj": nn.Linear(inner, size, bias=False)})
        self.mlp_layer_scale = LayerScale(size)

    def fused_slots(self, prefix: str) -> dict[str, Tensor]:
        """The checkpoint's separate projections as rows of the fused ones."""
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        attention = zip("qkv", self.qkv.weight.split(sizes), strict=True)
        mlp = zip(("gate", "up"), self.gate_up.weight.chunk(2), strict=True)
        return {f"{prefix}self_attn.{name}_proj.weight": rows for name, rows in attention} | {
            f"{prefix}mlp.{name}_proj.weight": rows for name, rows in mlp
        }

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, frames, _ = hidden.shape
        qkv = self.qkv(self.input_layernorm(hidden)).view(batch, frames, -1, self.head_dim)
        rotated, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        left, right = rotated.chunk(2, dim=-1)
        rotated = rotated * rope[0] + torch.cat((-right, left), dim=-1) * rope[1]
        query, key = rotated.split([self.heads, self.kv_heads], dim=2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        attended = self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        hidden = torch.addcmul(hidden, attended, self.self_attn_layer_scale.scale)
        gate, up = self.gate_up(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        return torch.addcmul(hidden, self.mlp["down_proj"](F.silu(gate) * up), self.mlp_layer_scale.scale)


class Upsample(nn.Module):
    """Transposed convolution whose kernel equals its stride: every step becomes `ratio` steps. [B, T, H] both ways."""

    def __init__(self, size: int, ratio: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(size, size, ratio, ratio)

    def prepare(self) -> None:
        """The kernel as a matrix that maps one step to `ratio` steps, one behind the other."""
        self.weight = self.conv.weight.permute(2, 1, 0).flatten(0, 1)
        self.bias = self.conv.bias.repeat(len(self.weight) // len(self.conv.bias))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias).view(len(hidden), -1, hidden.shape[-1])


class ConvNeXt(nn.Module):
    """Causal ConvNeXt block (arXiv 2201.03545) over [B, T, H]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(size, size, CONV_KERNEL, groups=size)
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.pwconv1 = nn.Linear(size, 4 * size)
        self.pwconv2 = nn.Linear(4 * size, size)
        self.gamma = nn.Parameter(torch.empty(size))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.dwconv(F.pad(hidden.transpose(1, 2), (self.dwconv.padding, 0))).transpose(1, 2)
        mixed = self.pwconv2(F.gelu(self.pwconv1(self.norm(mixed))))
        return torch.addcmul(hidden, mixed, self.gamma)


class CausalConv(nn.Module):
    """Convolution over [B, channels, padding + T] whose caller has put `padding` zeros in front."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.padding = (kernel - 1) * dilation

    def forward(self, padded: Tensor) -> Tensor:
        conv = self.conv
        if not padded.is_cpu or padded.numel() > ONEDNN_ELEMENTS or conv.groups > 1:
            return conv(padded)
        length = padded.shape[-1] - self.padding
        columns = padded.unfold(2, length, *conv.dilation).flatten(1, 2)
        return torch.baddbmm(conv.bias[:, None], conv.weight.flatten(1).expand(len(padded), -1, -1), columns)


def to_mono(padded: Tensor, conv: nn.Conv1d) -> Tensor:
    """The last convolution, [B, channels, padding + T] to [B, T].

    With one output channel it is cheaper on a CPU to apply all taps as one matrix and to add the seven shifted rows.
    """
    taps = conv.weight[0].t() @ padded
    length = padded.shape[-1] - len(conv.weight[0, 0]) + 1
    wave = taps[:, 0, :length] + conv.bias
    for tap in range(1, taps.shape[1]):
        wave += taps[:, tap, tap : tap + length]
    return wave


class SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9), with alpha and beta for each channel of [B, channels, T]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def prepare(self) -> None:
        self.frequency = self.alpha.exp()[:, None]
        self.gain = 1.0 / (self.beta.exp() + 1e-9)[:, None]

    def forward(self, signal: Tensor, padding: int = 0) -> Tensor:
        """The activated signal behind `padding` zeros, the room that the next causal convolution wants."""
        if torch.compiler.is_compiling():
            return F.pad(signal + self.gain * torch.sin(signal * self.frequency).square(), (padding, 0))
        padded = signal.new_empty((*signal.shape[:-1], padding + signal.shape[-1]))
        padded[..., :padding] = 0
        # Eager: every pass works in place in the padded buffer, so that no pass pays for fresh memory.
        out = padded[..., padding:]
        torch.mul(signal, self.frequency, out=out)
        torch.addcmul(signal, out.sin_().square_(), self.gain, out=out)
        return padded


class DecoderUpsample(nn.Module):
    """Transposed convolution of kernel 2 * rate and stride `rate`, less `rate` outputs at both ends.

    What remains of L inputs is (L - 1) * rate outputs: outputs n * rate .. (n + 1) * rate - 1 are the kernel's first
    half applied to input n + 1 plus its second half applied to input n, so two matrix products give them all.
    """

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, 2 * rate, rate)
        self.rate = rate

    def prepare(self) -> None:
        """Halves of the kernel as [1, inputs, rate * outputs] matrices, and the bias once for each phase."""
        halves = self.conv.weight.transpose(1, 2).chunk(2, dim=1)
        self.after, self.before = (half.reshape(1, half.shape[0], -1) for half in halves)
        self.bias = self.conv.bias.repeat(self.rate)[None, None]

    def forward(self, signal: Tensor) -> Tensor:
        batch, _, length = signal.shape
        steps = signal.transpose(1, 2)
        out = torch.baddbmm(self.bias, steps[:, 1:], self.after.expand(batch, -1, -1))
        out = out.baddbmm_(steps[:, :-1], self.before.expand(batch, -1, -1))
        return out.view(batch, (length - 1) * self.rate, -1).transpose(1, 2).contiguous()


class ResidualUnit(nn.Module):
    """h + conv1(snake(conv7(snake(h)))), the wide convolution dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, CONV_KERNEL, dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, signal: Tensor) -> Tensor:
        mixed = self.act2(self.conv1(self.act1(signal, self.conv1.padding)))
        # A kernel of 1 is a matrix product, which takes the residual in as its start value.
        weight, bias = self.conv2.conv.weight, self.conv2.conv.bias
        return torch.baddbmm(signal, weight[:, :, 0].expand(len(signal), -1, -1), mixed).add_(bias[:, None])


class DecoderBlock(nn.Module):
    """Upsamples by `rate` and halves the channels; then residual units of growing dilation."""

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                SnakeBeta(inputs),
                DecoderUpsample(inputs, outputs, rate),
                *(ResidualUnit(outputs, dilation) for dilation in DILATIONS),
            ]
        )

    def forward(self, signal: Tensor) -> Tensor:
        for part in self.block:
            signal = part(signal)
        return signal
