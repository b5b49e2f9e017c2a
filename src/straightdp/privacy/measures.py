"""What is measured on private records without noise. Every result may go to `private/` and the internal report only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from straightdp.data.captions import Template
from straightdp.data.records import Records, to_pixels, to_z
from straightdp.errors import BadInput
from straightdp.metrics.frechet import frechet_between
from straightdp.metrics.label_aware import per_class_frechet
from straightdp.metrics.neighbours import nearest
from straightdp.metrics.precision_recall import precision_recall
from straightdp.metrics.probe import agreement
from straightdp.nets.classifiers import Predict
from straightdp.privacy.mechanisms import RowSum

Fit = Callable[[Tensor, Tensor], Predict]
Score = Callable[[Tensor, Tensor], np.ndarray]
"""Images in [-1, 1] and their classes to one score a record: higher for what looks trained on."""

FeatureMap = Callable[[Tensor], Tensor]

K = 3  # of precision and recall: a ball reaches its K-th neighbour
YARDSTICK = 1000  # images and held-out records whose nearest training record is looked for


@dataclass(frozen=True)
class Closeness:
    """How near images come to training records, in pixels from 0 to 1: distances of some images and of some held-out
    records to their nearest one; and for the images in the rows `shown`, the nearest records and how far they are."""

    images: list[float]
    heldout: list[float]
    shown: list[int]
    nearest: np.ndarray  # (shown, k, C, H, W) uint8: private records
    distances: np.ndarray  # (shown, k)


class Measures:
    """The private records behind measures of them. There are no held-out ones if `holdout` is None."""

    def __init__(
        self, train: Records, holdout: Records | None, prompts: Template, prompt: np.ndarray, own: int | None = None
    ):
        """`own`: how many training records are no canaries; these come first."""
        self.__train, self.__holdout, self.__own = train, holdout, own
        self.__slots = prompts.combinations()[prompt].astype(np.int64)  # a row a training record: class, then slots
        self.__kept: tuple[FeatureMap, int, Tensor] | None = None

    @property
    def holdout_n(self) -> int:
        return 0 if self.__holdout is None else len(self.__holdout)

    @property
    def enough(self) -> bool:
        """Whether there are records to measure on: two of each kind, the fewest that have a spread."""
        return min(len(self.__train), self.holdout_n) >= 2

    def accuracy(self, predict: Predict) -> float:
        """Of a classifier on the held-out real records."""
        holdout = self.__held_out()
        return agreement(predict, holdout.z(), torch.from_numpy(holdout.labels))

    def real_accuracy(self, fit: Fit) -> float:
        """The non-private upper bound: the same probe trained on the private records themselves."""
        return self.accuracy(fit(self.__train.z(), torch.from_numpy(self.__train.labels)))

    def consistency(self, fit: Fit, sets: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """How often a classifier trained on the private records finds in each set's images the class that they
        have, and last in the held-out records their own."""
        predict = fit(self.__train.z(), torch.from_numpy(self.__train.labels))
        return [*(agreement(predict, z, y) for z, y in sets), self.accuracy(predict)]

    def agreement(self, fit: Fit, sets: Sequence[tuple[Tensor, Tensor]], slot: int) -> list[float]:
        """How often a classifier of one slot (0 is the class), trained on the private records, finds in each set's
        images what their captions say."""
        predict = fit(self.__train.z(), torch.from_numpy(self.__slots[:, slot]))
        return [agreement(predict, z, values) for z, values in sets]

    def domain_rates(self, fit: Fit, public: Tensor, sets: Sequence[Tensor]) -> list[float]:
        """The share of each set, and last of the held-out records, that a private-or-public classifier takes for
        private. It is trained on as many records of either side."""
        n = min(len(self.__train), len(public))
        generator = torch.Generator().manual_seed(0)
        real = to_z(self.__train.x[torch.randperm(len(self.__train), generator=generator)[:n].numpy()])
        other = public[torch.randperm(len(public), generator=generator)[:n]]
        predict = fit(torch.cat([real, other]), torch.arange(2).repeat_interleave(n))
        every = [*sets, self.__held_out().z()]
        return [agreement(predict, z, torch.zeros(len(z), dtype=torch.int64)) for z in every]

    def scores(self, score: Score, most: int) -> tuple[np.ndarray, np.ndarray]:
        """An attack's scores of at most `most` training records, canaries left out, and of as many held-out ones."""
        train, holdout = self.__train, self.__held_out()

        def of(records: Records, n: int) -> np.ndarray:
            rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most].numpy()
            return score(to_z(records.x[rows]), torch.from_numpy(records.labels[rows]))

        return of(train, min(len(train), self.__own or len(train))), of(holdout, len(holdout))

    def left_of(self, noisy: np.ndarray, statistic: RowSum, encode: FeatureMap) -> np.ndarray:
        """A released sum without all training records that are no canaries: canaries and noise are left. `encode` takes
        images to the space that the run works in."""
        if self.__own is None:
            raise BadInput("no canaries were planted among these records: this is for an audit alone")
        x, labels = self.__train.x[: self.__own], self.__train.labels[: self.__own]
        z, y = encode(to_z(x)), torch.from_numpy(labels.astype(np.int64))
        return noisy - statistic.assemble(statistic.exact(z, y))

    def quality(self, features: FeatureMap, found: Tensor, y: Tensor | None, most: int) -> dict:
        """Distance, precision, recall and distance within each class of features `found` to held-out records.

        Without labels y, none within classes; at most `most` held-out records take part.
        """
        real, labels = self.__features(features, most)
        enough = min(len(real), len(found)) > K
        precision, recall = precision_recall(real, found, K) if enough else (None, None)
        return {
            "n": len(found),
            "distance": frechet_between(real, found),
            "precision": precision,
            "recall": recall,
            "classes": per_class_frechet(real, labels, found, y, len(self.__train.classes)) if y is not None else None,
        }

    def quality_of_training(self, features: FeatureMap, n: int, most: int) -> dict:
        """The same of n private training records, drawn at random: what no generator should be asked to beat."""
        rows = torch.randperm(len(self.__train), generator=torch.Generator().manual_seed(0))[:n].numpy()
        labels = torch.from_numpy(self.__train.labels[rows])
        return self.quality(features, features(to_z(self.__train.x[rows])), labels, most)

    def closeness(self, z: Tensor, y: Tensor, *, shown: int, k: int) -> Closeness:
        """How near images z come to training records, beside held-out ones; for the first images of the classes, the
        k nearest training records themselves. Compared where z lies."""
        k = min(k, len(self.__train))
        train, heldout = self.__train.z().to(z.device), self.__held_out().z().to(z.device)

        def to_nearest(images: Tensor) -> list[float]:
            rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:YARDSTICK]
            return (nearest(images[rows], train, 1)[0][:, 0] / 2).tolist()

        rows = _first_of_classes(y, shown)
        distances, indices = nearest(z[rows], train, k)
        pictures = to_pixels(train[indices.flatten()].cpu()).reshape(*indices.shape, *z.shape[1:])
        return Closeness(to_nearest(z), to_nearest(heldout), rows, pictures, (distances / 2).cpu().numpy())

    def __held_out(self) -> Records:
        if self.__holdout is None:
            raise BadInput("there are no held-out records; set private.holdout")
        return self.__holdout

    def __features(self, features: FeatureMap, most: int) -> tuple[Tensor, Tensor]:
        """Of the held-out records, computed once for the same map and number; they never leave this object."""
        holdout = self.__held_out()
        rows = torch.randperm(len(holdout), generator=torch.Generator().manual_seed(0))[:most].sort().values.numpy()
        if self.__kept is None or self.__kept[:2] != (features, most):
            self.__kept = features, most, features(to_z(holdout.x[rows]))
        return self.__kept[2], torch.from_numpy(holdout.labels[rows])


def _first_of_classes(y: Tensor, n: int) -> list[int]:
    """n rows, taking the classes in turn."""
    by_class = [torch.nonzero(y == c).flatten().tolist() for c in y.unique().tolist()]
    longest = max(map(len, by_class), default=0)
    return [rows[k] for k in range(longest) for rows in by_class if k < len(rows)][:n]
