"""What is measured on private records, against slow loops and closed forms; and that the records stay behind it."""

import numpy as np
import pytest
import torch

from straightdp.data.captions import Template
from straightdp.data.records import Records, to_pixels
from straightdp.errors import BadInput
from straightdp.moments.basis import fit_basis
from straightdp.moments.statistics import class_moments
from straightdp.privacy import measures as module
from straightdp.privacy.measures import Closeness, Measures
from straightdp.recipe import Release

CLASSES, SIZES = ("ant", "bee", "cat"), ("big", "small")
PROMPTS = Template.read("a {size} {label}", CLASSES, {"size": SIZES})


def some(n: int, seed: int, low: int = 0, high: int = 256) -> Records:
    rng = np.random.default_rng(seed)
    return Records(rng.integers(low, high, (n, 1, 4, 4), dtype=np.uint8), rng.integers(0, 3, n), CLASSES)


def sizes_of(records: Records) -> np.ndarray:
    """Each record's second slot, told by its first pixel."""
    return (records.x[:, 0, 0, 0] % 2).astype(np.int64)


def measures_of(train: Records, holdout: Records | None, own: int | None = None) -> Measures:
    captions = PROMPTS.captions()
    said = [f"a {SIZES[k]} {CLASSES[y]}" for y, k in zip(train.labels, sizes_of(train), strict=True)]
    prompt = np.array([captions.index(text) for text in said], dtype=np.int64)
    return Measures(train, holdout, PROMPTS, prompt, own)


def rows_in(z: torch.Tensor, records: Records) -> list[int]:
    """Which records these images are."""
    places = {picture.tobytes(): k for k, picture in enumerate(records.x)}
    assert len(places) == len(records)
    return [places[picture.tobytes()] for picture in to_pixels(z)]


def copycat(z: torch.Tensor, y: torch.Tensor):
    """A classifier that says what was said of the nearest image it was trained on."""
    return lambda batch: y[torch.cdist(batch.flatten(1).double(), z.flatten(1).double()).argmin(dim=1)]


# --- classifiers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 20, 1000, 2300])
def test_accuracy_is_the_share_of_held_out_records_that_are_told_right(n):
    holdout = some(n, 1)
    wrong = set(range(0, n, 7))

    def predict(batch):
        rows = rows_in(batch, holdout)
        return torch.tensor([(holdout.labels[k] + (k in wrong)) % 3 for k in rows])

    measures = measures_of(some(5, 0), holdout)
    assert measures.holdout_n == n
    assert measures.accuracy(predict) == pytest.approx(1 - len(wrong) / n, abs=1e-12)


def test_the_upper_bound_is_learnt_from_training_records_and_told_of_held_out_ones():
    train, holdout = some(30, 0), some(40, 1)
    hits = 0
    for picture, label in zip(holdout.x.astype(float), holdout.labels, strict=True):
        distances = [((picture - other.astype(float)) ** 2).sum() for other in train.x]
        hits += train.labels[int(np.argmin(distances))] == label
    assert 0 < hits < 40
    assert measures_of(train, holdout).real_accuracy(copycat) == hits / 40


@pytest.mark.parametrize("slot", [0, 1])
def test_agreement_compares_what_is_said_with_what_is_found_slot_by_slot(slot):
    train = some(40, 0)
    truth = torch.from_numpy((train.labels, sizes_of(train))[slot])
    words = (3, 2)[slot]
    one = torch.arange(0, 40, 2)
    two = torch.arange(39, 9, -1)
    lies = truth[two].clone()
    lies[:6] = (lies[:6] + 1) % words
    sets = [(train.z()[one], truth[one]), (train.z()[two], lies)]
    assert measures_of(train, None).agreement(copycat, sets, slot) == [1.0, 1 - 6 / 30]


def test_consistency_trains_once_and_ends_with_the_held_out_records():
    train, holdout, made = some(30, 0), some(40, 1), some(20, 2)
    trained = []

    def fit(z, y):
        trained.append(len(z))
        return copycat(z, y)

    sets = [(made.z(), torch.from_numpy(made.labels))]
    measures = measures_of(train, holdout)
    apart = [*measures.agreement(copycat, sets, 0), measures.real_accuracy(copycat)]
    assert measures.consistency(fit, sets) == apart
    assert trained == [30]


@pytest.mark.parametrize("n_public", [12, 25, 60])
def test_domain_rates_come_from_a_balanced_training_set_and_end_with_the_held_out_records(n_public):
    """Private records are light and public ones are dark, but for four of the held-out ones."""
    train, public, dark = some(25, 0, 128, 256), some(n_public, 1, 0, 128), some(4, 2, 0, 128)
    light = some(6, 3, 128, 256)
    holdout = Records(np.concatenate([light.x, dark.x]), np.zeros(10, np.int64), CLASSES)
    seen = []

    def fit(z, y):
        seen.append((z, y))
        return lambda batch: (batch.flatten(1).mean(dim=1) < 0).long()

    sets = [light.z(), dark.z(), torch.cat([light.z()[:1], dark.z()])]
    assert measures_of(train, holdout).domain_rates(fit, public.z(), sets) == [1.0, 0.0, 0.2, 0.6]
    (z, y), n = seen[0], min(25, n_public)
    assert torch.bincount(y).tolist() == [n, n]
    assert len(set(rows_in(z[y == 0], train))) == len(set(rows_in(z[y == 1], public))) == n


def test_what_is_left_of_a_released_sum_is_canaries_and_noise():
    train, public = some(30, 0), some(80, 1)
    basis = fit_basis(public.z(), torch.from_numpy(public.labels), Release(features=5, rank=3), 4.0)
    statistic = class_moments(basis, 3)
    noise = np.random.default_rng(0).normal(size=(3, 6))
    total, slow = noise.copy(), noise.copy()
    for k, (z, label) in enumerate(zip(train.z(), train.labels, strict=True)):
        one = statistic.vectors(z.flatten()[None].double(), torch.tensor([label]))[0].numpy()
        total[label] += one
        slow[label] += one if k >= 22 else 0  # the last eight are canaries
    found = measures_of(train, None, own=22).left_of(total, statistic, lambda z: z)
    assert found == pytest.approx(slow, abs=1e-6)
    with pytest.raises(BadInput, match="audit alone"):  # it would be the exact sum of private records
        measures_of(train, None).left_of(total, statistic, lambda z: z)


# --- features ---------------------------------------------------------------------------------------------

LOOK = torch.from_numpy(np.random.default_rng(9).normal(size=(16, 4)))


class Looking:
    """Four numbers a picture; remembers which pictures it was shown."""

    def __init__(self):
        self.shown: list[torch.Tensor] = []

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        self.shown.append(z)
        return z.flatten(1).double() @ LOOK


def slow_frechet(one: torch.Tensor, two: torch.Tensor) -> float:
    a, b = one.numpy(), two.numpy()
    s, t = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    gap = a.mean(axis=0) - b.mean(axis=0)
    values, vectors = np.linalg.eigh(s)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ t @ root).clip(min=0)).sum()
    return float(gap @ gap + np.trace(s) + np.trace(t) - 2 * cross)


def slow_share_within(points: torch.Tensor, centres: torch.Tensor) -> float:
    """Of the points in some ball about a centre that reaches the centre's third neighbour."""
    inside = 0
    for point in points.numpy():
        for k, centre in enumerate(centres.numpy()):
            others = sorted(np.linalg.norm(centre - other) for j, other in enumerate(centres.numpy()) if j != k)
            if np.linalg.norm(point - centre) <= others[2]:
                inside += 1
                break
    return inside / len(points)


def check(found: dict, real: torch.Tensor, labels: np.ndarray, fake: torch.Tensor, y: np.ndarray) -> None:
    """What was said of fake features is what the slow way finds."""
    assert found["n"] == len(fake)
    assert found["distance"] == pytest.approx(slow_frechet(real, fake), rel=1e-6)
    assert found["precision"] == slow_share_within(fake, real)
    assert found["recall"] == slow_share_within(real, fake)
    within = [slow_frechet(real[labels == c], fake[y == c]) for c in range(3)]
    assert found["classes"] == pytest.approx(within, rel=1e-6)


def test_quality_against_all_held_out_records():
    holdout, made, look = some(50, 1), some(30, 2, 40, 220), Looking()
    measures, y = measures_of(some(5, 0), holdout), torch.from_numpy(made.labels)
    found = measures.quality(look, look(made.z()), y, 1000)
    check(found, look(holdout.z()), holdout.labels, look(made.z()), made.labels)
    assert 0 < found["precision"] < 1 or 0 < found["recall"] < 1
    without = measures.quality(look, look(made.z()), None, 1000)
    assert without == found | {"classes": None}


def test_at_most_so_many_held_out_records_take_part_and_each_with_its_own_class():
    holdout, made, look = some(60, 1), some(30, 2), Looking()
    measures = measures_of(some(5, 0), holdout)
    fake = Looking()(made.z())
    found = measures.quality(look, fake, torch.from_numpy(made.labels), 25)
    rows = rows_in(torch.cat(look.shown), holdout)
    assert len(rows) == len(set(rows)) == 25
    assert rows != list(range(25))  # no matter how a file is sorted
    check(found, Looking()(holdout.z()[rows]), holdout.labels[rows], fake, made.labels)
    again = measures.quality(look, fake + 1, None, 25)
    assert again["distance"] == pytest.approx(slow_frechet(Looking()(holdout.z()[rows]), fake + 1), rel=1e-6)


def test_too_few_points_have_no_precision_and_classes_of_one_no_distance():
    holdout, look = some(30, 1), Looking()
    measures, made = measures_of(some(5, 0), holdout), some(4, 2)
    three = measures.quality(look, look(made.z()[:3]), torch.tensor([0, 0, 2]), 100)
    assert (three["precision"], three["recall"]) == (None, None)
    assert three["distance"] == pytest.approx(slow_frechet(look(holdout.z()), look(made.z()[:3])), rel=1e-6)
    zeros = torch.from_numpy(holdout.labels == 0)
    nearly = pytest.approx(slow_frechet(look(holdout.z())[zeros], look(made.z()[:2])), rel=1e-6)
    assert three["classes"] == [nearly, None, None]
    four = measures.quality(look, look(made.z()), None, 100)
    assert four["recall"] == slow_share_within(look(holdout.z()), look(made.z()))
    few = measures_of(some(5, 0), some(3, 1)).quality(look, look(made.z()), None, 100)
    assert (few["precision"], few["recall"]) == (None, None)


def test_training_records_are_judged_as_if_they_were_synthetic():
    train, holdout, look = some(80, 0), some(40, 1), Looking()
    found = measures_of(train, holdout).quality_of_training(look, 30, 1000)
    shown = next(z for z in look.shown if len(z) == 30)
    rows = rows_in(shown, train)
    assert len(set(rows)) == 30
    assert rows != list(range(30))
    check(found, look(holdout.z()), holdout.labels, look(shown), train.labels[rows])
    assert measures_of(train, holdout).quality_of_training(look, 30, 1000) == found
    assert measures_of(train, holdout).quality_of_training(look, 100, 1000)["n"] == 80


# --- how near images come to training records -------------------------------------------------------------


def slow_distances(pictures: np.ndarray, train: Records) -> np.ndarray:
    """(n, N), in pixels from 0 to 1."""
    return np.array([[np.sqrt((((a / 255) - (b / 255)) ** 2).sum()) for b in train.x] for a in pictures])


def test_closeness_is_what_a_loop_over_all_pairs_finds():
    train, holdout, made = some(30, 0), some(12, 1), some(9, 2)
    y = torch.tensor([2, 0, 0, 2, 1, 0, 2, 2, 0])
    found = measures_of(train, holdout).closeness(made.z(), y, shown=7, k=4)
    assert found.shown == [1, 4, 0, 2, 3, 5, 6]  # ant, bee, cat; ant, cat; ant, cat
    far = slow_distances(made.x, train)
    assert sorted(found.images) == pytest.approx(sorted(far.min(axis=1)), rel=1e-5)
    assert sorted(found.heldout) == pytest.approx(sorted(slow_distances(holdout.x, train).min(axis=1)), rel=1e-5)
    order = np.argsort(far[found.shown], axis=1)[:, :4]
    assert found.nearest.dtype == np.uint8
    np.testing.assert_array_equal(found.nearest, train.x[order])
    np.testing.assert_allclose(found.distances, np.take_along_axis(far[found.shown], order, axis=1), rtol=1e-5)


def test_a_copy_of_a_training_record_is_at_distance_0_and_shows_that_record():
    train, made = some(300, 0), some(6, 2)
    made.x[4] = train.x[123]
    found = measures_of(train, some(5, 1)).closeness(made.z(), torch.zeros(6), shown=6, k=2)
    assert found.images.count(0.0) == 1
    assert found.shown == [0, 1, 2, 3, 4, 5]
    assert found.distances[4, 0] == 0.0
    np.testing.assert_array_equal(found.nearest[4, 0], train.x[123])
    assert (np.delete(found.distances.min(axis=1), 4) > 0).all()


def test_black_and_white_are_as_far_apart_as_the_root_of_the_number_of_pixels():
    black, white = (Records(np.full((1, 1, 4, 4), v, np.uint8), np.zeros(1, np.int64), CLASSES) for v in (0, 255))
    found = measures_of(black, white).closeness(white.z(), torch.zeros(1), shown=1, k=1)
    assert found.images == found.heldout == [4.0]
    assert found.distances.tolist() == [[4.0]]


def test_no_more_records_are_shown_or_measured_than_there_are_or_were_asked_for(monkeypatch):
    train, holdout, made = some(3, 0), some(20, 1), some(40, 2)
    measures = measures_of(train, holdout)
    few = measures.closeness(made.z()[:2], torch.tensor([1, 1]), shown=12, k=4)
    assert few.shown == [0, 1]
    assert few.nearest.shape == (2, 3, 1, 4, 4)
    monkeypatch.setattr(module, "YARDSTICK", 10)
    some_of = measures.closeness(made.z(), torch.arange(40) % 3, shown=0, k=1)
    for distances, records in ((some_of.images, made), (some_of.heldout, holdout)):
        every = slow_distances(records.x, train).min(axis=1)
        places = [int(np.abs(every - d).argmin()) for d in distances]
        assert every[places] == pytest.approx(distances, rel=1e-5)
        assert len(set(places)) == 10
        assert sorted(places) != list(range(10))  # images are sorted by class: the first ones would not do
    assert len(some_of.shown) == len(some_of.nearest) == 0


# --- the edges of the room --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.accuracy(lambda z: z),
        lambda m: m.real_accuracy(copycat),
        lambda m: m.consistency(copycat, []),
        lambda m: m.domain_rates(copycat, some(5, 1).z(), []),
        lambda m: m.quality(Looking(), torch.zeros(9, 4), None, 10),
        lambda m: m.quality_of_training(Looking(), 5, 10),
        lambda m: m.closeness(some(5, 1).z(), torch.zeros(5), shown=1, k=1),
    ],
    ids=["accuracy", "real_accuracy", "consistency", "domain_rates", "quality", "quality_of_training", "closeness"],
)
def test_without_held_out_records_nothing_is_measured_on_them(ask):
    measures = measures_of(some(10, 0), None)
    assert measures.holdout_n == 0
    with pytest.raises(BadInput, match=r"private\.holdout"):
        ask(measures)


def test_records_are_behind_the_measures_alone():
    """Nothing but the declared measures can be asked for, and what is kept is under mangled names."""
    train, holdout, look = some(20, 0), some(20, 1), Looking()
    measures = measures_of(train, holdout)
    measures.quality(look, look(train.z()), None, 20)  # so that whatever is kept for later is there
    found = measures.closeness(train.z(), torch.zeros(20), shown=2, k=2)
    assert {name for name in dir(measures) if not name.startswith("_")} == {
        "accuracy", "agreement", "closeness", "consistency", "domain_rates", "enough", "holdout_n", "left_of",
        "quality", "quality_of_training", "real_accuracy", "scores",
    }  # fmt: skip
    assert all(name.startswith("_Measures__") for name in vars(measures))
    assert repr(measures) == object.__repr__(measures)
    declared = {"images", "heldout", "shown", "nearest", "distances"}
    assert set(vars(found)) == {name for name in dir(found) if not name.startswith("_")} == declared
    assert isinstance(found, Closeness)
    assert not np.shares_memory(found.nearest, train.x)
