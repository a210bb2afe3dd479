"""Which torch_npu op computes a primitive, by shapes, dtypes and SoC: one table, and the rule.

A primitive has *forms*, in order of preference, each an op of torch_npu (its documentation calls
the product families A2, A3 and 950 what is here `ascend910b`, `ascend910c`, `ascend950`). A form
has *limits*: what the op asks of its arguments and only the hardware, or nothing at all, checks.
`choose` takes the first form whose limits all hold; where there is none, the primitive is composed
of torch ops, which is the reference's code unless the table says otherwise. The choice is a pure
function of what is known before a step runs, and `funcinfer plan` shows it.

Source: the custom API reference of op-plugin (Ascend/op-plugin, docs/zh/custom_APIs), by op.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from funcinfer.layers.primitives.npu_form import (
    FLOATS,
    HALVES,
    SOCS,
    Form,
    between,
    is_true,
    one_of,
)

# What `torch.npu.get_device_name()` begins with.
DEVICE_NAMES = {"Ascend910B": "ascend910b", "Ascend910_93": "ascend910c", "Ascend950": "ascend950"}

TOKENS = between("tokens", 1)
SAME_DTYPE = is_true("same_dtype", "the dtype of all arguments")
# A ragged layout: rows of requests one after another, lengths on the host.
RAGGED = (
    TOKENS,
    one_of("dtype", *HALVES),
    SAME_DTYPE,
    between("segments", 1, 4096),
    between("group", 1, 64),
)
HEADS = one_of("heads", 1, 2, 4, 8, 16, 32, 64, 128)
PAGES = between("page_size", 16, 1024, step=16)
EQUAL_128, EQUAL_64_MHA = (128, 128, "gqa"), (64, 64, "mha")
RAGGED_WIDTHS = (EQUAL_128, (128, 128, "mha"), EQUAL_64_MHA)
SPLIT_WIDTHS = (*RAGGED_WIDTHS, (192, 128, "gqa"), (192, 128, "mha"), (192, 192, "mha"))
NORM = (one_of("dtype", *FLOATS), TOKENS)
ROTARY = (TOKENS, one_of("dtype", *FLOATS), between("rotary_dim", 2, 894, step=2))
CLIPPED = (TOKENS, one_of("dtype", *FLOATS), SAME_DTYPE)
GATE = (
    TOKENS,
    one_of("dtype", *FLOATS),
    between("experts", 1, 2048),
    between("group_size", 3),
    between("padded_experts", 1, 2048),
)
A2_A3 = ("ascend910b", "ascend910c")

FORMS: Mapping[str, tuple[Form, ...]] = MappingProxyType(
    {
        "rms": (Form("norm", "npu_rms_norm", NORM),),
        "rms_norm": (Form("norm", "npu_rms_norm", (*NORM, one_of("weight_dtype", *FLOATS))),),
        "add_rms_norm": (Form("sum", "npu_add_rms_norm", (*NORM, SAME_DTYPE)),),
        "rms_norm_fp32_weight": (
            Form("norm", "npu_rms_norm", (*NORM, one_of("weight_dtype", *FLOATS))),
        ),
        "rms_norm_one_plus": (Form("norm", "npu_gemma_rms_norm", (*NORM, SAME_DTYPE)),),
        "layer_norm": (),
        "linear": (),
        "swiglu": (Form("halves", "npu_swiglu", CLIPPED),),
        "swiglu_clamped": (Form("halves", "npu_clipped_swiglu", CLIPPED, A2_A3),),
        "swiglu_oai": (Form("halves", "npu_clipped_swiglu", CLIPPED, A2_A3),),
        "rotate_half_split": (
            Form("half", "npu_rotary_mul", (*ROTARY, between("heads", 1, 999)), A2_A3),
        ),
        "rotate_interleaved": (
            Form("interleave", "npu_rotary_mul", (*ROTARY, between("heads", 1, 999)), A2_A3),
        ),
        "rotate_deinterleaved": (
            Form(
                "pairs",
                "npu_interleave_rope",
                (TOKENS, one_of("dtype", *HALVES), one_of("rotary_dim", 64)),
                A2_A3,
            ),
            Form("half", "npu_rotary_mul", (*ROTARY, between("heads", 1, 999)), A2_A3),
        ),
        "norm_rotate_write": (
            Form(
                "latents",
                "npu_kv_rmsnorm_rope_cache",
                (
                    TOKENS,
                    one_of("dtype", *HALVES),
                    SAME_DTYPE,
                    one_of("latent", 512),
                    one_of("rope_dim", 64),
                    one_of("rotary_dim", 64),
                    between("spare_pages", 0),
                ),
                A2_A3,
            ),
        ),
        "mla_prolog": (
            Form(
                "whole",
                "npu_mla_prolog_v3",
                (
                    TOKENS,
                    one_of("dtype", "bfloat16"),
                    SAME_DTYPE,
                    one_of("embed", *range(1024, 8193, 1024), 7680),
                    one_of("q_lora", 1536, 2048),
                    HEADS,
                    one_of("nope_dim", 128, 192),
                    one_of("latent", 512),
                    one_of("rope_dim", 64),
                    PAGES,
                ),
            ),
        ),
        "write_rows": (
            Form("scatter", "npu_scatter_nd_update_", (TOKENS, one_of("dtype", *FLOATS))),
        ),
        "write_kv": (
            Form(
                "pages",
                "npu_scatter_pa_kv_cache",
                (TOKENS, one_of("dtype", *FLOATS), SAME_DTYPE, between("value_width", 1)),
                A2_A3,
            ),
        ),
        "paged_attention": (
            Form(
                "ragged",
                "npu_fused_infer_attention_score_v2",
                (*RAGGED, one_of("widths", *RAGGED_WIDTHS), PAGES, between("kv_width", 1, 65535)),
            ),
            Form(
                "packed",
                "npu_fused_infer_attention_score_v2",
                (*RAGGED, one_of("widths", *SPLIT_WIDTHS), one_of("pages", 1)),
            ),
            Form(
                "masked",
                "npu_fused_infer_attention_score_v2",
                (
                    between("tokens", 1, 65536),
                    one_of("dtype", *HALVES),
                    SAME_DTYPE,
                    between("heads", 1, 256),
                    between("group", 1, 64),
                    is_true("equal_widths", "equal widths of keys and values"),
                    between("head_dim", 16, 512, step=16),
                    between("page_size", 128, 512, step=128),
                    between("positions", 1, 262144),
                    between("spare_pages", 0),
                    between("kv_width", 1, 65535),
                ),
            ),
        ),
        "merge_lse": (
            Form(
                "merge",
                "npu_attention_update",
                (
                    TOKENS,
                    between("parts", 1, 16),
                    between("width", 8, 512, step=8),
                    one_of("dtype", *FLOATS),
                    one_of("lse_dtype", "float32"),
                ),
            ),
        ),
        "paged_mla_attention": (
            Form(
                "ragged",
                "npu_fused_infer_attention_score_v2",
                (*RAGGED[:-1], HEADS, one_of("latent", 512), one_of("rope_dim", 64), PAGES),
            ),
        ),
        "sparse_mla_attention": (
            Form(
                "rows",
                "npu_sparse_flash_attention",
                (
                    TOKENS,
                    one_of("dtype", *HALVES),
                    SAME_DTYPE,
                    one_of("latent", 512),
                    one_of("rope_dim", 64),
                    PAGES,
                    one_of("lse", "not wanted"),
                ),
                by_soc={
                    "ascend910b": (HEADS,),
                    "ascend910c": (HEADS,),
                    "ascend950": (between("heads", 1, 128),),
                },
            ),
        ),
        "indexer_scores": (),
        "select_top": (),
        "lightning_indexer": (
            Form(
                "rows",
                "npu_lightning_indexer",
                (
                    TOKENS,
                    one_of("dtype", *HALVES),
                    SAME_DTYPE,
                    one_of("head_dim", 128),
                    PAGES,
                    one_of("topk", *range(1, 2049), *range(3072, 8193, 1024)),
                    one_of("lo", "none"),
                ),
                by_soc={
                    "ascend910b": (between("heads", 1, 64),),
                    "ascend910c": (between("heads", 1, 64),),
                    "ascend950": (
                        one_of("heads", 8, 16, 24, 32, 64),
                        one_of("gate_dtype", *HALVES),
                    ),
                },
            ),
        ),
        "gate_softmax": (Form("gate", "npu_moe_gating_top_k", GATE, A2_A3),),
        "gate_sigmoid": (Form("gate", "npu_moe_gating_top_k", GATE, A2_A3),),
        "expert_mlp": (
            Form(
                "grouped",
                "npu_grouped_matmul",
                (
                    TOKENS,
                    one_of("dtype", *FLOATS),
                    SAME_DTYPE,
                    between("experts", 1, 1024),
                    between("embed", 1, 65535),
                    between("width", 1, 65535),
                ),
                A2_A3,
            ),
        ),
        "dynamic_quant": (
            Form("rows", "npu_dynamic_quant", (TOKENS, one_of("dtype", *HALVES)), A2_A3),
        ),
        "quant_linear": (
            Form(
                "scaled",
                "npu_quant_matmul",
                (
                    TOKENS,
                    one_of("dtype", *HALVES),
                    one_of("bias", "none", *FLOATS),
                    between("embed", 1, 65535),
                    between("width", 1, 65535),
                ),
                A2_A3,
            ),
        ),
        "quant_expert_swiglu": (
            Form(
                "counts",
                "npu_grouped_matmul_swiglu_quant_v2",
                (
                    TOKENS,
                    between("experts", 1, 1024),
                    between("embed", 16, 65535, step=16),
                    between("columns", 32, 10240, step=32),
                    one_of("scale_dtype", *FLOATS),
                ),
                A2_A3,
            ),
        ),
        "fractal": (
            Form(
                "cast",
                "npu_format_cast",
                (
                    one_of("dims", 2),
                    one_of("dtype", *HALVES),
                    between("rows", 16, step=16),
                    between("columns", 16, step=16),
                ),
            ),
        ),
        "expert_mlp.combine": (
            Form(
                "finalize",
                "npu_moe_finalize_routing",
                (TOKENS, one_of("dtype", *FLOATS), SAME_DTYPE),
                ("ascend910b",),
            ),
        ),
    }
)

# What stands in where no form fits, other than the reference's own code.
COMPOSED = MappingProxyType(
    {
        "add_rms_norm": "a sum and rms_norm",
        "norm_rotate_write": "rms_norm, rotate_deinterleaved and write_kv",
        "mla_prolog": "linear, rms_norm, rotate_deinterleaved and norm_rotate_write",
        "layer_norm": "torch.nn.functional.layer_norm in float32",
        "linear": "torch.nn.functional.linear",
    }
)


@dataclass(frozen=True)
class Choice:
    """What computes a primitive: a form, or None for a composition; and why not the forms before.

    >>> print(choose("rms_norm", "ascend910b", tokens=1, dtype="float64", weight_dtype="float64"))
    composed of torch ops (npu_rms_norm: dtype float64 is not one of float16, bfloat16, ...)
    """

    primitive: str
    form: Form | None
    refused: tuple[tuple[Form, tuple[str, ...]], ...]

    @property
    def name(self) -> str:
        """The form's name; "composed" for a composition."""
        return self.form.name if self.form else "composed"

    def __str__(self) -> str:
        composed = COMPOSED.get(self.primitive, "composed of torch ops")
        what = f"{self.form.op} ({self.form.name})" if self.form else composed
        why = "; ".join(f"{form.op}: {', '.join(found)}" for form, found in self.refused)
        return f"{what} ({why})" if why and not self.form else what


def choose(primitive: str, soc: str, **facts: Hashable) -> Choice:
    """The first form of a primitive that fits these facts. ValueError for an unknown SoC.

    >>> facts = dict(tokens=7, dtype="bfloat16", same_dtype=True)
    >>> choose("swiglu", "ascend910b", **facts).form.op
    'npu_swiglu'
    """
    return _choose(primitive, soc, tuple(facts.items()))


def require(primitive: str, form: str, soc: str, **facts: Hashable) -> None:
    """ValueError naming everything in which a call is outside of a form that was asked for."""
    found = next(f for f in FORMS[primitive] if f.name == form)
    if refused := found.refusals(_known(soc), facts):
        raise ValueError(f"{primitive}: {found.op} can't take this on {soc}: {'; '.join(refused)}")


def soc_of_device_name(name: str) -> str:
    """The SoC of a device's name. ValueError for one that the table says nothing about.

    >>> soc_of_device_name("Ascend910B2"), soc_of_device_name("Ascend910_9391")
    ('ascend910b', 'ascend910c')
    """
    for start, soc in DEVICE_NAMES.items():
        if name.startswith(start):
            return soc
    raise ValueError(
        f"no limits are known for the device {name!r}: known are {', '.join(DEVICE_NAMES)}..."
    )


@lru_cache(4096)
def _choose(primitive: str, soc: str, facts: tuple[tuple[str, Any], ...]) -> Choice:
    known = dict(facts)
    refused = []
    for form in FORMS[primitive]:
        found = form.refusals(_known(soc), known)
        if not found:
            return Choice(primitive, form, tuple(refused))
        refused.append((form, tuple(found)))
    return Choice(primitive, None, tuple(refused))


def _known(soc: str) -> str:
    if soc not in SOCS:
        raise ValueError(f"unknown SoC {soc!r}: known are {', '.join(SOCS)}")
    return soc
