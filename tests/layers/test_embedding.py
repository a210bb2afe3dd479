"""Embedding and head against plain indexing and products, with any vocabulary over any ranks."""

from typing import Any

import pytest
import torch

from funcinfer.layers.embedding import (
    embed,
    embedding_specs,
    lm_head,
    lm_head_specs,
    lookup,
    take_rows,
)
from funcinfer.sharding import Mesh, P, Rules, pad, shard_map
from funcinfer.spec import pad_leaf

VOCAB, D, T = 13, 5, 12


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(seed))


def ids() -> torch.Tensor:
    """The first and the last token, and others, some twice."""
    return torch.tensor([0, 12, 3, 3, 7, 12, 1, 0, 5, 11, 6, 4], dtype=torch.int32)


def padded(w: torch.Tensor, spec: Any, mesh: Mesh, rules: Rules) -> torch.Tensor:
    return pad_leaf(w, pad(spec, mesh, rules))


EMBEDDINGS = {
    "one rank": (Mesh(), Rules()),
    "tp2": (Mesh(tp=2), Rules(vocab_in="tp")),
    "tp3": (Mesh(tp=3), Rules(vocab_in="tp")),
    "tp4": (Mesh(tp=4), Rules(vocab_in="tp")),
    "tp8, more ranks than some have rows": (Mesh(tp=8), Rules(vocab_in="tp")),
    "tp2 sp": (Mesh(tp=2), Rules(vocab_in="tp", residual_tokens="tp")),
    "dp2, over dp": (Mesh(dp=2), Rules(vocab_in="dp", tokens="dp", residual_tokens="dp")),
    "dp2 tp2 sp, over dp": (
        Mesh(dp=2, tp=2),
        Rules(vocab_in="dp", tokens="dp", residual_tokens=("dp", "tp")),
    ),
    "dp2 tp2, over both in another order": (
        Mesh(dp=2, tp=2),
        Rules(vocab_in=("tp", "dp"), tokens="dp", residual_tokens="dp"),
    ),
    "whole, tokens dealt": (Mesh(dp=2), Rules(tokens="dp", residual_tokens="dp")),
}


@pytest.mark.parametrize("layout", EMBEDDINGS)
def test_embedding_is_indexing_on_every_mesh(layout: str):
    mesh, rules = EMBEDDINGS[layout]
    w = table()
    f = shard_map(
        lambda w, ids: embed(w, ids, rules=rules),
        mesh,
        (rules.spec("vocab_in", "embed"), rules.spec("tokens")),
        rules.spec("residual_tokens", None),
    )
    assert torch.equal(f(padded(w, embedding_specs(VOCAB, D), mesh, rules), ids()), w[ids().long()])


def test_a_part_of_a_table_gives_zeros_for_ids_of_others():
    w = table()[:4]
    found = lookup(w, torch.tensor([3, 4, 8, 0], dtype=torch.int32), part=1)
    wanted = torch.stack([torch.zeros(D), w[0], torch.zeros(D), torch.zeros(D)])
    assert torch.equal(found, wanted)
    w[1] = torch.nan  # a row that nobody asked for
    assert torch.equal(lookup(w, torch.tensor([3, 4, 8, 0]), part=1), wanted)


HEADS = {
    "one rank": (Mesh(), Rules()),
    "tp2": (Mesh(tp=2), Rules(vocab_out="tp")),
    "tp3": (Mesh(tp=3), Rules(vocab_out="tp")),
    "tp8": (Mesh(tp=8), Rules(vocab_out="tp")),
    "tp4, sharded logits": (Mesh(tp=4), Rules(vocab_out="tp", logits="tp")),
    "dp2, over dp": (Mesh(dp=2), Rules(vocab_out="dp", requests="dp")),
    "dp2 tp2, over both": (Mesh(dp=2, tp=2), Rules(vocab_out=("dp", "tp"), requests="dp")),
    "dp2 tp2, over both in another order, sharded logits": (
        Mesh(dp=2, tp=2),
        Rules(vocab_out=("tp", "dp"), requests="dp", logits="tp"),
    ),
    "whole, requests dealt": (Mesh(dp=2), Rules(requests="dp")),
}


@pytest.mark.parametrize("layout", HEADS)
def test_the_head_is_a_product_on_every_mesh(layout: str):
    """Columns that only padding has are -inf, so that no sampler ever picks one."""
    mesh, rules = HEADS[layout]
    w, x = table(), torch.randn(6, D, generator=torch.Generator().manual_seed(1))
    f = shard_map(
        lambda w, x: lm_head(w, x, vocab_size=VOCAB, rules=rules),
        mesh,
        (rules.spec("vocab_out", "embed"), rules.spec("requests", None)),
        rules.spec("requests", "logits"),
    )
    logits = f(padded(w, lm_head_specs(VOCAB, D), mesh, rules), x)
    wanted = torch.stack([(w * row).sum(-1) for row in x])
    torch.testing.assert_close(logits[:, :VOCAB], wanted, rtol=1e-5, atol=1e-5)
    n = mesh.size(rules["vocab_out"])
    assert logits.shape[1] == -(-VOCAB // n) * n
    assert bool((logits[:, VOCAB:] == -torch.inf).all())


@pytest.mark.parametrize("layout", HEADS)
def test_a_tied_table_serves_both_ends(layout: str):
    mesh, rules = HEADS[layout]
    rules = rules.replace(vocab_in=rules["vocab_out"], tokens=rules["requests"])
    rules = rules.replace(residual_tokens=rules["requests"])
    w = table()

    def both_ends(w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return lm_head(w, embed(w, ids, rules=rules), vocab_size=VOCAB, rules=rules)

    f = shard_map(
        both_ends,
        mesh,
        (rules.spec("vocab_in", "embed"), rules.spec("tokens")),
        rules.spec("requests", "logits"),
    )
    logits = f(padded(w, embedding_specs(VOCAB, D), mesh, rules), ids()[:6])
    torch.testing.assert_close(logits[:, :VOCAB], w[ids()[:6].long()] @ w.T, rtol=1e-5, atol=1e-5)


ROWS = {
    "one rank": (Mesh(), Rules()),
    "sp": (Mesh(tp=4), Rules(residual_tokens="tp")),
    "dp": (Mesh(dp=2), Rules(requests="dp", residual_tokens="dp")),
    "dp sp": (Mesh(dp=2, tp=2), Rules(requests="dp", residual_tokens=("dp", "tp"))),
    "pcp tp in another order than the mesh's": (
        Mesh(tp=2, pcp=3),
        Rules(residual_tokens=("pcp", "tp")),
    ),
}


@pytest.mark.parametrize("layout", ROWS)
def test_wanted_rows_are_found_on_whatever_rank_they_lie(layout: str):
    """`out` counts within its requests group."""
    mesh, rules = ROWS[layout]
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(2))
    groups = mesh.size(rules["requests"])
    size = T // groups
    out = torch.tensor([[0, size - 1, 2, 2], [1, 0, size - 2, 3]][:groups], dtype=torch.int32)
    f = shard_map(
        lambda x, out: take_rows(x, out, rules=rules),
        mesh,
        (rules.spec("residual_tokens", None), rules.spec("requests")),
        rules.spec("requests", None),
    )
    wanted = [x[group * size + int(row)] for group in range(groups) for row in out[group]]
    assert torch.equal(f(x, out.flatten()), torch.stack(wanted))


def test_padding_of_the_vocabulary_is_visible():
    """It is asked for by name, said in the table of the layout, and refused where it is missing."""
    mesh, rules = Mesh(tp=4), Rules(vocab_in="tp", vocab_out="tp")
    specs = {"embed": embedding_specs(VOCAB, D), "head": lm_head_specs(VOCAB, D)}
    with pytest.raises(
        ValueError, match=r"embed: dim 0 .* is 13, .*\n?.*pad\(specs, mesh, rules\)"
    ):
        rules.check(specs, mesh)
    grown = pad(specs, mesh, rules)
    rules.check(grown, mesh)
    assert grown["embed"].shape == (16, D) and grown["embed"].true_shape == (VOCAB, D)
    table = rules.explain(grown, mesh)
    assert "embed is padded from (13, 5) to (16, 5)" in table
    assert "head is padded from (13, 5) to (16, 5)" in table
    assert bool((pad_leaf(torch.ones(VOCAB, D), grown["embed"])[VOCAB:] == 0).all())


def test_a_table_tied_to_a_head_that_lies_otherwise_is_refused():
    with pytest.raises(ValueError, match="the head is tied to the embedding, so vocab_in='tp'"):
        Rules(vocab_in="tp").check({"embed": embedding_specs(12, D)}, Mesh(tp=4))


def test_rows_in_a_layout_that_can_not_be_reached_are_refused():
    with pytest.raises(ValueError, match=r"can't go from layout P\("):
        shard_map(
            lambda w, x: lm_head(
                w, x, vocab_size=12, rules=Rules(vocab_out=("dp", "tp"), logits="tp", requests="dp")
            ),
            Mesh(dp=2, tp=2),
            (P(("dp", "tp"), None), P("dp", None)),
            P("dp", "tp"),
        )(torch.zeros(12, D), torch.zeros(4, D))
