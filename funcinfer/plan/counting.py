"""The work of a step, counted and not done: products by their shapes, attention and experts by
what they will see.

A step on meta tensors has shapes only, and what attention and experts cost depends on values too:
on how many positions a token sees, and on which experts are hit. So the primitives that depend on
them are replaced by ones that note their sizes, and `funcinfer.plan.cost` puts the workload in.

Counted: matrix products and what else torch's flop counter knows (2 m k n operations), attention
and indexer scores (2 operations a query head, position and width), experts. Bytes: weights and
caches once, and the activations that go in and out of each of these. Elementwise work is taken to
be fused into its neighbours.

Legend: T tokens, R requests, N query heads, K KV heads, H and V widths of keys and values, C latent
width, E rotated width, I indexer heads, M choices of experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from funcinfer.layers.primitives import reference
from funcinfer.sharding.meta import QuickMeta, quick

Result = TypeVar("Result")


@dataclass(frozen=True)
class Product:
    """A matrix product: operations, and bytes of its activations, weights not among them."""

    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class Attention:
    """Queries of `rows` tokens over cached rows of `requests` requests.

    `flops` are those of a token and a position that it sees, `row_bytes` those of a position in the
    cache. `parts` is the number of ranks that share the positions. With `selected` a token sees at
    most so many of them.
    """

    rows: int
    requests: int
    flops: int
    row_bytes: int
    activation_bytes: int
    parts: int = 1
    selected: int | None = None


@dataclass(frozen=True)
class Experts:
    """`rows` tokens with `choices` each among `experts`, of which this rank holds `held`.

    `flops`, `activation_bytes` are those of one choice, `weight_bytes` those of one expert.
    """

    rows: int
    choices: int
    held: int
    experts: int
    flops: int
    activation_bytes: int
    weight_bytes: int


Work = Product | Attention | Experts


class CountProducts(QuickMeta):
    """Notes each matrix product on meta tensors in `work`.

    A factor made of `weights` alone is a weight: its bytes are counted elsewhere, once a step.
    """

    def __init__(self, work: list[Work], weights: list[Tensor]) -> None:
        super().__init__()
        self._work = work
        # They are kept, so that no other tensor can have their ids while this lives.
        self._weights = {id(w): w for w in weights}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at one operation."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            moved = [x for x in tensors if id(x) not in self._weights]
            self._work.append(Product(flops, sum(map(_nbytes, moved)) + _nbytes(out)))
        elif tensors and all(id(x) in self._weights for x in tensors):
            made = out if isinstance(out, list | tuple) else [out]
            self._weights |= {id(x): x for x in made if isinstance(x, Tensor)}


# Of these, nothing is counted. What is not named here is looked into each time.
ELEMENTWISE = (
    "rms",
    "rms_norm",
    "rms_norm_fp32_weight",
    "rms_norm_one_plus",
    "layer_norm",
    "swiglu",
    "swiglu_clamped",
    "swiglu_oai",
    "rotate_half_split",
    "rotate_interleaved",
    "rotate_deinterleaved",
    "norm_rotate_write",
    "merge_lse",
    "select_top",
    "write_rows",
    "write_kv",
    "gate_softmax",
    "gate_sigmoid",
)


class CountingOps:
    """A back end of the primitives that notes attention and experts in `work`; every other op is
    the reference's, on meta tensors.

    `page_parts` is the number of ranks that page_tokens deals a request's positions to; `experts`
    gives the number of all experts, padding not among them, by how many a rank holds. Shapes are
    checked by the reference, which runs on one token.
    """

    def __init__(self, work: list[Work], *, page_parts: int, experts: Mapping[int, int]) -> None:
        self._work, self._page_parts, self._experts = work, page_parts, experts

    def __getattr__(self, name: str) -> Any:
        op = getattr(reference, name)
        return partial(quick, op) if name in ELEMENTWISE else op

    def _uncounted(self, f: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """`f` of one token, whose products are not noted."""
        noted = len(self._work)
        out = quick(f, *args, **options)
        del self._work[noted:]
        return out

    def paged_attention(
        self,
        q_TNH: Tensor,
        cache: Any,
        page_table_RM: Tensor,
        rows_T: Tensor,
        lo_T: Tensor,
        hi_T: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attention over pages, or over keys and values made for this step."""
        (T, N, H), (_, _, K, V) = q_TNH.shape, cache.v.shape
        one = (rows_T[:1], lo_T[:1], hi_T[:1])
        small = self._uncounted(
            reference.paged_attention, q_TNH[:1], cache, page_table_RM[:1, :1], *one, **options
        )
        out, lse = (_taller(x, T) for x in small)
        self._work.append(
            Attention(
                rows=T,
                requests=page_table_RM.shape[0],
                flops=2 * N * (H + V),
                row_bytes=K * (H + V) * cache.k.dtype.itemsize,
                activation_bytes=_nbytes(q_TNH) + _nbytes(out),
                parts=self._page_parts,
            )
        )
        return out, lse

    def paged_mla_attention(
        self,
        q_TNC: Tensor,
        q_pe_TNE: Tensor,
        cache: Any,
        page_table_RM: Tensor,
        rows_T: Tensor,
        lo_T: Tensor,
        hi_T: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over latents."""
        one = (rows_T[:1], lo_T[:1], hi_T[:1])
        small = self._uncounted(
            reference.paged_mla_attention,
            q_TNC[:1],
            q_pe_TNE[:1],
            cache,
            page_table_RM[:1, :1],
            *one,
            **options,
        )
        return self._latents(q_TNC, q_pe_TNE, cache, page_table_RM, small, None)

    def sparse_mla_attention(
        self,
        q_TNC: Tensor,
        q_pe_TNE: Tensor,
        cache: Any,
        page_table_RM: Tensor,
        rows_T: Tensor,
        positions_TK: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over selected latents."""
        small = self._uncounted(
            reference.sparse_mla_attention,
            q_TNC[:1],
            q_pe_TNE[:1],
            cache,
            page_table_RM[:1, :1],
            rows_T[:1],
            positions_TK[:1],
            **options,
        )
        selected = positions_TK.shape[1]
        return self._latents(q_TNC, q_pe_TNE, cache, page_table_RM, small, selected)

    def _latents(
        self,
        q_TNC: Tensor,
        q_pe_TNE: Tensor,
        cache: Any,
        page_table_RM: Tensor,
        small: tuple[Tensor, Tensor | None],
        selected: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        (T, N, C), E = q_TNC.shape, q_pe_TNE.shape[2]
        out, lse = _taller(small[0], T), None if small[1] is None else _taller(small[1], T)
        self._work.append(
            Attention(
                rows=T,
                requests=page_table_RM.shape[0],
                flops=2 * N * (2 * C + E),
                row_bytes=(C + E) * cache.ckv.dtype.itemsize,
                activation_bytes=_nbytes(q_TNC) + _nbytes(q_pe_TNE) + _nbytes(out),
                parts=self._page_parts,
                selected=selected,
            )
        )
        return out, lse

    def indexer_scores(
        self,
        q_TIH: Tensor,
        gate_TI: Tensor,
        keys: Any,
        page_table_RM: Tensor,
        rows_T: Tensor,
        lo_T: Tensor | None,
        hi_T: Tensor,
    ) -> Tensor:
        """Scores of all positions: each rank holds all keys."""
        one = (rows_T[:1], None if lo_T is None else lo_T[:1], hi_T[:1])
        args = (q_TIH[:1], gate_TI[:1], keys, page_table_RM[:1], *one)
        out = _taller(self._uncounted(reference.indexer_scores, *args), q_TIH.shape[0])
        return self._scored(q_TIH, keys, page_table_RM, out)

    def lightning_indexer(
        self,
        q_TIH: Tensor,
        gate_TI: Tensor,
        keys: Any,
        page_table_RM: Tensor,
        rows_T: Tensor,
        lo_T: Tensor | None,
        hi_T: Tensor,
        *,
        topk: int,
        **options: Any,
    ) -> Tensor:
        """Scores, and the best positions."""
        one = (rows_T[:1], None if lo_T is None else lo_T[:1], hi_T[:1])
        args = (q_TIH[:1], gate_TI[:1], keys, page_table_RM[:1], *one)
        small = self._uncounted(reference.lightning_indexer, *args, topk=topk)
        return self._scored(q_TIH, keys, page_table_RM, _taller(small, q_TIH.shape[0]))

    def _scored(self, q_TIH: Tensor, keys: Any, page_table_RM: Tensor, out: Tensor) -> Tensor:
        T, heads, width = q_TIH.shape
        self._work.append(
            Attention(
                rows=T,
                requests=page_table_RM.shape[0],
                flops=2 * heads * (width + 1),
                row_bytes=width * keys.k.dtype.itemsize,
                activation_bytes=_nbytes(q_TIH) + _nbytes(out),
            )
        )
        return out

    def expert_mlp(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up_ECFD: Tensor,
        down_EDF: Tensor,
        **options: Any,
    ) -> Tensor:
        """The experts' MLPs."""
        small = self._uncounted(
            reference.expert_mlp,
            x_TD[:1],
            ids_TK[:1],
            weights_TK[:1],
            gate_up_ECFD,
            down_EDF,
            **options,
        )
        (T, choices), (E, D, F) = ids_TK.shape, down_EDF.shape
        self._work.append(
            Experts(
                rows=T,
                choices=choices,
                held=min(E, self._experts[E]),
                experts=self._experts[E],
                flops=2 * 3 * D * F,
                activation_bytes=(2 * D + 3 * F) * x_TD.dtype.itemsize,
                weight_bytes=(_nbytes(gate_up_ECFD) + _nbytes(down_EDF)) // E,
            )
        )
        return _taller(small, T)


def _taller(x: Tensor, rows: int) -> Tensor:
    """A tensor like `x`, of so many rows."""
    return x.new_empty(rows, *x.shape[1:])


def _nbytes(x: Tensor) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
