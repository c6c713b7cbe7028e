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


@torch.library.custom_op("omni_lab::experts", mutates_args=())
def experts(x: Tensor, residual: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """residual + sum over each token's chosen experts of weight * down(silu(gate x) * up x).

    Tokens x and residual [N, H], weights and chosen expert ids [N, k], gate_up [E, H, 2I], down [E, I, H]; H and I are
    multiples of WIDEST.
    """
    return _call("experts", 1, x, residual, weights, chosen, gate_up, down)[0]


@experts.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("omni_lab::span_attention", mutates_args=())
def span_attention(qk: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Causal attention [N, heads * hd] of packed prompts, each to itself.

    qk [N, heads + kv_heads, hd] are queries, scaled already, and keys, value [N, kv_heads, hd]; token n belongs to the
    prompt that begins at starts[n]. hd is a multiple of WIDEST.
    """
    return _call("span_attention", 1, qk, value, starts)[0]


@span_attention.register_fake
def _(qk: Tensor, value: Tensor, _: Tensor) -> Tensor:
    return qk.new_empty(qk.shape[0], (qk.shape[1] - value.shape[1]) * qk.shape[2])


C_TYPES = {"Tensor": "AtenTensorHandle", "int": "int64_t"}


def _declaration(op: torch._ops.OpOverload) -> str:
    """The C function of an operator, as AOTInductor calls it."""
    arguments = [C_TYPES[str(argument.type)] for argument in op._schema.arguments]
    results = ["AtenTensorHandle*"] * len(op._schema.returns)
    return f"AOTITorchError aoti_torch_cpu_{op._opname}({', '.join(arguments + results)})"


OPS = torch.ops.omni_lab
KERNELS = OPS.snake_convolution, OPS.residual_unit, OPS.experts, OPS.span_attention
SHIMS = {kernel.default: [_declaration(kernel.default)] for kernel in KERNELS}
"""Operators and their C declarations, for `aot_inductor.custom_ops_to_c_shims`."""


def _call(name: str, count: int, *arguments: Tensor | int) -> tuple[Tensor, ...]:
    """`count` results of a kernel. Raises RuntimeError if it refuses its arguments."""
    kernel = getattr(open_kernels(), f"aoti_torch_cpu_{name}")
    given = handles([argument for argument in arguments if isinstance(argument, Tensor)])
    tensors = map(ctypes.c_void_p, given)
    passed = [next(tensors) if isinstance(argument, Tensor) else ctypes.c_int64(argument) for argument in arguments]
    results = (ctypes.c_void_p * count)()
    places = [ctypes.byref(results, index * ctypes.sizeof(ctypes.c_void_p)) for index in range(count)]
    failed = kernel(*passed, *places)
    release(given)
    if failed:
        release(handle for handle in results if handle)
        raise RuntimeError(f"the kernel {name} refuses its arguments; the cause is on stderr")
    return tuple(release(results))
