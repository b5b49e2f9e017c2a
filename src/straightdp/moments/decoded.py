"""Moments of codes, seen as pictures: mixtures of Gaussians fitted to what a decoder makes of a release's own draws.

Where the network works in pixels beside a release of codes (`latent.flow = "pixels"`), these lead it on. All here is
post-processing of the release, done anew from a fixed seed wherever it is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from straightdp.moments.basis import fit_basis
from straightdp.moments.components import k_means
from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import public_moments
from straightdp.recipe import Release

DRAWS, SEEN = 3_000, 4_000  # of each class; of all classes together, for the directions
GAUSSIANS, FEATURES = 16, 128

Decode = Callable[[Tensor], Tensor]
"""Codes (n, d) to pictures in [-1, 1], (n, C, H, W)."""
Fit = tuple[Tensor, Tensor, Tensor]
"""Centres (k, p), their shares, and one covariance around them."""


def decoded(moments: MomentModel, decode: Decode) -> MomentModel:
    """As many classes as the release has, GAUSSIANS each, on the device of `moments`; beside it the public records as
    one Gaussian of decoded draws too, if the release knows them: pictures of them it does not hold."""
    device, crowd, moments = moments.mu.device, moments.crowd, moments.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    classes = len(moments.mu)

    def pictures(model: MomentModel, label: int, n: int) -> Tensor:
        y = torch.full((n,), label)
        return decode(model.sample(y, generator)).flatten(1).double().cpu()

    some = torch.cat([pictures(moments, label, -(-SEEN // classes)) for label in range(classes)])
    p = min(FEATURES, len(some) - 1, some.shape[1])
    section = Release(features=p, rank=p, floor=moments.floor)
    basis = fit_basis(some, torch.zeros(len(some), dtype=torch.int64), section)
    known: dict[bytes, Fit] = {}  # captions of one class have the same moments
    for k in range(classes):
        if (key := _row(moments, k)) not in known:
            known[key] = _fit(basis.features(pictures(moments, k, DRAWS)), GAUSSIANS, generator)
    fitted = zip(*(known[_row(moments, k)] for k in range(classes)), strict=True)
    centres, shares, spread = (torch.stack(parts) for parts in fitted)
    found = MomentModel.from_features(basis, centres, spread, moments.prior.double(), p, moments.floor, shares)
    if crowd is not None:
        public = pictures(crowd.to(torch.device("cpu")), 0, DRAWS)
        found = found.beside(public_moments(public, torch.zeros(DRAWS, dtype=torch.int64), basis, section))
    return found.to(device)


def _row(moments: MomentModel, k: int) -> bytes:
    """All that draws of class k hang on."""
    own = 0 if len(moments.V) == 1 else k
    parts = [moments.means[k], moments.V[own], moments.lam[own]]
    parts += [] if moments.weights is None else [moments.weights[k]]
    return b"".join(part.numpy().tobytes() for part in parts)


def _fit(f: Tensor, k: int, generator: torch.Generator) -> Fit:
    """Of features (n, p). A centre that lost its points stands at their mean, with next to no share."""
    middle = f.mean(dim=0)
    centres = middle + k_means(f - middle, k, generator)
    place = torch.cdist(f, centres).argmin(dim=1)
    share = torch.bincount(place, minlength=k).double().clamp_min(1e-6)
    residual = f - centres[place]
    return centres, share / share.sum(), residual.T @ residual / len(f)
