"""Private Evolution: on points of the plane with known answers, and with a flow as its prior."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from straightdp.nets.mmdit import MMDiT
from straightdp.nets.spaces import Pixels
from straightdp.recipe import Net
from straightdp.rivals.private_evolution import FlowPrior, evolve, outlook, resample

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# a plane of pictures (2, 1, 1): a prior that is uniform in the square, and ballots that count exactly


class Square:
    """Variations step to a neighbour, the farther the smaller t."""

    def __init__(self):
        self.times: list[float] = []

    def draw(self, n, generator):
        return torch.rand(n, 2, 1, 1, generator=generator) * 2 - 1

    def vary(self, images, t, generator):
        self.times.append(t)
        return (images + 0.4 * (1 - t) * torch.randn(images.shape, generator=generator)).clamp(-1, 1)


def see(images):
    return images.flatten(1)


class Ballot:
    """Each record votes for the nearest candidate of its class, one by one; noise of its own on top."""

    def __init__(self, records: list[torch.Tensor], sigma: float = 0.0, seed: int = 0):
        self.records, self.sigma, self.noise = records, sigma, generator(seed)
        self.rounds: list[int] = []
        self.seen: list[torch.Tensor] = []

    def __call__(self, round, features):
        self.rounds.append(round)
        self.seen.append(features)
        counts = torch.zeros(features.shape[:2], dtype=torch.float64)
        for y, records in enumerate(self.records):
            for record in records:
                counts[y, ((features[y] - record) ** 2).sum(dim=1).argmin()] += 1
        return counts + self.sigma * torch.randn(counts.shape, generator=self.noise, dtype=torch.float64)


def clusters(*centres, n=60, width=0.02, seed=1) -> torch.Tensor:
    around = torch.tensor(centres).repeat_interleave(n // len(centres), dim=0)
    return around + width * torch.randn(around.shape, generator=generator(seed))


def run(vote, prior=None, **changes):
    settings = {"classes": len(vote.records) if isinstance(vote, Ballot) else 2, "population": 50, "rounds": 6}
    settings |= {"variations": 2, "times": (0.45, 0.85), "sigma": 0.0, "seed": 3, "device": CPU}
    return evolve(prior or Square(), see, vote, **(settings | changes))


def gap(a, b) -> float:
    """The mean distance from a point of a to the nearest one of b."""
    return float((a[:, None] - b).norm(dim=2).amin(dim=1).mean())


RECORDS = [clusters((-0.6, 0.5)), clusters((0.7, 0.6), (0.2, -0.7))]


def test_without_noise_the_population_moves_to_the_records_and_covers_them():
    begin, end = run(Ballot(RECORDS), rounds=0), run(Ballot(RECORDS), rounds=12)
    for y, records in enumerate(RECORDS):
        before, after = begin.images[y].flatten(1), end.images[y].flatten(1)
        assert gap(after, records) < gap(before, records) / 8
        assert gap(records, after) < gap(records, before) / 2
    left = (end.images[1, :, 0, 0, 0] < 0.45).double().mean()
    assert 0.35 < left < 0.65, "one of the two clusters was lost"


def test_under_huge_noise_the_population_stays_near_the_prior():
    classes = 40  # a population that drifts is one draw, so many of them are averaged
    records = [clusters((0.5, 0.5), n=20)] * classes
    begin = run(Ballot(records), rounds=0, population=30)
    end = run(Ballot(records, sigma=1e4), rounds=4, population=30, sigma=1e4)
    sure = run(Ballot(records), rounds=4, population=30)
    before, after, told = (
        sum(gap(r.images[y].flatten(1), records[y]) for y in range(classes)) / classes for r in (begin, end, sure)
    )
    assert 0.8 < after / before < 1.25
    assert told < 0.3 * before


def test_one_round_gives_the_candidates_that_were_voted_for_as_often_as_they_were():
    first = run(Ballot(RECORDS), rounds=0).images
    ballot = Ballot(RECORDS)
    result = run(ballot, rounds=1, variations=0)
    counts = Ballot(RECORDS)(0, first.flatten(2))
    for y in range(2):
        share = counts[y] * 50 / counts[y].sum()
        times = torch.tensor([int((result.images[y] == image).all(dim=(1, 2, 3)).sum()) for image in first[y]])
        assert times.sum() == 50, "a picture that was no candidate"
        assert ((times >= share.floor()) & (times <= share.ceil())).all()
        assert int(result.votes[0].parents[y]) == int((times > 0).sum())


def test_threshold_in_units_of_sigma_is_taken_off_before_the_resampling():
    ups = torch.zeros(1, 8, dtype=torch.float64)
    ups[0, 1], ups[0, 4], ups[0, 6], ups[0, 7] = 3.0, 4.0, 6.0, -50.0  # threshold 1.5 * 2 leaves 0, 1, 3 and 0
    first = run(lambda r, f: ups, rounds=0, classes=1, population=8).images[0]
    chosen = run(lambda r, f: ups, rounds=1, classes=1, population=8, sigma=2.0).images[0]
    assert torch.equal(chosen, first[[4, 4, 6, 6, 6, 6, 6, 6]])
    lower = run(lambda r, f: ups, rounds=1, classes=1, population=8, sigma=2.0, threshold=1.0).images[0]
    assert torch.equal(lower, first[[1, 4, 4, 6, 6, 6, 6, 6]]) or torch.equal(lower, first[[1, 4, 4, 4, 6, 6, 6, 6]])


def test_class_whose_weights_are_all_zero_is_left_as_it_is_and_the_others_are_not():
    votes = torch.zeros(2, 50, dtype=torch.float64)
    votes[0] = -7
    votes[1, 5] = 9
    first = run(lambda r, f: votes, rounds=0).images
    for rounds in (1, 4):
        end = run(lambda r, f: votes, rounds=rounds, sigma=1.0)
        assert torch.equal(end.images[0], first[0])
        assert [list(v.parents) for v in end.votes] == [[50, 1]] * rounds
        assert (end.images[1] == end.images[1, :1]).all(), "the last population is one candidate, unvaried"
    again = run(lambda r, f: votes if r else votes.flip(0), rounds=2, sigma=1.0)
    assert not torch.isin(again.images[0], first[0]).any(), "silence in one round does not stop the next"


def test_class_without_private_records_evolves_by_its_noise_alone():
    records = [RECORDS[0], torch.zeros(0, 2)]
    quiet = run(Ballot(records))
    assert torch.equal(quiet.images[1], run(Ballot(records), rounds=0).images[1])
    noisy = run(Ballot(records, sigma=1.0), sigma=1.0, population=200)
    assert noisy.images.shape == (2, 200, 2, 1, 1)
    passed = [int(r.parents[1]) for r in noisy.votes]  # 13.4 expected at 1.5 sigma; half of 200 at 0
    assert all(3 < n < 30 for n in passed), passed


def test_the_same_votes_give_the_same_pictures_whoever_counts_them():
    ballot = Ballot(RECORDS, sigma=1.0)
    before = run(ballot, sigma=1.0)
    assert ballot.rounds == list(range(6))
    torch.manual_seed(99)  # nothing comes from the global generator
    replayed = run(lambda r, features: before.votes[r].votes, sigma=1.0)
    assert torch.equal(before.images, replayed.images)
    other = run(lambda r, features: before.votes[r].votes, sigma=1.0, seed=4)
    assert not torch.isin(other.images, before.images).any()


def test_every_round_and_every_seed_has_randomness_of_its_own():
    class Still:
        """Pictures that never change, and the seeds that came with the asking."""

        def __init__(self):
            self.seeds: list[int] = []

        def draw(self, n, generator):
            self.seeds.append(generator.initial_seed())
            return torch.arange(2.0 * n).reshape(n, 2, 1, 1)

        def vary(self, images, t, generator):
            self.seeds.append(generator.initial_seed())
            return images

    weights = torch.linspace(0.5, 1.5, 50).expand(2, -1)
    priors = [Still(), Still()]
    ends = [run(lambda r, f: weights, prior, rounds=1, seed=k).images for k, prior in enumerate(priors)]
    assert not torch.equal(*ends), "who is resampled by chance hangs on the seed"
    for k, prior in enumerate(priors):
        run(lambda r, f: weights, prior, rounds=4, variations=1, seed=k)
    assert len(set(priors[0].seeds)) == 1 + 4, "one start, four rounds"
    assert not set(priors[0].seeds) & set(priors[1].seeds)


def test_what_is_kept_of_a_round_is_the_noisy_vote():
    ballot = Ballot(RECORDS, sigma=3.0, seed=8)
    kept = run(ballot, sigma=3.0).votes
    noise = Ballot([torch.zeros(0, 2)] * 2, sigma=3.0, seed=8)
    counts = Ballot(RECORDS)
    for r, seen in enumerate(ballot.seen):
        torch.testing.assert_close(kept[r].votes, counts(r, seen) + noise(r, seen))


@pytest.mark.parametrize("times", [(0.45, 0.85), (0.8, 0.2)])
def test_times_go_from_the_first_to_the_last_round_and_nothing_is_varied_after_it(times):
    prior = Square()
    kept = run(Ballot(RECORDS), prior, rounds=5, times=times).votes
    path = [times[0] + k * (times[1] - times[0]) / 4 for k in range(5)]
    assert prior.times == pytest.approx([t for t in path for _ in range(3)][:-1])
    assert [r.t for r in kept] == pytest.approx(path)
    assert run(Ballot(RECORDS), rounds=1, times=times).votes[0].t == times[0]


def test_candidate_stands_for_the_mean_feature_of_itself_and_its_variations():
    class Shift:
        """The k-th variation adds 10^k t to every number."""

        def __init__(self):
            self.k = 0

        def vary(self, images, t, generator):
            self.k += 1
            return images + 10**self.k * t

        draw = Square.draw

    images = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    found = outlook(Shift(), lambda x: x.flatten(1).square(), images, 0.5, 2, generator())
    expected = [(x**2 + (x + 5) ** 2 + (x + 50) ** 2) / 3 for x in (1.0, 2.0, 3.0)]
    assert found.flatten().tolist() == pytest.approx(expected)
    assert torch.equal(outlook(Shift(), see, images, 0.5, 0, generator()), see(images))
    ballot = Ballot([torch.zeros(1, 2)])
    first = run(ballot, Shift(), rounds=0).images
    run(ballot, Shift(), rounds=1, times=(0.5, 0.5))
    torch.testing.assert_close(ballot.seen[0], first.flatten(2) + (0 + 5 + 50) / 3)


def test_refusals_name_what_is_wrong():
    for times in ((0.45, 1.0), (-0.1, 0.5)):
        with pytest.raises(ValueError, match="times of variations"):
            run(Ballot(RECORDS), times=times)
    for votes in (torch.zeros(50, 2), torch.full((2, 50), math.nan), torch.full((2, 50), math.inf)):
        with pytest.raises(ValueError, match="votes should be finite"):
            run(lambda r, f, votes=votes: votes)


# resampling


def worst_deviation(weights: torch.Tensor, believed: torch.Tensor, repeats: int = 4000) -> float:
    """How many standard errors the mean count of a row lies from n w / sum(w), at the worst row."""
    n = len(weights)
    rows = resample(weights.expand(repeats, -1), generator(5))
    counts = torch.stack([(rows == k).sum(dim=1) for k in range(n)], dim=1).double()
    expected = believed * n / believed.sum()
    error = counts.std(dim=0).clamp_min(0.05) / math.sqrt(repeats)
    return float(((counts.mean(dim=0) - expected).abs() / error).max())


def test_resampling_is_unbiased_and_the_test_sees_wrong_weights():
    weights = torch.rand(30, generator=generator(2), dtype=torch.float64)
    weights[7], weights[8] = 6.0, 0.0
    assert worst_deviation(weights, weights) < 4
    for wrong in (torch.ones_like(weights), weights**2, weights.roll(1), weights.sqrt(), weights + 0.02):
        assert worst_deviation(weights, wrong) > 8


NONNEGATIVE = st.one_of(st.just(0.0), st.floats(1e-12, 1e6))


@given(st.lists(st.lists(NONNEGATIVE, min_size=7, max_size=7), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_row_comes_floor_or_ceil_of_its_share(lists, seed):
    weights = torch.tensor(lists, dtype=torch.float64)
    rows = resample(weights, generator(seed))
    assert rows.shape == weights.shape
    for row, weight in zip(rows, weights, strict=True):
        counts = torch.bincount(row, minlength=7)
        if weight.sum() == 0:
            assert (counts == 1).all()
            continue
        share = 7 * weight / weight.sum()
        assert (counts >= (share - 1e-9).floor()).all()
        assert (counts <= (share + 1e-9).ceil()).all()
        assert (counts[weight == 0] == 0).all()


def test_equal_weights_change_nothing_whatever_their_number():
    for n in (1, 3, 1000):
        assert torch.equal(resample(torch.full((4, n), 0.1), generator(n)), torch.arange(n).expand(4, n))


# the flow as the prior

SHAPE = (1, 4, 4)
SECTION = Net(width=16, depth=2, heads=2, patch=2, caption_width=8, caption_length=3, vocabulary=16)
NULL = torch.zeros(1, 3, dtype=torch.long)


def random_net() -> MMDiT:
    net = MMDiT(SECTION, SHAPE).requires_grad_(False)
    for k, parameter in enumerate(net.parameters()):
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator(k)))
    return net


def flow_prior(net, captions=NULL, steps=10, batch=4, shape=SHAPE) -> FlowPrior:
    return FlowPrior(net, captions, Pixels(shape), steps=steps, batch=batch, device=CPU)


PICTURES = torch.rand(6, *SHAPE, generator=generator(11)) * 2 - 1


@pytest.mark.parametrize(("t", "steps"), [(0.0, 10), (0.45, 6), (0.6, 4), (0.85, 2), (0.99, 1)])
def test_variation_is_the_euler_walk_from_t(t, steps):
    """10 steps in all, so (1 - t) 10 of them, to the nearest whole (5.5 to 6, 1.5 to 2) and at least one."""
    net = random_net()
    x = t * PICTURES + (1 - t) * torch.randn(PICTURES.shape, generator=generator(1))
    for k in range(steps):
        now = t + k * (1 - t) / steps
        x = x + (1 - t) / steps * net(x, torch.full((6,), now), NULL.expand(6, 3))
    found = flow_prior(net).vary(PICTURES, t, generator(1))
    torch.testing.assert_close(found, x.clamp(-1, 1), rtol=0, atol=1e-5)
    if t == 0:
        torch.testing.assert_close(flow_prior(net).draw(6, generator(1)), found, rtol=0, atol=1e-5)


def test_variation_near_data_is_the_picture_and_from_noise_has_forgotten_it():
    prior = flow_prior(random_net())
    assert (prior.vary(PICTURES, 0.999, generator()) - PICTURES).abs().max() < 0.05
    assert (prior.vary(PICTURES, 0.5, generator()) - PICTURES).abs().max() > 0.3
    assert torch.equal(prior.vary(PICTURES, 0.0, generator()), prior.vary(-PICTURES, 0.0, generator()))


@pytest.mark.parametrize("t", [0.2, 0.45, 0.85])
def test_under_the_true_field_of_a_gaussian_variations_keep_its_law_and_correlate_as_they_must(t):
    """z ~ N(m, s^2): the flow from t to 1 is affine, so corr(z, its variation) = t s / sqrt((1 - t)^2 + t^2 s^2)."""
    m, s = 0.2, 0.15

    def field(x, at, ids):
        now = float(at[0])
        variance = (1 - now) ** 2 + now**2 * s**2
        return m + (now * s**2 - (1 - now)) / variance * (x - now * m)

    prior = flow_prior(field, steps=400, batch=20_000, shape=(1, 1, 1))
    z = m + s * torch.randn(20_000, 1, 1, 1, generator=generator(3))
    varied = prior.vary(z, t, generator(4))
    drawn = prior.draw(20_000, generator(5))
    for found in (varied, drawn):
        assert float(found.mean()) == pytest.approx(m, abs=0.006)
        assert float(found.std()) == pytest.approx(s, rel=0.03)
    correlation = torch.corrcoef(torch.stack([z.flatten(), varied.flatten()]))[0, 1]
    assert float(correlation) == pytest.approx(t * s / math.hypot(1 - t, t * s), abs=0.03)


def test_batches_change_nothing_and_pictures_stay_in_range():
    whole, parts = (flow_prior(random_net(), batch=b) for b in (6, 4))
    for make in (lambda prior: prior.draw(6, generator()), lambda prior: prior.vary(PICTURES, 0.3, generator())):
        torch.testing.assert_close(make(whole), make(parts), rtol=0, atol=1e-5)
        assert make(whole).abs().max() <= 1


def test_with_captions_each_class_is_drawn_and_varied_under_its_own():
    """A net that walks straight to a grey level told by the caption: every variation ends there too."""
    levels = {2: -0.5, 3: 0.0, 4: 0.5}

    def net(x, t, ids):
        ends = torch.tensor([levels[int(row[0])] for row in ids])[:, None, None, None]
        return (ends - x) / (1 - t)[:, None, None, None]

    captions = torch.tensor([[2, 0, 0], [3, 0, 0], [4, 0, 0]])
    prior = flow_prior(net, captions)
    result = evolve(
        prior,
        see,
        lambda r, features: torch.rand(3, 5, generator=generator(r)),
        classes=3,
        population=5,
        rounds=3,
        variations=1,
        times=(0.4, 0.8),
        sigma=0.0,
        seed=0,
        device=CPU,
    )
    for y, level in enumerate(levels.values()):
        torch.testing.assert_close(result.images[y], torch.full((5, *SHAPE), level), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="4 pictures cannot be shared equally by 3 captions"):
        prior.draw(4, generator())
