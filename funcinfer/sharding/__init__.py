"""Meshes, rules, collectives and moves: how tensors lie over ranks, and how they get from one
layout to another.
"""

from typing import TYPE_CHECKING, Any

from funcinfer.sharding import presets
from funcinfer.sharding.collectives import (
    all_gather,
    all_to_all,
    all_to_all_v,
    axis_index,
    axis_size,
    pmax,
    ppermute,
    psum,
    psum_scatter,
)
from funcinfer.sharding.comm import Comm, Group, bind, current, solo
from funcinfer.sharding.mesh import (
    Axis,
    Mesh,
    P,
    both,
    drop,
    extends,
    is_p,
    join_axes,
    longer,
    names,
)
from funcinfer.sharding.reshard import reduce_to, reshard
from funcinfer.sharding.rules import LIBRARY_AXES, Rules, pad, token_multiple
from funcinfer.sharding.shard_map import Ranks, ThreadRanks, shard_map
from funcinfer.sharding.split_join import shard

if TYPE_CHECKING:
    from funcinfer.sharding.comm_torch import ProcessRanks, TorchComm, end_process, init_process

__all__ = [
    "LIBRARY_AXES",
    "Axis",
    "Comm",
    "Group",
    "Mesh",
    "P",
    "ProcessRanks",
    "Ranks",
    "Rules",
    "ThreadRanks",
    "TorchComm",
    "all_gather",
    "all_to_all",
    "all_to_all_v",
    "axis_index",
    "axis_size",
    "bind",
    "both",
    "current",
    "drop",
    "end_process",
    "extends",
    "init_process",
    "is_p",
    "join_axes",
    "longer",
    "names",
    "pad",
    "pmax",
    "ppermute",
    "presets",
    "psum",
    "psum_scatter",
    "reduce_to",
    "reshard",
    "shard",
    "shard_map",
    "solo",
    "token_multiple",
]


def __getattr__(name: str) -> Any:
    """What needs process groups is imported at its first use."""
    if name in ("ProcessRanks", "TorchComm", "end_process", "init_process"):
        from funcinfer.sharding import comm_torch

        return getattr(comm_torch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
