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

import numpy as np
import torch

from straightdp.data.records import Records, to_z
from straightdp.errors import BadInput, BudgetRefused
from straightdp.flow.path import Draws
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import BoundedSum, Relation
from straightdp.privacy.noise import Noise


@dataclass(frozen=True)
class MicroBatch:
    """A fixed-shape slice of a Poisson batch. Rows with mask 0 are padding and must contribute nothing."""

    z: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    draws: Draws


@dataclass(frozen=True)
class ClippedSum:
    """Per parameter, the sum of per-record gradients clipped to `clip`; each record's norm, for diagnostics only."""

    sums: list[torch.Tensor]
    norms: torch.Tensor
    clip: float


class Vault:
    """Guarantee: every value returned is the output of a mechanism that was declared, certified and recorded."""

    def __init__(self, records: Records, ledger: Ledger, noise: Noise, *, n: int, diagnostics: Path):
        if len(records) > n:
            raise BadInput(f"{len(records)} private records were found but N = {n} is declared; raise privacy.n")
        self.__records = records
        self.__labels = torch.from_numpy(records.labels.astype(np.int64))
        self.__ledger = ledger
        self.__noise = noise
        self.__diagnostics = diagnostics
        self.n = n
        self.classes = len(records.classes)

    def gaussian_sum(self, id: str, statistic: BoundedSum) -> np.ndarray:
        """The statistic's sum over all records plus discrete Gaussian noise, in the statistic's own units.

        The noise is drawn and the entry is on disk before a record is read.
        """
        part = self.__declared(id, "gaussian")
        needed = statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE)
        if needed > part.sensitivity * (1 + 1e-9):
            raise BudgetRefused(f"{id} moves by {needed:.6g}, more than the {part.sensitivity:.6g} declared")
        std = part.sigma * part.sensitivity / statistic.grid
        repeated = (id, 0) in self.__ledger.executed
        noise = {
            group: self.__noise.integer_gaussian(f"{id}/{group}", std * relative, size, drawn_before=repeated)
            for group, (size, relative) in statistic.noise_shape().items()
        }
        self.__ledger.spend(id)
        exact = statistic.exact(to_z(self.__records.x), self.__labels)
        self.__noise.bind(id, b"".join(exact[group].tobytes() for group in sorted(exact)))
        return statistic.assemble({group: exact[group] + noise[group] for group in exact})

    def bind(self, id: str, start: str) -> None:
        """Tie a mechanism of many steps to what it starts from (weights, plan), so that a resumed run repeats it."""
        self.__declared(id, "poisson_gaussian")
        self.__noise.bind(id, start.encode())

    def noisy_gradient(
        self,
        id: str,
        step: int,
        clipped_sum: Callable[[MicroBatch], ClippedSum],
        *,
        clip: float,
        micro_batch: int,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """One DP-SGD step's gradient: (sum of clipped gradients + sigma C noise) / (q N), N declared.

        An empty Poisson batch gives pure noise. The draws of t and xi come from the secret key: were they known,
        a record's place in the batch would matter to its neighbours.
        """
        part = self.__declared(id, "poisson_gaussian")
        if part.q is None:
            raise BudgetRefused(f"{id} has no sampling rate")
        self.__ledger.spend(id, step, clip=clip)
        members = self.__noise.members(f"{id}/members", step, part.q, len(self.__records))
        sums: list[torch.Tensor] | None = None
        norms: list[torch.Tensor] = []
        for index, start in enumerate(range(0, max(len(members), 1), micro_batch)):
            chosen = members[start : start + micro_batch]
            result = clipped_sum(self.__micro_batch(id, step, index, chosen, micro_batch, device))
            if result.clip != clip:
                raise BudgetRefused(f"{id} was clipped to {result.clip:g}, its noise is made for {clip:g}")
            norms.append(result.norms[: len(chosen)].float().cpu())
            sums = result.sums if sums is None else [a + b for a, b in zip(sums, result.sums, strict=True)]
        assert sums is not None
        self.__write_diagnostics(step, torch.cat(norms), clip)
        return self.__noised(id, step, sums, part.sigma * clip, part.q * self.n)

    def __micro_batch(
        self, id: str, step: int, index: int, chosen: np.ndarray, size: int, device: torch.device
    ) -> MicroBatch:
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(chosen)] = chosen
        mask = torch.zeros(size)
        mask[: len(chosen)] = 1
        z = to_z(self.__records.x[padded]) if len(self.__records) else torch.zeros(size, *self.__records.shape)
        y = self.__labels[padded] if len(self.__records) else torch.zeros(size, dtype=torch.int64)
        draws = self.__noise.draws(f"{id}/draws", step, index, device)
        return MicroBatch(z.to(device), y.to(device), mask.to(device), draws)

    def __noised(
        self, id: str, step: int, sums: list[torch.Tensor], std: float, expected_batch: float
    ) -> list[torch.Tensor]:
        sizes = [value.numel() for value in sums]
        noise = self.__noise.normal(f"{id}/noise", step, sum(sizes), sums[0].device) * std
        pieces = noise.split(sizes)
        return [(s + e.view_as(s)) / expected_batch for s, e in zip(sums, pieces, strict=True)]

    def __declared(self, id: str, kind: str):
        part = self.__ledger.declared.get(id)
        if part is None or part.kind != kind or not self.__ledger.certified:
            raise BudgetRefused(f"mechanism {id!r} ({kind}) was not declared before the first private read")
        return part

    def __write_diagnostics(self, step: int, norms: torch.Tensor, clip: float) -> None:
        """Per-step quantiles of the per-record norms and the clip fraction. Private: computed without noise."""
        entry: dict[str, float | int | None] = {"step": step, "batch": len(norms), "clip": clip}
        finite = norms[torch.isfinite(norms)]
        for name, level in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
            entry[name] = float(finite.quantile(level)) if len(finite) else None
        entry["clip_fraction"] = float((norms > clip).float().mean()) if len(norms) else None
        entry["non_finite"] = int(len(norms) - len(finite))
        with open(self.__diagnostics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
