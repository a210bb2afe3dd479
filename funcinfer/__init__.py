"""funcinfer: LLM inference as pure functions over parameter pytrees, with explicit sharding."""

from funcinfer.serving.engine import Completion, Engine
from funcinfer.serving.load import load
from funcinfer.serving.model import Model
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.steps import ModelFns, build
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks, bind, shard_map
from funcinfer.spec import ParamSpec

__all__ = [
    "Completion",
    "Engine",
    "Mesh",
    "Model",
    "ModelFns",
    "P",
    "ParamSpec",
    "Rules",
    "SamplingParams",
    "ThreadRanks",
    "bind",
    "build",
    "load",
    "shard_map",
]
