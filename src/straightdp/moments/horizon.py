"""How far the moments reach: the horizon tau, from public data alone (section 3.1, appendix B).

The moment field is compared with the exact field v* of the public records themselves, one kernel a record (the remark
after Proposition 1; `MomentModel.kernels`). Both point the same way near the noise end; tau is where the running mean
of their cosine bends down. A poor horizon wastes budget; it cannot leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import trapezoid
from torch import Tensor

from straightdp.flow.path import interpolate, noise_like
from straightdp.moments.basis import Basis
from straightdp.moments.field import MomentModel
from straightdp.recipe import Release

BANDWIDTH = 0.05  # h of the kernels: well below the distance between records
LEAST = 0.05  # of tau: the moments always lead a little way


@dataclass(frozen=True)
class Horizon:
    """Cosines of the two fields at each time, the knee of each curve, and the time tau that was chosen."""

    times: Tensor
    unconditional: Tensor
    worst_class: Tensor
    discrepancy: Tensor  # largest |v_bar - v*| seen at each time
    lipschitz: float  # largest ||dv*/dx|| seen up to tau
    knee: float
    tau: float

    @property
    def drift(self) -> float:
        """int_0^tau exp(L (tau - s)) delta(s) ds: Groenwall's bound on |x(tau) - x*(tau)| (the proposition on
        field-error propagation), for flows from one start, with the largest L and delta seen on public records."""
        s = np.append(self.times[self.times < self.tau].numpy(), self.tau)
        delta = np.interp(s, self.times.numpy(), self.discrepancy.numpy())
        with np.errstate(over="ignore"):  # a steep field's bound may be infinite
            return float(trapezoid(np.exp(self.lipschitz * (self.tau - s)) * delta, s))

    def curves(self) -> dict[str, list[float]]:
        """What Figure 2 (a) plots, one number a time, and the gap between the fields, as plain lists."""
        names = ("times", "unconditional", "worst_class", "discrepancy")
        return {name: getattr(self, name).tolist() for name in names}


def horizon(
    model: MomentModel, z: Tensor, labels: Tensor, generator: torch.Generator, *, cap: float, n: int = 256
) -> Horizon:
    """The horizon of a moment model of public records z, (N, ...), with `n` points a time.

    The knee is taken of the lower curve: of the running mean of the cosine over [0, t], unconditional or worst class.
    """
    z = z.flatten(1)
    times = torch.linspace(0.0, 0.95, 39, device=z.device)
    rows = torch.randint(len(z), (n,), generator=generator, device=z.device)
    y, xi = labels[rows], noise_like(z[rows], generator)
    everyone = MomentModel.kernels(z, BANDWIDTH)
    classes = [(MomentModel.kernels(z[labels == k], BANDWIDTH), y == k) for k in y.unique()]
    mixed, worst, gaps = [], [], []
    for t in times:
        at = t.expand(n)
        x = interpolate(z[rows], xi, at)
        exact, bar = everyone.mixture_velocity(x, at), model.mixture_velocity(x, at)
        mixed.append(torch.cosine_similarity(exact, bar, dim=1).mean())
        gaps.append((exact - bar).norm(dim=1).max())
        bar = model.velocity(x, at, y)
        pairs = [(field.mixture_velocity(x[own], at[own]), bar[own]) for field, own in classes]
        worst.append(torch.stack([torch.cosine_similarity(*pair, dim=1).mean() for pair in pairs]).min())
    curves = torch.stack(mixed), torch.stack(worst)
    knee = min(bend(times, running_mean(times, curve)) for curve in curves)
    tau = min(max(knee, LEAST), cap)
    inside = [*times[times < tau], times.new_tensor(tau)]
    slopes = [lipschitz(everyone, interpolate(z[rows], xi, t.expand(n)), t.expand(n)).max() for t in inside]
    steepest = float(torch.stack(slopes).max())
    return Horizon(times.cpu(), curves[0].cpu(), curves[1].cpu(), torch.stack(gaps).cpu(), steepest, knee, tau)


def lipschitz(kernels: MomentModel, x: Tensor, t: Tensor, iterations: int = 12) -> Tensor:
    """||dv*/dx|| of a kernel field at each x, (n,), as if one direction had no spread. x is (n, d).

    dv*/dx = (dE[z | x]/dx - I) / (1 - t), and dE[z | x]/dx = own I + slope Cov, with Cov that of the records'
    centres under their responsibilities. Its largest eigenvalue is found by power iteration, which comes from below.
    """
    weights, z = kernels.responsibilities(x, t), kernels.mu
    variance = (1 - t).square() + t.square() * kernels.floor
    own = t * kernels.floor / variance
    slope = (1 - t * own) * t / variance
    centre = weights @ z

    def spread(u: Tensor) -> Tensor:
        """Cov u."""
        return (weights * (u @ z.T)) @ z - centre * (centre * u).sum(dim=1, keepdim=True)

    u = torch.nn.functional.normalize(x - centre + 1e-3, dim=1)
    for _ in range(iterations):
        u = torch.nn.functional.normalize(spread(u) + 1e-12 * u, dim=1)
    largest = (u * spread(u)).sum(dim=1)
    return torch.maximum((own + slope * largest - 1).abs(), (own - 1).abs()) / (1 - t)


def public_moments(z: Tensor, labels: Tensor, basis: Basis, section: Release) -> MomentModel:
    """The moment model that a release of the public records themselves would give without noise."""
    means, residuals, y, counts = _around_means(z, labels, basis)
    if section.covariance == "residual":
        groups = [residuals[y == k] for k in range(len(means))]
        covariance = torch.stack([group.T @ group / len(group) for group in groups])
    else:
        covariance = public_spread(z, labels, basis)
    return MomentModel.from_features(basis, means, covariance, counts.double(), section.rank, section.floor)


def public_spread(z: Tensor, labels: Tensor, basis: Basis) -> Tensor:
    """The covariance of public records' features around their classes' means, (1, p, p)."""
    _, residuals, _, _ = _around_means(z, labels, basis)
    return (residuals.T @ residuals / len(residuals))[None]


def _around_means(z: Tensor, labels: Tensor, basis: Basis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The classes' feature means, each record's residual and class, and the classes' sizes."""
    f = basis.features(z.flatten(1).double().cpu())
    present, y, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    means = torch.stack([f[y == k].mean(dim=0) for k in range(len(present))])
    return means, f - means[y], y, counts


def running_mean(times: Tensor, values: Tensor) -> Tensor:
    """Mean of the curve over [0, t], at each t."""
    areas = torch.cumulative_trapezoid(values, times)
    return torch.cat([values[:1], areas / times[1:]])


def bend(times: Tensor, values: Tensor) -> float:
    """The knee of a falling curve: where it lies highest above the chord between its ends."""
    chord = values[0] + (values[-1] - values[0]) * (times - times[0]) / (times[-1] - times[0])
    return float(times[(values - chord).argmax()])
