"""The Thinker's audio encoder: log-mel frames (100 a second) to 13 vectors a second of the Thinker's width.

Recordings are cut into chunks of one second. Three strided convolutions see one chunk alone, so do the sinusoid
positions, which restart in each chunk; attention sees a window of eight chunks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_lab.models.qwen3_omni.config import AudioConfig
from omni_lab.models.qwen3_omni.packed import packed_attention
from omni_lab.models.qwen3_omni.weights import allocate

CONV_LAYERS = 3
CHUNKS_PER_CONV = 64
"""Chunks that go through the convolutions together: bounds their memory for long recordings."""


def audio_tokens(mel_frames: int, n_window: int = 50) -> int:
    """Placeholders, and output vectors, of a recording of `mel_frames` frames.

    Each chunk of 2 * n_window frames, the last and shorter one too, is halved three times, rounding up: 100 -> 13.
    """
    full, rest = divmod(mel_frames, 2 * n_window)
    return full * _halved(2 * n_window) + _halved(rest)


def _halved(frames: int) -> int:
    return math.ceil(frames / 2**CONV_LAYERS)


class AudioTower(nn.Module):
    def __init__(
        self, config: AudioConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        size, channels = config.hidden_size, config.conv_channels
        with torch.device("meta"):
            self.conv2d1 = nn.Conv2d(1, channels, 3, stride=2, padding=1)
            self.conv2d2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            self.conv2d3 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
            self.conv_out = nn.Linear(channels * _halved(config.mel_bins), size, bias=False)
            self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.layers))
            self.ln_post = nn.LayerNorm(size)
            self.proj1 = nn.Linear(size, size)
            self.proj2 = nn.Linear(size, config.output_size)
        allocate(self, dtype, device)
        self.positions = _sinusoids(_halved(2 * config.n_window), size).to(device, dtype)

    def slots(self, prefix: str = "thinker.audio_tower.") -> dict[str, Tensor]:
        """Checkpoint tensor name -> where its values go."""
        return {prefix + name: tensor for name, tensor in self.named_parameters()}

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Log-mel `features` [mel_bins, sum of lengths] of recordings of `lengths` [A] frames -> [tokens, output_size].

        The recordings of one call are one prompt: a recording shorter than a second is padded to the longest chunk
        of the call, and the convolutions can tell. Raises ValueError if the lengths do not fit the features.
        """
        frames = lengths.tolist()
        if min(frames, default=0) < 1 or sum(frames) != features.shape[1]:
            raise ValueError(f"audio lengths {frames} must be positive and add up to {features.shape[1]} mel frames")
        size = 2 * self.config.n_window
        chunks = [min(size, count - start) for count in frames for start in range(0, count, size)]
        pieces = [piece.t() for piece in features.to(self.positions.dtype).split(chunks, dim=1)]
        padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2).unsqueeze(1)
        hidden = torch.cat([self._convolve(part) for part in padded.split(CHUNKS_PER_CONV)])

        steps = hidden.shape[1]
        tokens = torch.tensor([_halved(chunk) for chunk in chunks], device=hidden.device)
        hidden = hidden[torch.arange(steps, device=hidden.device) < tokens[:, None]]
        window = steps * (self.config.n_window_infer // size)
        totals = [audio_tokens(count, self.config.n_window) for count in frames]
        windows = [min(window, total - start) for total in totals for start in range(0, total, window)]
        for layer in self.layers:
            hidden = layer(hidden, windows)
        return self.proj2(F.gelu(self.proj1(self.ln_post(hidden))))

    def _convolve(self, chunks: Tensor) -> Tensor:
        """[chunks, 1, mel_bins, frames] -> [chunks, steps, hidden_size], positions added."""
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            chunks = F.gelu(conv(chunks))
        hidden = self.conv_out(chunks.permute(0, 3, 1, 2).flatten(2))
        return hidden + self.positions[: hidden.shape[1]]


class AudioAttention(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, hidden: Tensor, windows: list[int]) -> Tensor:
        projected = (proj(hidden).unflatten(1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(packed_attention(*projected, windows))


class AudioLayer(nn.Module):
    """Pre-norm encoder layer over packed tokens [N, H]."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = AudioAttention(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor, windows: list[int]) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), windows)
        return hidden + self.fc2(F.gelu(self.fc1(self.final_layer_norm(hidden))))


def _sinusoids(length: int, channels: int) -> Tensor:
    """Position table [length, channels] (arXiv 1706.03762 as Whisper lays it out: all sines, then all cosines)."""
    half = channels // 2
    scales = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10000.0) / (half - 1)))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * scales
    return torch.cat((angles.sin(), angles.cos()), dim=1)
