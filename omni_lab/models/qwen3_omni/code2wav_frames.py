"""The first half of Code2Wav, [B, T, H]: a transformer over frames, and upsampling to a few steps for each frame.

Nothing looks ahead; whatever looks back takes what came before from a `Past`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_lab.models.qwen3_omni.code2wav_samples import CONV_KERNEL
from omni_lab.models.qwen3_omni.config import Code2WavConfig
from omni_lab.models.qwen3_omni.past import Past


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

    def forward(self, hidden: Tensor, starts: Tensor, past: Past) -> Tensor:
        """`starts` [B] are the positions of the rows' first frames in their streams."""
        window, length = self.config.sliding_window, hidden.shape[1]
        frames = torch.arange(length, device=hidden.device)
        angles = ((starts[:, None] + frames)[..., None].float() * self.frequencies).repeat(1, 1, 2)[:, :, None]
        rope = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        mask = None
        if past.begun or torch.compiler.is_compiling() or length > window:
            keys = torch.arange(1 - window if past.begun else 0, length, device=hidden.device)
            distance = frames[:, None] - keys
            mask = (distance >= 0) & (distance < window)
            if past.begun:
                mask = mask & (starts[:, None] + keys >= 0)[:, None, None]
        for layer in self.layers:
            hidden = layer(hidden, rope, mask, past)
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
        self.lookback = config.sliding_window - 1
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

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, past: Past) -> Tensor:
        batch, frames, _ = hidden.shape
        qkv = self.qkv(self.input_layernorm(hidden)).view(batch, frames, -1, self.head_dim)
        rotated, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        left, right = rotated.chunk(2, dim=-1)
        rotated = rotated * rope[0] + torch.cat((-right, left), dim=-1) * rope[1]
        query, key = rotated.split([self.heads, self.kv_heads], dim=2)
        new = torch.cat((key, value), 2).flatten(2).mT
        joined = torch.cat((past.before_if_any(new, self.lookback), new), 2)
        past.keep(joined, self.lookback)
        key, value = joined.unflatten(1, (2, self.kv_heads, self.head_dim)).mT.unbind(1)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
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
        self.ratio = ratio

    def prepare(self) -> None:
        """The kernel as a matrix that maps one step to `ratio` steps, one behind the other."""
        self.weight = self.conv.weight.permute(2, 1, 0).flatten(0, 1)
        self.bias = self.conv.bias.repeat(self.ratio)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        past.rate *= self.ratio
        return F.linear(hidden, self.weight, self.bias).view(hidden.shape[0], -1, hidden.shape[-1])


class ConvNeXt(nn.Module):
    """Causal ConvNeXt block (arXiv 2201.03545) over [B, T, H]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dwconv = nn.ModuleDict({"conv": nn.Conv1d(size, size, CONV_KERNEL, groups=size)})
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.pwconv1 = nn.Linear(size, 4 * size)
        self.pwconv2 = nn.Linear(4 * size, size)
        self.gamma = nn.Parameter(torch.empty(size))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        joined = torch.cat((past.before(hidden.mT, CONV_KERNEL - 1), hidden.mT), 2)
        past.keep(joined, CONV_KERNEL - 1)
        mixed = self.dwconv["conv"](joined).mT
        mixed = self.pwconv2(F.gelu(self.pwconv1(self.norm(mixed))))
        return torch.addcmul(hidden, mixed, self.gamma)
