"""The processes of one run: alone, or several started by `torchrun`, of which rank 0 leads.

The leader writes files, spends the budget and adds the noise; the others follow it through DP-SGD. A process that dies
takes the run down with it (torchrun ends the others); `--resume` goes on from the last checkpoint, with any number of
processes.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from straightdp.errors import BadInput, TeamBroken


class Team:
    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self._called = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def told(self, value: Any = None) -> Any:
        """The leader's value, everywhere. Returns only after the leader has got here."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def call(self, value: Any) -> None:
        """The leader calls the others, who wait to be told, to take part; once. None: there is nothing to do."""
        self._called = True
        self.told(value)

    def dismiss(self) -> None:
        """The leader lets the others go, unless it has called them."""
        if not self._called:
            self.call(None)

    def gathered(self, value: Any) -> list[Any]:
        """Everyone's value at the leader, by rank; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        torch.distributed.gather_object(value, found, dst=0)
        return found or []

    def largest(self, value: float) -> float:
        """The largest of everyone's, everywhere."""
        return self.told(max(self.gathered(value), default=None))

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all at the leader; elsewhere unspecified."""
        if self.size > 1:
            torch.distributed.reduce(x, dst=0)
        return x

    def from_leader(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            torch.distributed.broadcast(x, src=0)
        return x


ALONE = Team()


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; each process of a team on one machine has a GPU of its own."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("run.device is cuda but no CUDA device was found; set run.device to cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise BadInput(f"process {local} has no GPU of its own; start at most {torch.cuda.device_count()}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined(device: torch.device):
    """The team that torchrun's environment names; alone without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=7))  # the others wait while the leader pretrains
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if "Connection" in str(error) or "NCCL" in str(error):
            raise TeamBroken("another process of this run has ended; go on with --resume") from None
        raise
    finally:
        dist.destroy_process_group()
