"""Membership inference: does a record that was trained on fit the released network better than one that was not?

Every score is higher for what looks like a member. An attack that fails bounds nothing from above.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import norm, rankdata
from torch import Tensor

from straightdp.flow.loss import squared_error
from straightdp.flow.path import interpolate, velocity
from straightdp.flow.sampler import Network

SHADOWS_FOR_OWN_STD = 64  # from this many shadow models on, a record's own deviation is less noisy than the common one


@dataclass(frozen=True)
class Probes:
    """The draws at which all records are compared: t (k,) and xi (k, C, H, W), on the network's device."""

    t: Tensor
    xi: Tensor


@dataclass(frozen=True)
class Attack:
    """How well scores tell members from others: 0.5 and the false-positive rate itself are chance.

    `interval` holds the AUC with 95 % confidence. A true-positive rate is None where the others are too few for a
    single one of them to be allowed through.
    """

    auc: float
    interval: tuple[float, float]
    tpr_at_01: float | None
    tpr_at_1: float | None


def probes(k: int, shape: tuple[int, ...], seed: int, device: torch.device) -> Probes:
    """k draws from a public seed: one t in each k-th part of [0, 1), and a xi for each. The same on every device."""
    generator = torch.Generator().manual_seed(seed)
    t = (torch.arange(k) + torch.rand(k, generator=generator)) / k
    return Probes(t.to(device), torch.randn((k, *shape), generator=generator).to(device))


@torch.no_grad()
def residual_scores(network: Network, z: Tensor, captions: Tensor, draws: Probes, batch: int = 512) -> np.ndarray:
    """-||v_theta(x_t, t, c) - (z - xi)||^2 / d of each record, averaged over the draws; float64 (n,).

    All records meet the same t and xi, so that scores differ by the records alone. z (n, C, H, W) and captions
    (n, length) may lie anywhere; `batch` records at a time go to the draws' device, for one draw after the other.
    """
    scores = np.zeros(len(z))
    for start in range(0, len(z), batch):
        rows = slice(start, start + batch)
        part, ids = z[rows].to(draws.xi.device), captions[rows].to(draws.xi.device)
        total = torch.zeros(len(part), dtype=torch.float64, device=part.device)
        for t, xi in zip(draws.t, draws.xi, strict=True):
            times = t.expand(len(part))
            total += squared_error(network(interpolate(part, xi, times), times, ids), velocity(part, xi)).double()
        scores[rows] = -(total / len(draws.t)).cpu().numpy()
    return scores


def lira_offline(target: np.ndarray, shadows: np.ndarray) -> np.ndarray:
    """Offline LiRA (Carlini et al., 2022): (target - mean) / std of each record, one-sided, (n,).

    `target` (n,) are the attacked network's scores; `shadows` (S, n) those of networks trained alike on other records,
    none of which saw any of these n. The mean is each record's own. So is the deviation from 64 networks on; fewer
    share one, pooled over all records, because a deviation of a few values would be mostly noise. ValueError for
    fewer than 2 networks, or networks that are all alike on a record.
    """
    target, shadows = _scores(target), np.asarray(shadows, dtype=np.float64)
    if shadows.ndim != 2 or len(shadows) < 2 or shadows.shape[1:] != target.shape:
        raise ValueError(f"scores (S, {len(target)}) of 2 or more shadow networks were expected, {shadows.shape} came")
    variance = shadows.var(axis=0, ddof=1)
    std = np.sqrt(variance if len(shadows) >= SHADOWS_FOR_OWN_STD else variance.mean())
    if not np.all(std > 0):
        raise ValueError("shadow networks with scores that differ were expected; train each on records of its own")
    return (target - shadows.mean(axis=0)) / std


def roc(members: np.ndarray, others: np.ndarray) -> Attack:
    """The attack that calls a record a member when its score is above a threshold. ValueError for fewer than 2 a side.

    The AUC is the share of pairs in which the member scores higher, ties counted half, exactly. Its interval is
    DeLong's. Where every pair falls the same way, DeLong's has no width; then min(n, m) disjoint pairs, all alike,
    bound the share of pairs that fall otherwise.
    """
    members, others = _scores(members), _scores(others)
    n, m = len(members), len(others)
    if min(n, m) < 2:
        raise ValueError(f"2 or more scores a side were expected, but {n} of members and {m} of others came")
    ranks = rankdata(np.concatenate([members, others]))
    below = ranks[:n] - rankdata(members)  # others below each member, ties counted half
    above = n - (ranks[n:] - rankdata(others))  # members above each of the others
    auc = float(below.sum() / (n * m))
    variance = np.var(below / m, ddof=1) / n + np.var(above / n, ddof=1) / m
    width = float(norm.ppf(0.975) * np.sqrt(variance)) if variance > 0 else 1 - 0.025 ** (1 / min(n, m))
    return Attack(
        auc=auc,
        interval=(max(0.0, auc - width), min(1.0, auc + width)),
        tpr_at_01=_true_positives(members, others, one_in=1000),
        tpr_at_1=_true_positives(members, others, one_in=100),
    )


def _true_positives(members: np.ndarray, others: np.ndarray, one_in: int) -> float | None:
    """The share of members above the lowest threshold that at most one in `one_in` of the others is above."""
    allowed = len(others) // one_in
    if allowed == 0:
        return None
    threshold = np.sort(others)[-1 - allowed]
    return float(np.mean(members > threshold))


def _scores(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise ValueError("one score a record was expected, each a number")
    return values
