"""The experts' MLPs over routed tokens, in plain torch.

    h[T, K, F] = act(gate_up[e, 0] . x[T], gate_up[e, 1] . x[T])        e = ids[T, K]
    y[T, D]    = sum_K weights[T, K] * down[e] . h[T, K]

Choices (a token and one of its experts) are sorted by expert, so that an expert's weights meet all
of its rows at once. Three forms of the same sum; device and dtype alone say which one runs:

- counts on the host, on the CPU in eager mode, where they cost nothing: it reads only the experts
  that are hit, and that is what the time of a decode step goes into;
- `grouped_mm`, for bfloat16 on other devices and in a traced graph: no host waits, static shapes;
- tiles of rows of one expert, for all that `grouped_mm` doesn't take: static too, for at most about
  twice the products and a copy of each tile's weights.

Legend: T tokens, K choices of a token, M = T * K choices, E experts, C = 2 (gate, up), F width of
an expert, D model width, N tiles, Q places of a tile.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

Activation = Callable[[Tensor, Tensor], Tensor]
# A longer tile gains nothing: the fetch of its weights is already small beside its products.
MAX_TILE = 256
# What `grouped_mm` wants strides and addresses to be multiples of.
ALIGNMENT_BYTES = 16


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_ECFD: Tensor,
    down_EDF: Tensor,
    *,
    activation: Activation,
) -> Tensor:
    """The weighted sum over each token's choices of the chosen experts' MLPs: [T, D] in x's dtype.

    `ids` count the E experts given; any other value, such as -1, is no expert and adds 0, whatever
    its weight. `activation(gate, up)` maps two [..., F] to one. Products have x's dtype, the sum
    over choices at least float32, in order of K: equal inputs give equal bits. ValueError if
    shapes don't fit together.

    >>> x, ids = torch.tensor([[3.0]]), torch.tensor([[1, -1]])
    >>> gate_up, down = torch.ones(2, 2, 1, 1), torch.tensor([[[1.0]], [[10.0]]])
    >>> expert_mlp(x, ids, torch.full((1, 2), 0.5), gate_up, down, activation=torch.mul)
    tensor([[45.]])
    """
    check_experts(x_TD, ids_TK, weights_TK, gate_up_ECFD, down_EDF)
    E, (T, K) = gate_up_ECFD.shape[0], ids_TK.shape
    if T * K == 0:
        return torch.zeros_like(x_TD)
    mine_TK = (ids_TK >= 0) & (ids_TK < E)
    expert_M, order_M = torch.where(mine_TK, ids_TK.long(), E).flatten().sort(stable=True)
    x_MD = x_TD.index_select(0, order_M // K)
    if x_TD.device.type == "cpu" and not torch.compiler.is_compiling():
        form = _by_counts
    elif _fits_grouped_mm(gate_up_ECFD) and _fits_grouped_mm(down_EDF):
        form = _by_grouped_mm
    else:
        form = _by_tiles
    y_MD = form(x_MD, expert_M, gate_up_ECFD, down_EDF, activation)
    y_TKD = torch.zeros_like(y_MD).index_copy(0, order_M, y_MD).unflatten(0, (T, K))
    # Replaced and not multiplied by 0: a row of no expert may hold NaN, and so may its weight.
    y_TKD = torch.where(mine_TK[..., None], y_TKD, 0)
    weights_TK = torch.where(mine_TK, weights_TK, 0)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return torch.einsum("tkd,tk->td", y_TKD.to(wide), weights_TK.to(wide)).to(x_TD.dtype)


def _by_counts(
    x_MD: Tensor, expert_M: Tensor, gate_up_ECFD: Tensor, down_EDF: Tensor, activation: Activation
) -> Tensor:
    """One product for each expert that is hit."""
    E, C, F, _ = gate_up_ECFD.shape
    counts = torch.bincount(expert_M, minlength=E + 1).tolist()
    hit = [e for e in range(E) if counts[e]]
    if not hit:
        return torch.zeros_like(x_MD)
    *rows, none = x_MD.split([counts[e] for e in hit] + counts[E:])
    h_CF = [linear(x, gate_up_ECFD[e].flatten(0, 1)) for e, x in zip(hit, rows, strict=True)]
    gate, up = torch.cat(h_CF).unflatten(1, (C, F)).unbind(1)
    parts = activation(gate, up).split([counts[e] for e in hit])
    y_D = [linear(h, down_EDF[e]) for e, h in zip(hit, parts, strict=True)]
    return torch.cat([*y_D, torch.zeros_like(none)])


def _by_grouped_mm(
    x_MD: Tensor, expert_M: Tensor, gate_up_ECFD: Tensor, down_EDF: Tensor, activation: Activation
) -> Tensor:
    """One grouped product; rows past the last expert's end are left uninitialised by it."""
    E, C, F, _ = gate_up_ECFD.shape
    experts_E = torch.arange(E, device=expert_M.device)
    ends_E = torch.searchsorted(expert_M, experts_E, right=True, out_int32=True)
    h_MCF = grouped_mm(x_MD, gate_up_ECFD.flatten(1, 2).mT, offs=ends_E).unflatten(1, (C, F))
    gate, up = h_MCF.unbind(1)
    return grouped_mm(activation(gate, up).contiguous(), down_EDF.mT, offs=ends_E)


def _fits_grouped_mm(w: Tensor) -> bool:
    rows = w.stride()[:-1]
    return (
        w.dtype == torch.bfloat16
        and w.device.type in ("cpu", "cuda", "meta")
        and w.shape[-1] * w.itemsize % ALIGNMENT_BYTES == 0
        and all(n * w.itemsize % ALIGNMENT_BYTES == 0 for n in rows)
    )


def _by_tiles(
    x_MD: Tensor, expert_M: Tensor, gate_up_ECFD: Tensor, down_EDF: Tensor, activation: Activation
) -> Tensor:
    """Batched products of tiles: the M rows of E experts fill at most (M + E (Q - 1)) // Q of them.

    The place after the last tile takes the rows of no expert.
    """
    (M, D), E = x_MD.shape, gate_up_ECFD.shape[0]
    Q = max(1, min(-(-M // E), MAX_TILE))
    N = (M + E * (Q - 1)) // Q
    rows_E = expert_M.new_zeros(E + 1).scatter_add(0, expert_M, torch.ones_like(expert_M))
    tiles_E = (rows_E + Q - 1) // Q
    first_E, start_E = tiles_E.cumsum(0) - tiles_E, rows_E.cumsum(0) - rows_E
    nth_M = torch.arange(M, device=x_MD.device) - start_E.index_select(0, expert_M)
    place_M = first_E.index_select(0, expert_M) * Q + nth_M
    place_M = torch.where(expert_M < E, place_M, N * Q)
    x_NQD = x_MD.new_zeros(N * Q + 1, D).index_copy(0, place_M, x_MD)[:-1].unflatten(0, (N, Q))
    tile_N = torch.arange(N, device=x_MD.device)
    expert_N = torch.searchsorted(tiles_E.cumsum(0), tile_N, right=True).clamp(max=E - 1)
    gate, up = torch.einsum("nqd,ncfd->cnqf", x_NQD, gate_up_ECFD.index_select(0, expert_N))
    y_NQD = torch.einsum("nqf,ndf->nqd", activation(gate, up), down_EDF.index_select(0, expert_N))
    return y_NQD.flatten(0, 1).index_select(0, place_M.clamp(max=N * Q - 1))


def check_experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_ECFD: Tensor, down_EDF: Tensor
) -> None:
    """ValueError where the arguments of `expert_mlp` don't fit together."""

    def fail(problem: str) -> None:
        raise ValueError(
            f"expert_mlp: {problem}; x is {tuple(x_TD.shape)}, ids {tuple(ids_TK.shape)}, weights "
            f"{tuple(weights_TK.shape)}, gate_up {tuple(gate_up_ECFD.shape)}, "
            f"down {tuple(down_EDF.shape)}"
        )

    if x_TD.ndim != 2 or ids_TK.ndim != 2 or gate_up_ECFD.ndim != 4 or down_EDF.ndim != 3:
        fail("wanted x [T, D], ids [T, K], gate_up [E, 2, F, D], down [E, D, F]")
    if ids_TK.shape != weights_TK.shape or ids_TK.shape[0] != x_TD.shape[0]:
        fail("ids and weights must both be [T, K], with a row for each row of x")
    E, C, F, D = gate_up_ECFD.shape
    if E < 1 or C != 2 or down_EDF.shape != (E, D, F) or x_TD.shape[1] != D:
        fail("gate_up must be [E, 2, F, D] and down [E, D, F], with x's D and at least one expert")
