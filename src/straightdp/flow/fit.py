"""One optimisation loop for pretraining, distillation and DP-SGD: AdamW, EMA, checkpoints, resume.

Each step's randomness is keyed by its number, and a checkpoint holds all state exactly, so a resumed run ends with
the same weights to the bit (on the same machine and thread count).
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from straightdp.errors import BadInput, nearest

StepGradients = Callable[[int], None]
"""Fills `.grad` of every trainable parameter for step k."""


def step_generator(seed: int, stage: str, step: int, device: torch.device) -> torch.Generator:
    """Public randomness of one step. Privacy noise never comes from here."""
    digest = hashlib.blake2b(f"{seed}|{stage}|{step}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def train_only(net: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze all but the parameters whose names fit a pattern of the shell's: * stands for anything."""
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            raise BadInput(f"no parameter that trains is called {pattern!r}{nearest(pattern, named)}")
        chosen.update(found)
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)


def fit(
    net: nn.Module,
    gradients: StepGradients,
    *,
    steps: int,
    lr: float,
    ema: float,
    checkpoint: Path,
    identity: str,
    every: int,
    writes: bool = True,
    track: Callable[[Iterable[int], int, int], Iterable[int]],
) -> None:
    """Run `steps` steps and leave the EMA weights in `net`. `track(steps, done, total)` shows progress.

    Nothing here waits for the device, except a checkpoint, every `every` steps; `writes` says whether to write it. A
    checkpoint of another `identity` (of all that the steps hang on) is not taken up.
    """
    parameters = trainable(net)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=parameters[0].is_cuda)
    average = [p.detach().clone() for p in parameters]
    start = _restore(checkpoint, identity, parameters, average, optimizer)
    for step in track(range(start, steps), start, steps):
        optimizer.zero_grad(set_to_none=True)
        gradients(step)
        optimizer.step()
        decay = min(ema, (1 + step) / (10 + step))  # a short run is not dominated by its start
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)  # type: ignore
        last = step + 1 == steps
        if last or (step + 1) % every == 0:
            _refuse_divergence(average, step + 1)
        if writes and not last and (step + 1) % every == 0:
            _save(checkpoint, identity, step + 1, parameters, average, optimizer)
    with torch.no_grad():
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.copy_(mean)


def _refuse_divergence(average: list, step: int) -> None:
    """Weights that are not finite would go on, and be released, unnoticed."""
    if not all(bool(torch.isfinite(mean).all()) for mean in average):
        raise BadInput(f"training diverged: by step {step} its weights are not finite; lower its lr")


def _save(
    path: Path, identity: str, step: int, parameters: list, average: list, optimizer: torch.optim.Optimizer
) -> None:
    state = {
        "identity": identity,
        "step": step,
        "parameters": [p.detach() for p in parameters],
        "average": average,
        "optimizer": optimizer.state_dict(),
    }
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _restore(path: Path, identity: str, parameters: list, average: list, optimizer: torch.optim.Optimizer) -> int:
    """Take up the last checkpoint, if there is one of this work. Returns the number of steps already done."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=parameters[0].device, weights_only=True)
    if state.get("identity") != identity:
        return 0
    with torch.no_grad():
        for live, stored in zip([*parameters, *average], [*state["parameters"], *state["average"]], strict=True):
            live.copy_(stored)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
