"""Meshes, rules, collectives and moves: how tensors lie over ranks, and how they get from one
layout to another.
"""

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
from funcinfer.sharding.shard_map import Ranks, ThreadRanks, shard, shard_map

__all__ = [
    "LIBRARY_AXES",
    "Axis",
    "Comm",
    "Group",
    "Mesh",
    "P",
    "Ranks",
    "Rules",
    "ThreadRanks",
    "all_gather",
    "all_to_all",
    "all_to_all_v",
    "axis_index",
    "axis_size",
    "bind",
    "both",
    "current",
    "drop",
    "extends",
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
