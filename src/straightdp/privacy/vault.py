"""The vault: private records go in, and only declared, noised values come out.

It has no method that returns a record. It computes on records with functions it is given: the release's statistics,
whose bound it enforces itself, and the clipping engine's sum. A test lists the only places that may give it one.
What it computes without noise (gradient norms, batch sizes) it writes to `private/diagnostics.jsonl` itself and
does not return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from straightdp.data.records import Records, to_z
from straightdp.errors import BadInput, BudgetRefused
from straightdp.flow.path import Draws
from straightdp.nets.rowwise import RowWise
from straightdp.nets.spaces import Pixels, Space
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import BoundedSum, Relation, VoteSum
from straightdp.privacy.noise import Noise
from straightdp.team import ALONE, Team

if TYPE_CHECKING:
    from straightdp.dpsgd.clipping import ClippedSum


FeatureMap = Callable[[torch.Tensor], torch.Tensor]
"""Images in [-1, 1], (n, C, H, W), to features (n, p): frozen and public."""


@dataclass(frozen=True)
class MicroBatch:
    """A fixed-shape slice of a Poisson batch. Rows with mask 0 are padding and must contribute nothing."""

    z: torch.Tensor
    captions: torch.Tensor  # (n, length) ids
    mask: torch.Tensor
    draws: Draws


@dataclass(frozen=True)
class Captions:
    """How to find what the records' captions are to the network, (N, length) ids, and to cross moments, (N, m)."""

    ids: Callable[[], torch.Tensor]
    features: Callable[[], torch.Tensor] | None = None


class Vault:
    """Guarantee: every value returned is the output of a mechanism that was declared, certified and recorded.

    `space` says where records lie for the flow; they are brought there, and their captions read, after the first
    mechanism's entry is on disk. Left out, that is their pixels, and their class stands for their caption.
    """

    def __init__(
        self,
        records: Records,
        ledger: Ledger,
        noise: Noise,
        *,
        n: int,
        diagnostics: Path,
        team: Team = ALONE,
        space: Space | None = None,
        captions: Captions | None = None,
    ):
        if len(records) > n:
            raise BadInput(f"{len(records)} private records were found but N = {n} is declared; raise privacy.n")
        self.__records = records
        self.__space = space or Pixels(records.shape)
        self.__labels = torch.from_numpy(records.labels.astype(np.int64))
        self.__captions = captions or Captions(lambda: self.__labels[:, None])
        self.__codes: torch.Tensor | None = None
        self.__seen: torch.Tensor | None = None
        self.__ledger = ledger
        self.__noise = noise
        self.__diagnostics = diagnostics
        self.__team = team
        self.__resident: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.__norms: list[tuple[str, int, list[torch.Tensor], float, torch.Tensor, int]] = []
        self.n = n
        self.classes = len(records.classes)
        self.released: dict[str, np.ndarray] = {}  # what mechanisms of one execution gave out, noise and all

    def gaussian_sum(self, id: str, statistic: BoundedSum, step: int = 0) -> np.ndarray:
        """The statistic's sum over all records plus discrete Gaussian noise, in the statistic's own units.

        The noise is drawn and the entry is on disk before a record is read. A mechanism that was declared for several
        executions has one a step.
        """
        part = self.__declared(id, "gaussian")
        needed = statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE)
        if needed > part.sensitivity * (1 + 1e-9):
            raise BudgetRefused(f"{id} moves by {needed:.6g}, more than the {part.sensitivity:.6g} declared")
        features_of = self.__captions.features
        if statistic.condition == "caption" and features_of is None:
            raise BudgetRefused(f"{id} asks for features of captions, which these records have none of")
        std = part.sigma * part.sensitivity / statistic.grid
        repeated, name = (id, step) in self.__ledger.executed, f"{id}/{step}" if part.count > 1 else id
        noise = {
            group: self.__noise.integer_gaussian(f"{name}/{group}", std * relative, size, drawn_before=repeated)
            for group, (size, relative) in statistic.noise_shape().items()
        }
        self.__ledger.spend(id, step)
        given = features_of() if statistic.condition == "caption" and features_of else self.__labels
        exact = statistic.exact(self.__z(), given)
        self.__noise.bind(name, b"".join(exact[group].tobytes() for group in sorted(exact)))
        noisy = statistic.assemble({group: exact[group] + noise[group] for group in exact})
        if part.count == 1:
            self.released[id] = noisy.copy()
        return noisy

    def vote_histogram(self, id: str, step: int, see: FeatureMap, candidates: torch.Tensor) -> np.ndarray:
        """How many records have each candidate of their class for their nearest one, plus discrete Gaussian noise.

        Candidates are (classes, population, p): features, in which records are seen by `see`, once. A record's vote is
        the same to the bit whatever the other records are, so adding one adds one vote.
        """

        def places(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if self.__seen is None:
                self.__seen = RowWise(see, self.__records.shape, candidates.device, slots=32)(self.__records.z())
            found = torch.full((len(y),), -1)
            for c in y.unique().tolist():
                nearest = RowWise(
                    lambda rows, c=c: torch.cdist(rows, candidates[c]).argmin(dim=1, keepdim=True),
                    tuple(candidates.shape[2:]),
                    candidates.device,
                )
                found[y == c] = nearest(self.__seen[y == c])[:, 0].long()
            return found

        return self.gaussian_sum(id, VoteSum(places, candidates.shape[1], len(candidates)), step)

    def bind(self, id: str, start: str) -> None:
        """Tie a mechanism to what it starts from (weights, plan, basis) before it runs: a resumed run repeats it."""
        if id not in self.__ledger.declared:
            raise BudgetRefused(f"mechanism {id!r} was not declared before the first private read")
        if self.__team.leads:
            began = any(name == id for name, _ in self.__ledger.executed)
            self.__noise.bind(f"{id}/start", start.encode(), bound_before=began)

    def noisy_gradient(
        self,
        id: str,
        step: int,
        clipped_sum: Callable[[MicroBatch], ClippedSum],
        *,
        clip: float,
        micro_batch: int,
        device: torch.device,
        diagnostics_due: bool = True,
    ) -> torch.Tensor:
        """One DP-SGD step's gradient as one vector: (sum of clipped gradients + sigma C noise) / (q N), N declared.

        An empty Poisson batch gives pure noise. The draws of t and xi come from the secret key: were they known,
        a record's place in the batch would matter to its neighbours. In a team, each process samples its own share of
        the records (every size-th), the leader adds the shares up and noises the sum, once. What is known without noise
        is written down when `diagnostics_due` says so: asking the device for it at every step would make it wait.
        """
        part = self.__declared(id, "poisson_gaussian")
        if part.q is None:
            raise BudgetRefused(f"{id} has no sampling rate")
        if self.__team.leads:
            self.__ledger.spend(id, step, clip=clip)
        if self.__team.told((id, step, clip)) != (id, step, clip):  # and nobody reads a record before this is on disk
            raise BudgetRefused(f"{id}: the processes of this run are not at the same step")
        members = self.__noise.members(f"{id}/members", step, part.q, len(self.__records))
        places = np.flatnonzero(members % self.__team.size == self.__team.rank)
        total: torch.Tensor | None = None
        norms: list[torch.Tensor] = []
        for start in range(0, max(len(places), 1), micro_batch):
            chosen = places[start : start + micro_batch]
            result = clipped_sum(self.__micro_batch(id, step, members, chosen, micro_batch, device))
            if result.clip != clip:
                raise BudgetRefused(f"{id} was clipped to {result.clip:g}, its noise is made for {clip:g}")
            norms.append(result.norms[: len(chosen)].float().clone())
            total = result.total.clone() if total is None else total.add_(result.total)
        assert total is not None
        total = self.__team.summed(total)
        noise = torch.zeros(0)
        if self.__team.leads:
            noise = self.__noise.normal(f"{id}/noise", step, len(total), total.device) * (part.sigma * clip)
            total += noise
            total /= part.q * self.n
        self.__keep_diagnostics(id, step, norms, clip, noise, due=diagnostics_due)
        return self.__team.from_leader(total)

    def __micro_batch(
        self, id: str, step: int, members: np.ndarray, places: np.ndarray, size: int, device: torch.device
    ) -> MicroBatch:
        """The records at `places` of the batch, padded to `size`. A record's draws hang on its place alone."""
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(places)] = places
        rows = members[padded] if len(members) else padded
        mask = torch.zeros(size)
        mask[: len(places)] = 1
        x, captions = self.__on(device)
        index = torch.from_numpy(rows).to(device, non_blocking=True)
        draws = self.__noise.draws(f"{id}/draws", step, padded, device)
        return MicroBatch(to_z(x[index]), captions[index], mask.to(device, non_blocking=True), draws)

    def __z(self) -> torch.Tensor:
        """All records as the release and the network see them, made once."""
        if isinstance(self.__space, Pixels):
            return self.__records.z()
        if self.__codes is None:
            self.__codes = self.__space.encode(self.__records.z())
        return self.__codes

    def __on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Records and captions on the device, where they stay. An empty set has one row of zeros, for padding."""
        if device not in self.__resident:
            x = torch.from_numpy(self.__records.x) if isinstance(self.__space, Pixels) else self.__z()
            ids = self.__captions.ids()
            if not len(x):
                x, ids = torch.zeros(1, *self.__space.shape), ids.new_zeros(1, ids.shape[1])
            self.__resident[device] = x.to(device), ids.to(device)
        return self.__resident[device]

    def __declared(self, id: str, kind: str):
        part = self.__ledger.declared.get(id)
        if part is None or part.kind != kind or not self.__ledger.certified:
            raise BudgetRefused(f"mechanism {id!r} ({kind}) was not declared before the first private read")
        return part

    def __keep_diagnostics(
        self, id: str, step: int, norms: list[torch.Tensor], clip: float, noise: torch.Tensor, *, due: bool
    ) -> None:
        """Per-record norms, and how large the noise was, wait on the device and are written down together, when due."""
        size = noise.square().mean().sqrt()
        self.__norms.append((id, step, norms, clip, size, len(noise)))
        if not due:
            return
        shares = self.__team.gathered([torch.cat(values).cpu() for _, _, values, *_ in self.__norms])
        if self.__team.leads:
            with open(self.__diagnostics, "a", encoding="utf-8") as file:
                for (name, k, _, c, size, n), *values in zip(self.__norms, *shares, strict=True):
                    row = {"id": name, **_summary(k, torch.cat(values), c), "noise": float(size), "size": n}
                    file.write(json.dumps(row) + "\n")
        self.__norms = []


def _summary(step: int, norms: torch.Tensor, clip: float) -> dict[str, float | int | None]:
    """Quantiles of the per-record norms and the clip fraction. Private: computed without noise."""
    entry: dict[str, float | int | None] = {"step": step, "batch": len(norms), "clip": clip}
    finite = norms[torch.isfinite(norms)]
    for name, level in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
        entry[name] = float(finite.quantile(level)) if len(finite) else None
    entry["clip_fraction"] = float((norms > clip).float().mean()) if len(norms) else None
    entry["non_finite"] = int(len(norms) - len(finite))
    return entry
