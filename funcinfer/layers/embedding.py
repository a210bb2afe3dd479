"""Embedding and head, with the vocabulary over any mesh axes.

    embed    ids[T], W[V_v, D] {lookup}      -> x[T_residual, D]
    lm_head  x[L_requests, D], W[V_v, D]     -> logits[L, V]

T tokens, L rows that want logits, V vocabulary, D model width. Source: the vocabulary-parallel
embedding of Megatron-LM (Shoeybi et al., 2019).
"""

import torch

from funcinfer.layers import primitives as ops
from funcinfer.sharding import P, Rules, axis_index, drop, psum, reduce_to, reshard
from funcinfer.spec import ParamSpec


def embedding_specs(vocab_size: int, embed: int) -> ParamSpec:
    """The embedding table (V, D)."""
    return ParamSpec((vocab_size, embed), ("vocab_in", "embed"))


def lm_head_specs(vocab_size: int, embed: int) -> ParamSpec:
    """The head's weight (V, D)."""
    return ParamSpec((vocab_size, embed), ("vocab_out", "embed"))


def lookup(table_VD: torch.Tensor, ids_T: torch.Tensor, part: int) -> torch.Tensor:
    """Rows of a table of which this rank holds `part`; zeros for ids of other parts: a partial
    sum.
    """
    size = table_VD.shape[0]
    local_T = ids_T.long() - part * size
    mine_T = (local_T >= 0) & (local_T < size)
    return torch.where(mine_T[:, None], table_VD[local_T.clamp(0, size - 1)], 0)


def embed(w_VD: torch.Tensor, ids_T: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    """The residual stream's first value, in the residual_tokens layout, from ids in the tokens
    layout.

    >>> embed(torch.eye(3), torch.tensor([2, 0]), rules=Rules.none())
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    tokens, vocab = rules["tokens"], rules["vocab_in"]
    ids_T = reshard(ids_T, P(tokens), P(drop(tokens, vocab)))
    x_TD = lookup(w_VD, ids_T, axis_index(vocab))
    return reduce_to(x_TD, vocab, P(drop(tokens, vocab), None), P(rules["residual_tokens"], None))


def take_rows(x_TD: torch.Tensor, out_L: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    """Rows `out_L` (counted in the requests layout) of a tensor in the residual_tokens layout: [L,
    D].
    """
    dealt = drop(rules["residual_tokens"], rules["requests"])
    return psum(lookup(x_TD, out_L, axis_index(dealt)), dealt)


def lm_head(
    w_VD: torch.Tensor, x_LD: torch.Tensor, *, vocab_size: int, rules: Rules
) -> torch.Tensor:
    """Logits [L, V] in the (requests, logits) layout, of rows in the requests layout.

    Columns from `vocab_size` on are padding: -inf.

    >>> lm_head(torch.eye(3), torch.ones(1, 3), vocab_size=2, rules=Rules.none())
    tensor([[1., 1., -inf]])
    """
    requests, vocab = rules["requests"], rules["vocab_out"]
    x_LD = reshard(x_LD, P(requests, None), P(drop(requests, vocab), None))
    logits_LV = ops.linear(x_LD, w_VD)
    size = w_VD.shape[0]
    column_V = axis_index(vocab) * size + torch.arange(size, device=w_VD.device)
    logits_LV = logits_LV.masked_fill(column_V >= vocab_size, -torch.inf)
    return reshard(logits_LV, P(drop(requests, vocab), vocab), P(requests, rules["logits"]))
