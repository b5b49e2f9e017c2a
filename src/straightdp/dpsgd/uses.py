"""Sees every use of a trainable parameter in a forward pass, and refuses what cannot be split into records.

A use is replaced by the same operation on detached parameters, and remembers the tensor at which the backward pass is
to be read; from the gradient there, per-record gradients follow (`Factor`). Known are linear maps, convolutions,
embeddings, the gain and bias of layer, group and RMS norms, and bare parameters that are broadcast over the batch.
Anything else that takes a trainable parameter is refused by the parameter's name: nothing is skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from straightdp.dpsgd.factors import Factor, Outer, Scatter, summed
from straightdp.errors import BadInput


@dataclass(frozen=True)
class Use:
    """One use of `names` (weight first). `factors(g)` splits the gradient at `tensor` into a factor a name or pair."""

    kind: str
    names: tuple[str, ...]
    tensor: Tensor
    version: int
    # Must not hold `Uses`: activations would outlive the step.
    factors: Callable[[Tensor], dict[tuple[str, ...], Factor]]


class Uses(TorchFunctionMode):
    """While entered, collects the uses of `parameters` by a network that runs on `n` records, record-major."""

    def __init__(self, parameters: dict[str, nn.Parameter], n: int):
        super().__init__()
        self._names = {id(p): name for name, p in parameters.items()}
        self.n = n
        self.found: list[Use] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = [self._names[id(x)] for x in _flat(args, kwargs) if id(x) in self._names]
        if not names or not torch.is_grad_enabled() or func in ASKS or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None:
            raise BadInput(
                f"parameter {names[0]} goes into {resolve_name(func) or func}, which cannot be split into records: "
                "freeze it (requires_grad_(False)); or write the layer with Linear, Conv, Embedding, LayerNorm, "
                f"GroupNorm or RMSNorm; or, if it is a bare parameter, {LEADING}"
            )
        return handler(self, func, *args, **kwargs)

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a trainable parameter; None for anything else."""
        return self._names.get(id(parameter)) if parameter is not None else None

    def record(self, kind: str, names: list[str], tensor: Tensor, factors) -> Tensor:
        if not tensor.requires_grad:
            tensor.requires_grad_(True)
        if tensor.shape[0] % self.n:
            raise BadInput(
                f"parameter {names[0]} is used on {tensor.shape[0]} rows, no multiple of the {self.n} records: "
                "the batch must come first"
            )
        self.found.append(Use(kind, tuple(names), tensor, tensor._version, factors))
        return tensor


def _flat(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from _flat(value, {})
        else:
            yield value


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _tokens(x: Tensor, n: int) -> Tensor:
    """(rows, ..., channels), record-major, to (n, tokens of the record, channels)."""
    return x.reshape(n, -1, x.shape[-1])


def _linear(uses: Uses, func, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    names = [name for name in (uses.name(weight), uses.name(bias)) if name]
    output = func(input, _detached(weight), _detached(bias))
    if output.dim() < 2:
        raise BadInput(f"parameter {names[0]} is used on a single row: the batch must come first")
    kept = input.detach().to(output.dtype) if uses.name(weight) else None
    n = uses.n
    return uses.record("linear", names, output, lambda g: _map_factors(n, names, kept, g, 1))


def _map_factors(n: int, names: list[str], a: Tensor | None, g: Tensor, groups: int) -> dict:
    """Factors of y = W a + b; `a` is None where the weight is frozen."""
    if a is None:
        return {(names[0],): summed(g.flatten(0, -2), n, (g.shape[-1],))}
    a, g = _tokens(a, n), _tokens(g, n)
    if groups > 1:
        a, g = (x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1) for x in (a, g))
    return {tuple(names): Outer(a, g, bias=len(names) == 2, groups=groups)}


def _conv(dims: int):
    def handle(uses: Uses, func, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
        names = [name for name in (uses.name(weight), uses.name(bias)) if name]
        if input.dim() != dims + 2:
            raise BadInput(f"parameter {names[0]} is used on a single image: the batch must come first")
        output = func(input, _detached(weight), _detached(bias), stride, padding, dilation, groups)
        kept = None
        if uses.name(weight):
            size = tuple(weight.shape[2:])
            padding = _padding(padding, size, _each(dilation, dims))
            kept = windows(input.detach().to(output.dtype), size, _each(stride, dims), padding, _each(dilation, dims))

        n = uses.n

        def factors(g: Tensor) -> dict:
            return _map_factors(n, names, kept, g.flatten(2).mT, groups)

        return uses.record("convolution", names, output, factors)

    return handle


def _each(value, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def _padding(padding, size: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """(before, after) for each dimension."""
    if padding == "valid":
        return [(0, 0)] * len(size)
    if padding == "same":
        whole = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
        return [(w // 2, w - w // 2) for w in whole]
    return [(p, p) for p in _each(padding, len(size))]


def windows(x: Tensor, size, stride, padding: list[tuple[int, int]], dilation) -> Tensor:
    """What a convolution sees at each output position: (n, channels, *space) to (n, positions, channels * window)."""
    x = F.pad(x, [side for pair in reversed(padding) for side in pair])
    dims = len(size)
    for k in range(dims):
        x = x.unfold(2 + k, dilation[k] * (size[k] - 1) + 1, stride[k])[..., :: dilation[k]]
    order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return x.permute(order).flatten(1 + dims).flatten(1, dims)


def _embedding(
    uses: Uses, func, input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
    sparse=False,
) -> Tensor:  # fmt: skip
    name = uses.name(weight)
    assert name is not None
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise BadInput(f"parameter {name} is an embedding with max_norm, scale_grad_by_freq or sparse: turn them off")
    output = func(input, weight.detach(), padding_idx)
    n = uses.n
    ids = input.reshape(n, -1) if input.shape[0] % n == 0 else input
    if padding_idx is not None:
        ids = torch.where(ids == padding_idx % len(weight), -1, ids)
    rows = len(weight)
    return uses.record("embedding", [name], output, lambda g: {(name,): Scatter(ids, _tokens(g, n), rows)})


def _affine(normalise, channels):
    """A norm's gain and bias. `normalise` leaves them out; `channels` brings their axes last and back."""

    def handle(uses: Uses, func, *args, **kwargs) -> Tensor:
        hat, weight, bias = normalise(func, *args, **kwargs)
        shape = tuple((weight if weight is not None else bias).shape)
        output = channels(hat)
        kept = output.detach()
        for parameter, operation in ((weight, torch.mul), (bias, torch.add)):
            if parameter is not None:
                output = operation(output, parameter.detach().to(output.dtype))
        n, gain, shift = uses.n, uses.name(weight), uses.name(bias)
        names = [name for name in (gain, shift) if name]

        def factors(g: Tensor) -> dict:
            found: dict[tuple[str, ...], Factor] = {}
            if gain is not None:
                found[(gain,)] = summed(g.float() * kept.float(), n, shape)
            if shift is not None:
                found[(shift,)] = summed(g, n, shape)
            return found

        return channels(uses.record("norm", names, output, factors))

    return handle


def _layer_norm(func, input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return func(input, normalized_shape, None, None, eps), weight, bias


def _rms_norm(func, input, normalized_shape, weight=None, eps=None):
    return func(input, normalized_shape, None, eps), weight, None


def _group_norm(func, input, num_groups, weight=None, bias=None, eps=1e-5):
    return func(input, num_groups, None, None, eps), weight, bias


def _last(x: Tensor) -> Tensor:
    return x


def _second(x: Tensor) -> Tensor:
    """Swaps the channel axis of (n, channels, ...) with the last; its own inverse."""
    return x.transpose(1, -1)


def _elementwise(uses: Uses, func, input, other, **kwargs) -> Tensor:
    """A bare parameter broadcast over a batch: one copy a row, so that each row has a gradient of its own."""
    first = uses.name(input)
    parameter, partner = (input, other) if first else (other, input)
    name = first or uses.name(other)
    assert name is not None
    if not isinstance(partner, Tensor) or uses.name(partner) or partner.dim() < max(1, parameter.dim()):
        raise BadInput(f"bare parameter {name} does not meet a batch where it is used: {LEADING}")
    missing = partner.dim() - parameter.dim()
    if not missing and parameter.shape[0] != 1:
        raise BadInput(f"bare parameter {name} has no batch dimension where it is used: {LEADING}")
    copy = parameter.detach().reshape(*[1] * missing, *parameter.shape)
    copy = _copies(uses, name, copy, partner.shape[0], tuple(parameter.shape))
    return func(copy, partner, **kwargs) if first else func(partner, copy, **kwargs)


def _expand(uses: Uses, func, parameter, *sizes, **kwargs) -> Tensor:
    name = uses.name(parameter)
    assert name is not None
    size = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if len(size) != parameter.dim() or parameter.shape[0] != 1:
        raise BadInput(f"bare parameter {name} is expanded to {size}: {LEADING}")
    whole = _copies(uses, name, parameter.detach(), size[0], tuple(parameter.shape))
    return func(whole, size, **kwargs)


LEADING = "give it a leading dimension of 1 and add, multiply or expand it over the batch, or freeze it"


def _copies(uses: Uses, name: str, value: Tensor, rows: int, shape: tuple[int, ...]) -> Tensor:
    copies = value.expand(rows, *value.shape[1:]).clone()
    n = uses.n
    return uses.record("bare", [name], copies, lambda g: {(name,): summed(g, n, shape)})


T = Tensor
ASKS = {T.size, T.dim, T.numel, T.is_contiguous, T.stride, T.element_size, T.is_floating_point, T.detach}
ASKS |= {T.__len__, T.type, torch.is_floating_point, torch.is_tensor, T.data_ptr}
HANDLERS: dict[Callable, Callable] = {
    F.linear: _linear,
    torch.conv1d: _conv(1),
    torch.conv2d: _conv(2),
    torch.conv3d: _conv(3),
    F.embedding: _embedding,
    F.layer_norm: _affine(_layer_norm, _last),
    F.rms_norm: _affine(_rms_norm, _last),
    F.group_norm: _affine(_group_norm, _second),
    T.expand: _expand,
}
HANDLERS |= dict.fromkeys(
    (T.add, T.sub, T.mul, T.div, torch.add, torch.sub, torch.mul, torch.div, torch.true_divide), _elementwise
)
HANDLERS |= dict.fromkeys((T.__radd__, T.__rsub__, T.__rmul__, T.__rdiv__, torch.rsub), _elementwise)
