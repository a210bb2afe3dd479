"""What comes before absorbed latent attention, in plain torch: from x to queries and cached rows.

    a[T, Q] = rms(x . dq)           [q | q_pe][T, N, H + E] = a . uq_qr
    u[T, N, C] = q . uk             [c | kpe][T, C + E] = x . dkv_kr
    rms(c), rope(kpe) -> pages      u, rope(q_pe) -> attention

It is the sum of other primitives: a back end that has no op for all of it composes its own. Weights
of x are [in, out], unlike everywhere else, because the op that exists wants them so.

Legend: T tokens, D model width, Q width of the query latent, N heads, H rest of a head's key,
E rotated width, C latent width, W = H + E. Source: DeepSeek-V2 (2024), section 2.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PrologWeights:
    """`dq` [D, Q], `q_norm` [Q], `uq_qr` [Q, N W], `uk` [N, H, C], `dkv_kr` [D, C + E], `kv_norm`
    [C]; a head's columns of `uq_qr` end in its rotated ones. On an NPU the three matrices must be
    in the fractal layout (`fractal_weights`).
    """

    dq: Tensor
    q_norm: Tensor
    uq_qr: Tensor
    uk: Tensor
    dkv_kr: Tensor
    kv_norm: Tensor


@dataclass(frozen=True)
class Parts:
    """The primitives of one back end that `compose_prolog` is made of."""

    linear: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rotate_deinterleaved: Callable[..., Tensor]
    norm_rotate_write: Callable[..., tuple[Tensor, Tensor]]


def compose_prolog(
    parts: Parts,
    x_TD: Tensor,
    weights: PrologWeights,
    tables: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    slots_T: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mla_prolog` of checked arguments, by these parts."""
    w, (N, H, _) = weights, weights.uk.shape
    a_TQ = parts.rms_norm(parts.linear(x_TD, w.dq.T), w.q_norm, eps=eps)
    q_TNW = parts.linear(a_TQ, w.uq_qr.T).unflatten(1, (N, -1))
    q_pe_TNE = parts.rotate_deinterleaved(q_TNW[..., H:], *tables)
    kv_TW = parts.linear(x_TD, w.dkv_kr.T)
    written = parts.norm_rotate_write(kv_TW, w.kv_norm, *tables, *pages, slots_T, eps=eps)
    return torch.einsum("tnh,nhc->tnc", q_TNW[..., :H], w.uk), q_pe_TNE, *written


def check_prolog(
    x_TD: Tensor, weights: PrologWeights, tables: tuple[Tensor, Tensor], kpe_pages: Tensor
) -> None:
    """ValueError where x, weights and rotated widths don't fit together."""
    w, E = weights, kpe_pages.shape[-1]
    ndims = [x.ndim for x in (x_TD, w.dq, w.q_norm, w.uq_qr, w.uk, w.dkv_kr, w.kv_norm)]
    fits = ndims == [2, 2, 1, 2, 3, 2, 1] and all(2 * t.shape[-1] == E for t in tables)
    if fits:
        (D, Q), (N, H, C) = w.dq.shape, w.uk.shape
        found = [tuple(x.shape) for x in (x_TD[0:0], w.q_norm, w.uq_qr, w.dkv_kr, w.kv_norm)]
        fits = found == [(0, D), (Q,), (Q, N * (H + E)), (D, C + E), (C,)]
    if not fits:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in vars(w).items())
        raise ValueError(
            f"mla_prolog: x {tuple(x_TD.shape)}, {shapes}, tables {tuple(tables[0].shape)}, kpe"
            f" pages {tuple(kpe_pages.shape)}; wanted x [T, D], dq [D, Q], q_norm [Q], uq_qr [Q,"
            f" N (H + E)], uk [N, H, C], dkv_kr [D, C + E], kv_norm [C], tables [T, E / 2], kpe"
            f" pages [..., E]"
        )
