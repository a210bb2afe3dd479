"""Tensors on some pipeline stages only: on which, how they split and join, what they cost."""

import copy
import pickle

import pytest
import torch

from funcinfer import ParamSpec
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks
from funcinfer.spec import Member, stage_entries

MESH = Mesh(pp=3, tp=2)
RULES = Rules(layers="pp", mlp="tp")


def leaf(*entries: int, count: int = 4) -> ParamSpec:
    return ParamSpec((6, 4), ("mlp", None), torch.float32, member=Member("layers", entries, count))


# Of 4 entries, 3 stages hold [0, 1], [2] and [3].
SPECS = {"ends": leaf(0, 3), "list": [leaf(i) for i in range(4)]}
HOLDERS = {"ends": [0, 2], "list": [[0], [0], [1], [2]]}


def test_stages_are_contiguous_and_even():
    for count in range(1, 14):
        for n in range(1, count + 1):
            stages = [list(stage_entries(count, n, s)) for s in range(n)]
            assert [i for entries in stages for i in entries] == list(range(count))
            assert {len(entries) for entries in stages} <= {count // n, -(-count // n)}
            for s, entries in enumerate(stages):
                assert all(Member("layers", (i,), count).stages(n) == (s,) for i in entries)
    assert Member("layers", (0, 1, 5), 6).stages(3) == (0, 2)


def test_entries_that_a_list_lacks_are_refused():
    for entries in ((), (3,), (-1,), (0, 3)):
        with pytest.raises(ValueError, match=r"of a list of 3 along 'layers': give one or more"):
            Member("layers", entries, 3)


def test_layouts_are_values():
    here, there = (P("tp", None, on=Member("pp", (i,), 4)) for i in (0, 3))
    assert here == P("tp", None, on=Member("pp", (0,), 4)) and here != there
    assert here != P("tp", None) and P("tp", None) != here and here != ("tp", None)
    assert len({here, there, P("tp", None), copy.deepcopy(here)}) == 3
    for same in (copy.deepcopy(here), pickle.loads(pickle.dumps(here))):
        assert same == here and same.on == here.on and hash(same) == hash(here)
    assert eval(repr(here)) == here
    with pytest.raises(ValueError, match="mesh axis 'pp' is used twice"):
        P("pp", on=Member("pp", (0,), 4))


def test_rules_put_entries_on_mesh_axes():
    assert RULES.layout(leaf(2)) == P("tp", None, on=Member("pp", (2,), 4))
    assert Rules(mlp="tp").layout(leaf(2)) == P("tp", None)
    assert Rules(layers=("a", "b")).layout(leaf(2)).on == Member(("a", "b"), (2,), 4)
    with pytest.raises(KeyError, match="no rule for logical axis 'stack'"):
        Rules().layout(ParamSpec((), (), member=Member("stack", (0,), 1)))


def test_trees_split_and_join():
    whole = {"ends": torch.arange(24.0).view(6, 4), "list": [torch.rand(6, 4) for _ in range(4)]}
    ranks = ThreadRanks(MESH)
    layouts = RULES.specs(SPECS)
    parts = ranks.split(whole, layouts)
    for coord, part in zip(MESH.coords(), parts, strict=True):
        rows = slice(3 * coord["tp"], 3 * coord["tp"] + 3)
        given = [(part["ends"], whole["ends"], HOLDERS["ends"])]
        given += zip(part["list"], whole["list"], HOLDERS["list"], strict=True)
        for x, y, holders in given:
            assert (x is not None) == (coord["pp"] in holders)
            assert x is None or torch.equal(x, y[rows])
    joined = ranks.join(parts, layouts)
    assert torch.equal(joined["ends"], whole["ends"])
    assert all(torch.equal(x, y) for x, y in zip(joined["list"], whole["list"], strict=True))


def test_parts_that_do_not_fit_their_stage_are_found():
    ranks, layout = ThreadRanks(Mesh(pp=3)), {"x": P(None, on=Member("pp", (0, 2), 3))}
    x = torch.ones(2)
    with pytest.raises(
        ValueError,
        match=r"output\.x: rank 1 \(pp=1\) returned float32 \(2,\), but by its layout it exists on"
        r" ranks 0 \(pp=0\) and 2 \(pp=2\) alone: None is wanted",
    ):
        ranks.join([{"x": x}] * 3, layout)
    with pytest.raises(
        ValueError, match=r"rank 0 \(pp=0\) returned float32 \(2,\), rank 2 \(pp=2\) returned None"
    ):
        ranks.join([{"x": x}, {"x": None}, {"x": None}], layout)
    with pytest.raises(ValueError, match=r"ranks 0 \(pp=0\) and 2 \(pp=2\) must hold the same"):
        ranks.join([{"x": x}, {"x": None}, {"x": 2 * x}], layout)


def test_the_first_stage_need_not_hold_what_is_joined():
    ranks = ThreadRanks(Mesh(pp=2))
    x = torch.arange(3)
    joined = ranks.join([None, x], P(None, on=Member("pp", (1,), 2)))
    assert torch.equal(joined, x)


EXPLAINED = """\
Mesh(pp=3, tp=2): 6 ranks
rules: layers=pp, mlp=tp

leaf       axes    shape  layout            local shape  copies  bytes a rank
ends       mlp, -  6x4    tp, - on pp 0,2   3x4          2       48
list.* x2  mlp, -  6x4    tp, - on pp 0     3x4          1       48
list.2     mlp, -  6x4    tp, - on pp 1     3x4          1       48
list.3     mlp, -  6x4    tp, - on pp 2     3x4          1       48
bias       embed   4      - on pp 1         4            2       8
all        -       5      -                 5            6       20

164 bytes a rank where pp=0, 68 of them also held by another rank
76 bytes a rank where pp=1, 28 of them also held by another rank
116 bytes a rank where pp=2, 68 of them also held by another rank"""


def test_explain_counts_each_stage():
    bias = ParamSpec((4,), ("embed",), member=Member("layers", (2,), 4))
    specs = {**SPECS, "bias": bias, "all": ParamSpec((5,), (None,), torch.float32)}
    found = RULES.explain(specs, MESH).splitlines()
    wanted = EXPLAINED.splitlines()
    assert [line.split() for line in found] == [line.split() for line in wanted]


def test_more_stages_than_entries_and_shared_axes_are_refused():
    found = Rules(layers=("pp", "tp")).problems(SPECS, MESH)
    assert found == [
        "layers=('pp', 'tp') makes 6 stages of a list of 4: each stage needs an entry, so give it"
        " at most 4 ranks"
    ]
    found = Rules(layers="pp", mlp=("tp", "pp"), heads="pp", o_heads="pp").problems(SPECS, MESH)
    assert found == [
        f"layers='pp' and {name}={axis!r} share 'pp': the axes of layers are those of the"
        f" pipeline's stages alone"
        for name, axis in (("mlp", ("tp", "pp")), ("heads", "pp"), ("o_heads", "pp"))
    ]
