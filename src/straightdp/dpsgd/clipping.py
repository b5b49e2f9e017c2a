"""Per-record gradient norms and the clipped sum without per-record gradients (book-keeping).

Every trainable parameter sits in a linear map y = x W^T + b. One forward pass keeps each map's input a, one
backward pass to the maps' outputs gives g; a record's weight gradient is sum over its tokens of g a^T, so

    ||dW||^2 = sum_{s,t} (a_s . a_t)(g_s . g_t)   (ghost norm, cheap when tokens are few)
             = ||sum_t g_t a_t^T||^2              (direct norm, cheap when the map is small)

and the clipped sum over records is one matrix product with g scaled by each record's clip factor. With k draws a
record, its k T tokens form one example.

Guarantee: recomputed in float64 from the same a and g, no record contributes more than C. The computed norm is
raised by a bound on its own rounding (`ROUNDING`) before it is used. A record whose norm is not finite
contributes zero; a padded record contributes zero; a batch without records sums to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from straightdp.errors import BadInput
from straightdp.privacy.vault import ClippedSum

ROUNDING = 1e-5  # over (sum_t |a_t||g_t|)^2: float32 products of up to a few thousand tokens and channels
MARGIN = 1 - 1e-5

RecordLosses = Callable[[], Tensor]
"""Runs the network and returns one loss a record, (n,)."""


@dataclass
class Taps:
    """Inputs and outputs of each linear map in one forward pass."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class ClippingEngine:
    """Clips the gradients of a network made of linear maps. Refuses, by name, any other trainable parameter."""

    def __init__(self, net: nn.Module, clip: float):
        self.net, self.clip = net, clip
        self.layers = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
        self.layers = {n: m for n, m in self.layers.items() if m.weight.requires_grad}
        self._preflight()

    def _preflight(self) -> None:
        covered: dict[int, str] = {}
        for name, layer in self.layers.items():
            for parameter in layer.parameters():
                if id(parameter) in covered:
                    raise BadInput(f"layer {name} shares a parameter with {covered[id(parameter)]}: untie them")
                covered[id(parameter)] = name
        for name, parameter in self.net.named_parameters():
            if parameter.requires_grad and id(parameter) not in covered:
                raise BadInput(f"parameter {name} is not in a linear layer: freeze it, or put it into one")

    def parameters(self) -> list[nn.Parameter]:
        """In the order of the sums that `clipped_sum` returns."""
        return [p for layer in self.layers.values() for p in layer.parameters() if p.requires_grad]

    def clipped_sum(self, losses: RecordLosses, mask: Tensor) -> ClippedSum:
        """Sum of clipped per-record gradients over the records with mask 1, and every record's norm."""
        taps, gradients = self._backward(losses, mask)
        n = len(mask)
        squared = torch.zeros(n, device=mask.device)
        upper = torch.zeros(n, device=mask.device)
        for name, layer in self.layers.items():
            a, g = examples(taps.inputs[name], n), examples(gradients[name], n)
            norm, size = squared_norm(a, g)
            squared += norm
            upper += size
            if layer.bias is not None:
                squared += g.sum(dim=1).square().sum(dim=-1)
                upper += g.norm(dim=-1).sum(dim=1).square()
        norms = squared.clamp_min(0).sqrt()
        bound = (squared.clamp_min(0) + ROUNDING * upper).sqrt()
        usable = torch.isfinite(bound) & (mask > 0)
        factor = torch.where(usable, (self.clip * MARGIN / bound.clamp_min(1e-30)).clamp_max(1.0), 0.0)
        sums: list[Tensor] = []
        for name, layer in self.layers.items():
            a, g = examples(taps.inputs[name], n), examples(gradients[name], n)
            chosen = usable[:, None, None]
            scaled = torch.where(chosen, g, 0.0) * factor[:, None, None]
            sums.append(scaled.flatten(0, 1).T @ torch.where(chosen, a, 0.0).flatten(0, 1))
            if layer.bias is not None:
                sums.append(scaled.sum(dim=(0, 1)))
        return ClippedSum(sums, norms)

    def norms(self, losses: RecordLosses, n: int, device: torch.device) -> Tensor:
        """Per-record gradient norms alone: for public calibration of the clip."""
        return self.clipped_sum(losses, torch.ones(n, device=device)).norms

    def _backward(self, losses: RecordLosses, mask: Tensor) -> tuple[Taps, dict[str, Tensor]]:
        """One forward and one backward pass to the maps' outputs; weight gradients are never formed."""
        with self._tapped() as taps:
            per_record = losses()
            if per_record.shape != mask.shape:
                raise BadInput(
                    f"expected one loss for each of {len(mask)} records, got shape {tuple(per_record.shape)}"
                )
            total = torch.where(mask > 0, per_record, 0.0).sum()
            missing = [name for name in self.layers if name not in taps.outputs]
            if missing:
                raise BadInput(f"layer {missing[0]} took no part in the forward pass: freeze it")
            values = torch.autograd.grad(total, [taps.outputs[name] for name in self.layers], allow_unused=True)
        gradients = {}
        for name, value in zip(self.layers, values, strict=True):
            if value is None:
                raise BadInput(f"layer {name} does not reach the loss: freeze it")
            gradients[name] = value
        return taps, gradients

    @contextmanager
    def _tapped(self):
        """Hooks that keep every map's input and output; the maps' own parameters are taken out of the graph."""
        taps = Taps()

        def hook(name: str):
            def keep(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                if name in taps.outputs:
                    raise BadInput(f"layer {name} ran twice in one forward pass: give it one input a pass")
                if not output.requires_grad:
                    output.requires_grad_(True)
                taps.inputs[name], taps.outputs[name] = args[0].detach(), output
                return output

            return keep

        parameters = self.parameters()
        handles = [layer.register_forward_hook(hook(name)) for name, layer in self.layers.items()]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad():
                yield taps
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()


def examples(x: Tensor, n: int) -> Tensor:
    """(n k, ..., channels), record-major, to (n, tokens of the record, channels)."""
    return x.reshape(n, -1, x.shape[-1])


def squared_norm(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(||sum_t g_t a_t^T||_F^2, (sum_t |a_t||g_t|)^2) per record, by the cheaper of the two formulas."""
    tokens, wide, high = a.shape[1], a.shape[2], g.shape[2]
    size = (a.norm(dim=-1) * g.norm(dim=-1)).sum(dim=1).square()
    if tokens == 1:
        return size, size
    if tokens * (wide + high) < wide * high:
        return ((a @ a.mT) * (g @ g.mT)).sum(dim=(1, 2)), size
    return (g.mT @ a).square().sum(dim=(1, 2)), size
