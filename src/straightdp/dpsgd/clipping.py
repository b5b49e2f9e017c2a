"""Per-record gradient norms and the clipped sum without large per-record gradients (book-keeping).

One forward pass keeps, of each linear map, its input a; one backward pass to the maps' outputs gives g. A record's
weight gradient is the sum over its tokens of g a^T, so

    ||dW||^2 = sum_{s,t} (a_s . a_t)(g_s . g_t)   (ghost norm, cheap when tokens are few)
             = ||sum_t g_t a_t^T||^2              (direct norm, cheap when the map is small)

and the clipped sum over records is one matrix product with each record's clip factor. With k draws a record, its k T
tokens form one example. The other layers that a network may have (`uses`) are treated alike.

Guarantee: recomputed in float64 from the same a and g, no record contributes more than C, in float32 and in bfloat16:
a and g are the values that the network's own arithmetic left, products of them are formed exactly, and the computed
norm is raised by a bound on its rounding before it is used. A record whose norm is not finite contributes zero; a
padded record contributes zero; a batch without records sums to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from straightdp.compiled import CLOSE, Compiled, Speed
from straightdp.dpsgd.backward import Kept, Pass
from straightdp.errors import BadInput
from straightdp.team import ALONE, Team

CHECKED = 128  # at most so many records is a compiled step compared on with the plain one
MARGIN = 1 - 1e-5  # for the factor and the norm's square root

RecordLosses = Callable[..., Tensor]
"""(tensors, each with one row a record) to one loss a record, (n,)."""


@dataclass(frozen=True)
class ClippedSum:
    """The sum of per-record gradients clipped to `clip`, as one vector; each record's norm, for diagnostics only.

    Both are without noise, and a compiled engine overwrites them in its next call.
    """

    total: Tensor
    norms: Tensor
    clip: float


@dataclass(frozen=True)
class Coverage:
    """How one trainable parameter's per-record gradients are found."""

    name: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Close:
    """How far two computations of a value may be apart: relative to it, and to the size of the terms of its sum."""

    relative: float
    floor: float


FLOAT32, BFLOAT16 = Close(1e-3, 1e-5), Close(5e-2, 2.0**-6)


class ClippingEngine:
    """Clips the gradients of `losses(*batch)` with respect to the trainable parameters of `net`.

    `preflight` must see a batch (public, or made up) before the first call: it refuses by name what cannot be clipped
    exactly. `speed` has the whole step compiled for each batch shape, or only captured as a CUDA graph, and changes no
    value beyond rounding: the fast step is compared with the plain one on made-up records when it is made, and whenever
    `vouch` is called. Nor does computing `blocks`, modules of the network, a second time in the backward pass, which
    saves memory.
    """

    def __init__(
        self,
        net: nn.Module,
        losses: RecordLosses,
        clip: float,
        *,
        speed: Speed = "plain",
        blocks: Iterable[nn.Module] = (),
    ):
        if not (math.isfinite(clip) and clip > 0):
            raise BadInput(f"the clip must be a positive number, it is {clip}")
        self.net, self.losses, self._clip, self.blocks = net, losses, clip, tuple(blocks)
        self.trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise BadInput("the network has no trainable parameter: nothing to clip")
        self._step = Compiled(
            self._clipped, speed=speed, plain=self._of_those_that_count, made_up=self._some_count, each=True
        )
        self._checked: tuple | None = None
        self._seen: tuple[Tensor, ...] = ()

    @property
    def clip(self) -> float:
        """C. Fixed: one engine clips to one bound."""
        return self._clip

    def parameters(self) -> list[nn.Parameter]:
        """In the order of the sum's values."""
        return list(self.trainable.values())

    def __call__(self, batch: tuple[Tensor, ...], mask: Tensor) -> ClippedSum:
        """Sum of clipped per-record gradients over the records with mask 1, and every record's norm."""
        if self._checked is None:
            raise BadInput("ClippingEngine.preflight has not run: give it a public or made-up batch first")
        if self._checked != self._condition():
            raise BadInput(
                "the network has changed since preflight (train() or eval(), or a parameter was replaced): set it up "
                "first, and run preflight again on a new engine"
            )
        with _full_products():
            total, norms = self._step(torch.full((), self.clip, device=mask.device), mask, *batch)
        return ClippedSum(total, norms, self.clip)

    def vouch(self, team: Team = ALONE) -> None:
        """Refuse to go on where a compiled step no longer gives what the plain one gives, on made-up records, in any
        process of the team."""
        with _full_products():
            off = team.largest(self._step.off())
        if off > CLOSE:  # by how much hangs on weights that may not be private
            raise BadInput(
                f"the {self._step.speed} step has gone wrong: its last sums may not be clipped, and were thrown away; "
                "go on with --resume --set run.compile=off"
            )

    def split(self, flat: Tensor) -> list[Tensor]:
        """One flat vector, as in `ClippedSum.total`, as a tensor for each parameter."""
        parameters = self.parameters()
        pieces = flat.split([p.numel() for p in parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    def preflight(self, batch: tuple[Tensor, ...]) -> list[Coverage]:
        """Check on a public or made-up batch that every record's gradient is found exactly; list how, by parameter.

        Each record's gradient, found in the batch and in the batch turned round, from its loss alone and from all, is
        compared with autograd's of that record alone, at weights moved off special points such as zero; other records'
        rows must not feel its loss at all, nor its loss their values: it must stay as it is when they grow a
        thousandfold and change places. That finds layers that mix records, as far as they do on this batch, and
        parameters that reach the loss unseen. A forward pass that writes to a buffer is refused.
        """
        n = len(batch[0])
        if n < 2:
            raise BadInput("preflight needs at least two records, to see that they do not mix")
        with self._moved_weights(), self._same_buffers(), _full_products():
            once, _ = self._backward(batch, torch.ones(n, device=batch[0].device))
            dtypes = once.dtypes | {p.dtype for p in self.net.parameters()}
            close = BFLOAT16 if any(dtype.itemsize == 2 for dtype in dtypes) else FLOAT32
            felt: set[str] = set()
            for order in (batch, tuple(x.flip(0) for x in batch)):
                with torch.no_grad():
                    losses = self.losses(*order)
                for i in range(n):
                    felt |= self._check_record(order, i, losses, close)
        for name in self.trainable:
            if name not in felt:
                raise BadInput(
                    f"parameter {name} has no gradient on the batch that preflight was given: give it another"
                )
        self._checked, self._seen = self._condition(), batch
        return [Coverage(name, tuple(p.shape), once.kinds[name]) for name, p in self.trainable.items()]

    def _condition(self) -> tuple:
        """What must not change between preflight and a call: modes, and which tensors are trained."""
        modes = tuple(module.training for module in self.net.modules())
        return modes, tuple((id(p), p.data_ptr()) for p in self.net.parameters())

    def _check_record(self, batch: tuple[Tensor, ...], i: int, losses: Tensor, close: Close) -> set[str]:
        """Record i alone, through plain autograd, against record i in the batch. Returns the parameters that moved."""
        try:
            with torch.enable_grad():
                alone = self.losses(*(x[i : i + 1] for x in batch))[0]
        except ValueError:  # batch normalisation refuses a single row
            alone = losses.new_tensor(float("nan"))
        others = torch.arange(len(losses), device=losses.device) != i
        with torch.no_grad():
            louder = self.losses(*(_louder(x, others) for x in batch))[i]
        for other in (losses[i], louder):
            gap = float((alone.detach() - other).abs() / losses.abs().max())
            if not gap <= close.relative:
                raise BadInput(
                    f"a record's loss changes (by {gap:.2g} of the largest) with the other records of its batch, or "
                    "from call to call (batch normalisation, dropout?): use layer or group normalisation, and eval()"
                )
        expected = torch.autograd.grad(alone, self.parameters(), allow_unused=True)
        only = torch.zeros(len(losses), device=losses.device)
        only[i] = 1
        factors = self._backward(batch, only)[1]
        sizes = {name: size for names, f in factors.items() for name, size in zip(names, f.sizes(), strict=True)}
        together = self._backward(batch, torch.ones_like(only))[1]
        for every in (factors, together):
            gradient_norms(list(every.values()))  # a sum may take what its norms left: it is checked as it will run
        among = self._collect(together, only)
        moved = set()
        for name, found, same, theirs in zip(
            self.trainable, self._collect(factors, only), among, expected, strict=True
        ):
            theirs = torch.zeros_like(found) if theirs is None else theirs.float()
            off = max(float((found - theirs).norm()), float((same - theirs).norm()))
            elsewhere = float(sizes[name][others].max())
            allowed = close.relative * float(theirs.norm()) + close.floor * float(sizes[name][i])
            if not off <= allowed or elsewhere != 0:
                raise BadInput(
                    f"parameter {name}: its gradient for one record cannot be told from the batch (off by {off:.3g} "
                    f"of {float(theirs.norm()):.3g}, {elsewhere:.3g} in other records' rows): let the batch come first "
                    "everywhere and keep records apart, or freeze it"
                )
            if float(theirs.norm()) > 0:
                moved.add(name)
        return moved

    @contextmanager
    def _same_buffers(self):
        """Refuses a forward pass that leaves something of the records in the network."""
        before = {name: value.clone() for name, value in self.net.named_buffers()}
        yield
        for name, value in self.net.named_buffers():
            if name not in before or not torch.equal(value.nan_to_num(), before[name].nan_to_num()):
                raise BadInput(
                    f"buffer {name} changes in the forward pass, so it would hold values of records without noise: "
                    "turn its statistics off (track_running_stats=False), or eval()"
                )

    @contextmanager
    def _moved_weights(self):
        parameters = self.parameters()
        before = [p.detach().clone() for p in parameters]
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for p in parameters:
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.05)
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)

    def _clipped(self, clip: Tensor, mask: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """(the clipped sum as one vector, per-record norms). C is no constant of the step, so that runs whose C
        differs find it compiled."""
        _, factors = self._backward(batch, mask)
        with torch.autocast(mask.device.type, enabled=False):  # the caller's is for the network alone
            norms, bound = gradient_norms(list(factors.values()))
            factor = clip_factor(bound, mask, clip)
            finite = self._step.speed == "plain" and bool(torch.isfinite(bound).all())  # a fast step does not ask
            return torch.cat([value.flatten() for value in self._collect(factors, factor, finite=finite)]), norms

    def _of_those_that_count(self, clip: Tensor, mask: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """What `_clipped` gives, from the records with mask 1 alone."""
        rows = mask.nonzero().flatten()
        total, norms = self._clipped(clip, mask[rows], *(x[rows] for x in batch))
        return total, norms.new_zeros(len(mask)).index_copy(0, rows, norms)

    def _some_count(self, step: list[Tensor]) -> list[Tensor]:
        """A step's made-up inputs, with mask 1 for some records from all over the batch, and preflight's ids."""
        clip, mask, *batch = step
        n = len(mask)
        rows = torch.arange(n, device=mask.device)
        counts = rows % -(-n // max(2, min(CHECKED, n // 8))) == 0
        for k, (x, seen) in enumerate(zip(batch, self._seen, strict=False)):
            if not x.is_floating_point() and x.shape[1:] == seen.shape[1:]:
                batch[k] = seen.to(x)[rows % len(seen)]
        return [clip, counts.to(mask.dtype), *batch]

    def _collect(self, factors: dict[tuple[str, ...], Kept], factor: Tensor, *, finite: bool = False) -> list[Tensor]:
        sums: dict[str, Tensor] = {}
        for names, value in factors.items():
            sums.update(zip(names, value.weighted(factor, finite=finite), strict=True))
        return [sums[name].reshape(p.shape) for name, p in self.trainable.items()]

    def _backward(self, batch: tuple[Tensor, ...], mask: Tensor) -> tuple[Pass, dict[tuple[str, ...], Kept]]:
        once = Pass(self.trainable, len(mask), self.blocks)
        once(self.losses, batch, mask)
        return once, once.factors


def _louder(x: Tensor, others: Tensor) -> Tensor:
    """The batch with all records but one a thousand times as large; ids, which cannot grow, change places there."""
    if not x.is_floating_point():
        rows = torch.arange(len(x), device=x.device)
        rows[others] = rows[others].flip(0)
        return x[rows]
    scale = torch.where(others, 1e3, 1.0).reshape(-1, *[1] * (x.dim() - 1))
    return x * scale.to(x.dtype)


def gradient_norms(factors: list[Kept]) -> tuple[Tensor, Tensor]:
    """(gradient norms, the same raised by a bound on their rounding), per record."""
    pairs = [factor.norms() for factor in factors]
    squared = torch.stack([pair[0] for pair in pairs]).sum(dim=0).clamp_min(0)
    error = torch.stack([pair[1] for pair in pairs]).sum(dim=0)
    return squared.sqrt(), (squared + error).sqrt()


def clip_factor(bound: Tensor, mask: Tensor, clip: Tensor | float) -> Tensor:
    """What each record's gradient is multiplied by, from its norm's upper bound; zero for what must not contribute."""
    usable = torch.isfinite(bound) & (mask > 0)
    return torch.where(usable, (clip * MARGIN / bound.clamp_min(1e-30)).clamp_max(1.0), 0.0)


@contextmanager
def _full_products():
    """float32 products without TF32, whatever the caller has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
