"""The moment model and its analytic field: Proposition 1, in low-rank algebra, never a d x d inverse.

Sigma_y = V_y diag(lam_y) V_y^T + lambda_0 I with orthonormal columns V_y, so A_t has eigenvalues
a_i = (1 - t)^2 + t^2 (lam_i + lambda_0) on V and a_0 = (1 - t)^2 + t^2 lambda_0 elsewhere.

Guarantee: neither n x Y x d numbers nor, where the covariance is shared, n x d x r are ever held at once. What grows
with the number of classes beside the responsibilities themselves, (n, Y), is made in blocks of classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from straightdp.flow.path import noise_like, velocity_from_z
from straightdp.moments.basis import Basis
from straightdp.moments.covariance import project_psd

BLOCK = 2**22  # numbers that one block of classes may take: 32 MiB in float64


@dataclass(frozen=True)
class MomentModel:
    """mu (Y, d); V (Y or 1, d, r); lam (Y or 1, r), the excess over the floor; prior (Y,). A released value.

    `public` (d,) is the mean of public records, for a control; the model itself knows nothing of it.
    """

    mu: Tensor
    V: Tensor
    lam: Tensor
    prior: Tensor
    floor: float
    public: Tensor | None = None

    @classmethod
    def from_features(
        cls, basis: Basis, means: Tensor, covariance: Tensor, counts: Tensor, rank: int, floor: float
    ) -> MomentModel:
        """From feature means (Y, p) and covariances (Y or 1, p, p): lifted, rank-r, floored."""
        values, vectors = torch.linalg.eigh(covariance)
        rank = min(rank, values.shape[-1])
        V = basis.P.T @ vectors[..., -rank:]
        return cls._build(basis, means, V, values[..., -rank:], counts, floor)

    @classmethod
    def from_full(
        cls, basis: Basis, means: Tensor, covariance: Tensor, counts: Tensor, rank: int, floor: float
    ) -> MomentModel:
        """From feature means and one d x d covariance."""
        values, vectors = torch.linalg.eigh(project_psd(covariance))
        rank = min(rank, len(values))
        return cls._build(basis, means, vectors[None, :, -rank:], values[None, -rank:], counts, floor)

    @classmethod
    def kernels(cls, z: Tensor, h: float) -> MomentModel:
        """The empirical kernel field (the remark after Proposition 1): a component N(z_i, h^2 I) for each record z_i.

        z is (N, d). The model holds the records themselves, so it is for public ones and is never released.
        """
        n, d = z.shape
        return cls(z, z.new_zeros(1, d, 0), z.new_zeros(1, 0), z.new_full((n,), 1 / n), h**2)

    @classmethod
    def _build(
        cls, basis: Basis, means: Tensor, V: Tensor, values: Tensor, counts: Tensor, floor: float
    ) -> MomentModel:
        lam, prior, mu = (values - floor).clamp_min(0.0), counts / counts.sum(), basis.lift(means)
        return cls(mu.float(), V.float().contiguous(), lam.float(), prior.float(), floor, basis.mean.float())

    def to(self, device: torch.device) -> MomentModel:
        public = None if self.public is None else self.public.to(device)
        mu, V, lam, prior = (part.to(device) for part in (self.mu, self.V, self.lam, self.prior))
        return MomentModel(mu, V, lam, prior, self.floor, public)

    def tilted(self, tilt: str, seed: int) -> MomentModel:
        """The same with other means: the controls of a tilted start. `released` leaves them.

        zero: none; random: one direction for all, of `seed`, each as long as the class's own; public: the mean of the
        public records, ValueError where it is not known.
        """
        if tilt == "released":
            return self
        if tilt == "zero":
            return replace(self, mu=torch.zeros_like(self.mu))
        if tilt == "public":
            if self.public is None:
                raise ValueError("the public mean is not part of this release")
            return replace(self, mu=self.public.expand_as(self.mu).contiguous())
        direction = torch.randn(self.mu.shape[1], generator=torch.Generator().manual_seed(seed)).to(self.mu)
        return replace(self, mu=self.mu.norm(dim=1, keepdim=True) * direction / direction.norm())

    def under(self, labels: tuple[int, ...]) -> MomentModel:
        """One component a caption, given each caption's class: captions of a class share its moments and its prior."""
        rows = torch.tensor(labels, device=self.mu.device)
        share = torch.bincount(rows, minlength=len(self.mu))[rows]
        own = rows if len(self.V) > 1 else torch.zeros(1, dtype=torch.int64, device=rows.device)
        prior = self.prior[rows] / share
        return MomentModel(self.mu[rows], self.V[own], self.lam[own], prior, self.floor, self.public)

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"mu": self.mu, "V": self.V, "lam": self.lam, "prior": self.prior}
        tensors |= {} if self.public is None else {"public": self.public}
        save_file(tensors, path, metadata={"floor": repr(self.floor)})

    @classmethod
    def load(cls, path: Path) -> MomentModel:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
            return cls(floor=float(file.metadata()["floor"]), **tensors)

    def _of(self, table: Tensor, y: Tensor | slice) -> Tensor:
        """The classes' rows of a table, or the one row that all share, which broadcasts."""
        return table if len(table) == 1 else table[y]

    def _blocks(self, n: int) -> Iterator[slice]:
        """Slices of the classes whose tensors for n points, (d + n) r numbers a class, stay within BLOCK."""
        d, r = self.V.shape[1:]
        size = max(1, BLOCK // ((d + n) * max(r, 1)))
        return (slice(first, first + size) for first in range(0, len(self.mu), size))

    def posterior_mean(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Equation (3): E[z | x_t = x, y] = mu_y + t Sigma A_t^{-1} (x - t mu_y). x is (n, d)."""
        return self._condition(x, t, self.mu[y], self._of(self.V, y), self._of(self.lam, y))

    def _condition(self, x: Tensor, t: Tensor, mu: Tensor, V: Tensor, lam: Tensor) -> Tensor:
        """Equation (3) row by row: mu is (n, d), V (n or 1, d, r), lam (n or 1, r)."""
        t = t[:, None]
        u = x - t * mu
        gain0, gain = self._gains(t, lam)
        along = torch.einsum("ndr,nd->nr", V, u)
        return mu + gain0 * u + torch.einsum("ndr,nr->nd", V, (gain - gain0) * along)

    def _gains(self, t: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues of t Sigma A_t^{-1}: off V, and along V."""
        noise = (1 - t).square()
        gain0 = t * self.floor / (noise + t.square() * self.floor)
        gain = t * (lam + self.floor) / (noise + t.square() * (lam + self.floor))
        return gain0, gain

    def velocity(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """The conditional field by equation (2). Finite for t < 1."""
        flat = x.flatten(1)
        return velocity_from_z(self.posterior_mean(flat, t, y), flat, t).reshape(x.shape)

    def responsibilities(self, x: Tensor, t: Tensor) -> Tensor:
        """w_y(x, t) of equation (4), (n, Y), for t in [0, 1] and any number of classes; x is (n, d).

        Guarantee: finite, and rows add up to 1, however far x is from every class; at t = 0 they are the prior. The
        logits are float64: their terms are of order |mu|^2 / a_0, and float32 put weights off by 1e-2 at d = 12,288.
        """
        points, times = x.double(), t.double()[:, None]
        logs = [self._log_density(points, times, block) for block in self._blocks(len(x))]
        return (self.prior.double().log() + torch.cat(logs, dim=1)).softmax(dim=1).to(x.dtype)

    def _log_density(self, x: Tensor, t: Tensor, block: slice) -> Tensor:
        """log N(x; t mu_y, A_t), (n, classes of the block), less what all classes share: |x|^2 / a_0 and d log a_0."""
        mu, V, lam = self.mu[block].double(), self._of(self.V, block).double(), self._of(self.lam, block).double()
        a0 = (1 - t).square() + t.square() * self.floor
        a = a0[:, :, None] + t[:, :, None].square() * lam
        quadratic = (t.square() * mu.square().sum(dim=1) - 2 * t * (x @ mu.T)) / a0
        quadratic = quadratic + torch.einsum("nyr,nyr->ny", 1 / a - 1 / a0[:, :, None], _along(x, t, mu, V).square())
        return -0.5 * (quadratic + (a / a0[:, :, None]).log().sum(dim=2))

    def mixture_mean(self, x: Tensor, t: Tensor) -> Tensor:
        """Equation (4): E[z | x_t = x], the conditional ones averaged by responsibility. x is (n, d).

        Equation (3) is affine in mu_y, so under a shared covariance the average is equation (3) at the mean of the
        means. Else that holds off the V_y, with the floor for Sigma, and each class adds its part along V_y.
        """
        weights = self.responsibilities(x, t)
        centre = weights @ self.mu
        if len(self.V) == len(self.lam) == 1:
            return self._condition(x, t, centre, self.V, self.lam)
        t = t[:, None]
        mean = centre + self._gains(t, self.lam[:1])[0] * (x - t * centre)
        for block in self._blocks(len(x)):
            mu, V, lam = self.mu[block], self._of(self.V, block), self._of(self.lam, block)
            gain0, gain = self._gains(t[:, :, None], lam)
            share = weights[:, block, None] * (gain - gain0) * _along(x, t, mu, V)
            mean = mean + torch.einsum("ydr,nyr->nd", V, share)
        return mean

    def mixture_velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """The null branch's field: equation (4) by equation (2). Finite for t < 1."""
        flat = x.flatten(1)
        return velocity_from_z(self.mixture_mean(flat, t), flat, t).reshape(x.shape)

    def posterior_trace(self, t: Tensor) -> Tensor:
        """tr Cov[z | x_t, y], the same for every x, averaged over classes by prior: the planner's V-bar. t is (k,).

        Sigma - t^2 Sigma A_t^{-1} Sigma has eigenvalues lam (1 - t)^2 / ((1 - t)^2 + t^2 lam), lam those of Sigma.
        """
        t = t[:, None, None]
        noise = (1 - t).square()

        def left(lam: Tensor | float) -> Tensor:
            return lam * noise / (noise + t.square() * lam)

        d, r = self.V.shape[1:]
        traces = left(self.lam + self.floor).sum(dim=2) + (d - r) * left(self.floor)[:, :, 0]
        return (traces * self.prior).sum(dim=1)

    def sample(self, y: Tensor, generator: torch.Generator) -> Tensor:
        """z ~ N(mu_y, Sigma_y), (n, d): the release alone as a generator."""
        mu, r = self.mu[y], self.lam.shape[1]
        white = torch.randn((len(y), r), generator=generator, device=mu.device)
        shaped = torch.einsum("ndr,nr->nd", self._of(self.V, y), self._of(self.lam, y).sqrt() * white)
        return mu + shaped + self.floor**0.5 * noise_like(mu, generator)

    def tilted_start(self, y: Tensor, t0: float, generator: torch.Generator) -> Tensor:
        """x_{t0} ~ N(t0 mu_y, t0^2 Sigma_y + (1 - t0)^2 I): where guided sampling begins."""
        z = self.sample(y, generator)
        return t0 * z + (1 - t0) * noise_like(z, generator)


def _along(x: Tensor, t: Tensor, mu: Tensor, V: Tensor) -> Tensor:
    """V_y^T (x - t mu_y) for each point and class, (n, Y, r). x is (n, d), t (n, 1), mu (Y, d), V (Y or 1, d, r)."""
    return torch.einsum("nd,ydr->nyr", x, V) - t[:, :, None] * torch.einsum("yd,ydr->yr", mu, V)
