"""Per-record gradient norms and the clipped sum without per-record gradients (book-keeping).

Every trainable parameter sits in a linear map y = x W^T + b. One forward pass keeps each map's input a, one
backward pass to the maps' outputs gives g; a record's weight gradient is sum over its tokens of g a^T, so

    ||dW||^2 = sum_{s,t} (a_s . a_t)(g_s . g_t)   (ghost norm, cheap when tokens are few)
             = ||sum_t g_t a_t^T||^2              (direct norm, cheap when the map is small)

and the clipped sum over records is one matrix product with g scaled by each record's clip factor. With k draws a
record, its k T tokens form one example.

Guarantee: recomputed in float64 from the same a and g, no record contributes more than C. The computed norm is
raised by a bound on its own rounding before it is used (`rounding`). When the network runs in bfloat16, a and g
are bfloat16 values, which TF32 products take without rounding; only the scaled g is rounded there, and the clip
keeps a margin for that (`TF32`). A record whose norm is not finite contributes zero; a padded record contributes
zero; a batch without records sums to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from straightdp.errors import BadInput
from straightdp.privacy.vault import ClippedSum

EPS = 2.0**-24  # unit rounding of float32
TF32 = 2.0**-10  # of a float32 value taken into a TF32 product, rounded or cut off
MARGIN = 1 - 1e-5  # for the factor and the norm's square root

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
        kept, half = self._backward(losses, mask)
        with _matmul_precision("high" if half else "highest"):
            norms, bound = self._norms(kept, TF32 if half else 0.0)
            usable = torch.isfinite(bound) & (mask > 0)
            factor = torch.where(usable, (self.clip * MARGIN / bound.clamp_min(1e-30)).clamp_max(1.0), 0.0)
            sums: list[Tensor] = []
            for name, layer in self.layers.items():
                a, g = kept[name]
                chosen = usable[:, None, None]
                scaled = torch.where(chosen, g, 0.0) * factor[:, None, None]
                sums.append(scaled.flatten(0, 1).T @ torch.where(chosen, a, 0.0).flatten(0, 1))
                if layer.bias is not None:
                    sums.append(scaled.sum(dim=(0, 1)))
        return ClippedSum(sums, norms, self.clip)

    def _norms(self, kept: dict[str, tuple[Tensor, Tensor]], input_rounding: float) -> tuple[Tensor, Tensor]:
        """(gradient norms, the same raised by all rounding up to and including the clipped sum's), per record."""
        squared = error = size = torch.zeros((), device=next(self.net.parameters()).device)
        for name, layer in self.layers.items():
            a, g = kept[name]
            norm, upper, rounding = squared_norm(a, g)
            squared, error, size = squared + norm, error + rounding * upper, size + upper
            if layer.bias is not None:
                upper = g.norm(dim=-1).sum(dim=1).square()
                squared, size = squared + g.sum(dim=1).square().sum(dim=-1), size + upper
                error = error + 2 * (g.shape[1] + 16) * EPS * upper
        squared = squared.clamp_min(0)
        return squared.sqrt(), (squared + error).sqrt() + input_rounding * size.sqrt()

    def norms(self, losses: RecordLosses, n: int, device: torch.device) -> Tensor:
        """Per-record gradient norms alone: for public calibration of the clip."""
        return self.clipped_sum(losses, torch.ones(n, device=device)).norms

    def _backward(self, losses: RecordLosses, mask: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], bool]:
        """One forward and one backward pass to the maps' outputs; weight gradients are never formed.

        Returns each map's (a, g) as float32 (n, tokens, channels), and whether they hold bfloat16 values.
        """
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
        half = any(output.dtype == torch.bfloat16 for output in taps.outputs.values())
        kept = {}
        for name, g in zip(self.layers, values, strict=True):
            if g is None:
                raise BadInput(f"layer {name} does not reach the loss: freeze it")
            a = taps.inputs[name]
            if half:
                a, g = a.bfloat16(), g.bfloat16()
            kept[name] = examples(a.float(), len(mask)), examples(g.float(), len(mask))
        return kept, half

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


def squared_norm(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, float]:
    """(||sum_t g_t a_t^T||_F^2, (sum_t |a_t||g_t|)^2, rounding) per record, by the cheaper of the two formulas.

    The computed first value is off by at most rounding times the second: float32 inner products of k terms are
    off by at most k EPS times the sum of their absolute values, and both formulas square such a product once.
    """
    tokens, wide, high = a.shape[1], a.shape[2], g.shape[2]
    size = (a.norm(dim=-1) * g.norm(dim=-1)).sum(dim=1).square()
    if tokens == 1:
        return size, size, 2 * (wide + high + 16) * EPS
    if tokens * (wide + high) < wide * high:
        return ((a @ a.mT) * (g @ g.mT)).sum(dim=(1, 2)), size, 2 * (max(wide, high) + tokens + 16) * EPS
    return (g.mT @ a).square().sum(dim=(1, 2)), size, 2 * (tokens + 16) * EPS


@contextmanager
def _matmul_precision(precision: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
