"""One forward and one backward pass over n records, and what they leave of every record's gradient.

Weight gradients of the batch are never formed. Blocks that are computed again (activation checkpointing) leave their
inputs alone in the forward pass; the backward pass runs them a second time, the last one first, and takes all that is
wanted of one before it goes on to the next. What it then keeps of a linear map is the smaller of the pair (a, g) and
its records' gradients.

`torch.utils.checkpoint` would not do: the gradient is read at tensors that exist only while a block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from straightdp.dpsgd.factors import EPS, SLACK, TINY, Factor, Outer, summed
from straightdp.dpsgd.uses import Use, Uses
from straightdp.errors import BadInput

DOUBLE = 2.0**-52


@dataclass(frozen=True)
class Written:
    """A linear map's weight, each record's gradient written out, (n, p, d).

    Unlike `Outer`'s, its norm needs hardly a margin, however many tokens are summed: the sum is formed in float64.
    `size` is |a||g| per record.
    """

    value: Tensor
    squared: Tensor
    error: Tensor
    size: Tensor

    @classmethod
    def of(cls, outer: Outer) -> Written:
        a, g = outer.a.double(), outer.g.double()
        value = g.mT @ a
        squared, size = _length(value).square(), _length(a) * _length(g)
        terms = a.shape[1] + value[0].numel() + SLACK
        error = 2 * terms * DOUBLE * size.square() + 4 * EPS * squared + TINY
        return cls(value.float(), squared.float(), error.float(), size.float())

    def norms(self) -> tuple[Tensor, Tensor]:
        return self.squared, self.error

    def weighted(self, factor: Tensor, *, finite: bool = False) -> tuple[Tensor, ...]:
        value = self.value if finite else torch.where(factor[:, None, None] > 0, self.value, 0.0)
        return (factor @ value.flatten(1),)

    def sizes(self) -> tuple[Tensor, ...]:
        return (self.size,)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2))


Kept = Factor | Written


class Pass:
    """Once called: `factors`, by the parameters that they are of; how each is used, `kinds`; in which `dtypes`."""

    def __init__(self, parameters: dict[str, nn.Parameter], n: int, blocks: Iterable[nn.Module] = ()):
        self._parameters, self._n, self._blocks = parameters, n, blocks
        self._probe = torch.zeros((), requires_grad=True)  # goes into every block, so that none is passed over
        self.factors: dict[tuple[str, ...], Kept] = {}
        self.kinds: dict[str, str] = {}
        self.dtypes: set[torch.dtype] = set()
        self._covered: set[str] = set()

    def __call__(self, losses: Callable[..., Tensor], batch: tuple[Tensor, ...], mask: Tensor) -> None:
        with self._recomputed():
            uses, values = self.watched(losses, batch)
        if values.shape != (self._n,):
            raise BadInput(f"expected one loss for each of {self._n} records, got shape {tuple(values.shape)}")
        if not values.requires_grad:
            raise BadInput(f"parameter {next(iter(self._parameters))} does not reach the loss: freeze it")
        with torch.enable_grad():
            total = torch.where(mask > 0, values, 0.0).sum()
        del values
        self.keep(self.split(uses, [total], None, [])[0])
        for name in self._parameters:
            if name not in self.kinds:
                raise BadInput(
                    f"parameter {name} was not seen in a known layer (it is unused, or used through a view or an "
                    "operation that hides it): freeze it, or use it through a known layer"
                )

    def watched(self, function: Callable, inputs: Sequence[Any]) -> tuple[list[Use], Any]:
        """function(*inputs), and the uses of trainable parameters in it."""
        watch = Uses(self._parameters, self._n)
        try:
            with torch.enable_grad(), watch:
                outputs = function(*inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error) or not watch.found:
                raise
            raise BadInput(_in_place(watch.found[-1])) from None
        for use in watch.found:
            if use.tensor._version != use.version:
                raise BadInput(_in_place(use))
        return watch.found, outputs

    def split(
        self, uses: list[Use], outputs: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor]
    ) -> tuple[dict[tuple[str, ...], Factor], list[Tensor | None]]:
        """Back from `outputs`: the factors of `uses`, and the gradients at `inputs`."""
        wanted = [*(use.tensor for use in uses), *inputs, *self._parameters.values(), self._probe]
        values = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        at_inputs = len(uses) + len(inputs)
        for name, value in zip(self._parameters, values[at_inputs:-1], strict=True):
            if value is not None:
                raise BadInput(
                    f"parameter {name} reaches the loss by a way that cannot be split into records: freeze it"
                )
        factors: dict[tuple[str, ...], Factor] = {}
        for use, g in zip(uses, values, strict=False):
            if g is None:
                raise BadInput(f"parameter {use.names[0]} does not reach the loss: freeze it")
            self.kinds.update(dict.fromkeys(use.names, use.kind))
            self.dtypes.add(use.tensor.dtype)
            for names, factor in use.factors(g.detach()).items():
                factors[names] = _joined(names, factors.get(names), factor)
        return factors, list(values[len(uses) : at_inputs])

    def keep(self, factors: Mapping[tuple[str, ...], Kept]) -> None:
        """Each parameter's only factor: what several blocks leave of one is not put together."""
        for names, factor in factors.items():
            for name in names:
                if name in self._covered:
                    raise BadInput(_two_ways(name))
            self._covered.update(names)
            self.factors[names] = factor

    @contextmanager
    def _recomputed(self):
        """While entered, the blocks run without a graph of their own."""
        before = [(block, block.__dict__.get("forward")) for block in self._blocks]
        try:
            for block, _ in before:
                block.forward = self._without_graph(block.forward)
            yield
        finally:
            for block, forward in before:
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.forward = forward

    def _without_graph(self, forward: Callable) -> Callable:
        def run(*args, **kwargs):
            def call(*values):
                return forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

            return _Block.apply(self._probe, self, call, *args, *kwargs.values())

        return run


class _Block(torch.autograd.Function):
    """call(*inputs) of a block that gives a tensor, or a tuple of tensors and None."""

    @staticmethod
    def forward(ctx, probe: Tensor, owner: Pass, call: Callable, *inputs):
        ctx.owner, ctx.call = owner, call
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.device = next(x.device.type for x in inputs if isinstance(x, Tensor))
        ctx.settings = _settings(ctx.device)
        ctx.set_materialize_grads(False)
        return call(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        needed = ctx.needs_input_grad[3:]
        saved = zip(ctx.saved_tensors, ctx.others, needed, strict=True)
        inputs = [other if x is None else x.detach().requires_grad_(need) for x, other, need in saved]
        with ctx.settings():
            uses, outputs = ctx.owner.watched(ctx.call, inputs)
        ends = zip(outputs if isinstance(outputs, tuple) else (outputs,), gradients, strict=True)
        ends = [(y, g) for y, g in ends if g is not None]
        starts = [x for x, need in zip(inputs, needed, strict=True) if need]
        factors, found = ctx.owner.split(uses, [y for y, _ in ends], [g for _, g in ends], starts)
        with torch.autocast(ctx.device, enabled=False):  # the caller's is for the network alone
            ctx.owner.keep({name: kept for names, factor in factors.items() for name, kept in _smaller(names, factor)})
        values = iter(found)
        return None, None, None, *(next(values) if need else None for need in needed)


def _settings(device: str) -> Callable[[], AbstractContextManager]:
    """The caller's autocast and attention kernels, to be entered again."""
    cuda = torch.backends.cuda
    allowed = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def same():
        with torch.autocast(device, dtype, enabled), sdpa_kernel([kernel for kernel, on in allowed.items() if on]):
            yield

    return same


def _smaller(names: tuple[str, ...], factor: Factor) -> Iterator[tuple[tuple[str, ...], Kept]]:
    if not isinstance(factor, Outer) or factor.ghost or factor.groups > 1:
        yield names, factor
        return
    yield names[:1], Written.of(factor)
    if factor.bias:
        n, _, p = factor.g.shape
        yield names[1:], summed(factor.g, n, (p,))


def _joined(names: tuple[str, ...], before: Factor | None, factor: Factor) -> Factor:
    if before is None:
        return factor
    if type(before) is not type(factor):
        raise BadInput(_two_ways(names[0]))
    return before.joined(factor)  # type: ignore[arg-type]


def _two_ways(name: str) -> str:
    return f"parameter {name} is used in two different ways at once: untie it, or freeze it"


def _in_place(use: Use) -> str:
    return (
        f"the output of the layer with {use.names[0]} is changed in place: use the variant that is not (inplace=False)"
    )
