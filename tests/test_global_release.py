"""One mean for all records: its sum against a slow loop, what a record can do to it, and the public geometry around it,
which has to hold where there are fewer public records than numbers in one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moment_oracles import keyed
from straightdp.data.records import Records
from straightdp.moments import statistics
from straightdp.moments.basis import Z_BITS, Basis, exact_bits, fit_basis
from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import public_spread
from straightdp.moments.release import MEAN, release_parts, run_release
from straightdp.privacy import mechanisms
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.mechanisms import Relation
from straightdp.privacy.vault import Vault
from straightdp.recipe import Recipe, Release, parse
from test_vault import make_vault

D, P, N = 8, 3, 30
UNIT = 2**30  # grid steps in a length of 1
KEPT = {
    "features": P,
    "radius_quantile": 1.0,
    "residual_quantile": 1.0,
    "floor": 1e-6,
    "rank": P,
}  # clips no public one


def records(n: int, d: int = D, seed: int = 0) -> torch.Tensor:
    """(n, d) float32, spread differently along every axis."""
    return torch.randn(n, d, generator=keyed(seed)) * torch.linspace(1.0, 0.2, d)


def loop_features(z: torch.Tensor, basis: Basis) -> np.ndarray:
    """Number by number."""
    rows = np.zeros((len(z), len(basis.P)))
    for i in range(len(z)):
        for j in range(len(basis.P)):
            for k in range(z.shape[1]):
                seen = round(float(z[i, k]) * 2**Z_BITS) / 2**Z_BITS
                rows[i, j] += float(basis.P[j, k]) * (seen - float(basis.mean[k]))
    return rows


def loop_sum(z: torch.Tensor, basis: Basis) -> np.ndarray:
    total = np.zeros(len(basis.P))
    for f in loop_features(z, basis):
        length = math.sqrt(sum(x * x for x in f))
        total += f / max(length, basis.radius)
    return total


def exact_sum(basis: Basis, z: torch.Tensor, y: torch.Tensor | None = None) -> np.ndarray:
    """Before the noise, in grid steps."""
    y = torch.zeros(len(z), dtype=torch.int64) if y is None else y
    return statistics.global_mean(basis).exact(z, y)["rows"]


def length(steps: np.ndarray) -> float:
    """In units of the sensitivity; the square is a whole number."""
    return math.sqrt(sum(int(x) ** 2 for x in steps)) / UNIT


PUBLIC = fit_basis(records(50), torch.zeros(50, dtype=torch.int64), Release(features=P))


# The sum


def test_the_sum_is_that_of_a_loop_over_clipped_features():
    z = 1.5 * records(N, seed=1)
    clipped = np.linalg.norm(loop_features(z, PUBLIC), axis=1) > PUBLIC.radius
    assert 0.2 < clipped.mean() < 0.95, "some are clipped, and some are not"
    found = statistics.global_mean(PUBLIC).assemble({"rows": exact_sum(PUBLIC, z)})
    assert found.shape == (1, P)
    np.testing.assert_allclose(found[0], loop_sum(z, PUBLIC), rtol=0, atol=2 * N / UNIT)  # a step a record
    assert np.array_equal(exact_sum(PUBLIC, z, torch.arange(N) % 4), exact_sum(PUBLIC, z)), "classes play no part"
    assert not exact_sum(PUBLIC, z[:0]).any()


def test_what_is_declared_is_what_the_sum_can_move_by():
    statistic = statistics.global_mean(PUBLIC)
    assert statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE) == 1.0
    assert statistic.sensitivity(Relation.REPLACE_ONE) == 2.0
    along = (PUBLIC.mean + 100 * PUBLIC.P[0]).float()[None]
    assert length(exact_sum(PUBLIC, along)) == pytest.approx(1, abs=1e-6), "a far record uses all of it"
    opposite = (PUBLIC.mean - 100 * PUBLIC.P[0]).float()[None]
    assert length(exact_sum(PUBLIC, along) - exact_sum(PUBLIC, opposite)) == pytest.approx(2, abs=1e-6)


sizes = st.sampled_from([0.0, 1e-45, 1e-8, 0.5, 1.0, 3.0, 1e4, 1e18, 3.4e38, math.inf, -math.inf, math.nan])
numbers = st.one_of(st.floats(width=32), st.builds(lambda s, u: float(np.float32(s * u)), sizes, st.floats(-1, 1)))


@given(st.lists(numbers, min_size=D, max_size=D), st.integers(0, 9), st.integers(0, 9))
def test_any_record_moves_the_sum_by_at_most_one(record, n, place):
    """To the step, whatever it holds and wherever it stands: no other record's part may change with it."""
    others, place = records(n, seed=2), min(place, n)
    more = torch.cat([others[:place], torch.tensor([record]), others[place:]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanisms, "CHUNK", 4)  # others share a slice with it, or no longer do
        moved = exact_sum(PUBLIC, more) - exact_sum(PUBLIC, others)
        alone = exact_sum(PUBLIC, torch.tensor([record]))
    assert sum(int(x) ** 2 for x in moved) <= UNIT**2
    assert np.array_equal(moved, alone)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_a_record_that_is_not_finite_adds_nothing(value, whole):
    z = records(5, seed=3)
    bad = torch.full((1, D), value) if whole else torch.cat([torch.ones(1, D - 1), torch.tensor([[value]])], dim=1)
    assert not exact_sum(PUBLIC, bad).any()
    assert np.array_equal(exact_sum(PUBLIC, torch.cat([z[:2], bad, z[2:]])), exact_sum(PUBLIC, z))


# The release


def rules(mode: str = "tight", **release) -> Recipe:
    section = {"condition": "global", "covariance": "public", "features": P} | release
    return parse({"privacy": {"mode": mode}, "release": section, "dpsgd": {"steps": 0}})


@pytest.mark.parametrize(
    ("covariance", "ids"),
    [
        ("public", {"release/mean"}),
        ("shared", {"release/mean", "release/covariance"}),
        ("residual", {"release/mean", "release/covariance", "release/trace"}),
    ],
)
def test_a_release_declares_one_mean_and_what_its_spread_costs(covariance, ids):
    parts = {part.id: part for part in release_parts(rules(covariance=covariance))}
    assert parts.keys() == ids
    assert parts[MEAN].sensitivity == 1.0
    assert sum(part.part for part in parts.values()) == pytest.approx(1)
    assert parts[MEAN].part == (1.0 if covariance == "public" else 0.25)
    assert release_parts(rules("paper"))[0].sensitivity == 2.0


def vault_of(folder: Path, z: torch.Tensor, recipe: Recipe, sigma: float, n: int = N) -> tuple[Vault, dict[str, float]]:
    """And the declared deviations, for any noise. Records have two classes, which one mean has no use for."""
    workload = tuple(
        Declaration(part.id, "", "gaussian", part.sensitivity, sigma / math.sqrt(part.part))
        for part in release_parts(recipe)
    )
    private = Records(z.reshape(-1, 1, 1, z.shape[1]).numpy(), np.arange(len(z)) % 2, ("a", "b"))
    stds = {part.id: part.sigma * part.sensitivity for part in workload}
    return make_vault(folder, private, n=n, workload=workload), stds


def test_the_released_mean_comes_to_the_true_one_as_the_noise_goes(tmp_path):
    """The error is R sigma / N in every feature, N the declared one: half of that or twice would show."""
    d, p, n = 60, 40, 200  # N is not how many there are
    public, z = records(300, d), records(N, d, seed=1) + 0.3
    basis = fit_basis(public, torch.zeros(300, dtype=torch.int64), Release(features=p))
    true = basis.mean.numpy() + loop_sum(z, basis) * basis.radius / n @ basis.P.numpy()
    errors = []
    for k, sigma in enumerate([8.0, 0.5, 0.02]):
        recipe = rules(features=p)
        vault, stds = vault_of(tmp_path / str(k), z, recipe, sigma, n)
        assert stds == {MEAN: pytest.approx(sigma)}
        model = run_release(recipe, basis, vault, stds, public=torch.eye(p, dtype=torch.float64)[None])
        assert model.mu.shape == (1, d)
        error = (model.mu[0].double().numpy() - true) @ basis.P.numpy().T
        assert 0.55 < np.mean((error / (basis.radius * sigma / n)) ** 2) < 1.7
        errors.append(np.linalg.norm(error))
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 0.02 * np.linalg.norm(true)


def loop_covariance(z: torch.Tensor, labels: torch.Tensor, basis: Basis) -> np.ndarray:
    """Of features, around the classes' means."""
    f, total = loop_features(z, basis), np.zeros((len(basis.P), len(basis.P)))
    for label in set(labels.tolist()):
        own = [f[i] for i in range(len(z)) if int(labels[i]) == label]
        centre = sum(own) / len(own)
        for x in own:
            total += np.outer(x - centre, x - centre)
    return total / len(z)


def feature_covariance(model: MomentModel, basis: Basis) -> np.ndarray:
    """P Sigma P^T, for orthonormal rows of P."""
    V, lam = model.V[0].double().numpy(), model.lam[0].double().numpy()
    return basis.P.numpy() @ (V * lam) @ V.T @ basis.P.numpy().T + model.floor * np.eye(len(basis.P))


def test_a_public_covariance_is_the_loop_of_public_records_and_private_ones_have_no_say(tmp_path):
    z, labels = records(40), torch.arange(40) % 3
    z += labels[:, None] * torch.ones(D)  # so that around the classes is not around them all
    basis = fit_basis(z, labels, Release(features=P))
    spread = public_spread(z, labels, basis)
    expected = loop_covariance(z, labels, basis)
    np.testing.assert_allclose(spread, expected[None], rtol=0, atol=1e-9)
    assert np.abs(expected - loop_covariance(z, torch.zeros(40), basis)).max() > 0.1
    recipe = rules(floor=1e-6)
    found = []
    for k in range(2):
        vault, stds = vault_of(tmp_path / str(k), records(N, seed=k) + k, recipe, sigma=2.0)
        found.append(run_release(recipe, basis, vault, stds, public=spread))
        np.testing.assert_allclose(feature_covariance(found[k], basis), expected, rtol=0, atol=1e-5)
    assert torch.equal(found[0].V, found[1].V)
    assert torch.equal(found[0].lam, found[1].lam)
    assert not torch.allclose(found[0].mu, found[1].mu)


@pytest.mark.parametrize("covariance", ["shared", "residual"])
def test_a_spread_that_is_released_is_that_of_all_records_around_the_one_mean(covariance, tmp_path):
    """Hardly any noise, nothing clipped: two classes far apart count as one."""
    z = records(N, seed=4) + torch.arange(N)[:, None] % 2
    public = torch.cat([z, z + 2])
    basis = fit_basis(public, torch.zeros(2 * N, dtype=torch.int64), Release(**KEPT))
    recipe = rules(covariance=covariance, **KEPT)
    vault, stds = vault_of(tmp_path / "vault", z, recipe, sigma=1e-3)
    model = run_release(recipe, basis, vault, stds)
    expected = loop_covariance(z, torch.zeros(N), basis)
    np.testing.assert_allclose(feature_covariance(model, basis), expected, rtol=0, atol=0.01 * np.trace(expected))


# The basis where d is more than n


def shuffled(rows: int, seed: int) -> torch.Tensor:
    return torch.randperm(rows, generator=keyed(seed))


@pytest.mark.parametrize(("n", "d"), [(40, 300), (12, 256), (300, 40)])
def test_the_basis_is_that_of_the_whole_eigendecomposition(n, d):
    p, z, labels = 9, 3 * records(n, d), torch.arange(n) % 3
    basis = fit_basis(z, labels, Release(features=p, radius_quantile=0.5), bound=20.0)
    x = z.double().numpy()
    values, vectors = np.linalg.eigh(np.cov(x, rowvar=False, bias=True))
    top = vectors[:, ::-1][:, :p]
    gaps = np.diff(values[::-1][: p + 1])
    assert (np.abs(gaps) > 1e-4 * values[-1]).all(), "every direction is one of its own"
    rows = basis.P.numpy()
    rough = 2.0 ** -exact_bits(1.001 * math.sqrt(d), 20.0) * math.sqrt(d)  # what rounding to the grid does to a row
    assert rough < 1e-5
    np.testing.assert_allclose(rows @ rows.T, np.eye(p), rtol=0, atol=2 * rough)
    np.testing.assert_allclose(rows.T @ rows, top @ top.T, rtol=0, atol=10 * rough)
    expected = np.abs((x - x.mean(axis=0)) @ top)
    scale = np.linalg.norm(expected, axis=1).max()
    np.testing.assert_allclose(basis.features(z.double()).abs(), expected, rtol=0, atol=100 * rough * scale)
    assert basis.radius == pytest.approx(np.quantile(np.linalg.norm(expected, axis=1), 0.5), rel=1e-4)


@pytest.mark.parametrize("different", [1, 4])
def test_rows_are_orthonormal_where_public_records_repeat_themselves(different):
    """Fewer directions than features: the others are free, but still directions."""
    z = records(different, 100)[torch.arange(20) % different]
    basis = fit_basis(z, torch.zeros(20, dtype=torch.int64), Release(features=10))
    np.testing.assert_allclose(basis.P @ basis.P.T, np.eye(10), rtol=0, atol=1e-8)
    assert (basis.features(z.double()).norm(dim=1).numpy() > 0.1).all() == (different > 1)


@pytest.mark.parametrize("R", [1.0, 300.0, 1e5])
def test_features_are_the_same_to_the_bit_in_any_batch_however_large_codes_are(R):
    """Against whole numbers, which do not round: no order of adding can give anything else."""
    n, d, p = 24, 4096, 8
    z = torch.randn(n, d, generator=keyed(1))
    z *= R / z.norm(dim=1, keepdim=True)
    basis = fit_basis(z, torch.zeros(n, dtype=torch.int64), Release(features=p), bound=R)
    worst = R * basis.P.sign().float()  # every number as large as it may be, and all of one sign
    rows = torch.cat([z, worst, -worst]).double()
    together = basis.features(rows)
    order = shuffled(len(rows), 2)
    assert torch.equal(basis.features(rows[order]), together[order])
    for size in (1, 3, 7):
        assert torch.equal(torch.cat([basis.features(part) for part in rows.split(size)]), together)
    bits = exact_bits(1.001 * math.sqrt(d), R)
    whole = [[round(float(x) * 2**bits) for x in row] for row in basis.P]
    assert torch.equal(torch.tensor(whole).double() / 2**bits, basis.P)
    offset = basis.mean @ basis.P.T
    for i in (0, n - 1, n, len(rows) - 1):
        seen = [round(float(x) * 2**Z_BITS) for x in rows[i]]
        sums = torch.tensor([sum(a * b for a, b in zip(seen, ks, strict=True)) for ks in whole], dtype=torch.float64)
        assert torch.equal(sums * 2.0 ** -(bits + Z_BITS) - offset, together[i])


# Tilts, and the file


@pytest.fixture(params=["shared", "one a class"])
def model(request) -> MomentModel:
    g, Y, d, r = keyed(5), 4, 6, 2
    V = torch.linalg.qr(torch.randn(Y if request.param != "shared" else 1, d, r, generator=g))[0].contiguous()
    mu = torch.randn(Y, d, generator=g) * torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4])
    return MomentModel(mu, V, torch.rand(len(V), r, generator=g), prior, 0.05, torch.randn(d, generator=g))


def but_for_the_means(one: MomentModel, other: MomentModel) -> bool:
    names = ("V", "lam", "prior", "public")
    return one.floor == other.floor and all(torch.equal(getattr(one, k), getattr(other, k)) for k in names)


def test_tilts_change_the_means_and_nothing_else(model):
    before = model.mu.clone()
    assert model.tilted("released", 0) is model
    found = {tilt: model.tilted(tilt, 7) for tilt in ("zero", "random", "public")}
    assert all(but_for_the_means(one, model) for one in found.values())
    assert all(one.mu.shape == before.shape and one.mu.dtype == torch.float32 for one in found.values())
    assert torch.equal(model.mu, before)
    assert not found["zero"].mu.any()
    assert all(torch.equal(row, model.public) for row in found["public"].mu)


def test_a_random_tilt_is_one_direction_for_all_as_long_as_their_own(model):
    mu = model.tilted("random", 7).mu
    assert torch.allclose(mu.norm(dim=1), model.mu.norm(dim=1), rtol=1e-5)
    directions = torch.nn.functional.normalize(mu[1:], dim=1)
    assert torch.allclose(directions, directions[:1].expand(3, -1), atol=1e-6)
    torch.manual_seed(0)
    assert torch.equal(model.tilted("random", 7).mu, mu), "of its seed alone"
    assert abs(float(torch.nn.functional.normalize(model.tilted("random", 8).mu[1:2]) @ directions[0])) < 0.99
    many = torch.stack([model.tilted("random", seed).mu[2] for seed in range(2000)]) / model.mu[2].norm()
    assert float(many.mean(dim=0).norm()) < 0.1, "no direction is preferred"
    assert torch.allclose(many.square().mean(dim=0), torch.full((6,), 1 / 6), atol=0.03)


@pytest.mark.parametrize("tilt", ["released", "zero", "random", "public"])
def test_a_start_is_where_its_tilt_says(model, tilt):
    tilted, y = model.tilted(tilt, 7), torch.full((20_000,), 3)
    start = tilted.tilted_start(y, 0.4, keyed(1))
    assert torch.allclose(start.mean(dim=0), 0.4 * tilted.mu[3], atol=0.03)
    assert torch.equal(tilted.tilted_start(y, 0.0, keyed(1)), model.tilted_start(y, 0.0, keyed(1))), "not at t0 = 0"


@pytest.mark.parametrize("known", [True, False])
def test_a_model_comes_back_from_its_file_with_its_public_mean_or_without(model, known, tmp_path):
    given = model if known else MomentModel(model.mu, model.V, model.lam, model.prior, model.floor)
    given.save(tmp_path / "m.safetensors")
    found = MomentModel.load(tmp_path / "m.safetensors")
    assert all(torch.equal(getattr(found, k), getattr(given, k)) for k in ("mu", "V", "lam", "prior"))
    assert found.floor == given.floor
    under = found.under((0, 2, 2)).to(torch.device("cpu"))
    if known:
        assert torch.equal(found.public, model.public)
        assert torch.equal(under.tilted("public", 0).mu, model.public.expand(3, -1))
    else:
        assert found.public is under.public is None
        with pytest.raises(ValueError, match="public mean"):
            found.tilted("public", 0)
    found.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_a_release_knows_the_public_mean(tmp_path):
    recipe = rules()
    vault, stds = vault_of(tmp_path / "vault", records(N), recipe, sigma=1.0)
    model = run_release(recipe, PUBLIC, vault, stds, public=torch.eye(P, dtype=torch.float64)[None])
    assert torch.allclose(model.public.double(), records(50).double().mean(dim=0), atol=1e-6)
    assert float((model.tilted("public", 0).mu - model.mu).norm()) > 0
