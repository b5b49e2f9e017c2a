"""Neighbours, precision and recall, distances per class and the residual probe: loops, known cases, refusals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.metrics.frechet import frechet, moments
from straightdp.metrics.label_aware import mean_of, per_class_frechet
from straightdp.metrics.neighbours import nearest
from straightdp.metrics.precision_recall import precision_recall
from straightdp.nets.classifiers import ResidualNet

SEEDS = st.integers(0, 10**6)


def whole_numbers(seed: int, n: int, p: int, top: int = 4) -> torch.Tensor:
    """Points on a coarse grid: many ties and copies, and no rounding in their squared distances."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, top, size=(n, p))).float()


def by_loop(real: torch.Tensor, fake: torch.Tensor, k: int) -> tuple[float, float]:
    """The definition, pair by pair, on squared distances."""

    def share(points: np.ndarray, centres: np.ndarray) -> float:
        radii = []
        for i, centre in enumerate(centres):
            others = np.delete(centres, i, axis=0)
            radii.append(np.sort(((others - centre) ** 2).sum(axis=1))[k - 1])
        inside = [any(((point - c) ** 2).sum() <= r for c, r in zip(centres, radii, strict=True)) for point in points]
        return float(np.mean(inside))

    a, b = real.double().numpy(), fake.double().numpy()
    return share(b, a), share(a, b)


@settings(max_examples=25)
@given(SEEDS, st.integers(5, 40), st.integers(5, 40), st.integers(1, 4), st.integers(1, 50))
def test_precision_and_recall_are_the_loops_where_ties_abound(seed, n, m, k, block):
    real, fake = whole_numbers(seed, n, 3), whole_numbers(seed + 1, m, 3) + seed % 3
    assert precision_recall(real, fake, k, block) == by_loop(real, fake, k)


@pytest.mark.parametrize("kind", ["whole", "real"])
def test_precision_and_recall_of_500_points_are_the_loops(kind):
    rng = np.random.default_rng(0)
    if kind == "whole":
        real, fake = whole_numbers(1, 500, 12, top=6), whole_numbers(2, 500, 12, top=5) + 2
    else:
        real, fake = (torch.from_numpy(rng.normal(size=(500, 12)).astype(np.float32)) for _ in range(2))
        fake = fake * 0.8 + 0.5
    found = precision_recall(real, fake, block=77)
    assert found == by_loop(real, fake, 3)
    assert all(0.05 < share < 0.95 for share in found)


@settings(max_examples=25)
@given(SEEDS, st.integers(4, 60), st.integers(1, 20))
def test_a_set_covers_itself_and_swapping_the_sets_swaps_the_shares(seed, n, p):
    rng = np.random.default_rng(seed)
    one, two = (torch.from_numpy(rng.normal(size=(n, p)).astype(np.float32)) * 100 for _ in range(2))
    assert precision_recall(one, one[torch.randperm(n)]) == (1.0, 1.0)
    assert precision_recall(one, two) == precision_recall(two, one)[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_a_point_on_the_edge_is_inside_whatever_the_rounding(seed):
    """The mirror image of the third neighbour lies on the edge of one ball, and outside the others."""
    rng = np.random.default_rng(seed)
    centre = torch.from_numpy(rng.integers(-8, 8, size=64) / 8 + 1000).float()
    step = torch.from_numpy(rng.integers(1, 16, size=64) / 8).float()
    real = torch.stack((centre, centre + step, centre + step / 4, centre + step / 2))
    mirrored, beyond = centre - step, centre - step * (1 + 1 / 64)
    assert precision_recall(real, mirrored.expand(4, -1), block=2)[0] == 1.0
    assert precision_recall(real, beyond.expand(4, -1), block=2)[0] == 0.0


def test_copies_have_no_width_but_hold_each_other():
    """Four copies: the third neighbour is at distance 0, and only a fifth copy is inside."""
    copies = torch.full((4, 6), 0.1)
    far = copies + torch.arange(4.0)[:, None] + 1
    assert precision_recall(copies, torch.cat((copies[:1], far)))[0] == 0.2
    assert precision_recall(torch.cat((copies, far)), copies)[0] == 1.0


def test_realism_without_coverage_is_precision_without_recall():
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(400, 2, generator=generator) + torch.tensor([[0.0, 100.0]]) * (torch.arange(400) % 2)[:, None]
    one_half = torch.randn(400, 2, generator=generator) * 0.5
    precision, recall = precision_recall(real, one_half)
    assert precision > 0.95
    assert recall < 0.5


@pytest.mark.parametrize(("n", "m", "name"), [(3, 9, "real"), (9, 3, "fake"), (0, 9, "real")])
def test_too_few_points_are_refused(n, m, name):
    with pytest.raises(ValueError, match=name):
        precision_recall(torch.zeros(n, 2), torch.zeros(m, 2))
    with pytest.raises(ValueError, match="k >= 1"):
        precision_recall(torch.zeros(9, 2), torch.zeros(9, 2), k=0)


@settings(max_examples=30)
@given(SEEDS, st.integers(0, 30), st.integers(1, 30), st.integers(1, 40), st.data())
def test_the_nearest_are_those_of_a_sort(seed, n, m, block, data):
    k = data.draw(st.integers(1, m))
    queries, references = whole_numbers(seed, n, 8).view(n, 2, 2, 2), whole_numbers(seed + 1, m, 8).view(m, 2, 2, 2)
    distances, rows = nearest(queries, references, k, block)
    assert distances.shape == rows.shape == (n, k)
    between = (queries[:, None] - references).flatten(2).double().square().sum(dim=2)
    torch.testing.assert_close(distances, between.sort(dim=1).values[:, :k].sqrt())
    torch.testing.assert_close(between.gather(1, rows).sqrt(), distances)
    assert all(len(set(row)) == k for row in rows.tolist())


def test_a_record_is_at_distance_zero_from_itself_exactly():
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 1e3 + 1e4
    distances, rows = nearest(x, x, 2)
    assert torch.equal(rows[:, 0], torch.arange(50))
    assert (distances[:, 0] == 0).all()
    assert (distances[:, 1] > 0).all()


@pytest.mark.parametrize("k", [0, 6])
def test_more_neighbours_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match=f"the {k} nearest"):
        nearest(torch.zeros(2, 3), torch.zeros(5, 3), k)


def test_distances_per_class_are_a_loops():
    rng = np.random.default_rng(0)
    real, fake = (torch.from_numpy(rng.normal(size=(n, 6)).astype(np.float32)) for n in (90, 70))
    real_y, fake_y = (torch.from_numpy(rng.integers(0, 4, size=n)) for n in (90, 70))
    fake_y[fake_y == 2] = 1  # class 2 has no fake record, class 4 none at all, class 5 a single one
    real_y[0], fake_y[:3] = 5, 5
    found = per_class_frechet(real, real_y, fake, fake_y, 6)
    assert [value is None for value in found] == [False, False, True, False, True, True]
    for c in (0, 1, 3):
        rows = [i for i in range(90) if real_y[i] == c], [i for i in range(70) if fake_y[i] == c]
        expected = frechet(moments(real[rows[0]]), moments(fake[rows[1]]))
        assert found[c] == pytest.approx(expected, rel=1e-6)


def test_labels_that_are_swapped_show_per_class_alone():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    real, fake = (torch.randn(200, 3, generator=generator) + 10 * y[:, None] for _ in range(2))
    together = frechet(moments(real), moments(fake))
    right, swapped = per_class_frechet(real, y, fake, y, 2), per_class_frechet(real, y, fake, 1 - y, 2)
    assert together < 1
    assert all(value is not None and value < 1 for value in right)
    assert all(value is not None and value > 200 for value in swapped)


def test_the_mean_is_over_the_classes_that_have_a_distance():
    assert mean_of([1.0, None, 4.0]) == 2.5
    assert mean_of([None, None]) is None
    assert mean_of([]) is None


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 13), (1, 28, 28), (3, 32, 32)])
def test_the_residual_net_takes_any_shape_and_a_record_at_a_time(shape):
    net = ResidualNet(shape, 7)
    assert 300_000 < sum(value.numel() for value in net.parameters()) < 700_000
    z = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    together = net(z)
    assert together.shape == (5, 7)
    torch.testing.assert_close(net(z[2:3]), together[2:3], rtol=1e-4, atol=1e-5)


def test_the_residual_net_learns_what_its_mean_alone_cannot_tell():
    """Upright or lying stripes of random phase: equal in every pixel's mean."""
    torch.manual_seed(0)
    net = ResidualNet((1, 12, 12), 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def stripes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(2, (n,))
        wave = torch.sin(torch.arange(12.0) + 6.3 * torch.rand(n, 1))[:, None, None, :].expand(-1, 1, 12, -1)
        return torch.where(y[:, None, None, None] == 1, wave, wave.transpose(2, 3)), y

    for _ in range(30):
        z, y = stripes(32)
        optimizer.zero_grad()
        F.cross_entropy(net(z), y).backward()
        optimizer.step()
    z, y = stripes(200)
    assert (net(z).argmax(dim=1) == y).float().mean() > 0.95
