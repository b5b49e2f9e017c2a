"""The trainer's own choices: how a Poisson batch is cut, and what a record's draws are."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from straightdp.dpsgd.trainer import Bucket, draw, micro_batch, rows_at_once
from straightdp.flow.path import TorchDraws
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import DpSgd, Net


@given(
    q=st.floats(1e-4, 1.0),
    n=st.integers(1, 100_000),
    size=st.integers(1, 8),
    draws=st.integers(1, 16),
    rows=st.integers(64, 8192),
)
def test_micro_batches_hold_nearly_every_batch_and_fit_the_device(q, n, size, draws, rows):
    chosen = micro_batch(DpSgd(q=q, draws=draws), n, size, rows)
    mean = q * n / size
    usual = mean + 2.5 * math.sqrt(mean * (1 - q))
    parts = math.ceil(usual / chosen)
    assert chosen % 8 == 0
    assert chosen >= 8
    assert parts * chosen >= usual
    assert chosen * draws <= rows + 8 * draws  # rounding up to eight records
    assert parts * chosen <= usual + 8 + 8 * parts  # and little padding


def test_the_papers_batch_is_one_micro_batch_on_a_large_gpu():
    assert micro_batch(DpSgd(), 60_000, 1, 8192) == 1288


def test_a_recipes_micro_batch_is_kept_unless_the_batch_is_smaller():
    assert micro_batch(DpSgd(micro_batch=64), 60_000, 1, 8192) == 64
    assert micro_batch(DpSgd(micro_batch=5000), 60_000, 1, 8192) == 1288
    assert micro_batch(DpSgd(q=0.001, micro_batch=64), 1000, 1, 8192) == 8


def test_a_cpu_takes_few_rows_at_once():
    net = MMDiT(Net(width=16, depth=1, heads=2), (1, 8, 8))
    assert rows_at_once(net, torch.device("cpu")) == 512


def test_draws_have_their_times_in_range_and_drop_captions_at_the_rate_asked_for():
    section = DpSgd(draws=4, p_uncond=0.25)
    z, captions, null = torch.randn(500, 1, 2, 2), torch.full((500, 3), 7), torch.zeros(1, 3, dtype=torch.int64)
    _, ids, t, xi, weight = draw(
        z, captions, null, section, Bucket(0.4, 1.0, 0.5), TorchDraws(torch.Generator().manual_seed(0))
    )
    assert (ids.shape, t.shape, xi.shape) == ((500, 4, 3), (500, 4), (500, 4, 1, 2, 2))
    assert torch.equal(weight, torch.full((500,), 2.0))
    assert 0.4 <= float(t.min()) < 0.42
    assert 0.98 < float(t.max()) < 1.0
    dropped = (ids == 0).all(dim=2)
    assert bool((dropped | (ids == 7).all(dim=2)).all())
    assert abs(float(dropped.float().mean()) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
