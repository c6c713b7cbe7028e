"""The MLP of a decoder layer: one dense SwiGLU network, or the few chosen of many such experts.

Experts can be applied in three ways that give the same sum; sizes that are known statically choose between them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_lab.models.qwen3_omni.config import DecoderConfig

DENSE_TOKENS = 6
DENSE_EXPERTS = 16
"""Up to these sizes the work on experts that were not chosen costs no more than sorting. A compiled step always
takes this way if there are few experts: it fuses well, and tracing `_grouped_mm` needs bfloat16."""


class DenseMLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self.gate_up = torch.empty(2 * config.intermediate_size, config.hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)
        self.gate_up_t, self.down_t = self.gate_up.t(), self.down.t()

    def slots(self, prefix: str) -> dict[str, Tensor]:
        gate, up = self.gate_up.chunk(2)
        return {
            f"{prefix}gate_proj.weight": gate,
            f"{prefix}up_proj.weight": up,
            f"{prefix}down_proj.weight": self.down,
        }

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.addmm(residual, swiglu(torch.mm(x, self.gate_up_t)), self.down_t)


class ExpertMLP:
    """Top-k of many experts, and in the Talker one shared expert behind a sigmoid gate.

    Router, shared gate and shared expert read the same input, so their weights are rows of one matrix.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        hidden, count, size, shared = config.hidden_size, config.experts, config.expert_size, config.shared_expert_size
        self.top_k, self.norm_topk = config.experts_per_token, config.norm_topk
        self.sizes = [count, 1, 2 * shared] if shared else [count]
        self.front = torch.empty(sum(self.sizes), hidden, dtype=dtype, device=device)
        self.front_t = self.front.t()
        self.gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device=device)
        self.down = torch.empty(count, size, hidden, dtype=dtype, device=device)
        self.shared_down = torch.empty(shared, hidden, dtype=dtype, device=device)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        rows = self.front.split(self.sizes)
        slots = {f"{prefix}gate.weight": rows[0]}
        for index in range(self.gate_up.shape[0]):
            gate, up = self.gate_up[index].chunk(2)
            slots[f"{prefix}experts.{index}.gate_proj.weight"] = gate
            slots[f"{prefix}experts.{index}.up_proj.weight"] = up
            slots[f"{prefix}experts.{index}.down_proj.weight"] = self.down[index].t()
        if len(rows) > 1:
            gate, up = rows[2].chunk(2)
            slots[f"{prefix}shared_expert_gate.weight"] = rows[1]
            slots[f"{prefix}shared_expert.gate_proj.weight"] = gate
            slots[f"{prefix}shared_expert.up_proj.weight"] = up
            slots[f"{prefix}shared_expert.down_proj.weight"] = self.shared_down.t()
        return slots

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        logits, *shared = torch.mm(x, self.front_t).split(self.sizes, -1)
        if shared:
            gate, gate_up = shared
            residual = torch.addmm(residual, swiglu(gate_up).mul_(gate.sigmoid_()), self.shared_down)
        weights, chosen = self.route(logits)
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

    Tokens x and residual [N, H], weights and chosen expert ids [N, k], gate_up [E, 2I, H], down [E, I, H].
    """
    if x.shape[0] == 1:
        return gathered(x, residual, weights, chosen, gate_up, down)
    few = x.shape[0] <= DENSE_TOKENS or torch.compiler.is_compiling()
    if few and gate_up.shape[0] <= DENSE_EXPERTS:
        return dense(x, residual, weights, chosen, gate_up, down)
    return grouped(x, residual, weights, chosen, gate_up, down)


def gathered(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One token: copy the weights of its experts together and multiply once."""
    ids = chosen.view(-1)
    hidden = swiglu(torch.matmul(gate_up.index_select(0, ids), x[0])).mul_(weights.view(-1, 1))
    return torch.addmm(residual, hidden.view(1, -1), down.index_select(0, ids).view(-1, x.shape[1]))


def dense(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Few tokens and few experts: every expert for every token; those that were not chosen weigh 0."""
    count, size, width = down.shape
    spread = torch.zeros(x.shape[0], count, dtype=x.dtype, device=x.device).scatter_(1, chosen, weights)
    hidden = swiglu(F.linear(x, gate_up.view(-1, width)).view(-1, count, 2 * size)).mul_(spread.unsqueeze(-1))
    return torch.addmm(residual, hidden.view(-1, count * size), down.view(-1, width))


def grouped(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Many tokens: sort (token, expert) pairs by expert and multiply group by group."""
    top_k = chosen.shape[1]
    ids, order = chosen.view(-1).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(gate_up.shape[0], device=x.device), right=True, out_int32=True)
    rows = x.index_select(0, order // top_k)
    hidden = swiglu(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends))
    results = torch._grouped_mm(hidden, down, offs=ends)
    results = torch.empty_like(results).index_copy_(0, order, results).view(-1, top_k, x.shape[1])
    return torch.baddbmm(residual.unsqueeze(1), weights.unsqueeze(1), results).squeeze(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of two halves of the last axis."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
