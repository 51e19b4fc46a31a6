"""Layers shared by the transformers of several families; weights keep the names that each family publishes.

A module's own attribute takes Python a microsecond and a call of a module two, which small models on cores feel. So
blocks read children and weights from `_modules` and `_parameters`, in the order of the constructor, and call `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.policies.lora import ADAPTER

EXACT = (torch.float32, torch.float64)
ALL = slice(None)
RotaryTables = tuple[Tensor, Tensor]  # of the rotary embedding [N, L, 1, head_dim]: cosines, and sines with signs


is_empty: ContextVar[bool] = ContextVar("is_empty", default=False)  # True: weights hold no numbers yet


def allocate(module: nn.Module) -> None:
    """Give a module without memory its memory, which stays untouched."""
    token = is_empty.set(True)
    try:
        module.to_empty(device="cpu")
    finally:
        is_empty.reset(token)


class NamedParts(nn.Module):
    """A module with children of these names, to reproduce upstream's nested parameter names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)


class SideBySide(nn.Module):
    """A module some of whose linear layers read the same input. Their weights keep their names, and lie side by side in
    memory, so that `product` is one product for all of them."""

    joint: tuple[tuple[str, ...], ...] = ()  # names of layers that read the same input

    def _apply(self, fn: Callable, recurse: bool = True) -> SideBySide:
        """As whenever weights move to a device or precision."""
        super()._apply(fn, recurse)
        for names in self.joint:
            lay_side_by_side([getattr(self, name) for name in names])
        return self


class GroupedAttention(SideBySide):
    """The projections of an attention in which `heads` queries share `kv_heads` keys and values."""

    joint = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[N, L, heads * head_dim] -> [N, L, heads, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def project(self, x: Tensor, turn: RotaryTables, read: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values [N, heads, L, head_dim]; queries only of the places `read`."""
        *inputs, _ = self._modules.values()
        if read is not ALL or are_faster_apart(x, inputs):
            q_proj, k_proj, v_proj = inputs
            k, v = self.split(linear(x, k_proj)), self.split(linear(x, v_proj))
            q, q_turn = (
                (x, turn) if read is ALL else (x[:, read].contiguous(), [rotation[:, read] for rotation in turn])
            )
            q, k = rotate(self.split(linear(q, q_proj)), *q_turn), rotate(k, *turn)
        else:
            both = self.split(product(x, inputs))
            turned, v = both.split_with_sizes([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = rotate(turned, *turn).split_with_sizes([self.heads, self.kv_heads], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False, add_to: Tensor | None = None
    ) -> Tensor:
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        return linear(out.transpose(1, 2).flatten(2), self._modules["o_proj"], add_to)


class MLP(nn.Module):
    """`approximate` is the kind of GELU."""

    def __init__(self, dim: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self._modules.values()
        return linear(gelu(linear(x, fc1), self.approximate), fc2)


class GatedMLP(SideBySide):
    joint = (("gate_proj", "up_proj"),)

    def __init__(self, dim: int, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.halves = [hidden, hidden]
        self.activation = activation

    def forward(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Overwrites `add_to` where nothing is noted down for gradients."""
        *inputs, down_proj = self._modules.values()
        if are_faster_apart(x, inputs):
            gate, up = (linear(x, layer) for layer in inputs)
        else:
            gate, up = product(x, inputs).split_with_sizes(self.halves, dim=-1)
        if needs_a_graph():
            return linear(self.activation(gate) * up, down_proj, add_to)
        active = F.silu(gate, inplace=True) if self.activation is F.silu else self.activation(gate)
        return linear(active.mul_(up), down_proj, add_to, overwrite=True)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """F.gelu of new numbers, which are overwritten where nothing is noted down for gradients."""
    return (F.gelu if needs_a_graph() else torch.ops.aten.gelu_)(x, approximate=approximate)


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, *norm._parameters.values(), norm.eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x` divided by the root of its mean square and scaled, computed in float32 at least and rounded once."""
    if weight is not None and weight.dtype != x.dtype:
        return rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)
    by_hand = x.is_cpu and x.dtype in EXACT and not needs_a_graph()
    return (cpu_rms_norm if by_hand else F.rms_norm)(x, x.shape[-1:], weight, eps)


def needs_a_graph() -> bool:
    """True if operations are noted down, for gradients or by torch's compiler."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def cpu_rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """`F.rms_norm` bit for bit, which makes 17 calls on a CPU."""
    size, least = cpu_scalars(shape[-1], eps, x.dtype)
    normed = x * torch.addcdiv(least, (x * x).sum(-1, True), size).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


@cache
def cpu_scalars(size: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.tensor(size, dtype=dtype), torch.tensor(eps, dtype=dtype)


def turns(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTables:
    speed = theta ** (-torch.arange(0, head_dim, 2, device=position.device).float() / head_dim)
    angle = position[:, :, None, None].float() * speed
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, L, heads, head_dim], by tables [N, L, 1, head_dim]."""
    turned = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, turned, sin) if needs_a_graph() else (x * cos).addcmul_(turned, sin)


def patch_tokens(pixels: Tensor, convolution: nn.Module) -> Tensor:
    """[N, 3, H, W] -> [N, patches, dim]: the convolution as one matrix product, since patches do not overlap."""
    if is_scaled(convolution):
        return convolution(pixels).flatten(2).transpose(1, 2)
    (rows, colours, height, width), size = pixels.shape, convolution.weight.shape[-1]
    patches = pixels.view(rows, colours, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(rows, -1, colours * size**2)
    tokens = F.linear(patches, convolution.weight.flatten(1), convolution.bias)
    return with_adapter(tokens, convolution, patches)


# Products. LoRA's are y = x W^T + bias + scale (x A^T) B^T: `down` are the matrices A, `up` the matrices B.


def linear(x: Tensor, layer: nn.Module, add_to: Tensor | None = None, overwrite: bool = False) -> Tensor:
    """The output of a linear layer, added to `add_to`, which may be overwritten."""
    if type(layer) is not nn.Linear:  # it has an adapter
        return product(x, (layer,), add_to)
    weight, bias = layer._parameters.values()
    if add_to is None:
        return F.linear(x, weight, bias)
    if bias is not None or autocast_dtype(x):
        return add_to + F.linear(x, weight, bias)
    flat, columns = x.flatten(0, -2), weight.t()
    if overwrite and add_to.is_contiguous():
        return add_to.view(flat.shape[0], -1).addmm_(flat, columns).view_as(add_to)
    return torch.addmm(add_to.flatten(0, -2), flat, columns).view_as(add_to)


def are_faster_apart(x: Tensor, linears: Sequence[nn.Module]) -> bool:
    """True for passes with gradients on a CPU: gradients of a joint product's parts would be copied side by side."""
    plain = torch.is_grad_enabled() and x.is_cpu and x.dtype in EXACT
    return plain and not any("lora_A" in layer._modules for layer in linears)


def product(x: Tensor, linears: Sequence[nn.Module], add_to: Tensor | None = None) -> Tensor:
    """The outputs of linear layers that read `x`, one behind the other, added to `add_to`. Weights that lie side by
    side make one product, with adapters two and one for each adapter."""
    adapted = [number for number, layer in enumerate(linears) if "lora_A" in layer._modules]
    if not adapted and linears[0]._parameters["bias"] is None and not needs_a_graph():
        whole = side_by_side([layer._parameters["weight"] for layer in linears])
        if whole is not None:
            return added(F.linear(x, whole), add_to)
    weights, biases = [layer.weight for layer in linears], [layer.bias for layer in linears]
    biases = [] if biases[0] is None else biases
    downs = [linears[number].lora_A[ADAPTER].weight for number in adapted]
    ups = [linears[number].lora_B[ADAPTER].weight for number in adapted]
    plain = torch.compiler.is_compiling() or any(is_scaled(linears[number]) for number in adapted)
    whole, bias, down = (None if plain or not given else side_by_side(given) for given in (weights, biases, downs))
    apart = any(given and joint is None for given, joint in ((weights, whole), (biases, bias), (downs, down)))
    if apart or (down is not None and down.dtype != whole.dtype):
        return added(torch.cat([layer(x) for layer in linears], dim=-1), add_to)
    scales = [linears[number].scaling[ADAPTER] for number in adapted]
    joint = Joint(whole, bias, down, [len(tensor) for tensor in weights], adapted, scales)
    inputs = (x, add_to, *ups, *downs, *weights, *biases)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return JointProduct.apply(joint, *inputs)
    return joint.product(x, add_to, ups)[0]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The precision of matrix products in autocast."""
    kind = "cpu" if x.is_meta else x.device.type  # autocast does not know meta
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def added(y: Tensor, add_to: Tensor | None) -> Tensor:
    return y if add_to is None else add_to + y


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The rows of all these tensors as one tensor, if they follow each other in memory; kept with the first one."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach()
    places = [] if first.is_meta else [tensor.data_ptr() for tensor in tensors]
    kept = getattr(first, "side_by_side", None)
    if kept and kept[0] == places:
        return kept[1]
    memory, end = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if tensor.storage_offset() != end or tensor.untyped_storage()._cdata != memory or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    with torch.inference_mode(False):
        rows = first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    if places:
        first.side_by_side = places, rows
    return rows


@torch.no_grad()
def lay_side_by_side(linears: Sequence[nn.Module]) -> None:
    """Move the weights, biases and adapters of these layers to memory in which they follow each other, unless copies of
    a policy share only some of them (the frozen ones)."""
    adapted = [layer for layer in linears if "lora_A" in layer._modules]
    downs = [layer.lora_A[ADAPTER].weight for layer in adapted]
    for tensors in ([layer.weight for layer in linears], [layer.bias for layer in linears], downs):
        kinds = {(type(p), p.dtype, p.device, p.shape[1:], p.requires_grad) for p in tensors if p is not None}
        if len(kinds) == 1 and type(tensors[0]) is nn.Parameter and side_by_side(tensors) is None:
            sizes = [len(tensor) for tensor in tensors]
            shape = sum(sizes), *tensors[0].shape[1:]
            parts = (tensors[0].new_empty(shape) if is_empty.get() else torch.cat([*tensors])).split(sizes)
            for tensor, rows in zip(tensors, parts, strict=True):
                tensor.data = rows
            side_by_side(tensors)  # and forget the memory before


@dataclass(frozen=True)
class Joint:
    """Linear layers side by side: `adapted` are the numbers of those with an adapter."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None
    sizes: list[int]  # outputs of each layer
    adapted: list[int]
    scales: list[float]

    def product(self, x: Tensor, add_to: Tensor | None, ups: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the outputs, and what a backward pass needs: `x`, weights, A, its product and B."""
        shape, x, weight, bias, down = x.shape[:-1], x.flatten(0, -2), self.weight, self.bias, self.down
        half = autocast_dtype(x)
        if half:
            tensors = (x, weight, bias, down, *ups)
            x, weight, bias, down, *ups = (tensor if tensor is None else tensor.to(half) for tensor in tensors)
        folded = add_to is not None and bias is None and add_to.dtype == weight.dtype
        with torch.autocast(x.device.type, enabled=False) if half else nullcontext():
            y = torch.addmm(add_to.flatten(0, -2), x, weight.t()) if folded else F.linear(x, weight, bias)
            middle = None if down is None else x @ down.t()
            for columns, inner, up, scale in self.of_adapters(y, middle, ups):
                columns.addmm_(inner, up.t(), alpha=scale)
        y = y.view(*shape, -1)
        return y if folded else added(y, add_to), [x, weight, down, middle, *ups]

    def of_adapters(self, y: Tensor, middle: Tensor | None, ups: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """For each adapter its columns of `y` and of `middle`, B and its scale."""
        if middle is not None:
            columns, inner = y.split(self.sizes, dim=1), middle.split([up.shape[1] for up in ups], dim=1)
            yield from zip([columns[number] for number in self.adapted], inner, ups, self.scales, strict=True)


class JointProduct(torch.autograd.Function):
    """`Joint.product` with gradients for each layer's own weights."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, x: Tensor, add_to: Tensor | None, *rest: Tensor) -> Tensor:
        ups = rest[: len(joint.adapted)]
        y, saved = joint.product(x, add_to, ups)
        ctx.joint, ctx.shape = joint, x.shape
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:
        joint, (x, weight, down, middle, *ups), count = ctx.joint, ctx.saved_tensors, len(ctx.joint.adapted)
        _, wants_x, is_added, *wants = ctx.needs_input_grad
        flat = of_y.flatten(0, -2).to(weight.dtype)
        of_x = flat @ weight if wants_x else None
        of_ups, of_downs = [None] * count, [None] * count
        if down is not None:
            of_middle = torch.empty_like(middle)
            for number, (columns, inner, up, scale) in enumerate(joint.of_adapters(flat, of_middle, ups)):
                torch.addmm(inner, columns, up, beta=0, alpha=scale, out=inner)
                before = middle.split([factor.shape[1] for factor in ups], dim=1)[number]
                of_ups[number] = torch.addmm(up, columns.t(), before, beta=0, alpha=scale) if wants[number] else None
            of_x = of_x.addmm_(of_middle, down) if wants_x else None
            of_downs = (of_middle.t() @ x).split([up.shape[1] for up in ups])
        wants = wants[2 * count :]
        of_weights = (flat.t() @ x).split(joint.sizes) if any(wants[: len(joint.sizes)]) else [None] * len(joint.sizes)
        of_biases = flat.sum(0).split(joint.sizes) if any(wants[len(joint.sizes) :]) else [None] * len(joint.sizes)
        more = (*of_weights, *(of_biases if joint.bias is not None else ()))
        of_x = of_x.view(ctx.shape) if wants_x else None
        return None, of_x, of_y if is_added else None, *of_ups, *of_downs, *more


def with_adapter(y: Tensor, layer: nn.Module, x: Tensor, rows: slice = slice(None)) -> Tensor:
    """Adds a layer's plain LoRA adapter, if any, to its output `y` for `x`; `rows` are the outputs that `y`
    contains."""
    if "lora_A" not in layer._modules:
        return y
    down, up = (getattr(layer, name)[ADAPTER].weight.flatten(1) for name in ("lora_A", "lora_B"))
    return y + F.linear(F.linear(x.to(down.dtype), down), up[rows]) * layer.scaling[ADAPTER]


def is_scaled(layer: nn.Module) -> bool:
    """True if an adapter does more than add to the layer's output (DoRA), so the whole layer must be called."""
    return "lora_A" in layer._modules and bool(getattr(layer, "lora_variant", None))


def smooth_filters(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Initial filters [dim, colours, P, P] that vary slowly over a patch and ignore uniform brightness.

    With white-noise filters a small object in a patch adds little to the background, and something different at every
    place; a small model then learns to ignore images long before it learns the object's position.
    """
    coarse = torch.empty(*shape[:2], 2, 2).normal_(generator=draw)
    filters = F.interpolate(coarse, size=shape[2:], mode="bilinear")
    filters = filters - filters.mean((2, 3), keepdim=True)
    return filters / filters.std() * shape[1:].numel() ** -0.5
