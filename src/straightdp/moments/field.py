"""The moment model and its analytic field: Proposition 1, in low-rank algebra, never a d x d inverse.

Sigma_y = V_y diag(lam_y) V_y^T + lambda_0 I with orthonormal columns V_y, so A_t has eigenvalues
a_i = (1 - t)^2 + t^2 (lam_i + lambda_0) on V and a_0 = (1 - t)^2 + t^2 lambda_0 elsewhere.

A class may be several Gaussians that share its Sigma_y. The proposition then says how likely each is given x, and as
equation (3) is affine in the mean, the class's field is equation (3) at the mean of the means under these weights.

Guarantee: neither n x Y x d numbers nor, where the covariance is shared or draws are made, n x d x r are ever held at
once. What grows with the number of classes beside the responsibilities themselves, (n, Y k), is made in blocks of
classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from straightdp.flow.path import back_to, noise_like, velocity_from_z
from straightdp.moments.basis import Basis
from straightdp.moments.covariance import project_psd

BLOCK = 2**22  # numbers that one block of classes may take: 32 MiB in float64


@dataclass(frozen=True)
class MomentModel:
    """mu (Y, d); V (Y or 1, d, r); lam (Y or 1, r), the excess over the floor; prior (Y,). A released value.

    Where classes have k components, `centres` (Y, k, d) are their means, `weights` (Y, k) their shares of the class,
    and mu is the mean of the class; else a class is one Gaussian at mu. `public` (d,), `public_V` (d, r) and
    `public_lam` (r,) are what public records are as one Gaussian, for a control and for `crowd`; the model itself knows
    nothing of it.
    """

    mu: Tensor
    V: Tensor
    lam: Tensor
    prior: Tensor
    floor: float
    public: Tensor | None = None
    centres: Tensor | None = None
    weights: Tensor | None = None
    public_V: Tensor | None = None
    public_lam: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.centres is None) != (self.weights is None):
            raise ValueError("components have centres and weights, or neither")

    @classmethod
    def from_features(
        cls,
        basis: Basis,
        means: Tensor,
        covariance: Tensor,
        counts: Tensor,
        rank: int,
        floor: float,
        weights: Tensor | None = None,
    ) -> MomentModel:
        """From feature means (Y, p) and covariances (Y or 1, p, p): lifted, rank-r, floored. With `weights` (Y, k) the
        means are those of components, (Y, k, p)."""
        values, vectors = torch.linalg.eigh(covariance)
        rank = min(rank, values.shape[-1])
        V = basis.P.T @ vectors[..., -rank:]
        if weights is None:
            return cls._build(basis, means, V, values[..., -rank:], counts, floor)
        overall = torch.einsum("yk,ykp->yp", weights, means)
        model = cls._build(basis, overall, V, values[..., -rank:], counts, floor)
        return replace(model, centres=basis.lift(means).float(), weights=weights.float())

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
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        """All there are, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in every.items() if isinstance(value, Tensor)}

    def tilted(self, tilt: str, seed: int) -> MomentModel:
        """The same with other means: the controls of a tilted start. `released` leaves them. A class's components move
        with its mean.

        zero: none; random: one direction for all, of `seed`, each as long as the class's own; public: the mean of the
        public records, ValueError where it is not known.
        """
        if tilt == "released":
            return self
        if tilt == "zero":
            return self._at(torch.zeros_like(self.mu))
        if tilt == "public":
            if self.public is None:
                raise ValueError("the public mean is not part of this release")
            return self._at(self.public.expand_as(self.mu).contiguous())
        direction = torch.randn(self.mu.shape[1], generator=torch.Generator().manual_seed(seed)).to(self.mu)
        return self._at(self.mu.norm(dim=1, keepdim=True) * direction / direction.norm())

    def _at(self, mu: Tensor) -> MomentModel:
        """The same around other class means."""
        return replace(self, mu=mu, centres=None if self.centres is None else self.centres + (mu - self.mu)[:, None])

    def beside(self, crowd: MomentModel) -> MomentModel:
        """The same, which knows the public records as the one Gaussian that `crowd` is."""
        return replace(self, public=crowd.mu[0], public_V=crowd.V[0].contiguous(), public_lam=crowd.lam[0])

    @property
    def crowd(self) -> MomentModel | None:
        """The public records as one Gaussian, None where that is not known."""
        if self.public is None or self.public_V is None or self.public_lam is None:
            return None
        mu, V, lam = self.public[None], self.public_V[None], self.public_lam[None]
        return MomentModel(mu, V, lam, mu.new_ones(1), self.floor)

    def under(self, labels: tuple[int, ...]) -> MomentModel:
        """One row a caption, given each caption's class: captions of a class share its moments and its prior."""
        rows = torch.tensor(labels, device=self.mu.device)
        share = torch.bincount(rows, minlength=len(self.mu))[rows]
        own = rows if len(self.V) > 1 else torch.zeros(1, dtype=torch.int64, device=rows.device)
        prior = self.prior[rows] / share
        parts = {name: tensor[rows] for name, tensor in self._tensors().items() if name in ("mu", "centres", "weights")}
        return replace(self, **parts, V=self.V[own], lam=self.lam[own], prior=prior)

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self._tensors(), path, metadata={"floor": repr(self.floor)})

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
        """Slices of the classes whose tensors for n points, (d + n k) r + k d numbers a class, stay within BLOCK."""
        (d, r), k = self.V.shape[1:], self.means.shape[1]
        size = max(1, BLOCK // ((d + n * k) * max(r, 1) + k * d))
        return (slice(first, first + size) for first in range(0, len(self.mu), size))

    def posterior_mean(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Equation (3): E[z | x_t = x, y] = mu_y + t Sigma A_t^{-1} (x - t mu_y). x is (n, d). Of a class with
        components, mu_y is the mean of theirs given x."""
        mu = self.mu[y] if self.centres is None else self._mean_of_means(x, t, y)
        return self._condition(x, t, mu, self._of(self.V, y), self._of(self.lam, y))

    def _mean_of_means(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """sum_j P(j | x_t = x, y) of centre j, (n, d)."""
        means, points, times = torch.empty_like(x), x.double(), t.double()[:, None]
        for k in y.unique().tolist():
            rows = y == k
            logs = self._log_density(points[rows], times[rows], slice(k, k + 1))[:, 0] + self._shares[k].log()
            means[rows] = logs.softmax(dim=1).to(x.dtype) @ self.means[k]
        return means

    @property
    def means(self) -> Tensor:
        """Of every component, (Y, k, d)."""
        return self.mu[:, None] if self.centres is None else self.centres

    @property
    def _shares(self) -> Tensor:
        """Of every component in its class, (Y, k) float64."""
        return (torch.ones_like(self.prior)[:, None] if self.weights is None else self.weights).double()

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
        return self._component_weights(x, t).sum(dim=2)

    def _component_weights(self, x: Tensor, t: Tensor) -> Tensor:
        """How likely each component of each class is given x, (n, Y, k)."""
        points, times = x.double(), t.double()[:, None]
        logs = torch.cat([self._log_density(points, times, block) for block in self._blocks(len(x))], dim=1)
        logs = (self.prior.double()[:, None] * self._shares).log() + logs
        return logs.flatten(1).softmax(dim=1).to(x.dtype).reshape(logs.shape)

    def _log_density(self, x: Tensor, t: Tensor, block: slice) -> Tensor:
        """log N(x; t mu, A_t) of every component, (n, classes of the block, k), less what all classes share:
        |x|^2 / a_0 and d log a_0."""
        mu, V, lam = self.means[block].double(), self._of(self.V, block).double(), self._of(self.lam, block).double()
        a0 = (1 - t).square() + t.square() * self.floor
        a = a0[:, :, None] + t[:, :, None].square() * lam
        flat = mu.flatten(0, 1)
        quadratic = ((t.square() * flat.square().sum(dim=1) - 2 * t * (x @ flat.T)) / a0).reshape(-1, *mu.shape[:2])
        along = torch.einsum("nyr,nykr->nyk", 1 / a - 1 / a0[:, :, None], _along(x, t, mu, V).square())
        return -0.5 * (quadratic + along + (a / a0[:, :, None]).log().sum(dim=2, keepdim=True))

    def mixture_mean(self, x: Tensor, t: Tensor) -> Tensor:
        """Equation (4): E[z | x_t = x], the conditional ones averaged by responsibility. x is (n, d).

        Equation (3) is affine in mu_y, so under a shared covariance the average is equation (3) at the mean of the
        means. Else that holds off the V_y, with the floor for Sigma, and each component adds its part along V_y.
        """
        weights = self._component_weights(x, t)
        centre = weights.flatten(1) @ self.means.flatten(0, 1)
        if len(self.V) == len(self.lam) == 1:
            return self._condition(x, t, centre, self.V, self.lam)
        t = t[:, None]
        mean = centre + self._gains(t, self.lam[:1])[0] * (x - t * centre)
        for block in self._blocks(len(x)):
            mu, V, lam = self.means[block], self._of(self.V, block), self._of(self.lam, block)
            gain0, gain = self._gains(t[:, :, None], lam)
            share = weights[:, block, :, None] * (gain - gain0)[:, :, None] * _along(x, t, mu, V)
            mean = mean + torch.einsum("ydr,nyr->nd", V, share.sum(dim=2))
        return mean

    def mixture_velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """The null branch's field: equation (4) by equation (2). Finite for t < 1."""
        flat = x.flatten(1)
        return velocity_from_z(self.mixture_mean(flat, t), flat, t).reshape(x.shape)

    def posterior_trace(self, t: Tensor) -> Tensor:
        """tr Cov[z | x_t, y], the same for every x, averaged over classes by prior: the planner's V-bar. t is (k,).

        Sigma - t^2 Sigma A_t^{-1} Sigma has eigenvalues lam (1 - t)^2 / ((1 - t)^2 + t^2 lam), lam those of Sigma.
        ValueError for classes with components, where it hangs on x: the planner asks public moments, which have none.
        """
        if self.centres is not None:
            raise ValueError("the posterior trace of a class with components hangs on x")
        t = t[:, None, None]
        noise = (1 - t).square()

        def left(lam: Tensor | float) -> Tensor:
            return lam * noise / (noise + t.square() * lam)

        d, r = self.V.shape[1:]
        traces = left(self.lam + self.floor).sum(dim=2) + (d - r) * left(self.floor)[:, :, 0]
        return (traces * self.prior).sum(dim=1)

    def sample(self, y: Tensor, generator: torch.Generator) -> Tensor:
        """z ~ N(mu_y, Sigma_y), (n, d), at one of the class's components: the release alone as a generator."""
        mu, r = self.mu[y], self.lam.shape[1]
        if len(y) and self.centres is not None:
            place = torch.multinomial(self._shares[y].float(), 1, generator=generator)[:, 0]
            mu = self.centres[y, place]
        white = torch.randn((len(y), r), generator=generator, device=mu.device) * self._of(self.lam, y).sqrt()
        if len(self.V) == 1:
            shaped = white @ self.V[0].T
        else:
            shaped = torch.empty_like(mu)
            for k in y.unique().tolist():
                shaped[y == k] = white[y == k] @ self.V[k].T
        return mu + shaped + self.floor**0.5 * noise_like(mu, generator)

    def tilted_start(self, y: Tensor, t0: float, generator: torch.Generator) -> Tensor:
        """x_{t0} ~ N(t0 mu_y, t0^2 Sigma_y + (1 - t0)^2 I), or the mixture of such: where guided sampling begins."""
        return back_to(self.sample(y, generator), t0, generator)


def _along(x: Tensor, t: Tensor, mu: Tensor, V: Tensor) -> Tensor:
    """V_y^T (x - t mu) for each point and component, (n, Y, k, r). x is (n, d), t (n, 1), mu (Y, k, d) and V
    (Y or 1, d, r)."""
    return torch.einsum("nd,ydr->nyr", x, V)[:, :, None] - t[:, :, None, None] * torch.einsum("ykd,ydr->ykr", mu, V)
