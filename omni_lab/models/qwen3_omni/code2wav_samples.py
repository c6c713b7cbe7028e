"""The second half of Code2Wav, [B, channels, T]: causal convolutions and SnakeBeta up to the rate of samples.

A convolution reads its input behind the steps that came before: they stand where an offline decode has zeros, in the
buffer that the activation in front of it fills, so that a stream costs no copy more than an offline decode.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from omni_lab.kernels.ops import has_kernel, residual_unit, snake_convolution
from omni_lab.models.qwen3_omni.past import Past

CONV_KERNEL = 7
DILATIONS = (1, 3, 9)
ONEDNN_ELEMENTS = 20480
"""Above this input size of a row oneDNN convolves faster on a CPU; below, one matrix product does."""
ONEDNN_CHANNELS = 16
"""oneDNN fills channels up to a multiple of this on a CPU; other counts are faster as one matrix product a tap."""

KERNEL_CHANNELS = 64
"""Up to so many channels the fused kernel keeps a stretch of all of them in a core's own caches."""


def fits(tensor: Tensor, channels: int) -> bool:
    """Whether there is a kernel for an activation and the convolution to `channels` behind it."""
    return has_kernel(tensor) and channels <= KERNEL_CHANNELS


def fused(signal: Tensor, channels: int) -> bool:
    """Whether it is used: by what is compiled."""
    return torch.compiler.is_compiling() and fits(signal, channels)


class CausalConv(nn.Module):
    """Convolution over [B, channels, padding + T], the last `padding` steps before the T in front."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation)
        self.padding = (kernel - 1) * dilation

    def prepare(self) -> None:
        """The kernel as one matrix over all taps; where they are wanted, as one for each tap, and with outputs last."""
        weight = self.conv.weight
        if fits(weight, weight.shape[0]):
            self.kernel = weight.permute(1, 2, 0).contiguous()
        self.columns, self.bias = weight.flatten(1)[None], self.conv.bias[:, None]
        if weight.shape[1] % ONEDNN_CHANNELS:
            self.taps = weight.permute(2, 0, 1)[:, None].contiguous()

    def forward(self, padded: Tensor) -> Tensor:
        batch, channels, width = padded.shape
        length, dilation = width - self.padding, self.conv.dilation[0]
        if padded.is_cpu and not torch.compiler.is_compiling() and channels * width <= ONEDNN_ELEMENTS:
            columns = padded.unfold(2, length, dilation).flatten(1, 2)
            return torch.baddbmm(self.bias, self.columns.expand(batch, -1, -1), columns)
        if padded.is_cpu and channels % ONEDNN_CHANNELS:
            out = self.bias.expand(batch, -1, length)
            for tap, weight in enumerate(self.taps):
                shifted = padded[..., tap * dilation : tap * dilation + length]
                add = torch.baddbmm if tap == 0 else Tensor.baddbmm_
                out = add(out, weight.expand(batch, -1, -1), shifted)
            return out
        return self.conv(padded)


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
        self.turns = self.frequency / torch.pi
        self.gain = 1.0 / (self.beta.exp() + 1e-9)[:, None]

    def forward(self, signal: Tensor, before: Tensor) -> Tensor:
        """The activated signal behind the activated steps `before` it [B, channels, P]: [B, channels, P + T]."""
        if torch.compiler.is_compiling():
            return torch.cat((before, signal + self.gain * torch.sin(signal * self.frequency).square()), 2)
        joined = signal.new_empty((*signal.shape[:-1], before.shape[-1] + signal.shape[-1]))
        joined[..., : before.shape[-1]] = before
        # Eager: every pass works in place in the joined buffer, so that no pass pays for fresh memory.
        out = joined[..., before.shape[-1] :]
        torch.mul(signal, self.frequency, out=out)
        torch.addcmul(signal, sin_(out).square_(), self.gain, out=out)
        return joined


def sin_(x: Tensor) -> Tensor:
    """The sine in place: PyTorch takes MKL's on a CPU, which needs 2.5 times as long as numpy's where MKL is slow."""
    if not x.is_cpu or x.dtype != torch.float32:
        return x.sin_()
    np.sin(x.numpy(), out=x.numpy())
    return x


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
        weight = self.conv.weight
        if fits(weight, weight.shape[1]):
            self.kernel = torch.stack((weight[..., self.rate :], weight[..., : self.rate]), 1).flatten(2)
            self.kernel_bias = self.conv.bias.repeat_interleave(self.rate)
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
    """h + conv1(snake(conv7(snake(h)))), the wide convolution dilated; one kernel where it is compiled and narrow."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv(channels, channels, CONV_KERNEL, dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = nn.ModuleDict({"conv": nn.Conv1d(channels, channels, 1)})

    def prepare(self) -> None:
        """The pointwise weight as the kernel reads it."""
        weight = self.conv2["conv"].weight
        if fits(weight, weight.shape[0]):
            self.narrow = weight[:, :, 0].t().contiguous()

    def forward(self, signal: Tensor, past: Past) -> Tensor:
        padding = self.conv1.padding
        if fused(signal, signal.shape[1]):
            first = self.act1.turns, self.act1.gain, self.conv1.kernel, self.conv1.bias
            second = self.act2.turns, self.act2.gain, self.narrow, self.conv2["conv"].bias
            before, ends = past.before(signal, padding).contiguous(), past.ends(signal)
            signal, kept = residual_unit(signal, before, ends, self.conv1.conv.dilation[0], *first, *second)
            past.take(kept)
            return signal
        padded = self.act1(signal, past.before(signal, padding))
        past.keep(padded, padding)
        mixed = self.conv1(padded)
        mixed = self.act2(mixed, mixed[..., :0])
        # A kernel of 1 is a matrix product, which adds to the signal in place: nobody else reads it any more.
        conv = self.conv2["conv"]
        return signal.baddbmm_(conv.weight[:, :, 0].expand(signal.shape[0], -1, -1), mixed).add_(conv.bias[:, None])


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

    def forward(self, signal: Tensor, past: Past) -> Tensor:
        """[B, inputs, T] to [B, outputs, T * rate], less the last `rate` steps of the stream so far.

        Those need the next input step: they come first in the next pass, and where streams begin nothing does.
        """
        snake, upsample, *units = self.block
        before = past.before_if_any(signal, 1)
        if fused(signal, upsample.conv.out_channels):
            weights = snake.turns, snake.gain, upsample.kernel, upsample.kernel_bias
            ends = past.ends(signal)
            signal, kept = snake_convolution(signal, before.contiguous(), ends, upsample.rate, *weights)
            past.take(kept)
        else:
            joined = snake(signal, before)
            past.keep(joined, 1)
            signal = upsample(joined)
        past.rate *= upsample.rate
        for unit in units:
            signal = unit(signal, past)
        return signal
