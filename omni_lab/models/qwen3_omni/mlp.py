"""The MLP of a decoder layer: one dense SwiGLU network, or the few chosen of many such experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_lab.kernels.ops import WIDEST
from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.invariance import INVARIANT_ROWS

DENSE_EXPERTS = 16
"""Where the kernel does not go (bfloat16, odd widths), a compiled step takes the dense way if there are few experts: it
fuses well, and tracing `_grouped_mm` needs bfloat16."""


class DenseMLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.gate_up = torch.empty(config.hidden_size, 2 * config.intermediate_size, dtype=dtype, device=device)
        self.down = torch.empty(config.intermediate_size, config.hidden_size, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        gate, up = self.gate_up.t().chunk(2)
        return {
            f"{prefix}gate_proj.weight": gate,
            f"{prefix}up_proj.weight": up,
            f"{prefix}down_proj.weight": self.down.t(),
        }

    def __call__(self, x: Tensor, residual: Tensor, alone: bool = False) -> Tensor:
        return torch.addmm(residual, swiglu(torch.mm(x, self.gate_up)), self.down)


class ExpertMLP:
    """Top-k of many experts, and in the Talker one shared expert behind a sigmoid gate.

    Router, shared gate and shared expert read the same input, so their weights are columns of one matrix, which is
    filled up to whole vectors.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, count, size, shared = config.hidden_size, config.experts, config.expert_size, config.shared_expert_size
        self.top_k, self.norm_topk = config.experts_per_token, config.norm_topk
        self.sizes = [count, 1, 2 * shared] if shared else [count]
        self.sizes.append(-sum(self.sizes) % WIDEST)
        self.front = torch.zeros(hidden, sum(self.sizes), dtype=dtype, device=device)
        self.gate_up = torch.empty(count, hidden, 2 * size, dtype=dtype, device=device)
        self.down = torch.empty(count, size, hidden, dtype=dtype, device=device)
        self.each = list(zip(self.gate_up.unbind(), self.down.unbind(), strict=True))
        self.shared_down = torch.empty(shared, hidden, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        rows = self.front.t().split(self.sizes)
        slots = {f"{prefix}gate.weight": rows[0]}
        for index in range(self.gate_up.shape[0]):
            gate, up = self.gate_up[index].t().chunk(2)
            slots[f"{prefix}experts.{index}.gate_proj.weight"] = gate
            slots[f"{prefix}experts.{index}.up_proj.weight"] = up
            slots[f"{prefix}experts.{index}.down_proj.weight"] = self.down[index].t()
        if len(rows) > 2:
            gate, up = rows[2].chunk(2)
            slots[f"{prefix}shared_expert_gate.weight"] = rows[1]
            slots[f"{prefix}shared_expert.gate_proj.weight"] = gate
            slots[f"{prefix}shared_expert.up_proj.weight"] = up
            slots[f"{prefix}shared_expert.down_proj.weight"] = self.shared_down.t()
        return slots

    def __call__(self, x: Tensor, residual: Tensor, alone: bool = False) -> Tensor:
        logits, *shared, _ = torch.split_with_sizes(torch.mm(x, self.front), self.sizes, -1)
        if shared:
            gate, gate_up = shared
            residual = torch.addmm(residual, swiglu(gate_up).mul_(gate.sigmoid_()), self.shared_down)
        weights, chosen = self.route(logits)
        if alone and x.device.type == "cpu" and not torch.compiler.is_compiling():
            return one_token(x, residual, weights, chosen, self.each)
        return experts(x, residual, weights, chosen, self.gate_up, self.down)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [N, k] of the k likeliest experts; a softmax over k logits is the renormalised softmax."""
        if self.norm_topk:
            top, chosen = logits.topk(self.top_k, -1)
            return torch.softmax(top, -1, dtype=torch.float32).to(logits.dtype), chosen
        top, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(self.top_k, -1)
        return top.to(logits.dtype), chosen


def experts(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """residual + sum over each token's chosen experts of weight * down(silu(gate x) * up x).

    Tokens x and residual [N, H], weights and chosen expert ids [N, k], gate_up [E, H, 2I], down [E, I, H].
    """
    if torch.compiler.is_compiling() and x.shape[0] == 1:
        return gathered(x, residual, weights, chosen, gate_up, down)
    if torch.compiler.is_compiling() and gate_up.shape[0] <= DENSE_EXPERTS:
        return dense(x, residual, weights, chosen, gate_up, down)
    return grouped(x, residual, weights, chosen, gate_up, down)


def one_token(
    x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, each: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """As `grouped` when all rows are copies of one token: its experts one after the other, nothing to sort.

    `each` holds gate_up [H, 2I] and down [I, H] of every expert.
    """
    outputs = []
    for gate_up, down in map(each.__getitem__, chosen[0].tolist()):
        outputs.append(torch.mm(swiglu(torch.mm(x, gate_up)), down)[0])
    result = torch.baddbmm(residual[:1, None], weights[:1, None], torch.stack(outputs)[None])
    return result[0].expand_as(x).contiguous()


def gathered(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `grouped` for one token, x [1, H], without a word from the host: its experts' weights are copied together."""
    hidden = swiglu(torch.matmul(x, gate_up.index_select(0, chosen[0])))
    return residual + (torch.bmm(hidden, down.index_select(0, chosen[0])) * weights.view(-1, 1, 1)).sum(0)


def dense(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert for every token; those that were not chosen weigh 0."""
    spread = torch.zeros(x.shape[0], down.shape[0], dtype=x.dtype, device=x.device).scatter_(1, chosen, weights)
    hidden = swiglu(torch.matmul(x, gate_up).transpose(0, 1)).mul_(spread.unsqueeze(-1))
    return torch.addmm(residual, hidden.flatten(1), down.flatten(0, 1))


def grouped(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort (token, expert) pairs by expert and multiply group by group, without asking the device for sizes.

    On the CPU small groups are filled up with copies of token 0, so that no row depends on its neighbours.
    """
    top_k, count = chosen.shape[1], gate_up.shape[0]
    pairs = chosen.view(-1)
    sizes = torch.zeros(count, dtype=pairs.dtype, device=pairs.device).index_add_(0, pairs, torch.ones_like(pairs))
    missing = (INVARIANT_ROWS - sizes).clamp_(min=0).mul_(sizes > 0)
    fillers = torch.repeat_interleave(missing) if x.device.type == "cpu" else pairs[:0]
    order = torch.cat((pairs, fillers)).argsort(stable=True)
    rows = x.index_select(0, (order // top_k).masked_fill_(order >= len(pairs), 0))
    ends = (sizes + missing if len(fillers) else sizes).cumsum(0, dtype=torch.int32)
    hidden = swiglu(torch._grouped_mm(rows, gate_up, offs=ends))
    results = torch._grouped_mm(hidden, down, offs=ends)
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    results = results.index_select(0, places[: len(pairs)]).view(-1, top_k, x.shape[1])
    return results.mul_(weights.unsqueeze(-1)).sum(1).add_(residual)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of two halves of the last axis."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
