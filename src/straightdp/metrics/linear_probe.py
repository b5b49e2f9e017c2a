"""A linear probe on frozen features: multinomial logistic regression, solved to its one optimum, without a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS, STEPS = 100, 30  # of L-BFGS; the coordinates are scaled anew in every round
TOLERANCE = 1e-4  # of the gradient in scaled coordinates, for a loss summed over records
CONSTANT = 1e-7  # a feature that varies by less than this part of its largest value is rounding noise


def fit_linear(features: Tensor, y: Tensor, classes: int, *, l2: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Fit labels y (n,) to features (n, p) and return predict: features (m, p) to labels (m,), both where they lie.

    With x the features standardised by the mean and deviation of these n, it minimises

        sum_i cross_entropy(W x_i + b, y_i) + l2/2 ||W||^2

    in float64; b is not penalised. The optimum is unique but for a constant added to b, so the result hangs on no
    seed, and on the order of records and classes, and the features' units, by rounding only.

    A constant feature has no weight. A class without records is never predicted; with one class there is no other
    answer. n < p is fine, m may be 0. ValueError for no records, labels outside 0..classes-1, values that are not
    finite, and l2 <= 0, without which there may be no optimum.
    """
    n = len(features)
    if not l2 > 0:
        raise ValueError(f"l2 should be above 0 but is {l2}")
    if n == 0 or y.shape != (n,) or not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise ValueError(f"{n} records should have labels in 0..{classes - 1}, one each; they are {tuple(y.shape)}")
    if not bool(features.isfinite().all()):
        raise ValueError("features should be finite")
    with torch.no_grad():
        present, target = y.to(features.device).unique(return_inverse=True)
        x = features.double()
        mean, largest = x.mean(dim=0), x.abs().amax(dim=0)
        x = x - mean
        deviation = x.square().mean(dim=0).sqrt()
        scale = torch.where(deviation > CONSTANT * largest, deviation.reciprocal(), 0.0)
        weight, bias = _optimum(x.mul_(scale), target, len(present), l2)
        weight = weight * scale
        bias = bias - weight @ mean

    @torch.no_grad()
    def predict(features: Tensor) -> Tensor:
        found = (features.to(weight.device, torch.float64) @ weight.mT + bias).argmax(dim=1)
        return present[found].to(features.device)

    return predict


def _optimum(x: Tensor, target: Tensor, classes: int, l2: float) -> tuple[Tensor, Tensor]:
    """W (classes, p) and b (classes,) for x (n, p) with mean 0.

    The penalty does not see rotations, so the work is done in principal coordinates, at most n of them. There the
    Hessian's diagonal is about s_k lambda_j + l2, for lambda the eigenvalues of x^T x and s_k the mean of p_k (1 - p_k)
    over records; L-BFGS in units of its square root needs about a hundred evaluations where the plain one needs
    several hundred. s moves with W, so every round of STEPS starts with a new one.
    """
    n, p = x.shape
    basis = torch.linalg.qr(x.mT).Q if n < p else None
    inner = x if basis is None else x @ basis
    eigenvalues, axes = torch.linalg.eigh(inner.mT @ inner)
    z = torch.cat([inner @ axes, x.new_ones(n, 1)], dim=1)  # the last coordinate is b's
    curvature = torch.cat([eigenvalues.clamp_min(0), x.new_tensor([n])])
    penalty = torch.full_like(curvature, l2)
    penalty[-1] = 0
    records = torch.arange(n, device=x.device)

    def objective(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, its gradient, and s."""
        logs = (w @ z.mT).log_softmax(dim=0)  # classes first: thin products are several times faster so
        loss = (penalty * w.square()).sum() / 2 - logs[target, records].sum()
        p = logs.exp_()
        s = (p * (1 - p)).mean(dim=1)
        p[target, records] -= 1
        return loss, p @ z + penalty * w, s

    w = z.new_zeros(classes, z.shape[1])
    for _ in range(ROUNDS):
        _, gradient, s = objective(w)
        unit = (s[:, None] * curvature + penalty).clamp_min(torch.finfo(x.dtype).tiny).rsqrt()
        if float((gradient * unit).abs().max()) <= TOLERANCE:
            inner_weight = w[:, :-1] @ axes.mT
            return inner_weight if basis is None else inner_weight @ basis.mT, w[:, -1]
        u = w / unit
        optimizer = torch.optim.LBFGS(
            [u], max_iter=STEPS, history_size=STEPS, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure(u: Tensor = u, unit: Tensor = unit) -> Tensor:
            loss, gradient, _ = objective(u * unit)
            u.grad = gradient * unit
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        w = u * unit
    raise RuntimeError(f"the linear probe has not converged in {ROUNDS} rounds; raise l2 above {l2}")
