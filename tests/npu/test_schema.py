"""Every call of torch_npu by the back end is one that its schemas allow, and gives the primitive.

The schemas are those of the wheel, in `schemas.json`; torch's own dispatcher checks each call by
them: names, kinds, arguments, defaults. What an op computes comes from the emulators, which know
its documentation and nothing of the back end. So this needs neither torch_npu nor a device. With
torch_npu, the same calls are made on the simulated device.
"""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import npu, reference
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.npu_layout import to_fractal
from funcinfer.layers.primitives.npu_limits import FORMS
from funcinfer.layers.primitives.segments import Segments
from funcinfer.tree import tree_leaves
from tests.npu.cases import BFLOAT16_ONLY, CASES, FIA, HALF_ONLY, Call, Draw
from tests.npu.emulators import rules
from tests.npu.emulators.rules import Unsupported
from tests.npu.recorder import (
    INSTALLED,
    SCHEMAS,
    Changes,
    Recorder,
    cast,
    fetched,
    placed,
    recording,
)

BACK_END = sorted(Path(npu.__file__).parent.glob("npu*.py"))
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as recorder:
        yield recorder


def run(call: Call, backend: Any) -> Any:
    call = call if backend is reference else placed(call)
    with ops.use_backend(backend):
        return fetched(getattr(ops, call.primitive)(*call.args, **call.settings))


def ulps(x: Tensor) -> Tensor:
    """The unit in the last place of bfloat16 at each number."""
    return torch.exp2(x.abs().clamp_min(1e-30).log2().floor() - 7)


def assert_close(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, exact: Tensor | None = None
) -> None:
    """float32: 5e-5. bfloat16: a unit in the last place of max(|b|, rms of b's row), where b is the
    reference's result, or its result without rounding: it rounds in more places than an op.
    """
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    a = found.double()
    if not found.is_floating_point() or dtype == torch.float32 or found.dtype == torch.float32:
        torch.testing.assert_close(a, wanted.double(), rtol=5e-5, atol=5e-5)
        return
    far = torch.ones_like(a, dtype=torch.bool)
    for b in (wanted.double(), wanted.double() if exact is None else exact.double()):
        rms = b.square().mean(-1, keepdim=True).sqrt().expand_as(b)
        far &= (a - b).abs() > ulps(torch.maximum(b.abs(), rms))
    assert not far.any(), f"{int(far.sum())} of {a.numel()} are too far: {a[far]} {wanted[far]}"


def compare(call: Call, found: Any, wanted: Any, dtype: torch.dtype, exact: Any = None) -> None:
    if call.primitive == "lightning_indexer":  # in any order
        found, wanted = found.sort(-1).values, wanted.sort(-1).values
    found, wanted = tree_leaves(found), tree_leaves(wanted)
    exacts = tree_leaves(exact) if exact is not None else [None] * len(wanted)
    for a, b, c in zip(found, wanted, exacts, strict=True):
        if a is None or b is None:
            assert a is b
        elif call.primitive == "quant_expert_swiglu" and b.dtype == torch.int8:
            assert a.dtype == b.dtype and (a.int() - b.int()).abs().max() <= 1  # a half, rounded
        else:
            assert_close(a, b, dtype, c)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_primitive_is_computed_by_the_op_of_the_table(
    name: str, dtype: torch.dtype, recorder: Recorder
):
    call, again, exact = (CASES[name](Draw(dtype)) for _ in range(3))
    found = run(call, npu)
    if call.op is None:
        assert recorder.calls == []
    elif call.op in HALF_ONLY | BFLOAT16_ONLY and dtype == torch.float32:
        assert call.op not in recorder.calls
    else:
        assert call.op in recorder.calls
    compare(call, found, run(again, reference), dtype, run(cast(exact, torch.float64), reference))


@pytest.mark.parametrize(
    "name", [n for n in CASES if CASES[n](Draw(torch.bfloat16)).op in HALF_ONLY]
)
def test_ops_of_half_precision_in_float32(name: str, recorder: Recorder, monkeypatch):
    """The same arguments without rounding, where mistakes can't hide behind a tolerance."""
    half, wide = CASES[name](Draw(torch.bfloat16)), CASES[name](Draw(torch.float32))
    chosen = npu_choice(half)
    for module in ("npu", "npu_attention", "npu_mla", "npu_quant"):
        monkeypatch.setattr(f"funcinfer.layers.primitives.{module}.choice", lambda *a, **k: chosen)
    with rules.any_dtype():
        found = run(wide, npu)
    assert recorder.calls == [half.op]
    compare(wide, found, run(wide, reference), torch.float32)


def npu_choice(call: Call) -> Any:
    settings = {k: v for k, v in call.settings.items() if k != "sinks_N"}
    return choice(call.primitive, *call.args, **settings)


# ---- arguments that are easily wrong: each changes the result, or is refused


def added_up(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths))


def one_by_one(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


MUTATIONS: dict[str, tuple[str, str, Changes]] = {
    "top left": ("attention, chunks", FIA, dict(sparse_mode=2)),
    "dense": ("attention, chunks", FIA, dict(sparse_mode=0, atten_mask=None)),
    "scale": ("attention, chunks", FIA, dict(softmax_scale=1.0)),
    "heads": ("attention, chunks", FIA, dict(num_key_value_heads=0)),
    "keys added up": (
        "attention, chunks",
        FIA,
        dict(actual_seq_kvlen=lambda a: added_up(a["actual_seq_kvlen"])),
    ),
    "queries not added up": (
        "attention, chunks",
        FIA,
        dict(actual_seq_qlen=lambda a: one_by_one(a["actual_seq_qlen"])),
    ),
    "keys not added up": (
        "expanded, split",
        FIA,
        dict(actual_seq_kvlen=lambda a: one_by_one(a["actual_seq_kvlen"])),
    ),
    "mask turned": ("attention, window", FIA, dict(atten_mask=lambda a: ~a["atten_mask"])),
    "rope left out": ("latents, chunks", FIA, dict(query_rope=None, key_rope=None)),
    "queries of the indexer not added up": (
        "indexer",
        "npu_lightning_indexer",
        dict(actual_seq_lengths_query=lambda a: torch.ones_like(a["actual_seq_lengths_query"])),
    ),
    "runs see all": ("indexer, runs", "npu_lightning_indexer", dict(sparse_mode=0)),
    "counts as sums": ("experts", "npu_grouped_matmul", dict(group_list_type=0)),
    "sums as counts": ("experts", "npu_moe_init_routing_v2", dict(expert_tokens_num_type=0)),
    "scattered places": ("experts", "npu_moe_init_routing_v2", dict(row_idx_type=1)),
    "places by column": ("experts", "npu_moe_finalize_routing", dict(drop_pad_mode=0)),
    "the other gate": ("gate_softmax, groups", "npu_moe_gating_top_k", dict(norm_type=1)),
    "the other group": ("gate_sigmoid, groups", "npu_moe_gating_top_k", dict(group_select_mode=0)),
    "terms of another sum": (
        "add_rms_norm",
        "npu_add_rms_norm",
        dict(x2=lambda a: a["x2"].flip(0)),
    ),
    "another eps": ("add_rms_norm", "npu_add_rms_norm", dict(epsilon=1e-1)),
    "scales of columns": (
        "quantised rows",
        "npu_dynamic_quant",
        dict(smooth_scales=lambda a: a["input"][0].abs() + 0.5),
    ),
    "no scales of rows": ("quantised", "npu_quant_matmul", dict(pertoken_scale=None)),
    "scales of other rows": (
        "quantised",
        "npu_quant_matmul",
        dict(pertoken_scale=lambda a: a["pertoken_scale"].flip(0)),
    ),
    "one scale of all": (
        "quantised",
        "npu_quant_matmul",
        dict(scale=lambda a: a["scale"].amax().reshape(1)),
    ),
    "inverse scales": ("quantised", "npu_quant_matmul", dict(scale=lambda a: 1 / a["scale"])),
    "whole numbers out": ("quantised", "npu_quant_matmul", dict(output_dtype=None)),
    "no bias": ("quantised, bias", "npu_quant_matmul", dict(bias=None)),
    "groups as sums": (
        "quantised experts",
        "npu_grouped_matmul_swiglu_quant_v2",
        dict(group_list_type=0),
    ),
    "gate last": (
        "quantised experts",
        "npu_grouped_matmul_swiglu_quant_v2",
        dict(weight=lambda a: [a["weight"][0].roll(16, -1)]),
    ),
    "pairs apart": ("half", "npu_rotary_mul", dict(rotary_mode="interleave")),
    "even and odd": ("swiglu_clamped", "npu_clipped_swiglu", dict(interleaved=True)),
    "bias of the other model": ("swiglu_clamped", "npu_clipped_swiglu", dict(bias=1.0)),
    "fractal pages": ("write_kv, heads", "npu_scatter_pa_kv_cache", dict(cache_mode="PA_NZ")),
    "latents and rotated keys swapped": (
        "latent rows",
        "npu_kv_rmsnorm_rope_cache",
        dict(k_cache=lambda a: a["ckv_cache"], ckv_cache=lambda a: a["k_cache"]),
    ),
    "sine and cosine swapped": (
        "prolog",
        "npu_mla_prolog_v3",
        dict(rope_sin=lambda a: a["rope_cos"], rope_cos=lambda a: a["rope_sin"]),
    ),
    "keys and values swapped": (
        "write_kv, heads",
        "npu_scatter_pa_kv_cache",
        dict(key_cache=lambda a: a["value_cache"], value_cache=lambda a: a["key_cache"]),
    ),
    "parts forgotten": ("merge_lse", "npu_attention_update", dict(lse=lambda a: a["lse"][::-1])),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_argument_is_noticed(mutation: str, recorder: Recorder):
    name, op, changes = MUTATIONS[mutation]
    call, again = (CASES[name](Draw(torch.bfloat16)) for _ in range(2))
    recorder.changed = {op: changes}
    try:
        found = run(call, npu)
        recorder.changed = {}
        compare(call, found, run(again, reference), torch.bfloat16)
    except (AssertionError, Unsupported, RuntimeError, IndexError, ValueError):
        assert op in recorder.calls
        return
    pytest.fail(f"nothing notices {mutation}")


def test_runs_of_a_part_of_the_positions_are_wrong(recorder: Recorder):
    """Where pages are dealt over ranks, tokens of a run don't see one position more each."""
    call = CASES["attention, chunks"](Draw(torch.bfloat16))
    *args, hi = call.args
    segments = call.settings["segments"]
    dealt = (hi + 1) // 2
    single = segments.one_by_one(lambda n: (n + 1) // 2)
    runs = Segments(segments.rows, segments.lens, tuple((n + 1) // 2 for n in segments.kv_lens))
    for hint, right in ((single, True), (runs, False)):
        call.args, call.settings["segments"] = (*args, dealt), hint
        found, wanted = run(call, npu), run(call, reference)
        assert torch.allclose(found[0].float(), wanted[0].float(), atol=2e-2) == right
    assert recorder.calls == [call.op] * 2


# ---- the table of schemas


def called_names() -> set[str]:
    """Every `torch.ops.npu.name` in the sources of the back end."""
    found = set()
    for path in BACK_END:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.npu":
                found.add(node.attr)
    return found


def test_the_table_has_the_ops_that_are_called():
    assert called_names() == set(SCHEMAS)


def test_every_op_of_a_form_is_called_and_every_call_is_of_a_form():
    of_forms = {form.op for forms in FORMS.values() for form in forms}
    used = {"npu_moe_init_routing_v2"}  # parts of others' forms
    assert called_names() == of_forms | used


def test_every_op_is_called_by_a_case(recorder: Recorder):
    for make in CASES.values():
        run(make(Draw(torch.bfloat16)), npu)
    of_weights = {form.op for form in FORMS["fractal"]}
    of_forms = {form.op for forms in FORMS.values() for form in forms}
    assert set(recorder.calls) >= of_forms - of_weights


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_table_is_the_installed_schemas(name: str):
    if not INSTALLED:
        assert str(torch._C.parse_schema(SCHEMAS[name])).startswith(name)
        return
    assert str(getattr(torch.ops.npu, name).default._schema) == f"npu::{SCHEMAS[name]}"


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("npu_rms_norm", (torch.ones(2, 3), torch.ones(3)), dict(eps=1e-6)),
        ("npu_swiglu", (torch.ones(2, 4), "half"), {}),
        ("npu_attention_update", ([torch.ones(2)], torch.ones(2, 8), 1), {}),
        ("npu_scatter_nd_update_", (torch.ones(2, 3), torch.ones(1, 1)), {}),
    ],
)
def test_the_dispatcher_refuses_what_the_schemas_do(op: str, args, kwargs, recorder: Recorder):
    with pytest.raises((RuntimeError, TypeError), match=op):
        getattr(torch.ops.npu, op)(*args, **kwargs)
    assert recorder.calls == []


# ---- weights


def test_a_weight_in_the_fractal_layout(recorder: Recorder):
    """The values and shape are those before."""
    x = Draw(torch.bfloat16).normal(32, 16)
    moved = x.to("npu") if INSTALLED else x
    assert torch.equal(fetched(to_fractal(moved)), x)
    assert recorder.calls == ["npu_format_cast"]
    for bad, problem in (
        (x[None], "dims 3 is not 2"),
        (x[:5], "rows 5 is not a multiple of 16"),
        (x.double(), "dtype float64"),
    ):
        with pytest.raises(ValueError, match=f"layers.0.wq: fractal: .*{problem}"):
            to_fractal(bad, "layers.0.wq")
