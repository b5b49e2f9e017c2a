"""The noise has the declared scale, comes from the key, and repeats only for the same (key, stream, step)."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from straightdp.errors import BadInput
from straightdp.privacy.noise import Noise, open_noise

CPU = torch.device("cpu")


def p_value(draw: np.ndarray, std: float) -> float:
    """Of a Kolmogorov-Smirnov test against N(0, std^2)."""
    return float(stats.kstest(draw, "norm", args=(0, std)).pvalue)


def accepts_only(draw: np.ndarray, std: float) -> bool:
    """A test that takes the declared scale and refuses two thirds and three halves of it."""
    return p_value(draw, std) > 1e-4 and p_value(draw, std * 2 / 3) < 1e-6 and p_value(draw, std * 1.5) < 1e-6


@pytest.fixture
def real(tmp_path) -> Noise:
    return open_noise(tmp_path, None, context="x", spent=False)


def pinned(tmp_path, byte: int = 7) -> Noise:
    return Noise(bytes([byte]) * 32, pinned=True, folder=tmp_path / str(byte))


@pytest.mark.parametrize("scale", [50.0, 8.0 * 2**30])
def test_release_noise_has_the_declared_scale(real, tmp_path, scale):
    assert accepts_only(real.integer_gaussian("a", scale, 5000), scale)
    assert accepts_only(pinned(tmp_path).integer_gaussian("a", scale, 5000), scale)


def test_release_noise_is_drawn_once_and_kept(real):
    first = real.integer_gaussian("release/means", 100.0, 50)
    np.testing.assert_array_equal(first, real.integer_gaussian("release/means", 100.0, 50))
    assert not np.array_equal(first, real.integer_gaussian("release/other", 100.0, 50))
    with pytest.raises(BadInput):
        real.integer_gaussian("release/means", 100.0, 51)


def test_gradient_noise_is_standard_normal(real):
    draw = real.normal("s", 0, 40_000, CPU).numpy()
    assert accepts_only(draw, 1.0)
    assert abs(np.corrcoef(draw[:-1], draw[1:])[0, 1]) < 5 / math.sqrt(len(draw))


def test_draws_are_keyed_by_key_stream_and_step(tmp_path):
    noise = pinned(tmp_path)
    base = noise.normal("s", 3, 100, CPU)
    torch.testing.assert_close(base, noise.normal("s", 3, 100, CPU), rtol=0, atol=0)
    others = [
        noise.normal("s", 4, 100, CPU),
        noise.normal("t", 3, 100, CPU),
        pinned(tmp_path, 8).normal("s", 3, 100, CPU),
    ]
    assert all(not torch.equal(base, other) for other in others)


def test_two_runs_get_two_keys_of_the_operating_system(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = (open_noise(tmp_path / name, None, context="x", spent=False) for name in "ab")
    assert a.label == "os"
    assert (tmp_path / "a" / "noise.key").read_bytes() != (tmp_path / "b" / "noise.key").read_bytes()
    assert (tmp_path / "a" / "noise.key").stat().st_mode & 0o077 == 0
    assert not torch.equal(a.normal("s", 0, 10, CPU), b.normal("s", 0, 10, CPU))
    again = open_noise(tmp_path / "a", None, context="x", spent=True)
    torch.testing.assert_close(a.normal("s", 0, 10, CPU), again.normal("s", 0, 10, CPU), rtol=0, atol=0)


def test_the_experiments_seed_does_not_move_the_noise(tmp_path):
    torch.manual_seed(0)
    np.random.seed(0)
    first = pinned(tmp_path).normal("s", 0, 10, CPU)
    torch.manual_seed(1)
    np.random.seed(1)
    torch.testing.assert_close(first, pinned(tmp_path).normal("s", 0, 10, CPU), rtol=0, atol=0)


def test_a_pinned_key_says_so(tmp_path):
    assert open_noise(tmp_path, "00" * 32, context="x", spent=False).label == "pinned"
    assert not (tmp_path / "noise.key").exists()


@pytest.mark.parametrize("q", [0.003, 0.2, 1.0])
def test_poisson_sampling_is_independent_coins(tmp_path, q):
    noise, n, steps = pinned(tmp_path), 400, 500
    sizes = np.array([len(noise.members("m", k, q, n)) for k in range(steps)])
    if q == 1.0:
        assert (sizes == n).all()
        return
    assert sizes.mean() == pytest.approx(n * q, abs=5 * math.sqrt(n * q * (1 - q) / steps))
    assert sizes.var() == pytest.approx(n * q * (1 - q), rel=0.35)  # a fixed batch size would have none
    inclusion = np.zeros(n)
    for k in range(steps):
        inclusion[noise.members("m", k, q, n)] += 1
    spread = inclusion.std() / math.sqrt(steps * q * (1 - q))
    assert 0.85 < spread < 1.15


def test_small_rates_give_empty_batches(tmp_path):
    sizes = [len(pinned(tmp_path).members("m", k, 0.001, 50)) for k in range(50)]
    assert 0 in sizes


def test_a_lost_key_is_not_replaced_once_something_was_spent(tmp_path):
    with pytest.raises(BadInput, match="spend twice"):
        open_noise(tmp_path, None, context="x", spent=True)
    assert not (tmp_path / "noise.key").exists()


def test_noise_is_never_used_again_for_another_scale_context_or_kind_of_key(tmp_path):
    """Else a second recipe in the same folder would carry the first one's noise."""
    draw = open_noise(tmp_path, None, context="recipe one", spent=False).integer_gaussian("m", 100.0, 20)
    same = open_noise(tmp_path, None, context="recipe one", spent=True)
    np.testing.assert_array_equal(same.integer_gaussian("m", 100.0, 20, drawn_before=True), draw)
    with pytest.raises(BadInput, match="another run"):
        same.integer_gaussian("m", 101.0, 20)
    other = open_noise(tmp_path, None, context="recipe two", spent=False)
    with pytest.raises(BadInput, match="another run"):
        other.integer_gaussian("m", 100.0, 20)
    with pytest.raises(BadInput, match="another run"):
        open_noise(tmp_path, "00" * 32, context="recipe one", spent=False).integer_gaussian("m", 100.0, 20)
    assert not torch.equal(same.normal("s", 0, 10, CPU), other.normal("s", 0, 10, CPU))
    with pytest.raises(BadInput, match="lost"):
        same.integer_gaussian("gone", 100.0, 20, drawn_before=True)


def placed(tmp_path, places, step: int = 0, stream: str = "d"):
    return pinned(tmp_path).draws(stream, step, np.asarray(places), CPU)


def test_secret_draws_are_uniform_and_normal(tmp_path):
    """Over several blocks of places, and for a second call as for the first."""
    draws = placed(tmp_path, np.arange(700))
    for uniform in (draws.uniform((700, 8)), draws.uniform((700,))):
        assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-4
        assert float(uniform.min()) >= 0
        assert float(uniform.max()) < 1
    for normal in (draws.normal((700, 3, 5)), draws.normal((700, 3, 5))):
        assert normal.shape == (700, 3, 5)
        assert accepts_only(normal.flatten().numpy(), 1.0)


def test_secret_draws_of_places_steps_streams_and_calls_are_unrelated(tmp_path):
    """Two places of one block or of two, two calls of one shape, two steps, two streams."""
    places = np.arange(600)
    draws = placed(tmp_path, places)
    first, second = draws.normal((600, 40)), draws.normal((600, 40))
    others = [placed(tmp_path, places, 1).normal((600, 40)), placed(tmp_path, places, 0, "e").normal((600, 40))]
    rows = torch.cat([first, second, *others])
    assert len(torch.unique(rows, dim=0)) == 4 * 600
    bound = 6 / math.sqrt(600 * 40)
    for other in (second, *others, first.roll(1, dims=0), first.roll(256, dims=0)):
        assert abs(float((first * other).mean())) < bound


def test_a_places_draws_do_not_depend_on_which_others_are_asked_for(tmp_path):
    """In any order, from any block, repeated or alone; so neither micro-batches nor processes change them."""

    def three(places):
        draws = placed(tmp_path, places)
        n = len(places)
        return draws.uniform((n, 2)), draws.normal((n, 3, 4)), draws.uniform((n, 2, 1))

    everyone = three(np.arange(1000))
    for places in ([0], [999], [5, 3, 5, 0, 0], [255, 256, 257], [900, 1, 512, 511], list(range(0, 1000, 7))):
        for mine, whole in zip(three(places), everyone, strict=True):
            assert torch.equal(mine, whole[places])


def test_the_draws_of_a_place_repeat_in_another_session(tmp_path):
    assert torch.equal(placed(tmp_path, [3, 700]).normal((2, 5)), placed(tmp_path, [3, 700]).normal((2, 5)))


def test_draws_for_another_number_of_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match="3 records"):
        placed(tmp_path, [0, 1, 2]).uniform((4, 2))
