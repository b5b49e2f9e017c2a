"""The one-shot rivals: their features against kernels and autograd, their bound, their sums, and the matching."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from straightdp.errors import BadInput
from straightdp.nets.rowwise import row_sum
from straightdp.privacy.mechanisms import FactorSum
from straightdp.progress import quiet
from straightdp.rivals.dp_hp import DpHp, hermite, longest_square, widest_pairs
from straightdp.rivals.dp_merf import DpMerf, median_squared_distance
from straightdp.rivals.dp_ntk import DpNtk
from straightdp.rivals.matching import Generator, draw, match

CPU = torch.device("cpu")
D, CLASSES = 12, 3


def uniform(n: int, seed: int, d: int = D) -> torch.Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


PUBLIC = uniform(50, seed=99)
ALL = {
    "merf": DpMerf.fit(PUBLIC, features=40, seed=0),
    "hp": DpHp.fit(PUBLIC, order=6, pairs=9, pair_order=2, alpha=0.3),
    "ntk": DpNtk.fit(D, width=7, seed=0),
}
embeddings = pytest.mark.parametrize("name", ALL)


def released(embedding, z, y) -> np.ndarray:
    """The vault's sum, without noise."""
    statistic = embedding.statistic(CLASSES, CPU)
    return statistic.assemble(statistic.exact(z, y))


def one(embedding, z) -> torch.Tensor:
    """phi of a single record, in float64."""
    return embedding.class_sums(z[None, None])[0]


# What phi is


def test_merf_inner_products_are_the_gaussian_kernel_of_the_median_distance():
    embedding, z = DpMerf.fit(PUBLIC, features=20_001, seed=1), uniform(20, seed=2)
    assert embedding.width == 20_000
    distances = sorted(float((a - b).square().sum()) for i, a in enumerate(PUBLIC) for b in PUBLIC[:i])
    length = distances[(len(distances) - 1) // 2]
    phi = embedding.phi(z)
    apart = torch.cdist(z, z).square()

    def error(squared: float) -> float:
        return float((phi @ phi.T - torch.exp(-apart / (2 * squared))).abs().max())

    assert error(length) < 5 / math.sqrt(10_000)
    assert error(length * 1.5) > 5 / math.sqrt(10_000) < error(length / 1.5)


@pytest.mark.parametrize("length_squared", [0.05, 0.4, 3.0])
def test_hermite_features_are_mehlers_by_numpys_polynomials_and_sum_to_the_gaussian_kernel(length_squared):
    rho = -length_squared + math.sqrt(length_squared**2 + 1)
    x = np.linspace(-1, 1, 9)
    found = hermite(torch.from_numpy(x)[None], rho, 60)[0].numpy()
    for k in range(13):
        polynomial = np.polynomial.hermite.hermval(x, [0] * k + [1])
        norm = 2.0**k * math.factorial(k) * math.sqrt((1 - rho) / (1 + rho))
        expected = math.sqrt((1 - rho) * rho**k / norm) * polynomial * np.exp(-rho / (1 + rho) * x**2)
        np.testing.assert_allclose(found[k], expected, rtol=1e-9, atol=1e-12)
    if rho < 0.8:  # 60 orders are all that matter
        kernel = np.exp(-((x[:, None] - x) ** 2) / (2 * length_squared))
        np.testing.assert_allclose(found.T @ found, kernel, atol=1e-6)


def test_hp_joins_the_sum_kernel_and_the_product_kernel_and_scales_them_by_its_largest_length():
    pairs, length_squared, alpha = torch.tensor([[0, 3], [2, 1]]), 0.5, 0.3
    embedding = DpHp(4, pairs, length_squared, order=40, pair_order=30, alpha=alpha)  # nothing cut off: its length is 1
    a, b = uniform(2, seed=5, d=4)

    def k(i: int) -> float:
        return math.exp(-(float(a[i] - b[i]) ** 2) / (2 * length_squared))

    expected = (1 - alpha) * sum(k(i) for i in range(4)) / 4 + alpha * (k(0) * k(2) + k(3) * k(1)) / 2
    assert float(one(embedding, a) @ one(embedding, b)) == pytest.approx(expected, abs=1e-7)
    assert embedding.width == 4 * 41 + 2 * 31**2


@pytest.mark.parametrize(("rho", "order"), [(0.9, 3), (0.5, 3), (0.95, 20), (0.3, 0), (0.98, 5)])
def test_the_largest_length_of_hermite_features_is_bounded_from_above_and_tightly(rho, order):
    x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, 200_000))
    largest = float(hermite(x[None], rho, order).square().sum(dim=1).max())
    assert largest <= longest_square(rho, order) <= largest + 2e-4


def test_hp_multiplies_the_pairs_of_pixels_with_the_largest_products_of_variances():
    variances = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products = {(i, j): float(variances[i] * variances[j]) for i in range(30) for j in range(i)}
    best = sorted(products, key=lambda pair: -products[pair])[:40]
    assert {tuple(sorted(pair)) for pair in widest_pairs(variances, 40).T.tolist()} == {(j, i) for i, j in best}
    assert widest_pairs(variances[:4], 40).shape == (2, 6)  # all there are


def test_ntk_is_the_normalised_gradient_that_autograd_finds():
    generator = torch.Generator().manual_seed(3)
    W1, b1, W2 = (torch.randn(*shape, generator=generator).double() for shape in ((7, D), (7,), (10, 7)))
    net = nn.Sequential(nn.Linear(D, 7), nn.ReLU(), nn.LayerNorm(7, elementwise_affine=False), nn.Linear(7, 10))
    net.double()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), (W1, b1, W2, torch.zeros(10)), strict=True):
            parameter.copy_(value)
    embedding = DpNtk(W1, b1, W2)
    z = uniform(6, seed=4)
    slow, fast = [], torch.stack([one(embedding, record) for record in z])
    for record, phi in zip(z, fast, strict=True):
        by_W1, by_b1, by_W2, by_b2 = torch.autograd.grad(net(record[None]).sum(), list(net.parameters()))
        slow.append(torch.cat([by_W1.flatten(), by_b1, by_W2.flatten(), by_b2]))
        first = torch.cat([by_W1, by_b1[:, None]], dim=1).flatten() / slow[-1].norm()
        torch.testing.assert_close(phi[: len(first)], first, atol=1e-7, rtol=0)
    slow = torch.stack([g / g.norm() for g in slow])
    torch.testing.assert_close(fast @ fast.T, slow @ slow.T, atol=1e-7, rtol=0)  # ten copies kept as one


# How long it can be


def extreme(seed: int, n: int = 5) -> torch.Tensor:
    """Records of ends and zeros, constant ones, and one of anything."""
    rng = np.random.default_rng(seed)
    corners = rng.choice([-1.0, 0.0, 1.0], size=(n, D))
    constant = np.repeat([[-1.0], [0.0], [1.0], [rng.uniform(-1, 1)]], D, axis=1)
    return torch.from_numpy(np.concatenate([corners, constant, rng.uniform(-1, 1, (1, D))]))


@embeddings
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_record_is_longer_than_one(name, seed):
    for record in extreme(seed):
        assert float(one(ALL[name], record).norm()) <= 1
        assert float(one(ALL[name], record.float()).norm()) <= 1 + 1e-5


@embeddings
def test_the_bound_is_used_up(name):
    """Some record has length 1 within 0.1 %: no noise is wasted."""
    grid = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None].expand(-1, D)
    assert max(float(one(ALL[name], record).norm()) for record in grid) > 0.999


@embeddings
def test_a_record_out_of_range_is_clamped_and_one_that_is_no_number_adds_nothing(name):
    z, y = uniform(3, seed=0), torch.tensor([0, 1, 2])
    z[0] *= 1e30
    z[1, 4] = float("nan")
    found = released(ALL[name], z, y)
    np.testing.assert_allclose(found[0], released(ALL[name], z[:1].sign(), y[:1])[0], atol=0)
    assert not found[1].any()
    assert found[2].any()


# Its sums


@embeddings
def test_class_sums_are_those_of_a_loop(name):
    z = uniform(12, seed=1).reshape(CLASSES, -1, D)
    loop = torch.stack([sum(one(ALL[name], record) for record in records) for records in z])
    torch.testing.assert_close(ALL[name].class_sums(z), loop, atol=1e-12, rtol=0)
    single = ALL[name].class_sums(z.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), loop, atol=1e-5, rtol=0)


@embeddings
def test_the_vault_sums_what_the_matching_matches(name):
    z, y = uniform(12, seed=1), torch.arange(12) % CLASSES
    embedding, statistic = ALL[name], ALL[name].statistic(CLASSES, CPU)
    assert statistic.width == embedding.width
    assert statistic.bound == 1.0
    grid = 2.0**-14 if isinstance(statistic, FactorSum) else 2.0**-16  # of its factors; of z
    expected = embedding.class_sums(torch.stack([z[y == c] for c in range(CLASSES)])).numpy()
    np.testing.assert_allclose(released(embedding, z, y), expected, atol=12 * grid)
    assert np.linalg.norm(expected) > 1


@pytest.mark.parametrize("name", ["ntk"])  # the others' steps are simpler, and compiling takes long
def test_a_compiled_match_is_the_plain_one(name, tmp_path):
    target = ALL[name].class_sums(uniform(30, seed=5).reshape(CLASSES, -1, D)) / 30
    given = {"shape": (1, 1, D), "hidden": 16, "code": 3, "steps": 8, "batch": 12, "seed": 0, "track": quiet}
    nets = []
    for speed in ("plain", "compiled"):
        nets.append(match(ALL[name], target, checkpoint=tmp_path / speed, speed=speed, **given).state_dict())
    for key, value in nets[0].items():
        torch.testing.assert_close(nets[1][key], value, atol=1e-4, rtol=1e-3)


WIDE = {
    "merf": DpMerf.fit(uniform(20, seed=0, d=200), features=100, seed=0),
    "hp": DpHp.fit(uniform(20, seed=0, d=200), order=3, pairs=20, pair_order=2),
    "ntk": DpNtk.fit(200, width=90, seed=0),
}


@embeddings
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 40))
def test_what_a_record_adds_is_the_same_to_the_bit_whatever_is_beside_it(name, seed, n):
    """Before it is rounded onto the vault's grid, already."""
    statistic = WIDE[name].statistic(CLASSES, CPU)
    z, y = uniform(n, seed, d=200), torch.zeros(n, dtype=torch.int64)

    def values(z: torch.Tensor) -> torch.Tensor:
        if isinstance(statistic, FactorSum):
            return torch.cat(statistic.factors(z, y[: len(z)]), dim=1)
        return statistic.vectors(z, y[: len(z)])

    assert torch.equal(values(z), torch.cat([values(z[:1]), values(z[1:])]))


@embeddings
def test_class_sums_have_the_gradient_that_differences_show(name):
    z = uniform(4, seed=8).reshape(2, 2, D).requires_grad_()
    assert torch.autograd.gradcheck(ALL[name].class_sums, (z,))


@given(rows=st.integers(0, 4), width=st.integers(1, 70), seed=st.integers(0, 99))
def test_a_sum_by_halves_is_the_sum(rows, width, seed):
    x = uniform(rows, seed, width)
    torch.testing.assert_close(row_sum(x), x.sum(dim=1, keepdim=True))


def test_a_digest_tells_every_setting_apart():
    again = [DpMerf.fit(PUBLIC, 40, 0), DpHp.fit(PUBLIC, order=6, pairs=9, pair_order=2, alpha=0.3), DpNtk.fit(D, 7, 0)]
    assert [e.digest() for e in again] == [e.digest() for e in ALL.values()]
    others = [
        DpMerf.fit(PUBLIC, 42, 0),
        DpMerf.fit(PUBLIC, 40, 1),
        DpMerf.fit(PUBLIC * 0.9, 40, 0),
        DpHp.fit(PUBLIC, order=7, pairs=9, pair_order=2, alpha=0.3),
        DpHp.fit(PUBLIC, order=6, pairs=8, pair_order=2, alpha=0.3),
        DpHp.fit(PUBLIC, order=6, pairs=9, pair_order=3, alpha=0.3),
        DpHp.fit(PUBLIC, order=6, pairs=9, pair_order=2, alpha=0.4),
        DpHp.fit(PUBLIC * 0.9, order=6, pairs=9, pair_order=2, alpha=0.3),
        DpHp.fit(PUBLIC.flip(1), order=6, pairs=9, pair_order=2, alpha=0.3),
        DpNtk.fit(D, 8, 0),
        DpNtk.fit(D, 7, 1),
    ]
    assert len({e.digest() for e in [*again, *others]}) == len(again) + len(others)


@pytest.mark.parametrize("public", [PUBLIC[:1], PUBLIC[:1].expand(5, -1)])
def test_public_records_without_a_distance_are_refused(public):
    with pytest.raises(BadInput, match="differ"):
        median_squared_distance(public, torch.Generator())


# The matching

MEANS = torch.tensor([[0.6, -0.3], [-0.4, 0.5]], dtype=torch.float64)
SMALL = {"shape": (2, 1, 1), "hidden": 32, "code": 4, "steps": 300, "batch": 63, "seed": 0, "track": quiet}


def toy() -> tuple[DpMerf, torch.Tensor]:
    """Two classes of two numbers, around MEANS: an embedding and the sums over n."""
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(400) % 2
    z = (MEANS[y] + 0.1 * noise).clamp(-1, 1)
    embedding = DpMerf.fit(uniform(60, seed=3, d=2), features=60, seed=0)
    statistic = embedding.statistic(2, CPU)
    return embedding, torch.from_numpy(statistic.assemble(statistic.exact(z, y))) / 400


def pictures(net: Generator) -> torch.Tensor:
    return draw(net, torch.arange(2).repeat(200), torch.Generator().manual_seed(7))


def test_matching_finds_each_classs_mean_and_spread_and_does_so_again(tmp_path):
    embedding, target = toy()
    net = match(embedding, target, checkpoint=tmp_path / "match.pt", **SMALL)
    z = pictures(net)
    assert z.shape == (400, 2, 1, 1)
    assert float(z.abs().max()) <= 1
    for k in range(2):
        own = z[k::2].flatten(1).double()
        assert float((own.mean(dim=0) - MEANS[k]).norm()) < 0.05
        assert 0.03 < float(own.std(dim=0).mean()) < 0.2
    again = match(embedding, target, checkpoint=tmp_path / "again.pt", **SMALL)
    assert torch.equal(pictures(again), z)
    other = match(embedding, target, checkpoint=tmp_path / "other.pt", **SMALL | {"seed": 1})
    assert not torch.equal(pictures(other), z)


class Plain:
    """phi(z) = z: what a match finds is then known."""

    width = 2

    def statistic(self, classes, device):
        raise NotImplementedError

    def class_sums(self, z):
        return z.sum(dim=1)

    def digest(self) -> str:
        return "plain"


def test_every_class_has_an_equal_part_of_a_batch_that_is_rounded_up(tmp_path):
    """Three images for two classes become four; a class's sum over n is then half its mean."""
    net = match(Plain(), MEANS / 2, checkpoint=tmp_path / "match.pt", **SMALL | {"batch": 3, "lr": 3e-3})
    z = pictures(net).flatten(1).double()
    for k in range(2):
        assert float((z[k::2].mean(dim=0) - MEANS[k]).norm()) < 0.05


class Stop(Exception):
    pass


def stops_after(steps: int):
    def track(all_steps, done, total):
        for step in all_steps:
            if step == steps:
                raise Stop
            yield step

    return track


def test_matching_resumes_to_the_bit_and_takes_up_no_checkpoint_of_another_release(tmp_path):
    embedding, target = toy()
    short, path = SMALL | {"steps": 120}, tmp_path / "match.pt"
    with pytest.raises(Stop):
        match(embedding, target, checkpoint=path, **short | {"track": stops_after(70)})
    left = path.read_bytes()
    done = []

    def counted(steps, before, total):
        done.append(before)
        return steps

    calm = match(embedding, target, checkpoint=tmp_path / "calm.pt", **short)
    resumed = match(embedding, target, checkpoint=path, **short | {"track": counted})
    assert torch.equal(pictures(resumed), pictures(calm))
    path.write_bytes(left)
    match(embedding, target * 1.01, checkpoint=path, **short | {"track": counted})
    assert done == [50, 0]
