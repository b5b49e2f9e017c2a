"""What leads a draw after its start: the pull of moments, noise that is drawn anew, and levels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.cli import main
from straightdp.data import sources
from straightdp.errors import BadInput
from straightdp.flow.sampler import euler, pulled
from straightdp.generator import Conditioning, Generator, levelled
from straightdp.moments.basis import fit_basis
from straightdp.moments.field import MomentModel
from straightdp.nets.captions import Tokenizer
from straightdp.progress import quiet
from straightdp.recipe import Sample, load

CPU = torch.device("cpu")
D, SHAPE = 4, (1, 2, 2)
CLASSES = ("cat", "dog")


def gaussian(seed: int, classes: int, r: int = 2, floor: float = 0.05) -> MomentModel:
    g = torch.Generator().manual_seed(seed)
    V = torch.linalg.qr(torch.randn(classes, D, r, generator=g)).Q.contiguous()
    lam = 0.3 * torch.rand(classes, r, generator=g) + 0.05
    mu = 0.4 * torch.randn(classes, D, generator=g)
    return MomentModel(mu, V, lam, torch.full((classes,), 1 / classes), floor)


def released() -> MomentModel:
    return gaussian(1, 2).beside(gaussian(2, 1))


def dense_velocity(mu, sigma, x, t: float):
    """Equations (2) and (3) with a whole inverse, a record at a time."""
    a = (1 - t) ** 2 * torch.eye(D) + t**2 * sigma
    z = torch.stack([mu + t * sigma @ torch.linalg.inv(a) @ (row - t * mu) for row in x])
    return (z - x) / (1 - t)


def covariance(model: MomentModel, k: int):
    return model.V[k] @ torch.diag(model.lam[k]) @ model.V[k].T + model.floor * torch.eye(D)


class CrowdNet:
    """Knows the public set as well as can be: the public Gaussian's own field, whatever the caption."""

    shape = SHAPE

    def __init__(self, crowd: MomentModel):
        self.crowd = crowd

    def __call__(self, x, t, _ids):
        return self.crowd.mixture_velocity(x.flatten(1), t).reshape(x.shape)


def generator_of(moments: MomentModel | None) -> Generator:
    conditioning = Conditioning(CLASSES, CLASSES, Tokenizer.from_captions(CLASSES, 3, 16))
    return Generator(CrowdNet(gaussian(2, 1)), conditioning, moments, Sample())  # type: ignore[arg-type]


# the pull


def test_what_the_pull_takes_off_and_puts_on_is_the_moments_own_field():
    model, x = released(), torch.randn(6, D, generator=torch.Generator().manual_seed(3))
    y, crowd = torch.tensor([0, 1, 1, 0, 1, 0]), model.crowd
    for t in (0.0, 0.3, 0.69):
        times = torch.full((6,), t)
        field = pulled(
            lambda x, t: torch.zeros_like(x), lambda x, t: model.velocity(x, t, y), crowd.mixture_velocity, 0.7, 0.7
        )
        own = torch.stack(
            [dense_velocity(model.mu[k], covariance(model, k), x[i : i + 1], t)[0] for i, k in enumerate(y)]
        )
        public = dense_velocity(crowd.mu[0], covariance(crowd, 0), x, t)
        torch.testing.assert_close(field(x, times), 0.7 * (own - public), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.1, 1.0), st.lists(st.floats(0, 0.95), min_size=1, max_size=6), st.floats(0.1, 3))
def test_the_pull_ends_for_every_record_at_its_own_time(until, times, weight):
    t, x = torch.tensor(times), torch.zeros(len(times), *SHAPE)
    field = pulled(lambda x, t: x + 1, lambda x, t: x + 5, lambda x, t: x + 3, weight, until)
    expected = torch.where(t < until, 1 + 2 * weight, 1.0)
    torch.testing.assert_close(field(x, t), expected[:, None, None, None].expand_as(x))


def test_a_model_that_knows_the_public_gaussian_alone_is_pulled_all_the_way_to_the_released_one():
    """By closed form: the pulled field is then the released one, whose flow takes its start to its own Gaussian."""
    moments = released()
    one, y = generator_of(moments), torch.zeros(4000, dtype=torch.int64)
    section = Sample(port="guide", t0=0.2, steps=60, guidance=0.0, pull=1.0, pull_until=1.0, batch=4000)
    drawn = one._batch(one.net, moments, moments, y, section, torch.Generator().manual_seed(5)).flatten(1)
    left = one._batch(one.net, moments, None, y, section, torch.Generator().manual_seed(5)).flatten(1)
    off = (drawn.mean(dim=0) - moments.mu[0]).norm()
    assert off < 0.05 < (left.mean(dim=0) - moments.mu[0]).norm()
    torch.testing.assert_close(torch.cov(drawn.T), covariance(moments, 0), rtol=0.15, atol=0.03)


def test_a_release_without_the_public_gaussian_is_not_pulled_and_says_why():
    older, y = generator_of(gaussian(1, 2)), torch.tensor([0, 1])
    section = Sample(port="guide", t0=0.2, steps=2)
    assert older.draw(y, section, 0, quiet).shape == (2, *SHAPE)
    led = section.model_copy(update={"pull": 1.0})
    with pytest.raises(BadInput, match=r"set sample\.pull=0"):
        older.draw(y, led, 0, quiet)
    weights = led.model_copy(update={"port": "weights"})  # which starts at no moments
    assert torch.equal(
        older.draw(y, weights, 0, quiet), older.draw(y, weights.model_copy(update={"pull": 0}), 0, quiet)
    )


def test_the_public_gaussian_travels_with_the_released_moments(tmp_path):
    moments = released()
    moments.save(tmp_path / "m.safetensors")
    back, crowd = MomentModel.load(tmp_path / "m.safetensors"), gaussian(2, 1)
    for model in (back, back.under((0, 1, 1)), back.to(CPU), back.tilted("zero", 0)):
        assert torch.equal(model.crowd.mu, crowd.mu)
        assert torch.equal(model.crowd.V, crowd.V)
        assert torch.equal(model.crowd.lam, crowd.lam)
        assert model.crowd.floor == model.floor
    assert gaussian(1, 2).crowd is None


# fresh noise


def ancestral(x, z, t: float, s: float, noise):
    """x_s given x_t and z, by conditioning Gaussians: x_t = (t/s) x_s + noise of what variance is left."""
    a = t / s
    between = (1 - t) ** 2 - a**2 * (1 - s) ** 2
    prior_mean, prior_variance = s * z, (1 - s) ** 2
    variance = 1 / (1 / prior_variance + a**2 / between)
    mean = variance * (prior_mean / prior_variance + a * x / between)
    return mean + math.sqrt(variance) * noise


def test_a_whole_churn_is_the_ancestral_sampler():
    target = torch.randn(5, *SHAPE, dtype=torch.float64)
    x = torch.randn(5, *SHAPE, dtype=torch.float64)

    def field(x, t):
        return (0.5 * target - 0.3 * x - x) / (1 - t)[:, None, None, None]

    steps, t0 = 4, 0.2
    found = euler(field, x, steps, t0, 1.0, torch.Generator().manual_seed(0))
    g, width = torch.Generator().manual_seed(0), (1 - t0) / steps
    for k in range(steps):
        t, s = t0 + k * width, t0 + (k + 1) * width
        z = 0.5 * target - 0.3 * x
        x = z if k == steps - 1 else ancestral(x, z, t, s, torch.randn(x.shape, generator=g, dtype=x.dtype))
    torch.testing.assert_close(found, x)


def test_fresh_noise_without_a_generator_is_refused():
    with pytest.raises(ValueError, match="generator"):
        euler(lambda x, t: x, torch.zeros(1, *SHAPE), 2, churn=0.5)


def test_without_churn_nothing_is_drawn_and_the_flow_is_straight():
    x, g = torch.randn(3, *SHAPE), torch.Generator().manual_seed(0)
    state = g.get_state()

    def field(x, t):
        return -x * t[:, None, None, None]

    assert torch.equal(euler(field, x, 5, 0.1, 0.0, g), euler(field, x, 5, 0.1))
    assert torch.equal(g.get_state(), state)


@pytest.mark.parametrize("churn", [0.0, 0.5, 1.0])
def test_an_exact_field_draws_the_same_gaussian_however_much_is_stirred(churn):
    model, g = gaussian(4, 1), torch.Generator().manual_seed(1)
    start = model.tilted_start(torch.zeros(6000, dtype=torch.int64), 0.1, g)
    drawn = euler(lambda x, t: model.mixture_velocity(x, t), start, 120, 0.1, churn, g)
    torch.testing.assert_close(drawn.mean(dim=0), model.mu[0], rtol=0, atol=0.04)
    torch.testing.assert_close(torch.cov(drawn.T), covariance(model, 0), rtol=0.1, atol=0.03)


# levels


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 0.45), st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20))
def test_levels_stretch_what_is_between_and_keep_order_and_range(part, values):
    images = torch.tensor(values)
    found = levelled(images, part)
    grey = (images + 1) / 2
    expected = ((grey - part) / (1 - 2 * part)).clamp(0, 1) * 2 - 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    order = images.argsort()
    assert bool((found[order].diff() >= 0).all())


def test_levels_leave_black_and_white_alone_and_are_off_by_default():
    images = torch.tensor([-1.0, 1.0, 1.0, -1.0])
    assert torch.equal(levelled(images, 0.1), images)
    veiled = torch.tensor([-0.97, 0.2, 0.99])
    assert torch.equal(levelled(veiled, Sample().levels), veiled)
    one, y = generator_of(released()), torch.tensor([0, 1, 1])
    section = Sample(port="guide", t0=0.2, steps=3)
    plain = one.draw(y, section, 0, quiet)
    assert torch.equal(one.draw(y, section.model_copy(update={"levels": 0.2}), 0, quiet), (plain / 0.6).clamp(-1, 1))


# a whole run


def test_a_run_is_led_on_by_what_it_released_and_what_is_public(tiny, tiny_data, tmp_path):
    run, more = tmp_path / "run", tmp_path / "more"
    led = ("sample.port=guide", "sample.pull=1", "sample.churn=1", "sample.levels=0.05")
    short = ("pretrain.steps=20", "distill.steps=0", "dpsgd.steps=0", "sample.n=20", "evaluate.probe_steps=20")
    options = [word for one in (*led, *short) for word in ("--set", one)]
    assert main(["run", str(tiny), "--out", str(run), *options]) == 0
    assert main(["replay", str(run / "release")]) == 0

    moments = MomentModel.load(run / "release/moments.safetensors")
    recipe = load(str(run / "recipe.toml"))
    public = sources.load(str(tiny_data["public"]), size=None, channels=1).z().flatten(1).double()
    centred = public - public.mean(dim=0)
    basis = fit_basis(public, torch.from_numpy(public_labels(tiny_data)), recipe.release)
    within = basis.P @ (centred.T @ centred / len(public)) @ basis.P.T
    values, vectors = torch.linalg.eigh(within)
    rank, floor = min(recipe.release.rank, len(values)), recipe.release.floor
    expected = (
        (basis.P.T @ vectors[:, -rank:])
        @ torch.diag((values[-rank:] - floor).clamp_min(0))
        @ (basis.P.T @ vectors[:, -rank:]).T
    )
    crowd = moments.crowd
    torch.testing.assert_close(crowd.mu[0].double(), public.mean(dim=0), rtol=1e-4, atol=1e-5)
    found = crowd.V[0] @ torch.diag(crowd.lam[0]) @ crowd.V[0].T
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)

    drawn = ["sample", str(run / "release"), "--n", "12"]
    assert main([*drawn, "--out", str(more)]) == 0
    assert main([*drawn, "--out", str(tmp_path / "straight"), "--set", "sample.pull=0"]) == 0
    pictures = [sorted((folder / "images").glob("*.png")) for folder in (more, tmp_path / "straight")]
    assert len(pictures[0]) == len(pictures[1]) == 12
    assert any(a.read_bytes() != b.read_bytes() for a, b in zip(*pictures, strict=True))


def public_labels(tiny_data):
    labels = sources.load(str(tiny_data["public"]), size=None, channels=1).labels
    return labels - labels.min()
