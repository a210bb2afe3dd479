"""The primitive ops, each run by the back end of the device that its first argument lies on.

`from funcinfer.layers import primitives as ops; ops.rms_norm(x, w, eps=eps)`. This is the one
place where a back end is chosen. A back end is a module with the same names, signatures, defaults
and dtypes as `reference`, which defines what is correct; it stands in `BACKENDS` by device type.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from funcinfer.layers.primitives import npu, reference
from funcinfer.layers.primitives.npu_attention import host_lengths
from funcinfer.layers.primitives.npu_layout import fractal_weights
from funcinfer.layers.primitives.reference_attention import PagedCache
from funcinfer.layers.primitives.reference_indexer import IndexCache
from funcinfer.layers.primitives.reference_mla import LatentCache
from funcinfer.layers.primitives.reference_prolog import PrologWeights
from funcinfer.layers.primitives.segments import Segments

__all__ = [
    "BACKENDS",
    "IndexCache",
    "LatentCache",
    "PagedCache",
    "PrologWeights",
    "Segments",
    "add_rms_norm",
    "dynamic_quant",
    "expert_mlp",
    "find_device",
    "force_reference",
    "fractal_weights",
    "gate_sigmoid",
    "gate_softmax",
    "host_lengths",
    "indexer_scores",
    "layer_norm",
    "lightning_indexer",
    "linear",
    "merge_lse",
    "mla_prolog",
    "norm_rotate_write",
    "paged_attention",
    "paged_mla_attention",
    "quant_expert_swiglu",
    "quant_linear",
    "rms",
    "rms_norm",
    "rms_norm_fp32_weight",
    "rms_norm_one_plus",
    "rotate_deinterleaved",
    "rotate_half_split",
    "rotate_interleaved",
    "select_top",
    "sparse_mla_attention",
    "swiglu",
    "swiglu_clamped",
    "swiglu_oai",
    "use_backend",
    "wants_segments",
    "write_kv",
    "write_rows",
]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

BACKENDS: dict[str, ModuleType] = {
    "cpu": reference,
    "meta": reference,
    "cuda": reference,
    "npu": npu,
}


class _Choice(threading.local):
    backend: Any = None


_choice = _Choice()


@contextmanager
def use_backend(backend: Any) -> Iterator[None]:
    """Run every primitive of this thread on `backend`, whatever the device.

    It is a module with the names of `reference`, or any object that has them.

    >>> from types import SimpleNamespace
    >>> with use_backend(SimpleNamespace(rms=lambda x, *, eps: x.shape)):
    ...     rms(torch.ones(1, 2), eps=0.0)
    torch.Size([1, 2])
    """
    before = _choice.backend
    _choice.backend = backend
    try:
        yield
    finally:
        _choice.backend = before


def force_reference() -> AbstractContextManager[None]:
    """Run every primitive of this thread on the reference back end, whatever the device.

    >>> with force_reference():
    ...     rms(torch.ones(1, 2), eps=0.0)
    tensor([[1., 1.]])
    """
    return use_backend(reference)


def find_device(device: torch.device | str) -> torch.device:
    """The device of a name. Device npu brings in torch_npu: ImportError that says what is missing,
    it or CANN. RuntimeError for a name that torch doesn't know.

    >>> find_device("cpu")
    device(type='cpu')
    """
    if isinstance(device, str) and device.split(":")[0] == "npu":
        npu.load_torch_npu()
    return torch.device(device)


def wants_segments(device: torch.device) -> bool:
    """Whether kernels of a device take the lengths of runs of tokens from the host.

    >>> wants_segments(torch.device("cpu"))
    False
    """
    return BACKENDS.get(device.type) is npu


def _backend(first: object) -> Any:
    if not isinstance(first, torch.Tensor):
        raise TypeError(
            f"a primitive's first argument is {type(first).__name__}; it must be the tensor whose "
            "device chooses the back end"
        )
    if _choice.backend is not None:
        return _choice.backend
    device = first.device.type
    if device not in BACKENDS:
        raise ValueError(
            f"no back end of the primitives for device type {device!r}; there are "
            f"{sorted(BACKENDS)}. Move the tensors, or use force_reference()"
        )
    return BACKENDS[device]


def _op(definition: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The op of this definition's name, from the back end of its first argument's device."""
    name = definition.__name__

    @functools.wraps(definition)
    def dispatched(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        first = args[0] if args else next(iter(kwargs.values()))
        return getattr(_backend(first), name)(*args, **kwargs)

    return dispatched


rms = _op(reference.rms)
rms_norm = _op(reference.rms_norm)
add_rms_norm = _op(reference.add_rms_norm)
rms_norm_fp32_weight = _op(reference.rms_norm_fp32_weight)
rms_norm_one_plus = _op(reference.rms_norm_one_plus)
layer_norm = _op(reference.layer_norm)
linear = _op(reference.linear)
dynamic_quant = _op(reference.dynamic_quant)
quant_linear = _op(reference.quant_linear)
swiglu = _op(reference.swiglu)
swiglu_clamped = _op(reference.swiglu_clamped)
swiglu_oai = _op(reference.swiglu_oai)
rotate_half_split = _op(reference.rotate_half_split)
rotate_interleaved = _op(reference.rotate_interleaved)
rotate_deinterleaved = _op(reference.rotate_deinterleaved)
norm_rotate_write = _op(reference.norm_rotate_write)
mla_prolog = _op(reference.mla_prolog)
paged_attention = _op(reference.paged_attention)
merge_lse = _op(reference.merge_lse)
paged_mla_attention = _op(reference.paged_mla_attention)
sparse_mla_attention = _op(reference.sparse_mla_attention)
indexer_scores = _op(reference.indexer_scores)
select_top = _op(reference.select_top)
lightning_indexer = _op(reference.lightning_indexer)
quant_expert_swiglu = _op(reference.quant_expert_swiglu)
expert_mlp = _op(reference.expert_mlp)
gate_softmax = _op(reference.gate_softmax)
gate_sigmoid = _op(reference.gate_sigmoid)
write_rows = _op(reference.write_rows)
write_kv = _op(reference.write_kv)
