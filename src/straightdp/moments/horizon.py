"""How far the moments reach: the horizon tau, from public data alone (section 3.1, appendix B).

The moment field is compared with the exact field of the public records themselves, one kernel a record (the remark
after Proposition 1). Both point the same way near the noise end; tau is where the running mean of their cosine bends
down. A poor horizon wastes budget; it cannot leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.flow.path import interpolate, noise_like, velocity_from_z
from straightdp.moments.basis import Basis
from straightdp.moments.field import MomentModel
from straightdp.recipe import Release

BANDWIDTH = 0.05  # h of the kernels: well below the distance between records
LEAST = 0.05  # of tau: the moments always lead a little way


@dataclass(frozen=True)
class EmpiricalField:
    """v* of the law that gives each record a kernel of width h: Proposition 1 with one component a record."""

    z: Tensor  # (N, d)
    h: float = BANDWIDTH

    def posterior(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Each record's weight given x_t = x, (n, N), and E[z | x_t = x], (n, d). x is (n, d)."""
        variance = self._variance(t)[:, None]
        distance = x.square().sum(dim=1, keepdim=True) - 2 * t[:, None] * (x @ self.z.T)
        distance = distance + t[:, None].square() * self.z.square().sum(dim=1)
        weights = (-distance / (2 * variance)).softmax(dim=1)
        centre = weights @ self.z
        gain = t[:, None] * self.h**2 / variance
        return weights, centre + gain * (x - t[:, None] * centre)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        return velocity_from_z(self.posterior(x, t)[1], x, t)

    def _variance(self, t: Tensor) -> Tensor:
        """Of x_t around t z, for one record's kernel."""
        return (1 - t).square() + (t * self.h).square()

    def lipschitz(self, x: Tensor, t: Tensor, iterations: int = 12) -> Tensor:
        """||dv*/dx|| at each x, (n,), as if one direction had no spread: dv*/dx = (dE[z | x]/dx - I) / (1 - t).

        The largest spread is found by power iteration, which comes from below.
        """
        weights, _ = self.posterior(x, t)
        own = t * self.h**2 / self._variance(t)
        slope = (1 - t * own) * t / self._variance(t)
        centre = weights @ self.z

        def spread(u: Tensor) -> Tensor:
            """Cov(z | x) u over the records' centres."""
            along = u @ self.z.T
            return (weights * along) @ self.z - centre * (centre * u).sum(dim=1, keepdim=True)

        u = torch.nn.functional.normalize(x - centre + 1e-3, dim=1)
        for _ in range(iterations):
            u = torch.nn.functional.normalize(spread(u) + 1e-12 * u, dim=1)
        largest = (u * spread(u)).sum(dim=1)
        # dE[z | x]/dx has eigenvalues from `own` to `own + slope * largest`
        return torch.maximum((own + slope * largest - 1).abs(), (own - 1).abs()) / (1 - t)


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
        """What Groenwall's inequality gives for |x(tau) - x*(tau)|, with the largest values seen on public records."""
        inside = self.times <= self.tau
        s, delta = self.times[inside].double(), self.discrepancy[inside].double()
        return float(torch.trapezoid((self.lipschitz * (self.tau - s)).exp() * delta, s))


def horizon(
    model: MomentModel, z: Tensor, labels: Tensor, generator: torch.Generator, *, cap: float, n: int = 256
) -> Horizon:
    """The horizon of a moment model of public records z, (N, ...), with `n` points a time.

    The knee is taken of the lower curve: of the running mean of the cosine over [0, t], unconditional or worst class.
    """
    z = z.flatten(1)
    times = torch.linspace(0.0, 0.95, 39, device=z.device)
    everyone = EmpiricalField(z)
    classes = [EmpiricalField(z[labels == y]) for y in range(len(model.mu))]
    rows = torch.randint(len(z), (n,), generator=generator, device=z.device)
    xi = noise_like(z[rows], generator)
    mixed, worst, gaps, slopes = [], [], [], []
    for t in times:
        at = t.expand(n)
        x = interpolate(z[rows], xi, at)
        exact, bar = everyone.velocity(x, at), model.mixture_velocity(x, at)
        mixed.append(torch.cosine_similarity(exact, bar, dim=1).mean())
        gaps.append((exact - bar).norm(dim=1).max())
        slopes.append(everyone.lipschitz(x, at).max())
        conditional = model.velocity(x, at, labels[rows])
        cosines = torch.stack(
            [
                torch.cosine_similarity(field.velocity(x[own], at[own]), conditional[own], dim=1).mean()
                for y, field in enumerate(classes)
                if bool((own := labels[rows] == y).any())
            ]
        )
        worst.append(cosines.min())
    curves = torch.stack(mixed), torch.stack(worst)
    knee = min(bend(times, running_mean(times, curve)) for curve in curves)
    tau = min(max(knee, LEAST), cap)
    return Horizon(
        times.cpu(), curves[0].cpu(), curves[1].cpu(), torch.stack(gaps).cpu(),
        float(torch.stack(slopes)[times <= tau].max()), knee, tau,
    )  # fmt: skip


def public_moments(z: Tensor, labels: Tensor, basis: Basis, section: Release) -> MomentModel:
    """The moment model that a release of the public records themselves would give without noise."""
    f = basis.features(z.flatten(1).double().cpu())
    present, y, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    means = torch.stack([f[y == k].mean(dim=0) for k in range(len(present))])
    residuals = f - means[y]
    if section.covariance == "shared":
        covariance = (residuals.T @ residuals / len(f))[None]
    else:
        groups = [residuals[y == k] for k in range(len(present))]
        covariance = torch.stack([group.T @ group / len(group) for group in groups])
    return MomentModel.from_features(basis, means, covariance, counts.double(), section.rank, section.floor)


def running_mean(times: Tensor, values: Tensor) -> Tensor:
    """Mean of the curve over [0, t], at each t."""
    areas = torch.cumulative_trapezoid(values, times)
    return torch.cat([values[:1], areas / times[1:]])


def bend(times: Tensor, values: Tensor) -> float:
    """The knee of a falling curve: where it lies highest above the chord between its ends."""
    chord = values[0] + (values[-1] - values[0]) * (times - times[0]) / (times[-1] - times[0])
    return float(times[(values - chord).argmax()])
