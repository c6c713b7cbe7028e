"""The Thinker's vision encoder: 16 x 16 patches of images and video frames to vectors of the Thinker's width.

Patches come in merge order: the four patches of a 2 x 2 block lie next to each other, blocks row by row, frames one
behind the other. A block becomes one output token. Some layers give a second output (deepstack, arXiv 2406.04334),
which the Thinker adds to its own first layers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_lab.models.qwen3_omni.config import VisionConfig
from omni_lab.models.qwen3_omni.packed import packed_attention
from omni_lab.models.qwen3_omni.weights import allocate


class VisionTower(nn.Module):
    def __init__(
        self, config: VisionConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.patch_embed = PatchEmbed(config)
            self.pos_embed = nn.Embedding.from_pretrained(torch.empty(config.positions, config.hidden_size))
            self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))
            self.merger = Merger(config, norm_size=config.hidden_size)
            merged = config.hidden_size * config.merge_size**2
            self.merger_list = nn.ModuleList(Merger(config, norm_size=merged) for _ in config.deepstack_layers)
        allocate(self, dtype, device)
        # Half of a head's frequencies turn with the row, half with the column.
        axis = config.hidden_size // config.heads // 2
        exponent = torch.arange(0, axis, 2, dtype=torch.float32, device=device) / axis
        self.frequencies = 1.0 / config.rope_theta**exponent

    def slots(self, prefix: str = "thinker.visual.") -> dict[str, Tensor]:
        """Checkpoint tensor name -> where its values go."""
        return {prefix + name: tensor for name, tensor in self.named_parameters()}

    def forward(self, pixels: Tensor, grid: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Patches of any number of images or videos -> (tokens [M, output_size], deepstack features, each as tokens).

        `pixels` [patches, channels * temporal * 16 * 16], `grid` [n, 3]: frames, rows and columns of patches. M is
        the number of patches / 4. Raises ValueError if grid and pixels do not fit, or a side is not a multiple of 2.
        """
        shapes = grid.tolist()
        merge = self.config.merge_size
        if any(rows % merge or columns % merge for _, rows, columns in shapes):
            raise ValueError(f"image grid {shapes}: rows and columns of patches must be multiples of {merge}")
        if sum(math.prod(shape) for shape in shapes) != pixels.shape[0]:
            raise ValueError(f"image grid {shapes} does not describe the {pixels.shape[0]} patches given")
        places = [self._places(*shape) for shape in shapes]
        hidden = self.patch_embed(pixels) + torch.cat([table for table, _ in places])
        angles = torch.cat([angles for _, angles in places]).repeat(1, 2)[:, None]
        rope = angles.cos(), angles.sin()
        frames = [rows * columns for count, rows, columns in shapes for _ in range(count)]
        deepstack = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rope, frames)
            if index in self.config.deepstack_layers:
                deepstack.append(self.merger_list[self.config.deepstack_layers.index(index)](hidden))
        return self.merger(hidden), deepstack

    def _places(self, frames: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Position vectors and RoPE angles of one image's patches in merge order, the same for each frame."""
        merge, table = self.config.merge_size, self.pos_embed.weight
        raster = torch.arange(rows * columns, device=table.device)
        order = raster.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
        side = math.isqrt(self.config.positions)
        square = table.float().t().view(1, -1, side, side)
        resized = F.interpolate(square, size=(rows, columns), mode="bilinear", align_corners=True)
        vectors = resized[0].flatten(1).t()[order].to(table.dtype)
        row, column = order // columns, order % columns
        angles = torch.cat([axis[:, None] * self.frequencies for axis in (row, column)], dim=1)
        return vectors.repeat(frames, 1), angles.repeat(frames, 1)


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel, over patches that are cut out already: one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel)

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(pixels.to(weight.dtype), weight, self.proj.bias)


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], frames: list[int]) -> Tensor:
        qkv = self.qkv(hidden).unflatten(1, (3 * self.heads, -1))
        rotated, value = qkv.split([2 * self.heads, self.heads], dim=1)
        rotated = rotated.float()
        left, right = rotated.chunk(2, dim=-1)
        rotated = (rotated * rope[0] + torch.cat((-right, left), dim=-1) * rope[1]).to(value.dtype)
        return self.proj(packed_attention(*rotated.chunk(2, dim=1), value, frames))


class VisionBlock(nn.Module):
    """Pre-norm encoder layer over packed patches [N, H]; each frame attends to itself."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {
                "linear_fc1": nn.Linear(config.hidden_size, config.intermediate_size),
                "linear_fc2": nn.Linear(config.intermediate_size, config.hidden_size),
            }
        )

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], frames: list[int]) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), rope, frames)
        wide = F.gelu(self.mlp["linear_fc1"](self.norm2(hidden)), approximate="tanh")
        return hidden + self.mlp["linear_fc2"](wide)


class Merger(nn.Module):
    """Four patches to one token. The norm works on single patches, or on the four joined, by its size."""

    def __init__(self, config: VisionConfig, norm_size: int) -> None:
        super().__init__()
        merged = config.hidden_size * config.merge_size**2
        self.ln_q = nn.LayerNorm(norm_size, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config.output_size))
        self.norm_size, self.merged_size = norm_size, merged

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.ln_q(hidden.view(-1, self.norm_size)).view(-1, self.merged_size))
