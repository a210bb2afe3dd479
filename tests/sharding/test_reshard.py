"""Moves between layouts against a model in which each element is its own global index.

The model knows nothing of moves. After a move to `dst`, each row on each rank is read: its columns
must be one token's, and exactly those that `dst` deals to the rank. The tokens of the ranks must be
dealt out as `dst` says. Where both layouts of dim 0 lie on one chain they must lie in plain order.
"""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from funcinfer.sharding import Mesh, P, ThreadRanks, reduce_to, reshard
from funcinfer.sharding.comm import Env, ExchangeComm, use_env
from funcinfer.sharding.reshard import moves
from tests.sharding import brute

MESH = Mesh(a=2, b=2, c=2)
RANKS = ThreadRanks(MESH)
LAYOUTS = brute.layouts("abc", 2)
TOKENS, WIDTH = 24, 40
WHOLE = torch.arange(TOKENS * WIDTH).view(TOKENS, WIDTH)
Layout = tuple[brute.Axes, ...]


def chain(src: brute.Axes, dst: brute.Axes) -> bool:
    """Whether the axes that leave are src's last and those that arrive are dst's last."""
    shared = [a for a in src if a in dst]
    return list(src[: len(shared)]) == shared == list(dst[: len(shared)])


def check_bag(parts: Sequence[torch.Tensor], dst: Layout, what: str) -> None:
    """Each row is one token with the right columns; the ranks hold the tokens that dst deals."""
    dealt: dict[int, list[int]] = {}
    for rank, x in enumerate(parts):
        columns = brute.cut(torch.arange(WIDTH)[None], ((), dst[1]), MESH, rank)[0]
        tokens = x[:, 0].div(WIDTH, rounding_mode="floor")
        assert torch.equal(x, tokens[:, None] * WIDTH + columns), f"{what}: rows of rank {rank}"
        place = brute.index(MESH, dst[0], rank)
        assert dealt.setdefault(place, tokens.tolist()) == tokens.tolist(), f"{what}: replicas"
    assert sorted(t for tokens in dealt.values() for t in tokens) == list(range(TOKENS)), what
    assert len({len(tokens) for tokens in dealt.values()}) == 1, what


def check_plain(parts: Sequence[torch.Tensor], dst: Layout, what: str) -> None:
    for rank, x in enumerate(parts):
        assert torch.equal(x, brute.cut(WHOLE, dst, MESH, rank)), f"{what}: rank {rank}"


def run_all(jobs: Sequence[Callable[[int], torch.Tensor]]) -> list[list[torch.Tensor | str]]:
    """The result of each job on each rank, or what it refused; all of them in one run."""

    def attempt(rank: int) -> list[torch.Tensor | str]:
        outs: list[torch.Tensor | str] = []
        for job in jobs:
            try:
                outs.append(job(rank))
            except ValueError as error:
                outs.append(str(error))
        return outs

    by_rank = RANKS.run(attempt, list(range(8)))
    return [list(outs) for outs in zip(*by_rank, strict=True)]


def local(layout: Layout) -> list[torch.Tensor]:
    return [brute.cut(WHOLE, layout, MESH, rank) for rank in range(8)]


def test_every_pair_of_layouts_is_right_or_refused():
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    parts = {layout: local(layout) for layout in LAYOUTS}
    jobs = [lambda rank, s=src, d=dst: reshard(parts[s][rank], P(*s), P(*d)) for src, dst in pairs]
    plain = bags = refused = 0
    for (src, dst), outs in zip(pairs, run_all(jobs), strict=True):
        what = f"{P(*src)} -> {P(*dst)}"
        if isinstance(outs[0], str):
            assert set(outs) == {outs[0]} and outs[0].startswith(
                f"can't go from layout {P(*src)!r}"
            )
            assert repr(P(*dst)) in outs[0]
            refused += 1
        elif chain(src[0], dst[0]):
            check_plain(outs, dst, what)
            plain += 1
        else:
            check_bag(outs, dst, what)
            bags += 1
    assert (plain, bags, refused) == (973, 408, 1020)


def test_the_same_route_moves_tokens_alike():
    """Ids of one dim and rows of two that change dim 0 in the same way stay side by side."""
    changes = [(s, d) for s, d in itertools.product(LAYOUTS, LAYOUTS) if s[1] == d[1] == ()]
    ids = [[x[:, 0] // WIDTH for x in local((s[0], ()))] for s, _ in changes]
    jobs = [
        lambda rank, s=s, d=d, i=i: torch.cat(
            [
                reshard(ids[i][rank], P(s[0]), P(d[0]))[:, None],
                reshard(brute.cut(WHOLE, s, MESH, rank), P(*s), P(*d))[:, :1],
            ],
            1,
        )
        for i, (s, d) in enumerate(changes)
    ]
    moved = 0
    for outs in run_all(jobs):
        if not isinstance(outs[0], str):
            moved += 1
            assert all(torch.equal(x[:, 0] * WIDTH, x[:, 1]) for x in outs)
    assert moved > 200


def test_axes_that_leave_dim_0_come_back_to_where_they_were():
    jobs, ways = [], []
    for src in LAYOUTS:
        for n in range(1, len(src[0]) + 1):
            for gone in itertools.combinations(src[0], n):
                less = (tuple(a for a in src[0] if a not in gone), src[1])
                ways.append((src, less))
    parts = {layout: local(layout) for layout in LAYOUTS}
    jobs = [
        lambda rank, s=s, d=d: reshard(reshard(parts[s][rank], P(*s), P(*d)), P(*d), P(*s))
        for s, d in ways
    ]
    for (src, less), outs in zip(ways, run_all(jobs), strict=True):
        check_plain(outs, src, f"{src} -> {less} and back")


def test_three_dims_are_right_or_refused():
    rng = random.Random(7)
    choices = brute.layouts("abc", 3)
    whole = torch.arange(8 * 8 * 24).view(8, 8, 24)
    pairs = [(rng.choice(choices), rng.choice(choices)) for _ in range(400)]
    jobs = [
        lambda rank, s=s, d=d: reshard(brute.cut(whole, s, MESH, rank), P(*s), P(*d))
        for s, d in pairs
    ]
    done = 0
    for (src, dst), outs in zip(pairs, run_all(jobs), strict=True):
        if isinstance(outs[0], str) or not chain(src[0], dst[0]):
            continue
        done += 1
        for rank, x in enumerate(outs):
            assert torch.equal(x, brute.cut(whole, dst, MESH, rank)), f"{src} -> {dst}"
    assert done > 60


def test_reduce_to_is_the_sum_in_the_layout_that_is_wanted():
    """Every (over, src, dst): parts of a sum whose total is the model, in each rank's layout."""
    cases = [
        (over, src, dst)
        for n in range(4)
        for over in itertools.permutations("abc", n)
        for src, dst in itertools.product(LAYOUTS, LAYOUTS)
        if not set(over) & {a for axes in src for a in axes}
    ]
    rng = random.Random(3)
    cases = rng.sample(cases, 1200)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-99, 99, (8, TOKENS, WIDTH), generator=generator)

    def partial(over: brute.Axes, rank: int) -> torch.Tensor:
        """This rank's summand: noise, but for the last one, which makes the total right."""
        size, i = len(brute.group(MESH, over, rank)), brute.index(MESH, over, rank)
        return noise[i] if i < size - 1 else WHOLE - noise[: size - 1].sum(0)

    jobs = [
        lambda rank, o=over, s=src, d=dst: reduce_to(
            brute.cut(partial(o, rank), s, MESH, rank), o, P(*s), P(*d)
        )
        for over, src, dst in cases
    ]
    plain = bags = refused = 0
    for (over, src, dst), outs in zip(cases, run_all(jobs), strict=True):
        what = f"{over}: {P(*src)} -> {P(*dst)}"
        grows = set(src[0]) <= set(dst[0]) and dst[1][: len(src[1])] == src[1]
        if not grows:
            assert isinstance(outs[0], str), what
            assert "may only gain axes" in outs[0] and repr(P(*dst)) in outs[0]
            refused += 1
        elif dst[0][: len(src[0])] == src[0]:
            check_plain(outs, dst, what)
            plain += 1
        else:
            check_bag(outs, dst, what)
            bags += 1
    assert plain > 100 and bags > 5 and refused > 500


def recorded(f: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> list[str]:
    """The collectives of `f` on rank 0, which meets copies of itself: `what over axes`."""
    log: list[str] = []

    def exchange(x, group, what):
        log.append(f"{what} over {'*'.join(group.axes)}")
        return [x] * group.size

    with use_env(Env(MESH, MESH.coords()[0], ExchangeComm(0, exchange))):
        f(torch.zeros(shape))
    return log


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (P(("a", "b", "c"), None), P(None, None), ["all_gather dim=0 over a*b*c"]),
        (P(("a", "b", "c"), None), P("b", None), ["all_gather dim=0 over a*c"]),
        (P(None, ("a", "b", "c")), P(None, "a"), ["all_gather dim=1 over b*c"]),
        (P(("a", "b"), None), P(None, ("a", "b")), ["all_to_all split=1 concat=0 over a*b"]),
        (P("c", ("a", "b")), P(("c", "a", "b"), None), ["all_to_all split=0 concat=1 over a*b"]),
        (
            P(("c", "b"), None),
            P(None, "b"),
            ["all_to_all split=1 concat=0 over b", "all_gather dim=0 over c"],
        ),
        (P(None, None), P(("a", "b"), "c"), []),
        (P("a", "b"), P("a", "b"), []),
    ],
)
def test_a_run_of_axes_with_one_target_is_one_collective(src, dst, expected):
    assert recorded(lambda x: reshard(x, src, dst), 8, 8) == expected


@pytest.mark.parametrize(
    ("over", "src", "dst", "expected"),
    [
        (("a", "b", "c"), P(None, None), P(None, None), ["psum over a*b*c"]),
        (("b", "a"), P(None, None), P(("a", "b"), None), ["psum_scatter dim=0 over a*b"]),
        (
            ("a", "b", "c"),
            P(None, None),
            P("b", None),
            ["psum_scatter dim=0 over b", "psum over a*c"],
        ),
        (
            ("a", "c"),
            P(None, None),
            P(("a", "b", "c"), None),
            ["psum_scatter dim=0 over a", "psum_scatter dim=0 over c"],
        ),
        (("b",), P("a", None), P("a", ("b",)), ["psum_scatter dim=1 over b"]),
        ((), P(None, None), P("a", None), []),
    ],
)
def test_sums_that_are_scattered_side_by_side_are_one_collective(over, src, dst, expected):
    assert recorded(lambda x: reduce_to(x, over, src, dst), 8, 8) == expected


REFUSED = [
    (P("a", "b"), P("b", "a"), "'b' leaves dim 1, but it is not the last of .*reorder the rule"),
    (
        P(None, ("a", "b")),
        P(None, "b"),
        r"'a' leaves dim 1, but it is not the last of \('a', 'b'\)",
    ),
    (P(None, "b"), P(None, ("a", "b")), r"dim 1 would end with the order \('b', 'a'\)"),
    (P(None, ("a", "b")), P(("b", "a"), None), r"axes reach dim 0 in the order \('a', 'b'\)"),
    (P(None, "a"), P(("c", "a"), None), r"axes reach dim 0 in the order \('a', 'c'\)"),
]


@pytest.mark.parametrize(("src", "dst", "said"), REFUSED)
def test_what_can_not_be_reached_is_refused(src, dst, said):
    with pytest.raises(ValueError, match=said) as caught:
        moves(src, dst)
    assert str(caught.value).startswith(f"can't go from layout {src!r} to {dst!r}: ")


def test_wrong_ranks_and_sizes_are_refused():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"a tensor of 2 dims can't go from P\(None\) to P\('a'\)"):
        reshard(x, P(None), P("a"))
    with pytest.raises(ValueError, match=r"2 dims can't go from P\(None, None\) to P\('a'\)"):
        reduce_to(x, None, P(None, None), P("a"))
    with pytest.raises(
        ValueError, match=r"sums over \('a', 'b'\) can't be partial over 'b', which shards P"
    ):
        reduce_to(x, ("a", "b"), P(None, "b"), P(None, "b"))
    with pytest.raises(
        ValueError, match=r"dim 0 of shape \(3, 4\) is 3, which 'a' does not divide into 2 even"
    ):
        recorded(lambda x: reshard(x, P(None, None), P("a", None)), 3, 4)


def test_an_axis_that_is_not_bound_is_named():
    with pytest.raises(NameError, match="mesh axis 'a' is not bound"):
        reshard(torch.zeros(2), P("a"), P(None))
