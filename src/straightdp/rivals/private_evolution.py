"""Private Evolution (Lin et al., 2024): noisy votes choose among pictures of a frozen public prior; nothing is trained.

Each class has a population of its own. In a round, every private record votes for the candidate of its class that is
nearest to it in feature space. The votes are counted and noised elsewhere, behind `vote`; here are only their noisy
counts, so all that this module makes is post-processing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from straightdp.flow.fit import step_generator
from straightdp.flow.path import back_to, noise_like
from straightdp.flow.sampler import Network, euler, guided
from straightdp.moments.elected import above_noise
from straightdp.nets.spaces import Space
from straightdp.progress import Track, quiet

Vote = Callable[[int, Tensor], Tensor]
"""(round, the candidates' features (classes, population, p)) to noisy counts (classes, population).

A round that is asked for again must give what it gave before: to count anew under the same noise could reveal counts.
"""


class Prior(Protocol):
    """The public prior. Pictures come and go class by class, in equal blocks; a prior may do the same for all."""

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n new pictures in [-1, 1], (n, C, H, W)."""
        ...

    def vary(self, images: Tensor, t: float, generator: torch.Generator) -> Tensor:
        """One variation of each picture: noised back to time t, then brought to 1 again."""
        ...


@dataclass(frozen=True)
class Round:
    """A vote as it was released. Guarantee: t and the parents hang on the noisy votes and public numbers alone."""

    t: float  # of this round's variations
    votes: Tensor  # noisy counts, (classes, population)
    parents: Tensor  # how many different candidates of each class were resampled, (classes,)


@dataclass(frozen=True)
class Evolution:
    images: Tensor  # (classes, population, C, H, W) in [-1, 1]
    votes: list[Round]


def evolve(
    prior: Prior,
    see: Callable[[Tensor], Tensor],
    vote: Vote,
    *,
    classes: int,
    population: int,
    rounds: int,
    variations: int,
    times: tuple[float, float],
    threshold: float = 1.5,
    sigma: float,
    seed: int,
    device: torch.device,
    track: Track = quiet,
) -> Evolution:
    """`rounds` votes over `population` pictures a class; `see` gives pictures' features (n, p).

    In round r, with t_v going linearly from times[0] in the first round to times[1] in the last (t = 1 is data, so
    rising times vary strongly at first and little at the end; the paper names the range, Lin et al. the direction):

    1. a candidate stands for itself and `variations` variations of it at t_v: their mean feature is what is voted on;
    2. `threshold` * sigma is taken off the noisy counts and what is left, not below 0, is each candidate's weight;
    3. parents are resampled by weight within each class, and one variation of each at t_v is the next population.

    After the last vote the resampled pictures themselves are the result, unvaried: what comes out was voted for. A
    class whose weights are all 0 keeps its population as it is, unvaried, for that round. A class without private
    records drifts by its noise: released counts cannot tell. No rounds give the prior's first pictures.

    Guarantee: every round's public randomness is keyed by (seed, round), so a run that is repeated from the start and
    gets the same votes ends with the same pictures (on the same machine). ValueError for times outside [0, 1) and for
    votes of another shape or not finite.
    """
    if not all(0 <= t < 1 for t in times):
        raise ValueError(f"the times of variations should lie in [0, 1) but are {times}")
    images = prior.draw(classes * population, step_generator(seed, "evolution start", 0, device))
    first_rows = population * torch.arange(classes)[:, None]
    released = []
    for r in track(range(rounds), 0, rounds):
        t = times[0] + (times[1] - times[0]) * r / max(1, rounds - 1)
        generator = step_generator(seed, "evolution vary", r, device)
        features = outlook(prior, see, images, t, variations, generator)
        votes = vote(r, features.unflatten(0, (classes, population))).cpu()
        if votes.shape != (classes, population) or not bool(votes.isfinite().all()):
            raise ValueError(f"votes should be finite and ({classes}, {population}) but are {tuple(votes.shape)}")
        weights = above_noise(votes, threshold * sigma)
        parents = resample(weights, step_generator(seed, "evolution resample", r, torch.device("cpu")))
        released.append(Round(t, votes, torch.tensor([len(row.unique()) for row in parents])))
        chosen = images[(parents + first_rows).flatten()]
        if r + 1 < rounds:
            unheard = (weights.sum(dim=1) == 0).repeat_interleave(population).to(chosen.device)
            images = torch.where(unheard[:, None, None, None], chosen, prior.vary(chosen, t, generator))
        else:
            images = chosen
    return Evolution(images.unflatten(0, (classes, population)), released)


def outlook(
    prior: Prior,
    see: Callable[[Tensor], Tensor],
    images: Tensor,
    t: float,
    variations: int,
    generator: torch.Generator,
) -> Tensor:
    """Each picture's feature averaged with those of its `variations` variations at t, (n, p).

    It says where a picture's descendants will be, rather than where it is. (Lin et al. leave the picture itself out;
    it is in here because in the last round it is itself what is released.)
    """
    total = see(images)
    for _ in range(variations):
        total = total + see(prior.vary(images, t, generator))
    return total / (1 + variations)


def resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Systematic resampling: weights (classes, n), not negative, to n rows of each class's, ascending, (classes, n).

    Guarantee: row k of a class comes floor or ceil of n w_k / sum(w) times, so often on average, and never if its
    weight is 0. Equal weights give every row once; so do weights that are all 0.
    """
    classes, n = weights.shape
    weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights.double(), 1.0)
    edges = weights.cumsum(dim=1)
    edges = edges / edges[:, -1:] * n
    start = torch.rand(classes, 1, generator=generator).double() + 2.0**-25  # of 24 bits: never too near to 0 or 1
    reached = torch.ceil(edges - start).long()  # how many of start, start + 1, ... lie below each edge
    counts = reached.diff(dim=1, prepend=torch.zeros(classes, 1, dtype=torch.long))
    return torch.arange(n).repeat(classes).repeat_interleave(counts.flatten()).reshape(classes, n)


class FlowPrior:
    """A pretrained network as the prior: v_theta under fixed captions, without guidance unless a null caption and a
    weight are given for it.

    `captions` are ids, (M, length). The null caption alone (M = 1) makes a prior that knows no classes; with M, block
    k of every n pictures is drawn and varied under caption k, so that in `evolve` M = classes gives each class the
    caption that the paper's prior has for it. `steps` Euler steps lead from t = 0 to 1, and their share from a later
    time, at least one. Noise is drawn for all pictures at once, so `batch` changes nothing but speed, memory and
    rounding. Pictures are returned on the CPU; generators must be of `device`.
    """

    def __init__(
        self,
        net: Network,
        captions: Tensor,
        space: Space,
        *,
        guidance: tuple[Tensor, float] | None = None,
        steps: int,
        batch: int,
        device: torch.device,
    ) -> None:
        self._net, self._space, self._device = net, space, device
        self._null, self._weight = guidance or (captions[:1].to(device), 1.0)
        self._captions = captions.to(device)
        self._steps, self._batch = steps, batch

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        return self._arrive(noise_like(torch.empty(n, *self._space.shape, device=self._device), generator), 0.0)

    def vary(self, images: Tensor, t: float, generator: torch.Generator) -> Tensor:
        """At t = 0 nothing of the picture is left; as t goes to 1 the variation becomes the picture itself."""
        return self._arrive(back_to(self._space.encode(images).to(self._device), t, generator), t)

    @torch.no_grad()
    def _arrive(self, x: Tensor, t: float) -> Tensor:
        """Integrate from t to 1 and decode."""
        if len(x) % len(self._captions):
            raise ValueError(f"{len(x)} pictures cannot be shared equally by {len(self._captions)} captions")
        ids = self._captions.repeat_interleave(len(x) // len(self._captions), dim=0)
        steps = max(1, round(self._steps * (1 - t)))
        found = []
        for part, caption in zip(x.split(self._batch), ids.split(self._batch), strict=True):
            end = euler(guided(self._net, caption, self._null, self._weight), part, steps, t)
            found.append(self._space.decode(end).cpu())
        return torch.cat(found)
