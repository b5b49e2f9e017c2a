"""What is compared: one whole optimisation step, private or not, done in several ways on the same data.

A step is the gradient (private: each record's clipped to C, summed, noise of std sigma C added, divided by the number
of records), AdamW and an EMA of the weights. Every contender starts from the same weights, data, t and xi. Drawing t,
xi and the Poisson batch is not timed, and every contender takes its noise from torch's own generator: what differs is
how gradients are found and clipped.

Guarantee: what a contender leaves in `.grad` after a step, times the number of records, is its clipped sum plus noise;
with sigma = 0 it is the clipped sum itself, which `check_contenders.py` compares with a loop over records.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from cases import Case, Work
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from straightdp.compiled import Compiled, Speed, halves
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import record_losses

warnings.filterwarnings("error", message="not compiled")  # a step that fell back to eager is not to be timed

CHUNK = 64  # records at once where every record's gradient is written out: 64 x 8.2 M weights are 2 GiB


@dataclass(frozen=True)
class Contender:
    """`step()` does one whole step on the case's batch; `note` says in which arithmetic and how much at once."""

    step: Callable[[], None]
    parameters: list[nn.Parameter]
    note: str


def plain_eager(case: Case) -> Contender:
    work = Work(case)
    return _plain(work, lambda *batch: work.losses(*batch).mean())


def plain_compiled(case: Case) -> Contender:
    work = Work(case)
    return _plain(work, torch.compile(lambda *batch: work.losses(*batch).mean(), dynamic=False))


def _plain(work: Work, loss: Callable[..., Tensor]) -> Contender:
    def step() -> None:
        work.optimizer.zero_grad(set_to_none=True)
        loss(*work.batch).backward()
        work.optimizer.step()
        work.move_average()

    return Contender(step, work.parameters, f"{_arithmetic(work)}, whole batch")


def plain_graph(case: Case) -> Contender:
    """The whole gradient as one compiled graph, on CUDA replayed as a CUDA graph: what `ours_compiled` also gets."""
    work = Work(case)

    def gradients(*batch: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(work.losses(*batch).mean(), work.parameters)

    compiled = Compiled(gradients, speed="compiled")
    return Contender(lambda: work.update(compiled(*work.batch)), work.parameters, f"{_arithmetic(work)}, whole batch")


def ours_eager(case: Case) -> Contender:
    return _ours(case, speed="plain")


def ours_compiled(case: Case) -> Contender:
    return _ours(case, speed="compiled")


def _ours(case: Case, *, speed: Speed) -> Contender:
    work = Work(case)
    engine = ClippingEngine(work.net, work.losses, case.clip, speed=speed)
    engine.preflight(tuple(x[:2] for x in work.batch))
    mask = torch.ones(case.micro_batch, device=work.device)
    flat = torch.zeros(sum(p.numel() for p in work.parameters), device=work.device)
    parts = work.parts(case.micro_batch)

    def step() -> None:
        flat.zero_()
        for part in parts:
            flat.add_(engine(part, mask).total)
        work.update(engine.split(work.noised([flat])[0]))

    return Contender(step, work.parameters, f"{_arithmetic(work)}, {case.micro_batch} records at once")


def vmap_grad(case: Case) -> Contender:
    """Per-record gradients by `torch.func`, uncompiled, as the paper describes its own."""
    work = Work(case)
    values = {name: p.detach() for name, p in work.net.named_parameters()}

    def loss(values: dict[str, Tensor], *record: Tensor) -> Tensor:
        def call(*inputs: Tensor) -> Tensor:
            with ExitStack() as settings:
                settings.enter_context(sdpa_kernel(SDPBackend.MATH))  # the fused kernels have no batching rule,
                settings.enter_context(mock.patch.object(F, "rms_norm", rms_norm))  # nor has this one's, backward
                settings.enter_context(torch.autocast(work.device.type, enabled=False))
                return functional_call(work.net, values, inputs)

        return record_losses(call)(*(x.unsqueeze(0) for x in record))[0]  # type: ignore[arg-type]

    per_record = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))
    size = min(CHUNK, case.micro_batch)
    parts = work.parts(size)

    def step() -> None:
        sums = [torch.zeros_like(p) for p in work.parameters]
        for part in parts:
            gradients = list(per_record(values, *part).values())
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
            factor = (case.clip / norms).clamp_max(1.0)
            for total, g in zip(sums, gradients, strict=True):
                total.add_(torch.einsum("n,n...->...", factor, g))
        work.update(work.noised(sums))

    return Contender(step, work.parameters, f"float32, {size} records at once")


def rms_norm(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`F.rms_norm` over the last dimension in elementary operations: vmap loops over records in its CUDA kernel."""
    assert shape == x.shape[-1:]
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).eps)).to(x.dtype)


class Grouped(nn.Module):
    """A linear map shown a record's k draws as one sequence, (n k, ..., d) as (n, tokens, d).

    Opacus takes each row of a layer's input for a record; with this, a record's draws are one record to it too.
    """

    def __init__(self, linear: nn.Linear, draws: int):
        super().__init__()
        self.linear, self.draws = linear, draws

    def forward(self, x: Tensor) -> Tensor:
        joined = x.reshape(len(x) // self.draws, -1, x.shape[-1])
        return self.linear(joined).reshape(*x.shape[:-1], -1)


def grouped(net: nn.Module, draws: int) -> None:
    """Wrap every linear map of `net` in place; parameters keep their order."""
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Grouped(child, draws))


def opacus_ghost(case: Case) -> Contender:
    """Opacus' ghost clipping: one backward pass for the norms, a second one of the reweighted losses."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    work = Work(case)
    grouped(work.net, case.draws)
    module = GradSampleModuleFastGradientClipping(work.net, max_grad_norm=case.clip)
    optimizer = DPOptimizerFastGradientClipping(work.optimizer, **_opacus_settings(case))
    losses = DPLossFastGradientClipping(module, optimizer, record_losses(module))
    return _opacus(work, optimizer, losses, case.micro_batch)


def opacus_hooks(case: Case) -> Contender:
    """Opacus' default: every record's gradient is written out."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    work = Work(case)
    grouped(work.net, case.draws)
    losses = record_losses(GradSampleModule(work.net))
    optimizer = DPOptimizer(work.optimizer, **_opacus_settings(case))
    return _opacus(work, optimizer, lambda *batch: losses(*batch).mean(), min(CHUNK, case.micro_batch))


def _opacus_settings(case: Case) -> dict:
    return {
        "noise_multiplier": case.sigma,
        "max_grad_norm": case.clip,
        "expected_batch_size": case.records,
    }


def _opacus(work: Work, optimizer, loss: Callable, size: int) -> Contender:
    """Opacus' own accumulation: all but the last part signal that the optimiser's step is to be skipped."""
    parts = work.parts(size)

    def step() -> None:
        for k, part in enumerate(parts):
            optimizer.zero_grad()
            optimizer.signal_skip_step(k < len(parts) - 1)
            loss(*part).backward()
            optimizer.step()
        work.move_average()

    return Contender(step, work.parameters, f"{_arithmetic(work)}, {size} records at once")


def _arithmetic(work: Work) -> str:
    return "bf16 autocast" if halves(work.device) else "float32"


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    build.__name__: build
    for build in (
        plain_eager,
        plain_compiled,
        plain_graph,
        ours_eager,
        ours_compiled,
        vmap_grad,
        opacus_ghost,
        opacus_hooks,
    )
}
