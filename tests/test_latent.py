"""The latent variant: codes are bounded and each is its record's alone, private ones are made only after the budget is
spent, a release decodes by itself, and what runs share is public."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from conftest import PIN, TINY, save
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cache import shared
from straightdp.cli import main
from straightdp.data.demo import digits
from straightdp.data.records import Records, to_pixels, to_z
from straightdp.data.sources import load as load_records
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning, Generator
from straightdp.moments import statistics
from straightdp.moments.basis import fit_basis
from straightdp.moments.field import MomentModel
from straightdp.moments.plateau import ALLOWED, TIMES, Plateau, plateau
from straightdp.nets.autoencoder import COARSEST, Autoencoder, code_shape, sides
from straightdp.nets.captions import Tokenizer
from straightdp.nets.mmdit import MMDiT
from straightdp.nets.rowwise import SLOTS
from straightdp.nets.spaces import Codes
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import Relation, RowSum
from straightdp.privacy.noise import Noise
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import Certificate
from straightdp.progress import quiet
from straightdp.recipe import Latent, Net, Release, Sample
from straightdp.stages.public import settled_sample

CPU = torch.device("cpu")
GREY, RGB = (1, 8, 8), (3, 8, 8)
SHORT = (
    "pretrain.steps=2",
    "distill.steps=2",
    "dpsgd.steps=2",
    "sample.n=20",
    "sample.steps=3",
    "evaluate.probe_steps=5",
    f'privacy.pinned_key="{PIN}"',
)
LATENT = ("latent.d=32", "latent.width=8", "latent.steps=3", "latent.batch=8", "net.patch=1")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.delenv("STRAIGHTDP_CACHE", raising=False)


def pictures(n: int, image=GREY, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return to_z(rng.integers(0, 256, (n, *image), dtype=np.uint8))


def new_net(image=GREY, d: int = 32, seed: int = 0, gain: float = 1.0, **section) -> Autoencoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Autoencoder(Latent(d=d, **{"width": 8} | section), image)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(gain)
    return net


def settled(image=GREY, *, n: int = 300, **options) -> Autoencoder:
    """A frozen autoencoder with random weights: what is promised of codes does not hang on training."""
    net = new_net(image, **options)
    net.settle(pictures(n, image, seed=1))
    return net


def norms(codes: torch.Tensor) -> np.ndarray:
    return np.linalg.norm(codes.double().flatten(1).numpy(), axis=1)


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert ";" in message, f"no cure in: {message}"
    return message


# the grid of a code


def test_each_level_halves_the_side_rounding_up_until_four_or_less():
    for side in range(8, 65):
        found = sides(side)
        assert found == [math.ceil(side / 2**k) for k in range(len(found))]
        assert found[-1] <= COARSEST < found[-2]


def test_a_code_has_the_asked_size_on_the_coarsest_grid():
    for side in range(8, 65):
        grid = sides(side)[-1]
        for channels in (1, 2, 5):
            assert code_shape(channels * grid**2, side) == (channels, grid, grid)


@pytest.mark.parametrize(("d", "side"), [(33, 8), (2, 28), (15, 32), (32, 9), (100, 64)])
def test_a_code_that_does_not_fill_its_grid_is_refused_with_a_size_that_would(d, side):
    with pytest.raises(BadInput) as caught:
        code_shape(d, side)
    message = one_line(caught)
    assert "latent.d" in message
    multiple = int(message.split()[-1])
    assert math.prod(code_shape(7 * multiple, side)) == 7 * multiple


@pytest.mark.parametrize(
    ("setting", "word"),
    [("latent.d=33", "latent.d"), ("net.patch=3", "net.patch"), ("release.features=33", "32 values")],
)
def test_a_run_whose_code_does_not_fit_is_refused_before_anything_is_written(setting, word, tiny, tmp_path):
    with pytest.raises(BadInput) as caught:
        pipeline.run(recipe.load(tiny, (*SHORT, *LATENT, setting)), tmp_path / "run")
    assert word in one_line(caught)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [8, 13, 28, 32, 64])
def test_a_decoded_code_has_the_images_shape_and_range(side, channels):
    image = (channels, side, side)
    grid = sides(side)[-1]
    net = settled(image, d=2 * grid**2, n=6)
    space = Codes(net, CPU)
    codes = space.encode(pictures(3, image))
    assert codes.shape == (3, 2, grid, grid)
    for z in (codes, 1e6 * torch.randn(2, 2, grid, grid), codes[:0]):
        found = space.decode(z)
        assert found.shape == (len(z), *image)
        assert bool((found.abs() <= 1).all())


def test_inside_the_ball_decoding_undoes_the_standardisation():
    """The picture is what the unsettled net makes of its own code, whatever mean, scale and radius were taken."""
    x = pictures(60, RGB, seed=1)
    net = new_net(RGB, gain=2.0, radius_quantile=1.0)
    with torch.no_grad():
        expected = net.from_raw(net.raw_code(x)).clamp(-1, 1)
    net.settle(x)
    space = Codes(net, CPU)
    torch.testing.assert_close(space.decode(space.encode(x)), expected, rtol=0, atol=1e-3)
    assert float(expected.std(dim=0).mean()) > 0.1  # the pictures differ


# the radius


@settings(max_examples=150)
@given(
    st.lists(st.floats(width=32), min_size=32, max_size=32),
    st.floats(2**-10, 2**10, width=32),
    st.sampled_from([1.0, 1e-20, 1e10, 1e30]),
)
def test_whatever_a_code_is_it_ends_within_the_radius(values, radius, scale):
    """And what was inside stays as it was, to the bit."""
    net = new_net()
    net.radius.fill_(radius)
    code = (torch.tensor([values]) * scale).reshape(1, *net.shape)
    found = net.within(code)
    assert bool(torch.isfinite(found).all())
    assert norms(found)[0] <= radius * (1 + 1e-5)
    if bool(torch.isfinite(code).all()) and norms(code)[0] <= radius * (1 - 1e-5):
        assert torch.equal(found, code)


@pytest.mark.parametrize("d", [16, 512, 4096])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e17, 1e18, 1e25, 3e38])
def test_codes_of_any_length_and_number_are_brought_within(d, size):
    net = new_net(d=d)
    net.radius.fill_(3.0)
    directions = torch.randn(20, *net.shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    found = net.within(torch.cat([directions * size, torch.full((1, *net.shape), size)]))
    assert bool(torch.isfinite(found).all())
    assert norms(found).max() <= 3.0 * (1 + 1e-5)
    if 1.0 < size < 1e18:  # squares that float32 can hold: the direction is kept, and the length is R
        expected = directions.double().flatten(1)
        expected = 3.0 * expected / expected.norm(dim=1, keepdim=True)
        torch.testing.assert_close(found[:20].flatten(1).double(), expected, rtol=1e-4, atol=1e-6)


def adversarial(image) -> torch.Tensor:
    """Images made to leave the ball: constants, stripes, single pixels, values no image has, and none at all."""
    rows = [torch.full(image, v) for v in (-1.0, 0.0, 1.0, 1e4, -1e10, 1e30, 3e38, math.nan, math.inf, -math.inf)]
    stripes = torch.ones(image)
    stripes[:, ::2] = -1.0
    for value in (1.0, 1e30, math.nan, math.inf):
        pixel = torch.zeros(image)
        pixel[0, 3, 4] = value
        rows.append(pixel)
    return torch.stack([*rows, stripes, -stripes])


@pytest.mark.parametrize("image", [GREY, RGB])
@pytest.mark.parametrize("gain", [1.0, 1e3, 1e-3])
def test_no_image_leaves_the_ball_whatever_the_weights(image, gain):
    net = settled(image, gain=gain)
    assert math.isfinite(float(net.radius))
    codes = Codes(net, CPU).encode(torch.cat([adversarial(image), pictures(20, image, seed=9)]))
    assert bool(torch.isfinite(codes).all())
    assert norms(codes).max() <= float(net.radius) * (1 + 1e-5)
    assert float(codes.abs().max()) <= Codes(net, CPU).bound


@pytest.mark.parametrize("gain", [10.0, 1e3])
def test_the_ball_is_enforced_on_codes_unlike_all_public_ones(gain):
    """Weights that grew after the radius was set: every code would leave the ball, and none does."""
    net = settled()
    with torch.no_grad():
        net.to_code.weight.mul_(gain)
        net.to_code.bias.add_(gain)
    codes = Codes(net, CPU).encode(torch.cat([adversarial(GREY), pictures(50, seed=3)]))
    assert bool(torch.isfinite(codes).all())
    assert norms(codes).max() <= float(net.radius) * (1 + 1e-5)
    assert norms(codes)[-50:].min() >= float(net.radius) * (1 - 1e-5)


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_the_radius_is_the_asked_quantile_of_the_public_norms(quantile):
    """By sorting; and as many public codes lie inside, untouched, as the quantile says."""
    x = pictures(701, seed=1)  # no whole number of the pieces that are computed at once
    net = new_net(radius_quantile=quantile)
    with torch.no_grad():
        raw = net.raw_code(x).double().flatten(1).numpy()
    net.settle(x)
    lengths = np.sort(np.linalg.norm((raw - raw.mean(axis=0)) / raw.std(axis=0, ddof=1), axis=1))
    place = quantile * (len(x) - 1)
    low = math.floor(place)
    high = min(low + 1, len(x) - 1)
    expected = lengths[low] + (place - low) * (lengths[high] - lengths[low])
    assert float(net.radius) == pytest.approx(expected, rel=1e-4)
    inside = norms(Codes(net, CPU).encode(x)) < expected * (1 - 1e-4)
    assert inside.sum() == pytest.approx(quantile * len(x), abs=2)


@pytest.mark.parametrize("gain", [1.0, 1e3])
def test_public_codes_are_standardised_before_the_ball(gain):
    x = pictures(701, seed=1)
    net = new_net(gain=gain)
    net.settle(x)
    net.radius.fill_(math.inf)  # no ball
    codes = net.encode(x).double().numpy()
    np.testing.assert_allclose(codes.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(codes.std(axis=0, ddof=1), 1, rtol=1e-3)


def test_a_public_set_of_equal_images_still_gives_a_ball():
    net = new_net()
    net.settle(pictures(1).expand(50, -1, -1, -1).contiguous())
    codes = Codes(net, CPU).encode(torch.cat([adversarial(GREY), pictures(20)]))
    assert bool(torch.isfinite(codes).all())
    assert norms(codes).max() <= float(net.radius) * (1 + 1e-5)


def test_nothing_trains_once_it_is_settled():
    net, x = new_net(), pictures(50)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    assert all(p.requires_grad for p in net.parameters())
    net.settle(x)
    assert not any(p.requires_grad for p in net.parameters())
    assert not any(module.training for module in net.modules())
    assert not net.encode(x).requires_grad
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    space = Codes(net, CPU)
    assert not space.decode(space.encode(x).requires_grad_()).requires_grad


# a record's code is its own


def space_of(net: Autoencoder, slots: int) -> Codes:
    space = Codes(net, CPU)
    space._encode._slots = slots
    return space


@pytest.fixture(scope="module", params=[SLOTS, 1], ids=["full batches", "one by one"])
def encoded(request):
    """A space, more images than one batch holds, and their codes."""
    space, x = space_of(settled(RGB), request.param), pictures(SLOTS + 44, RGB)
    return space, x, space.encode(x)


def test_codes_are_what_the_autoencoder_says_of_each_image(encoded):
    space, x, codes = encoded
    slow = torch.cat([space.autoencoder.encode(image[None]) for image in x])
    torch.testing.assert_close(codes, slow, rtol=1e-4, atol=1e-5)
    assert codes.dtype == torch.float32
    assert len(codes.unique(dim=0)) == len(x)


def test_reordering_records_reorders_their_codes(encoded):
    space, x, codes = encoded
    orders = [torch.randperm(len(x), generator=torch.Generator().manual_seed(k)) for k in range(3)]
    for order in [*orders, torch.arange(len(x)).flip(0)]:
        assert torch.equal(space.encode(x[order]), codes[order])


def test_a_records_code_is_the_same_among_few_others_and_alone(encoded):
    space, x, codes = encoded
    for start, n in ((0, 1), (5, 1), (len(x) - 1, 1), (0, 2), (17, 31), (44, SLOTS), (3, SLOTS + 1), (0, SLOTS - 1)):
        assert torch.equal(space.encode(x[start : start + n]), codes[start : start + n])
    assert torch.equal(space.encode(x[::3]), codes[::3])
    assert space.encode(x[:0]).shape == (0, *space.shape)


def test_a_records_code_is_the_same_in_every_place(encoded):
    """It stands in every second place of a batch, among others, and then in the places between."""
    space, x, codes = encoded
    for first in (0, 1):
        mixed = x[:SLOTS].clone()
        mixed[first::2] = x[-1]
        found = space.encode(mixed)
        assert torch.equal(found[first::2], codes[-1].expand_as(found[first::2]))
        assert torch.equal(found[1 - first :: 2], codes[1 - first : SLOTS : 2])


def test_removing_or_adding_a_record_leaves_the_other_codes_as_they_were(encoded):
    space, x, codes = encoded
    for k in (0, 1, 100, SLOTS - 1, SLOTS, len(x) - 1):
        rest = torch.arange(len(x)) != k
        assert torch.equal(space.encode(x[rest]), codes[rest])
        spoilt = torch.cat([x[:k], adversarial(RGB)[7:9], x[k:]])  # of NaN and of inf
        found = space.encode(spoilt)
        assert torch.equal(torch.cat([found[:k], found[k + 2 :]]), codes)


def test_codes_of_larger_images_and_wider_nets_are_their_records_own_too():
    image = (1, 28, 28)
    space, x = Codes(settled(image, n=60, width=32, seed=2), CPU), pictures(270, image)
    codes = space.encode(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(space.encode(x[order]), codes[order])
    assert torch.equal(space.encode(x[260:261]), codes[260:261])


class Unlike(Autoencoder):
    """A net whose last place in a batch is a little off: a machine on which places are not alike."""

    def encode(self, x):
        codes = super().encode(x)
        if len(x) > 1:
            codes[-1] += 1e-7
        return codes


def test_where_places_are_not_alike_records_are_encoded_one_by_one():
    net = Unlike(Latent(d=32, width=8), GREY)
    net.settle(pictures(50, seed=1))
    space, x = Codes(net, CPU), pictures(SLOTS)
    codes = space.encode(x)
    assert torch.equal(space.encode(x.flip(0)), codes.flip(0))
    assert torch.equal(codes, torch.cat([net.encode(image[None]) for image in x]))


# codes in the vault

STATISTICS = ("class moments", "residual second moments", "residual trace", "shared second moment", "of records")
CLASSES = 3


@pytest.fixture(scope="module")
def in_codes():
    """A space, and every release statistic with the geometry of public codes."""
    space = Codes(settled(), CPU)
    z, y = space.encode(pictures(300, seed=1)), torch.arange(300) % CLASSES
    basis = fit_basis(z, y, Release(features=8), space.bound)
    means = 0.3 * torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = (
        statistics.class_moments(basis, CLASSES),
        statistics.residual_second_moments(basis, means.__getitem__, CLASSES),
        statistics.residual_trace(basis, means.__getitem__),
        statistics.shared_second_moment(basis),
        statistics.shared_second_moment_of_records(basis),
    )
    return space, dict(zip(STATISTICS, found, strict=True))


def exact_vector(statistic, z, y) -> np.ndarray:
    """The pre-noise value in the coordinates in which the noise is isotropic."""
    groups, shapes = statistic.exact(z, y), statistic.noise_shape()
    return np.concatenate([groups[k] / shapes[k][1] for k in groups]).astype(np.float64) * statistic.grid


@pytest.mark.parametrize("name", STATISTICS)
def test_one_image_more_moves_a_statistic_of_codes_by_at_most_its_sensitivity(name, in_codes):
    """Both sets of images are encoded anew, with the further image anywhere among the others."""
    space, statistic = in_codes[0], in_codes[1][name]
    limit, moves = statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE), []
    extras = torch.cat([adversarial(GREY), pictures(4, seed=8)])
    for k, extra in enumerate(extras):
        n = (0, 1, 20, SLOTS - 1, SLOTS)[k % 5]
        x, y, place = pictures(n, seed=k), torch.arange(n) % CLASSES, (7 * k) % (n + 1)
        more = torch.cat([x[:place], extra[None], x[place:]])
        labels = torch.cat([y[:place], torch.tensor([k % CLASSES]), y[place:]])
        move = exact_vector(statistic, space.encode(more), labels) - exact_vector(statistic, space.encode(x), y)
        moves.append(np.linalg.norm(move))
    assert max(moves) <= limit * (1 + 1e-12)
    assert max(moves) >= 0.3 * limit  # images do reach its order


WORKLOAD = (
    Declaration("sum", "", "gaussian", math.sqrt(1.25), 3.0),
    Declaration("steps", "", "poisson_gaussian", 1.0, 1.5, 0.4, 20),
)


def some_records(n: int) -> Records:
    rng = np.random.default_rng(0)
    return Records(rng.integers(0, 256, (n, *GREY), dtype=np.uint8), np.arange(n) % CLASSES, ("a", "b", "c"))


def make_vault(folder: Path, records: Records, space) -> Vault:
    folder.mkdir(exist_ok=True)
    ledger = Ledger(folder / "t.jsonl")
    ledger.declare(
        Certificate(WORKLOAD, 1.0, 1e-5, 1e-3), budget=9, noise="pinned", mode="tight", n=50, recipe="", assumptions=[]
    )
    noise = Noise(b"k" * 32, pinned=True, folder=folder / "noise")
    return Vault(records, ledger, noise, n=50, diagnostics=folder / "diagnostics.jsonl", space=space)


def test_a_neighbour_moves_the_noisy_sum_of_codes_by_at_most_the_declared_sensitivity(tmp_path, in_codes):
    """Same key, so the noise cancels; the record that is missing stood among the others."""
    space, found = in_codes
    whole = some_records(30)
    sums = []
    for name, keep in (("all", np.arange(30) < 30), ("without", np.arange(30) != 11)):
        vault = make_vault(tmp_path / name, whole.subset(keep), space)
        sums.append(vault.gaussian_sum("sum", found["class moments"]))
    assert 1.0 <= np.linalg.norm(sums[0] - sums[1]) <= math.sqrt(1.25) * (1 + 1e-12)


def test_a_neighbour_moves_the_noisy_gradient_on_codes_by_at_most_the_clip(tmp_path, in_codes):
    """The last record of all is in some batches and not in others; both vaults encode their own set."""
    space, whole, moves = in_codes[0], some_records(21), []
    vaults = [make_vault(tmp_path / str(n), whole.subset(np.arange(n)), space) for n in (20, 21)]
    for step in range(20):
        a, b = (gradient(vault, step) for vault in vaults)
        moves.append(float((a - b).norm()) * 0.4 * 50)
    assert max(moves) <= 0.3 * (1 + 1e-4)
    assert max(moves) >= 0.3 * 0.9
    assert min(moves) < 1e-5


def small_engine(clip: float) -> ClippingEngine:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Linear(32, 3)
    engine = ClippingEngine(net, lambda z, xi: (net(z.flatten(1)) - xi).square().sum(dim=1), clip)
    engine.preflight((torch.ones(2, 2, 4, 4), torch.ones(2, 3)))
    return engine


def gradient(vault: Vault, step: int, seen=None) -> torch.Tensor:
    engine = small_engine(0.3)

    def clipped_sum(batch):
        if seen is not None:
            seen.append(batch)
        return engine((batch.z, batch.draws.normal((len(batch.z), 3))), batch.mask)

    return vault.noisy_gradient("steps", step, clipped_sum, clip=0.3, micro_batch=8, device=CPU)


def test_dp_sgd_meets_the_codes_of_the_records_and_nothing_else(tmp_path, in_codes):
    space, records, seen = in_codes[0], some_records(20), []
    vault = make_vault(tmp_path, records, space)
    for step in range(20):
        gradient(vault, step, seen)
    met = {row.numpy().tobytes() for batch in seen for row, used in zip(batch.z, batch.mask, strict=True) if used}
    assert met == {row.numpy().tobytes() for row in space.encode(records.z())}


class WatchingSpace:
    """Writes down what the transcript says whenever records are encoded."""

    shape, bound = (2, 4, 4), 1.0

    def __init__(self, transcript: Path):
        self.transcript, self.found = transcript, []

    def encode(self, images):
        lines = [json.loads(line) for line in self.transcript.read_text().splitlines()]
        self.found.append([(entry["id"], entry["step"]) for entry in lines if entry["kind"] == "execute"])
        return torch.zeros(len(images), *self.shape)

    def decode(self, z):
        raise AssertionError("the vault decodes nothing")


def test_records_are_encoded_once_and_only_after_the_entry_is_on_disk(tmp_path):
    space = WatchingSpace(tmp_path / "t.jsonl")
    vault = make_vault(tmp_path, some_records(6), space)
    statistic = RowSum(lambda z, y: z, 32, math.sqrt(1.25))
    for id, refused in (("other", statistic), ("steps", statistic), ("sum", RowSum(lambda z, y: z, 32, 2.0))):
        with pytest.raises(BudgetRefused):
            vault.gaussian_sum(id, refused)
    assert space.found == []
    vault.gaussian_sum("sum", statistic)
    assert space.found == [[("sum", 0)]]
    gradient(vault, 0)
    assert space.found == [[("sum", 0)]]  # the same codes serve


def test_records_are_encoded_after_the_entry_when_dp_sgd_comes_first(tmp_path):
    space = WatchingSpace(tmp_path / "t.jsonl")
    vault = make_vault(tmp_path, some_records(6), space)
    with pytest.raises(BudgetRefused):
        gradient(vault, 20)
    assert space.found == []
    gradient(vault, 3)
    gradient(vault, 4)
    assert space.found == [[("steps", 3)]]


# whole runs


@pytest.fixture(scope="module")
def recipe_file(tiny_data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TINY.format(**tiny_data))
    return path


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory):
    """A latent run with home, working and temporary folder of its own, and what was encoded on its way."""
    root, seen, encode = tmp_path_factory.mktemp("latent"), [], Codes.encode

    def watched(self, images):
        ledger = root / "run/private/transcript.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        seen.append((images.clone(), [json.loads(line)["kind"] for line in lines]))
        return encode(self, images)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("home", "working", "temporary"):
            (root / name).mkdir()
        patch.setenv("HOME", str(root / "home"))
        patch.setenv("TMPDIR", str(root / "temporary"))
        patch.setattr(tempfile, "tempdir", str(root / "temporary"))
        for name in ("XDG_CACHE_HOME", "STRAIGHTDP_CACHE"):
            patch.delenv(name, raising=False)
        patch.chdir(root / "working")
        patch.setattr(Codes, "encode", watched)
        folder = pipeline.run(recipe.load(recipe_file, SHORT + LATENT), root / "run")
    return SimpleNamespace(root=root, folder=folder, encoded=seen)


def resumed(folder: Path, recipe_file: Path, *more: str) -> RunFolder:
    return pipeline.run(recipe.load(recipe_file, (*SHORT, *LATENT, *more)), folder, resume=True)


def test_a_latent_runs_transcript_holds_and_closes(finished):
    verdict = replay(finished.folder.release)
    assert verdict.holds, verdict.text
    kinds = [json.loads(line)["kind"] for line in finished.folder.transcript.read_text().splitlines()]
    assert kinds.index("certificate") < kinds.index("execute")
    assert kinds[-1] == "totals"


def test_in_a_whole_run_private_records_are_encoded_once_after_the_first_entry(finished, tiny_data):
    sets = {}
    for name in ("private", "holdout", "public"):
        z = load_records(str(tiny_data[name]), size=8, channels=1).z()
        sets[name] = {picture.numpy().tobytes() for picture in z}
    private = [(x, kinds) for x, kinds in finished.encoded if sets["private"] & {p.numpy().tobytes() for p in x}]
    assert len(private) == 1
    assert "certificate" in private[0][1]
    assert private[0][1][-1] == "execute"
    assert private[0][1].count("execute") == 1
    assert len(private[0][0]) == 400
    others = [x for x, kinds in finished.encoded if "execute" not in kinds]
    assert others
    for x in others:
        assert {p.numpy().tobytes() for p in x} <= sets["public"]


def test_nothing_is_written_outside_the_runs_folder(finished):
    assert sorted(path.name for path in finished.root.iterdir()) == ["home", "run", "temporary", "working"]
    for name in ("home", "working", "temporary"):
        assert [path for path in (finished.root / name).rglob("*") if path.is_file()] == []


def test_the_autoencoder_stays_frozen_from_its_training_to_the_release(finished):
    """Distillation and DP-SGD leave its weights as they are, to the bit; the network's own have moved."""
    trained, released = load_file(finished.folder.autoencoder), load_file(finished.folder.model)
    prefix = "autoencoder."
    own = {name.removeprefix(prefix): value for name, value in released.items() if name.startswith(prefix)}
    assert own.keys() == trained.keys()
    assert all(torch.equal(own[name], trained[name]) for name in trained)
    start = load_file(finished.folder.checkpoints / "distilled.safetensors")
    assert start.keys() == released.keys() - {prefix + name for name in trained}
    assert any(not torch.equal(start[name], released[name]) for name in start)


def test_more_images_come_from_the_release_folder_alone(finished, tmp_path):
    alone = tmp_path / "published"
    shutil.copytree(finished.folder.release, alone)
    shutil.rmtree(alone / "synthetic")
    hidden = finished.root.with_name(finished.root.name + " hidden")
    finished.root.rename(hidden)  # the run, its private folder included, is not there
    try:
        assert main(["sample", str(alone), "--n", "7", "--out", str(tmp_path / "more")]) == 0
    finally:
        hidden.rename(finished.root)
    found = sorted((tmp_path / "more/images").iterdir())
    assert len(found) == 7
    assert all(np.asarray(Image.open(path)).shape == (8, 8) for path in found)


def test_the_synthetic_set_is_what_the_released_generator_draws(finished):
    generator = Generator.load(finished.folder.release, CPU)
    drawn = generator.draw(generator.prompts(20, CPU), generator.sample, 0, quiet)
    written = [np.asarray(Image.open(path)) for path in sorted((finished.folder.synthetic / "images").iterdir())]
    assert np.array_equal(np.stack(written), to_pixels(drawn)[:, 0])
    assert drawn.shape == (20, *GREY)


def latent_generator() -> Generator:
    """Random weights, made here and never loaded."""
    captions = ("a cat", "a dog", "an eel")
    words = Conditioning(("cat", "dog", "eel"), captions, Tokenizer.from_captions(captions, 3, 16))
    section = Net(width=16, depth=2, heads=2, patch=2, caption_width=8, caption_length=3, vocabulary=16)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = MMDiT(section, (2, 4, 4))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(0, 0.2)
        mu, V = torch.randn(3, 32), torch.linalg.qr(torch.randn(32, 4))[0][None].contiguous()
    moments = MomentModel(mu, V, torch.full((1, 4), 0.5), torch.tensor([0.5, 0.3, 0.2]), 0.1)
    return Generator(net, words, moments, Sample(n=12, steps=3), Codes(settled(RGB), CPU))


@pytest.mark.parametrize("port", ["weights", "guide", "release"])
def test_a_latent_generator_comes_back_from_its_files(port, tmp_path):
    one = latent_generator()
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    one.moments.save(tmp_path / "moments.safetensors")
    two = Generator.load(tmp_path, CPU)
    section, y = Sample(port=port, steps=3, batch=5), one.prompts(12, CPU)
    drawn = two.draw(y, section, 5, quiet)
    assert torch.equal(drawn, one.draw(y, section, 5, quiet))
    assert drawn.shape == (12, *RGB)
    assert drawn.unique(dim=0).shape == drawn.shape
    assert two.draw(y[:0], section, 5, quiet).shape == (0, *RGB)
    two.save(tmp_path / "again.safetensors", tmp_path / "again.json")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "model.json").read_bytes()


def test_draws_of_the_release_port_are_decoded_codes():
    """Moments of no spread: each picture is the decoder's of its caption's mean code."""
    one = latent_generator()
    mean = one.moments.mu
    one.moments = MomentModel(mean, torch.zeros(1, 32, 1), torch.zeros(1, 1), one.moments.prior, 1e-12)
    y = torch.tensor([2, 0, 1, 1])
    found = one.draw(y, Sample(port="release"), 0, quiet)
    expected = one.space.autoencoder.decode(mean[y].reshape(-1, 2, 4, 4))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("missing", ["autoencoder.mean", "autoencoder.radius"])
def test_a_release_without_its_whole_decoder_is_refused_in_one_line(missing, tmp_path):
    from safetensors.torch import save_file

    latent_generator().save(tmp_path / "model.safetensors", tmp_path / "model.json")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != missing}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="damaged"):
        Generator.load(tmp_path, CPU)


RELEASED = ("transcript.jsonl", "moments.safetensors", "model.safetensors", "model.json", "synthetic")


def fails(*_):
    raise AssertionError("this trains again")


def test_resuming_with_nothing_but_the_autoencoder_gives_the_same_release(finished, recipe_file, tmp_path, monkeypatch):
    """Everything that came after it is gone; it is not trained again."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.folder.root, folder.root)
    shutil.rmtree(folder.release)
    stamps = folder.read_stamps()
    kept = {folder.autoencoder, folder.fingerprint}
    for path in [p for p in folder.private.rglob("*") if p.is_file() and p not in kept]:
        path.unlink()
    folder.stamps.write_text(json.dumps({"autoencode": stamps["autoencode"]}))
    before = folder.autoencoder.stat().st_mtime_ns, file_hash(folder.autoencoder)
    monkeypatch.setattr(pipeline.prepare, "autoencode", fails)
    resumed(folder.root, recipe_file)
    assert (folder.autoencoder.stat().st_mtime_ns, file_hash(folder.autoencoder)) == before
    for name in RELEASED:
        assert file_hash(folder.release / name) == file_hash(finished.folder.release / name), name


def test_a_finished_run_can_be_evaluated_again_and_resampled_in_another_number(finished, recipe_file, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(finished.folder.root, root)
    again = resumed(root, recipe_file, "sample.n=9")
    assert len(list((again.synthetic / "images").iterdir())) == 9
    assert again.transcript.read_bytes() == finished.folder.transcript.read_bytes()
    assert main(["report", str(root)]) == 0


@pytest.mark.pipeline
def test_a_run_killed_while_the_autoencoder_trains_ends_like_one_left_alone(recipe_file, tmp_path, monkeypatch):
    """And goes on from where it was."""
    more = ("latent.steps=500",)
    killed = RunFolder(tmp_path / "killed")
    arguments = [word for setting in (*SHORT, *LATENT, *more) for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "straightdp", "run", str(recipe_file), "--out", str(killed.root), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (killed.checkpoints / "autoencode.pt").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not killed.autoencoder.exists(), "it was killed too late: give it more to do"
    assert (killed.checkpoints / "autoencode.pt").exists()
    assert not killed.ledger.exists()
    calm = pipeline.run(recipe.load(recipe_file, (*SHORT, *LATENT, *more)), tmp_path / "calm")
    steps, loss = [], Autoencoder.loss
    monkeypatch.setattr(Autoencoder, "loss", lambda *given: steps.append(1) or loss(*given))
    resumed(killed.root, recipe_file, *more)
    assert 0 < len(steps) <= 450
    assert file_hash(killed.autoencoder) == file_hash(calm.autoencoder)
    for name in RELEASED:
        assert file_hash(killed.release / name) == file_hash(calm.release / name), name


# what runs share


class Stop(Exception):
    pass


def stops(*_):
    raise Stop


@pytest.fixture(scope="module")
def other_private(tmp_path_factory) -> Path:
    """Other digits, of the same classes."""
    records = digits("train")
    rest = records.subset(np.arange(800, 1200))
    return save(tmp_path_factory.mktemp("other") / "private.npz", rest, 400)


@pytest.fixture(scope="module")
def cached(recipe_file, tmp_path_factory):
    """A whole run that filled a cache."""
    root = tmp_path_factory.mktemp("cached")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRAIGHTDP_CACHE", str(root / "cache"))
        folder = pipeline.run(recipe.load(recipe_file, SHORT + LATENT), root / "run")
    return SimpleNamespace(cache=root / "cache", folder=folder)


def contents(cache: Path) -> dict[str, str]:
    return {path.name: file_hash(path) for path in cache.iterdir() if path.suffix != ".lock"}


def test_a_cache_changes_nothing_that_is_released(cached, finished):
    for name in RELEASED:
        assert file_hash(cached.folder.release / name) == file_hash(finished.folder.release / name), name


def test_the_cache_holds_the_public_autoencoder_and_the_pretrained_weights_and_nothing_else(cached):
    pretrained = cached.folder.checkpoints / "pretrained.safetensors"
    found = contents(cached.cache)
    assert sorted(name.partition("-")[0] for name in found) == ["autoencode", "pretrain"]
    assert sorted(found.values()) == sorted(map(file_hash, (cached.folder.autoencoder, pretrained)))
    locks = [path for path in cached.cache.iterdir() if path.suffix == ".lock"]
    assert len(locks) == 2
    assert all(path.read_bytes() == b"" for path in locks)
    assert all(path.is_file() for path in cached.cache.iterdir())


def test_the_cache_is_the_same_whatever_the_private_records_are(
    cached, recipe_file, other_private, tmp_path, monkeypatch
):
    """A whole run on other private records, with another budget and other noise, fills a cache of its own."""
    monkeypatch.setenv("STRAIGHTDP_CACHE", str(tmp_path / "cache"))
    other = (f"private.data={other_private}", "privacy.epsilon=6", f'privacy.pinned_key="{"bb" * 32}"')
    folder = pipeline.run(recipe.load(recipe_file, (*SHORT, *LATENT, *other)), tmp_path / "run")
    assert file_hash(folder.moments) != file_hash(cached.folder.moments)  # the records did matter
    assert contents(tmp_path / "cache") == contents(cached.cache)


def test_a_second_run_with_another_epsilon_trains_nothing_public(cached, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_CACHE", str(cached.cache))
    monkeypatch.setattr(pipeline.prepare, "autoencode", fails)
    monkeypatch.setattr(pipeline.prepare, "pretrain", fails)
    before = contents(cached.cache)
    folder = pipeline.run(recipe.load(recipe_file, (*SHORT, *LATENT, "privacy.epsilon=6")), tmp_path / "run")
    assert replay(folder.release).holds
    for name in ("autoencoder.safetensors", "pretrained.safetensors"):
        assert file_hash(folder.checkpoints / name) == file_hash(cached.folder.checkpoints / name)
    assert contents(cached.cache) == before


ALIKE = {
    "another delta": ("privacy.delta=1e-6",),
    "another release": ("release.rank=4",),
    "other private steps": ("dpsgd.lr=1e-3",),
    "other sampling": ("sample.steps=9",),
    "other private records": ("private.data={private}",),
}
UNLIKE = {
    "a deeper net": ("net.depth=3",),
    "longer captions": ("net.caption_length=5",),
    "longer pretraining": ("pretrain.steps=3",),
    "another seed": ("run.seed=1",),
    "a larger code": ("latent.d=48",),
    "another radius": ("latent.radius_quantile=0.5",),
    "another public caption": ("public.caption=a sign like {label}",),
    "other public records": ("public.data={public}",),
    "three channels": ("image.channels=3",),
}
SAME_AUTOENCODER = {"a deeper net", "longer pretraining"}


def trained(recipe_file: Path, out: Path, settings: tuple[str, ...]) -> list[str]:
    """Which public stages train in a run that stops after them."""
    found: list[str] = []

    def counted(name):
        work = getattr(pipeline.prepare, name)
        return lambda inputs, path: found.append(name) or work(inputs, path)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("autoencode", "pretrain"):
            patch.setattr(pipeline.prepare, name, counted(name))
        patch.setattr(pipeline.prepare, "calibrate", stops)
        with pytest.raises(Stop):
            pipeline.run(recipe.load(recipe_file, settings), out)
    return found


@pytest.fixture
def copy_of_the_cache(cached, tmp_path, monkeypatch) -> Path:
    shutil.copytree(cached.cache, tmp_path / "cache")
    monkeypatch.setenv("STRAIGHTDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ALIKE)
def test_runs_that_differ_in_nothing_public_share(name, copy_of_the_cache, recipe_file, other_private, tmp_path):
    more = tuple(setting.replace("{private}", str(other_private)) for setting in ALIKE[name])
    assert trained(recipe_file, tmp_path / "run", (*SHORT, *LATENT, *more)) == []


@pytest.mark.parametrize("name", UNLIKE)
def test_runs_that_differ_in_what_public_training_sees_do_not_share(
    name, copy_of_the_cache, recipe_file, tiny_data, tmp_path
):
    """One pixel of one public record is enough. What is trained joins the cache beside what was there."""
    with np.load(tiny_data["public"]) as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"]
    images[17, 2, 3] ^= 1
    np.savez(tmp_path / "public.npz", images=images, labels=labels)
    before = contents(copy_of_the_cache)
    more = tuple(setting.replace("{public}", str(tmp_path / "public.npz")) for setting in UNLIKE[name])
    found = trained(recipe_file, tmp_path / "run", (*SHORT, *LATENT, *more))
    assert "pretrain" in found
    if name in SAME_AUTOENCODER:
        assert "autoencode" not in found
    elif name not in ("another public caption", "longer captions"):  # the autoencoder sees no captions
        assert "autoencode" in found
    after = contents(copy_of_the_cache)
    assert before.items() <= after.items()
    assert len(after) == len(before) + len(found)


def test_pixel_runs_share_their_pretraining_but_not_with_latent_ones(copy_of_the_cache, recipe_file, tmp_path):
    assert trained(recipe_file, tmp_path / "one", SHORT) == ["pretrain"]
    assert trained(recipe_file, tmp_path / "two", (*SHORT, "privacy.epsilon=6")) == []


ASKS = """
import sys, time
from pathlib import Path
from straightdp.cache import shared

out, count = Path(sys.argv[1]), Path(sys.argv[2])

def work():
    with open(count, "a") as file:
        file.write("worked\\n")
    time.sleep(0.5)
    out.write_text("made by " + out.name)

print("ready", flush=True)
sys.stdin.readline()
shared("thing", "key", out, work)
"""


def test_of_several_processes_that_ask_at_once_one_works(tmp_path):
    """All get what the one made."""
    environment = os.environ | {"STRAIGHTDP_CACHE": str(tmp_path / "cache")}
    outs = [tmp_path / f"{k}.bin" for k in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASKS, str(out), str(tmp_path / "count")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for out in outs
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert (tmp_path / "count").read_text() == "worked\n"
    assert len({out.read_text() for out in outs}) == 1
    assert list(contents(tmp_path / "cache")) == ["thing-key.bin"]


def test_work_that_breaks_off_leaves_nothing_to_share(tmp_path, monkeypatch):
    """The next one works, and is not kept waiting; a third one copies."""
    monkeypatch.setenv("STRAIGHTDP_CACHE", str(tmp_path / "cache"))

    def half_way():
        (tmp_path / "a.bin").write_text("ha")
        raise Stop

    with pytest.raises(Stop):
        shared("thing", "key", tmp_path / "a.bin", half_way)
    assert contents(tmp_path / "cache") == {}
    shared("thing", "key", tmp_path / "b.bin", lambda: (tmp_path / "b.bin").write_text("whole") and None)
    shared("thing", "key", tmp_path / "c.bin", fails)
    assert (tmp_path / "c.bin").read_text() == "whole"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_everyone_works_and_no_folder_is_made(value, tmp_path, monkeypatch):
    if value is not None:
        monkeypatch.setenv("STRAIGHTDP_CACHE", value)
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "b.bin"):
        shared("thing", "key", tmp_path / name, lambda name=name: (tmp_path / name).write_text(name) and None)
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == [
        ("a.bin", "a.bin"),
        ("b.bin", "b.bin"),
    ]


# where guidance starts

CURVES = {
    "flat, then up": ([1.0, 1.05, 0.98, 1.09, 1.2, 1.3], 0.3),
    "up at once": ([1.0, 1.2, 1.3, 1.4, 1.5, 1.6], 0.0),
    "never up": ([1.0, 0.9, 0.8, 0.9, 1.0, 1.1], 0.6),
    "a dip after it went up": ([1.0, 1.05, 1.2, 0.5, 0.5, 0.5], 0.1),
    "down, and then up beyond the start": ([1.0, 0.2, 0.2, 1.0, 1.2, 1.0], 0.3),
    "up in the last place": ([2.0, 2.0, 2.0, 2.0, 2.0, 2.3], 0.4),
    "just allowed": ([10.0, 11.0, 11.0, 11.0, 11.1, 10.0], 0.3),
    "not a number on the way": ([1.0, 1.0, math.nan, 1.0, 1.0, 1.0], 0.1),
    "not a number from the start": ([math.nan, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0),
    "all zero": ([0.0] * 6, 0.6),
}


@pytest.mark.parametrize("name", CURVES)
def test_guidance_starts_at_the_end_of_the_flat_part(name):
    distances, expected = CURVES[name]
    assert Plateau([0.0, 0.1, 0.2, 0.3, 0.4, 0.6], distances).t0 == expected


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=11))
def test_all_is_allowed_up_to_t0_and_the_next_time_is_not(distances):
    times = list(TIMES[: len(distances)])
    last = times.index(Plateau(times, distances).t0)
    assert max(distances[: last + 1]) <= ALLOWED * distances[0]
    assert last + 1 == len(times) or distances[last + 1] > ALLOWED * distances[0]


def public_set(n: int = 200):
    """Records with their numbers as captions, so that a network may know where each is to go."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 2
    z = torch.randn(n, 1, 2, 2, generator=generator) * 0.3 + y[:, None, None, None]
    return z, y, torch.arange(n)[:, None], fit_basis(z, y, Release(features=3))


def moments_at(mean: float) -> MomentModel:
    mu = torch.full((2, 4), mean)
    return MomentModel(mu, torch.eye(4)[None, :, :1].contiguous(), torch.ones(1, 1), torch.full((2,), 0.5), 0.1)


def find_plateau(net, model, public) -> Plateau:
    z, y, ids, basis = public
    section = Sample(port="guide", steps=4, guidance=1.0, batch=64)
    return plateau(net, model, basis, z, y, ids, torch.zeros(1, 1).long(), section, torch.Generator().manual_seed(1))


def test_a_network_that_arrives_from_anywhere_may_start_last():
    """It walks each record's noise straight to the record, shifted: the distance is that of a shifted resample."""
    from test_frechet import by_scipy

    public = public_set()
    z, _, _, basis = public
    met: dict[float, list[int]] = {}
    shift = 0.5

    def net(x, t, ids):
        met.setdefault(round(float(t[0]), 6), []).extend(ids[:, 0].tolist())
        return (z[ids[:, 0]] + shift - x) / (1 - t)[:, None, None, None]

    found = find_plateau(net, moments_at(50.0), public)
    assert found.times == list(TIMES)
    assert found.t0 == TIMES[-1]
    drawn = met[0.0]
    assert all(met[t][: len(drawn)] == drawn for t in TIMES)  # the same captions at every time
    expected = by_scipy(
        basis.features(z.flatten(1).double()).numpy(),
        basis.features((z[torch.tensor(drawn)] + shift).flatten(1).double()).numpy(),
    )
    np.testing.assert_allclose(found.distances, expected, rtol=1e-3)


def test_moments_that_mislead_may_not_start_at_all():
    """A network that stays where it is shows where it was started: ever farther away."""
    found = find_plateau(lambda x, t, ids: torch.zeros_like(x), moments_at(50.0), public_set())
    assert found.t0 == 0.0
    assert bool((np.diff(found.distances) > 0).all())


@pytest.fixture(scope="module")
def guided_run(recipe_file, tmp_path_factory) -> RunFolder:
    asked = ("sample.port=guide", "sample.t0=plateau")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STRAIGHTDP_CACHE", raising=False)
        return pipeline.run(
            recipe.load(recipe_file, (*SHORT, *LATENT, *asked)), tmp_path_factory.mktemp("guided") / "run"
        )


def test_a_run_writes_the_start_it_found_as_a_number(guided_run):
    card, curve = json.loads(guided_run.model_card.read_text()), json.loads(guided_run.plateau.read_text())
    assert card["sample"]["port"] == "guide"
    assert isinstance(card["sample"]["t0"], float)
    assert card["sample"]["t0"] == curve["t0"] == Plateau(curve["times"], curve["distances"]).t0
    assert curve["times"] == list(TIMES)
    assert replay(guided_run.release).holds


def test_a_guided_release_samples_alone(guided_run, tmp_path):
    shutil.copytree(guided_run.release, tmp_path / "published")
    assert main(["sample", str(tmp_path / "published"), "--n", "5", "--out", str(tmp_path / "more")]) == 0
    assert len(list((tmp_path / "more/images").iterdir())) == 5


def test_a_generator_asked_for_the_plateau_refuses_in_one_line(guided_run, tmp_path, capsys):
    generator = Generator.load(guided_run.release, CPU)
    with pytest.raises(BadInput) as caught:
        generator.draw(generator.prompts(3, CPU), Sample(port="guide", t0="plateau"), 0, quiet)
    assert "give a number" in one_line(caught)
    capsys.readouterr()
    arguments = ["sample", str(guided_run.release), "--n", "3", "--out", str(tmp_path / "x")]
    assert main([*arguments, "--set", "sample.t0=plateau"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("port", ["weights", "release"])
def test_ports_that_start_from_noise_get_a_number_without_looking(port, tmp_path):
    """No plateau is sought: there is no run's folder to find it in."""
    section = Sample(port=port, t0="plateau")
    found = settled_sample(SimpleNamespace(recipe=SimpleNamespace(sample=section), folder=RunFolder(tmp_path / "none")))
    assert isinstance(found.t0, float)
    assert found.model_copy(update={"t0": "plateau"}) == section
