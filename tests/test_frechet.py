"""The Frechet distance of Gaussians: closed forms, scipy's matrix root, covariances without full rank, and what is kept
of public references."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from straightdp.metrics.frechet import Streamed, frechet, frechet_between, moments, reference
from straightdp.metrics.inception import Features

SEEDS = st.integers(0, 10**6)


def gaussian(seed: int, p: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A random mean and a random covariance of the given rank."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(p, p if rank is None else rank))
    return torch.from_numpy(rng.normal(size=p)), torch.from_numpy(factor @ factor.T)


def by_scipy(a: np.ndarray, b: np.ndarray) -> float:
    """The definition on two feature sets, with numpy's covariance and scipy's root of the product."""
    one, two = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    root = scipy.linalg.sqrtm(one @ two)
    return float(np.sum((a.mean(axis=0) - b.mean(axis=0)) ** 2) + np.trace(one + two - 2 * root.real))


def rounding(*gaussians: tuple[torch.Tensor, torch.Tensor]) -> float:
    """What float64 leaves of roots of products of eigenvalues: half its digits, for the smallest of them."""
    return 1e-7 * max(float(covariance.trace()) for _, covariance in gaussians)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 30))
def test_diagonal_gaussians_have_a_closed_form(seed, p):
    """|m1 - m2|^2 + sum (s1 - s2)^2, where s are standard deviations."""
    rng = np.random.default_rng(seed)
    m1, m2 = rng.normal(size=(2, p))
    s1, s2 = rng.uniform(0, 3, size=(2, p))
    both = [(torch.from_numpy(m), torch.diag(torch.from_numpy(s**2))) for m, s in ((m1, s1), (m2, s2))]
    expected = np.sum((m1 - m2) ** 2) + np.sum((s1 - s2) ** 2)
    assert frechet(*both) == pytest.approx(expected, rel=1e-9, abs=rounding(*both))


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 20))
def test_equal_gaussians_are_at_distance_zero(seed, p):
    one = gaussian(seed, p)
    assert abs(frechet(one, one)) <= rounding(one)


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 20))
def test_the_distance_is_symmetric(seed, p):
    one, two = gaussian(seed, p), gaussian(seed + 1, p)
    assert frechet(one, two) == pytest.approx(frechet(two, one), rel=1e-9, abs=rounding(one, two))
    assert frechet(one, two) > 0


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 12), st.floats(0.01, 100), st.floats(-10, 10))
def test_turning_scaling_and_shifting_both_does_to_the_distance_what_it_does_to_lengths(seed, p, scale, shift):
    one, two = gaussian(seed, p), gaussian(seed + 1, p)
    turn = torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).normal(size=(p, p)))[0]) * scale
    moved = [(turn @ m + shift, turn @ s @ turn.T) for m, s in (one, two)]
    assert frechet(*moved) == pytest.approx(scale**2 * frechet(one, two), rel=1e-6, abs=rounding(*moved))


def test_a_shift_alone_adds_its_square():
    (m, s), shift = gaussian(0, 7), torch.arange(7.0, dtype=torch.float64)
    assert frechet((m, s), (m + shift, s)) == pytest.approx(91, rel=1e-9)


@pytest.mark.parametrize(("n", "p"), [(50, 1), (40, 8), (200, 32), (400, 64)])
def test_on_features_it_is_what_scipys_matrix_root_gives(n, p):
    rng = np.random.default_rng(n)
    a = rng.normal(size=(n, p)) @ rng.normal(size=(p, p)) + 1
    b = rng.normal(size=(n + 7, p)) @ rng.normal(size=(p, p))
    found = frechet(moments(torch.from_numpy(a)), moments(torch.from_numpy(b)))
    assert found == pytest.approx(by_scipy(a, b), rel=1e-8)


def test_moments_are_numpys_in_float64_whatever_comes_in():
    x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32) + 100
    mean, covariance = moments(torch.from_numpy(x))
    assert mean.dtype == covariance.dtype == torch.float64
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_covariances_without_full_rank_are_fine(rank):
    """In the plane that holds both, the distance is that of the small full-rank covariances."""
    p = 12
    directions = torch.from_numpy(np.linalg.qr(np.random.default_rng(1).normal(size=(p, p)))[0][:, :rank])
    small = [gaussian(seed, rank) for seed in (3, 4)]
    lifted = [(directions @ m, directions @ s @ directions.T) for m, s in small]
    expected = frechet(*small) if rank else 0.0
    assert frechet(*lifted) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert frechet(lifted[0], lifted[0]) == pytest.approx(0, abs=1e-6)


def test_a_point_and_a_gaussian_are_apart_by_the_gaussians_spread():
    mean, covariance = gaussian(5, 9)
    point = (mean, torch.zeros(9, 9, dtype=torch.float64))
    assert frechet((mean, covariance), point) == pytest.approx(float(covariance.trace()), rel=1e-9)
    assert frechet(point, (mean, covariance)) == pytest.approx(float(covariance.trace()), rel=1e-9)


def test_fewer_records_than_features_are_fine():
    """Two records in forty dimensions: covariances of rank one, and a distance that is known on a line."""
    line = torch.zeros(40, dtype=torch.float64)
    line[7] = 1.0
    a, b = (torch.tensor(v, dtype=torch.float64)[:, None] * line for v in ([0.0, 2.0], [3.0, 7.0]))
    expected = (1 - 5) ** 2 + (2**0.5 - 8**0.5) ** 2
    assert frechet(moments(a), moments(b)) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 12), st.integers(2, 40), st.integers(2, 40))
def test_straight_from_features_it_is_the_distance_of_their_moments(seed, p, n1, n2):
    """On either side, fewer records than features and more."""
    rng = np.random.default_rng(seed)
    one, two = (torch.from_numpy(rng.normal(size=(n, p)) @ rng.normal(size=(p, p)) + 3) for n in (n1, n2))
    both = moments(one), moments(two)
    assert frechet_between(one, two) == pytest.approx(frechet(*both), rel=1e-9, abs=rounding(*both))


@settings(max_examples=40)
@given(SEEDS, st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6))
def test_streamed_moments_are_those_of_the_whole_in_any_order_of_batches(seed, sizes, p):
    rng = np.random.default_rng(seed)
    batches = [torch.from_numpy(rng.normal(size=(n, p)) * 3 + k) for k, n in enumerate([*sizes, 2])]
    mean, covariance = moments(torch.cat(batches))
    for order in (batches, batches[::-1], [batches[k] for k in rng.permutation(len(batches))]):
        streamed = Streamed()
        for batch in order:
            streamed.add(batch)
        assert streamed.n == sum(sizes) + 2
        found = streamed.moments()
        torch.testing.assert_close(found[0], mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[1], covariance, rtol=1e-10, atol=1e-10)


def test_streamed_moments_lose_nothing_to_a_large_mean():
    """Sums of squares would: with a mean of 1e8 they keep no digit of a variance of 1."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(400, 3)))
    streamed = Streamed()
    for batch in (x + 1e8).split(7):
        streamed.add(batch)
    torch.testing.assert_close(streamed.moments()[1], moments(x)[1], rtol=1e-6, atol=1e-6)


def test_moments_that_were_handed_out_do_not_change():
    streamed = Streamed()
    streamed.add(torch.tensor([[0.0], [2.0]]))
    mean, covariance = streamed.moments()
    streamed.add(torch.tensor([[40.0]]))
    assert (mean.item(), covariance.item()) == (1.0, 2.0)


@pytest.mark.parametrize("records", [0, 1])
def test_a_covariance_needs_two_records(records):
    streamed = Streamed()
    streamed.add(torch.zeros(records, 3))
    with pytest.raises(ValueError, match=f"{records} came"):
        streamed.moments()


class Counted(nn.Module):
    """Nine pixels of a picture, some multiplied; it counts the pictures it has seen."""

    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        pixels = x[:, 0, ::149, ::149].flatten(1)
        return torch.cat((pixels, self.gain * pixels[:, :3] * pixels[:, 3:6]), dim=1)


def pictures(seed: int, n: int = 40) -> torch.Tensor:
    return torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_a_reference_is_computed_once_for_the_same_weights_resizing_and_pictures(tmp_path):
    net, z = Counted(), pictures(0)
    features = Features("stub", "aa", net)
    folder = tmp_path / "new" / "references"
    first = reference(features, z, folder)
    torch.testing.assert_close(first, moments(features(z)), rtol=1e-10, atol=1e-12)
    seen = net.seen
    again = reference(features, z.clone(), folder)
    assert net.seen == seen
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    others = [
        (Features("stub", "ab", net), z),
        (Features("stub", "aa", net, "another way"), z),
        (features, z + torch.eye(6) * 1e-6),
        (features, z[:-1]),
        (features, z.reshape(40, 1, 4, 9)),
    ]
    for other, other_z in others:
        before = net.seen
        reference(other, other_z, folder)
        assert net.seen > before
    assert len(list(folder.iterdir())) == 1 + len(others)


def test_a_damaged_reference_is_computed_and_written_again(tmp_path):
    net, z = Counted(), pictures(0)
    features = Features("stub", "aa", net)
    right = reference(features, z, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        before = net.seen
        found = reference(features, z, tmp_path)
        assert net.seen == before + len(z)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        assert path.read_bytes() == whole
        assert list(tmp_path.iterdir()) == [path]


def test_a_reference_that_is_not_to_be_kept_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features, z = Features("stub", "aa", Counted()), pictures(0)
    torch.testing.assert_close(reference(features, z, None), moments(features(z)), rtol=1e-10, atol=1e-12)
    assert list(tmp_path.iterdir()) == []


def test_another_library_gives_the_same_distance_in_our_features():
    fid = pytest.importorskip("torchmetrics.image.fid")
    features, real, fake = Features("stub", "aa", Counted(4.0)), pictures(1, 300), pictures(2, 200) ** 3

    class Ours(nn.Module):
        num_features = 12

        def forward(self, z):
            return features(z)

    theirs = fid.FrechetInceptionDistance(Ours(), normalize=True)
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    found = frechet(reference(features, real, None), moments(features(fake)))
    assert found == pytest.approx(float(theirs.compute()), rel=1e-3)
    assert found > 0.1
