"""The kernels as operators of torch, for contiguous float32 tensors on the CPU.

A compiled graph calls them directly, by the names in SHIMS; called from Python they do the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from omni_lab.kernels.handles import handles, release
from omni_lab.kernels.library import open_kernels

WIDEST = 16
"""Numbers of the widest vectors that a processor has."""


def has_kernel(tensor: Tensor) -> bool:
    """Whether the kernels take such a tensor."""
    return tensor.is_cpu and tensor.dtype == torch.float32


@torch.library.custom_op("omni_lab::snake_convolution", mutates_args=())
def snake_convolution(
    signal: Tensor, before: Tensor, ends: Tensor, rate: int, turns: Tensor, gain: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """A convolution over snake(signal) behind the steps `before` it, and what the next pass looks back on.

    signal [B, C, T] and before [B, C, P], at most taps - 1 steps, with `weight` [C, taps, O * rate] and `bias`
    [O * rate] give [B, O, (P + T - taps + 1) * rate]: each place of a kernel makes `rate` steps of an output, which
    stand side by side in the weight. What is kept [B, C, taps - 1] are the last steps of row b up to its step ends[b].
    snake(x) = x + gain * sin(pi * turns * x)^2 with C turns and gains.
    """
    return _call("snake_convolution", 2, signal, before, ends, rate, turns, gain, weight, bias)


@snake_convolution.register_fake
def _(
    signal: Tensor, before: Tensor, ends: Tensor, rate: int, turns: Tensor, gain: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    padding, places = weight.shape[1] - 1, before.shape[2] + signal.shape[2] - weight.shape[1] + 1
    out = signal.new_empty(signal.shape[0], weight.shape[2] // rate, places * rate)
    return out, signal.new_empty(*signal.shape[:2], padding)


@torch.library.custom_op("omni_lab::residual_unit", mutates_args=())
def residual_unit(
    signal: Tensor,
    before: Tensor,
    ends: Tensor,
    dilation: int,
    turns1: Tensor,
    gain1: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    turns2: Tensor,
    gain2: Tensor,
    weight2: Tensor,
    bias2: Tensor,
) -> tuple[Tensor, Tensor]:
    """signal + conv2(snake2(conv1(snake1(signal)))) [B, C, T], and what the next pass looks back on.

    `weight1` [C, taps, C] is dilated and reads P = (taps - 1) * dilation steps `before` [B, C, P], `weight2` is [C, C],
    inputs first. The rest is as in `snake_convolution`.
    """
    first, second = (turns1, gain1, weight1, bias1), (turns2, gain2, weight2, bias2)
    return _call("residual_unit", 2, signal, before, ends, dilation, *first, *second)


@residual_unit.register_fake
def _(signal: Tensor, before: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(signal), torch.empty_like(before)


@torch.library.custom_op("omni_lab::project_heads", mutates_args=())
def project_heads(
    x: Tensor, norm: Tensor, weight: Tensor, head_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """The front half of a decoder layer: x [N, H] -> queries, keys and values [N, heads + 2 * kv_heads, hd].

    x is normed (`norm` [H] and `head_norm` [heads + kv_heads, hd] are scales of `RMSNorm`) and multiplied with weight
    [H, (heads + 2 * kv_heads) * hd]; queries and keys are normed and turned by cos and sin [N, hd].
    """
    return _call("project_heads", 1, x, norm, weight, head_norm, cos, sin, eps)[0]


@project_heads.register_fake
def _(x: Tensor, norm: Tensor, weight: Tensor, head_norm: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] // head_norm.shape[1], head_norm.shape[1])


@torch.library.custom_op("omni_lab::span_attention", mutates_args=())
def span_attention(heads: Tensor, kv_heads: int, starts: Tensor) -> Tensor:
    """Causal attention [N, heads * hd] of packed prompts, each to itself.

    heads [N, heads + 2 * kv_heads, hd] are queries, scaled already, keys and values; token n belongs to the prompt that
    begins at starts[n].
    """
    return _call("span_attention", 1, heads, kv_heads, starts)[0]


@span_attention.register_fake
def _(heads: Tensor, kv_heads: int, _: Tensor) -> Tensor:
    return heads.new_empty(heads.shape[0], (heads.shape[1] - 2 * kv_heads) * heads.shape[2])


@torch.library.custom_op("omni_lab::row_attention", mutates_args=())
def row_attention(heads: Tensor, lines: Tensor, first_lines: Tensor, lengths: Tensor) -> Tensor:
    """Attention [B, heads * hd] of one token for each row of a KV cache.

    heads is as in `span_attention`. Row b attends to positions 0..lengths[b] of the cache `lines` [all, hd], in which
    first_lines[b] [2 * kv_heads] are those of position 0 (see `KVCache`).
    """
    return _call("row_attention", 1, heads, lines, first_lines, lengths)[0]


@row_attention.register_fake
def _(heads: Tensor, lines: Tensor, first_lines: Tensor, _: Tensor) -> Tensor:
    return heads.new_empty(heads.shape[0], (heads.shape[1] - first_lines.shape[1]) * heads.shape[2])


@torch.library.custom_op("omni_lab::finish_dense", mutates_args=())
def finish_dense(
    x: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """The back half of a decoder layer: y + down(silu(gate z) * up z) [N, H], y = x + attended @ out, z = normed y.

    x [N, H], attended [N, A], out [A, H], `norm` [H] a scale of `RMSNorm`, gate_up [H, 2I], down [I, H].
    """
    return _call("finish_dense", 1, x, attended, out, norm, gate_up, down, eps)[0]


@finish_dense.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("omni_lab::finish_experts", mutates_args=())
def finish_experts(
    x: Tensor,
    attended: Tensor,
    out: Tensor,
    norm: Tensor,
    front: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_down: Tensor,
    top_k: int,
    norm_topk: bool,
    eps: float,
) -> Tensor:
    """As `finish_dense`, with E experts of gate_up [E, H, 2I] and down [E, I, H], as `ExpertMLP` has them.

    front [H, E + ...] are the columns of router, shared gate and shared expert; shared_down [0, H] says that there is
    no shared one.
    """
    weights = out, norm, front, gate_up, down, shared_down
    return _call("finish_experts", 1, x, attended, *weights, top_k, norm_topk, eps)[0]


@finish_experts.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("omni_lab::predict_codes", mutates_args=())
def predict_codes(
    hidden: Tensor,
    embed0: Tensor,
    cos: Tensor,
    sin: Tensor,
    layers: list[Tensor],
    norm: Tensor,
    embedding: Tensor,
    head: Tensor,
    uniforms: Tensor,
    eps: float,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor]:
    """All of `CodePredictor.predict`: residual codes [B, G - 1] and the sum of the G codes' embeddings [B, H].

    hidden and embed0 [B, H], cos and sin [G, hd], `layers` the weights of `project_heads` (norm, weight, head_norm) and
    `finish_dense` (out, norm, gate_up, down) of each layer in turn, embedding [G - 1, V, H], head [G - 1, H, V].
    uniforms float64 [B, G] are for the draws of each group, see `ResidualPick`; rows below 0 take the likeliest code.
    """
    tensors = hidden, embed0, cos, sin, layers, norm, embedding, head, uniforms
    codes, embeds = _call("predict_codes", 2, *tensors, eps, top_k, top_p)
    return codes, embeds


@predict_codes.register_fake
def _(hidden: Tensor, embed0: Tensor, cos: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape[0], cos.shape[0] - 1, dtype=torch.int64), torch.empty_like(hidden)


C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "List[Tensor]": "const AtenTensorHandle*, int64_t",
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
}


def _declaration(op: torch._ops.OpOverload) -> str:
    """The C function of an operator, as AOTInductor calls it."""
    arguments = [C_TYPES[str(argument.type)] for argument in op._schema.arguments]
    results = ["AtenTensorHandle*"] * len(op._schema.returns)
    return f"AOTITorchError aoti_torch_cpu_{op._opname}({', '.join(arguments + results)})"


OPS = torch.ops.omni_lab
KERNELS = (
    OPS.snake_convolution,
    OPS.residual_unit,
    OPS.project_heads,
    OPS.span_attention,
    OPS.row_attention,
    OPS.finish_dense,
    OPS.finish_experts,
    OPS.predict_codes,
)
SHIMS = {kernel.default: [_declaration(kernel.default)] for kernel in KERNELS}
"""Operators and their C declarations, for `aot_inductor.custom_ops_to_c_shims`."""


def _call(name: str, count: int, *arguments: Tensor | list[Tensor] | float) -> tuple[Tensor, ...]:
    """`count` results of a kernel. Raises RuntimeError if it refuses its arguments."""
    kernel = getattr(open_kernels(), f"aoti_torch_cpu_{name}")
    given: list[int] = []
    passed = [part for argument in arguments for part in _passed(argument, given)]
    results = (ctypes.c_void_p * count)()
    places = [ctypes.byref(results, index * ctypes.sizeof(ctypes.c_void_p)) for index in range(count)]
    failed = kernel(*passed, *places)
    release(given)
    if failed:
        release(handle for handle in results if handle)
        raise RuntimeError(f"the kernel {name} refuses its arguments; the cause is on stderr")
    return tuple(release(results))


def _passed(argument: Tensor | list[Tensor] | float, given: list[int]) -> list[object]:
    """What C takes for an argument; the handles among it are added to `given`."""
    match argument:
        case Tensor() | list():
            several = argument if isinstance(argument, list) else [argument]
            own = handles(several)
            given += own
            if several is argument:
                return [(ctypes.c_void_p * len(own))(*own), ctypes.c_int64(len(own))]
            return [ctypes.c_void_p(own[0])]
        case bool():
            return [ctypes.c_bool(argument)]
        case int():
            return [ctypes.c_int64(argument)]
        case _:
            return [ctypes.c_double(argument)]
