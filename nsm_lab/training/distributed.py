"""Membership in a group of training processes (torchrun sets the variables)."""

from __future__ import annotations

import dataclasses
import os

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """Rank of this process among all, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """The one process that logs and writes files."""
        return self.rank == 0


def join_world(device: str) -> World:
    """Joins the processes torchrun started, or forms a world of one. `device` "auto": a GPU when there is one."""
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own_device = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if own_device.type == "cuda" else "gloo")
    return World(dist.get_rank() if size > 1 else 0, size, own_device)


def leave_world() -> None:
    """The end of `join_world`; harmless without one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def mean_over_world(value: torch.Tensor, world: World) -> torch.Tensor:
    """Average of a scalar over all processes."""
    if world.size > 1:
        dist.all_reduce(value)
        value /= world.size
    return value
