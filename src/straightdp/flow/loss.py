"""The flow-matching loss of equation (1), one value a record, so that batches and clipping can weigh it."""

from __future__ import annotations

from torch import Tensor


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """||v_theta - v||^2 / d per row, (n,). Dividing by d only changes the unit that clips are measured in."""
    return (prediction - target).square().flatten(1).mean(dim=1)
