"""The moment model and its analytic field: Proposition 1, in low-rank algebra, never a d x d inverse.

Sigma_y = V_y diag(lam_y) V_y^T + lambda_0 I with orthonormal columns V_y, so A_t has eigenvalues
a_i = (1 - t)^2 + t^2 (lam_i + lambda_0) on V and a_0 = (1 - t)^2 + t^2 lambda_0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from straightdp.flow.path import noise_like, velocity_from_z
from straightdp.moments.basis import Basis
from straightdp.moments.covariance import project_psd


@dataclass(frozen=True)
class MomentModel:
    """mu (Y, d); V (Y or 1, d, r); lam (Y or 1, r), the excess over the floor; prior (Y,). A released value."""

    mu: Tensor
    V: Tensor
    lam: Tensor
    prior: Tensor
    floor: float

    @classmethod
    def from_features(
        cls, basis: Basis, means: Tensor, covariance: Tensor, counts: Tensor, rank: int, floor: float
    ) -> MomentModel:
        """From feature means (Y, p) and covariances (Y or 1, p, p): lifted, rank-r, floored."""
        values, vectors = torch.linalg.eigh(covariance)
        rank = min(rank, values.shape[-1])
        V = basis.P.T @ vectors[..., -rank:]
        return cls._build(basis.lift(means), V, values[..., -rank:], counts, floor)

    @classmethod
    def from_full(
        cls, basis: Basis, means: Tensor, covariance: Tensor, counts: Tensor, rank: int, floor: float
    ) -> MomentModel:
        """From feature means and one d x d covariance."""
        values, vectors = torch.linalg.eigh(project_psd(covariance))
        rank = min(rank, len(values))
        return cls._build(basis.lift(means), vectors[None, :, -rank:], values[None, -rank:], counts, floor)

    @classmethod
    def _build(cls, mu: Tensor, V: Tensor, values: Tensor, counts: Tensor, floor: float) -> MomentModel:
        lam = (values - floor).clamp_min(0.0)
        prior = counts / counts.sum()
        return cls(mu.float(), V.float().contiguous(), lam.float(), prior.float(), floor)

    def to(self, device: torch.device) -> MomentModel:
        return MomentModel(
            self.mu.to(device), self.V.to(device), self.lam.to(device), self.prior.to(device), self.floor
        )

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"mu": self.mu, "V": self.V, "lam": self.lam, "prior": self.prior}
        save_file(tensors, path, metadata={"floor": repr(self.floor)})

    @classmethod
    def load(cls, path: Path) -> MomentModel:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in ("mu", "V", "lam", "prior")}
            return cls(floor=float(file.metadata()["floor"]), **tensors)

    def _of(self, table: Tensor, y: Tensor) -> Tensor:
        """A class's row of a table that may be shared by all classes."""
        return table.expand(len(self.mu), *table.shape[1:])[y] if len(table) == 1 else table[y]

    def posterior_mean(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Equation (3): E[z | x_t = x, y] = mu_y + t Sigma A_t^{-1} (x - t mu_y). x is (n, d)."""
        mu, V, lam = self.mu[y], self._of(self.V, y), self._of(self.lam, y)
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
        """w_y(x, t), (n, Y), in log space: stable for t near 0 and 1 and for many classes."""
        t = t[:, None]
        a0 = (1 - t).square() + t.square() * self.floor
        logs = []
        for y in range(len(self.mu)):
            V, lam = self.V[y % len(self.V)], self.lam[y % len(self.lam)]
            a = (1 - t).square() + t.square() * (lam + self.floor)
            u = x - t * self.mu[y]
            along = u @ V
            quadratic = u.square().sum(dim=1) / a0[:, 0] + ((1 / a - 1 / a0) * along.square()).sum(dim=1)
            logdet = (a / a0).log().sum(dim=1)  # the common d log a_0 cancels
            logs.append(self.prior[y].log() - 0.5 * (quadratic + logdet))
        return torch.stack(logs, dim=1).softmax(dim=1)

    def mixture_velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Equation (4): the null branch's field, the conditional ones averaged by responsibility."""
        flat = x.flatten(1)
        weights = self.responsibilities(flat, t)
        mean = torch.zeros_like(flat)
        for y in range(len(self.mu)):
            label = torch.full((len(flat),), y, device=x.device)
            mean += weights[:, y : y + 1] * self.posterior_mean(flat, t, label)
        return velocity_from_z(mean, flat, t).reshape(x.shape)

    def sample(self, y: Tensor, generator: torch.Generator) -> Tensor:
        """z ~ N(mu_y, Sigma_y), (n, d): the release alone as a generator."""
        mu = self.mu[y]
        lam = self._of(self.lam, y)
        white = torch.randn(lam.shape, generator=generator, device=mu.device)
        shaped = torch.einsum("ndr,nr->nd", self._of(self.V, y), lam.sqrt() * white)
        return mu + shaped + self.floor**0.5 * noise_like(mu, generator)

    def tilted_start(self, y: Tensor, t0: float, generator: torch.Generator) -> Tensor:
        """x_{t0} ~ N(t0 mu_y, t0^2 Sigma_y + (1 - t0)^2 I): where guided sampling begins."""
        z = self.sample(y, generator)
        return t0 * z + (1 - t0) * noise_like(z, generator)
