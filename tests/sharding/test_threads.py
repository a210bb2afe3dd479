"""Ranks as threads: what happens when a rank fails, waits in vain, or is called from elsewhere."""

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from funcinfer.sharding import (
    Mesh,
    P,
    ThreadRanks,
    all_gather,
    all_to_all_v,
    axis_index,
    current,
    pmax,
    ppermute,
    psum,
    shard_map,
)
from funcinfer.sharding.comm import ExchangeComm

GRID = Mesh(dp=2, tp=2)


def run(f: Callable[[], object], mesh: Mesh = GRID, timeout: float = 30.0) -> list[object]:
    return ThreadRanks(mesh, timeout=timeout).run(f)


def me(axis: str | tuple[str, ...] = ("dp", "tp")) -> int:
    return axis_index(axis)


ONE = torch.ones(2)


def test_the_first_error_is_raised_and_the_others_are_woken():
    def f():
        if me() == 2:
            time.sleep(0.05)
            raise KeyError("the cause")
        return psum(ONE, "dp")

    with pytest.raises(KeyError, match="the cause") as caught:
        run(f)
    assert caught.value.__notes__ == ["raised on rank 2 (dp=1, tp=0) of Mesh(dp=2, tp=2)"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_errors_that_are_not_exceptions_come_out_too(error):
    def f():
        if me() == 1:
            raise error
        psum(ONE, "tp")

    with pytest.raises(error):
        run(f)


def test_a_rank_that_catches_every_exception_is_still_woken():
    def f():
        if me() == 3:
            raise ValueError("the cause")
        try:
            psum(ONE, "tp")
        except Exception:
            pytest.fail("the wake-up was taken for an error of the function")

    with pytest.raises(ValueError, match="the cause"):
        run(f)


def test_a_rank_that_returns_without_the_collective_ends_the_others_at_once():
    with pytest.raises(
        RuntimeError,
        match=r"no collective can be completed: rank 0 \(dp=0, tp=0\): waiting in psum over 'tp';"
        r" ranks 1 \(dp=0, tp=1\), 2 \(dp=1, tp=0\) and 3 \(dp=1, tp=1\): returned",
    ):
        run(lambda: psum(ONE, "tp") if me() == 0 else None)


def test_ranks_that_wait_for_each_other_in_different_groups_are_told():
    with pytest.raises(
        RuntimeError,
        match=r"no collective can be completed: ranks 0 \(dp=0, tp=0\) and 3 \(dp=1, tp=1\):"
        r" waiting in psum over 'tp'; ranks 1 .* and 2 .*: waiting in pmax over 'dp'",
    ):
        run(lambda: psum(ONE, "tp") if me() in (0, 3) else pmax(ONE, "dp"))


def test_two_ranks_in_different_collectives_are_told():
    def f():
        return psum(ONE, "tp") if me("tp") == 0 else all_gather(ONE, "tp", dim=0)

    with pytest.raises(
        ValueError,
        match=r"ranks met in different collectives: rank 0 \(tp=0\): psum over 'tp' of float32"
        r" \[2\]; rank 1 \(tp=1\): all_gather dim=0 over 'tp' of float32 \[2\]",
    ):
        run(f, Mesh(tp=2))


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (lambda i: psum(torch.ones(2 + i), "tp"), r"float32 \[2\]; .* float32 \[3\]"),
        (lambda i: psum(ONE.to([torch.float32, torch.int64][i]), "tp"), r"float32 \[2\]; .* int64"),
        (lambda i: ppermute(ONE, "tp", [(0, i)]), r"ppermute \(\(0, 0\),\) .* \(\(0, 1\),\)"),
        (
            lambda i: all_to_all_v(torch.ones(2 + i, 3 + i), "tp", [1, 1 + i]),
            r"all_to_all_v over 'tp' of float32 \[any, 3\]; .* float32 \[any, 4\]",
        ),
    ],
    ids=["shape", "dtype", "perm", "trailing dims"],
)
def test_calls_that_do_not_fit_are_told(f, said):
    with pytest.raises(ValueError, match=f"ranks met in different collectives: .*{said}"):
        run(lambda: f(me("tp")), Mesh(tp=2))


def test_axis_tuples_in_different_orders_do_not_fit():
    def f():
        return psum(ONE, ("dp", "tp") if me() % 2 else ("tp", "dp"))

    with pytest.raises(ValueError, match=r"psum over \('tp', 'dp'\) .* psum over \('dp', 'tp'\)"):
        run(f)


def test_a_rank_that_never_arrives_is_named():
    go_on = threading.Event()

    def f():
        if me() == 3:
            go_on.wait(60)
            return None
        return psum(ONE, "tp")

    ranks = ThreadRanks(GRID, timeout=0.2)
    with pytest.raises(
        TimeoutError,
        match=r"psum over 'tp': rank 3 \(dp=1, tp=1\) did not arrive within 0.2 s,"
        r" while rank 2 \(dp=1, tp=0\) waited",
    ):
        ranks.run(f)
    # The stuck thread is left behind: the next run has new ones.
    assert [x.tolist() for x in ranks.run(lambda: psum(ONE, "tp"))] == [[2.0, 2.0]] * 4
    go_on.set()


def test_a_missing_rank_that_waits_elsewhere_is_told():
    go_on = threading.Event()

    def f():
        if me() == 0:
            psum(ONE, "tp")
        elif me() == 1:
            time.sleep(0.1)
            psum(ONE, "dp")
        elif me() == 3:
            go_on.wait(60)

    with pytest.raises(
        TimeoutError,
        match=r"psum over 'tp': rank 1 \(dp=0, tp=1\) did not arrive within 0.3 s,"
        r" while rank 0 \(dp=0, tp=0\) waited; rank 1 waits in psum over 'dp'",
    ):
        run(f, timeout=0.3)
    go_on.set()


def test_ranks_go_on_after_an_error():
    ranks = ThreadRanks(Mesh(tp=2))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            ranks.run(lambda: psum(ONE, "tp") / (1 // me("tp")))
        assert [x.tolist() for x in ranks.run(lambda: psum(ONE, "tp"))] == [[2.0, 2.0]] * 2


def test_a_rank_may_write_its_tensor_while_others_still_read():
    written = threading.Event()

    def f():
        env, x = current(), torch.ones(2)
        assert env is not None and isinstance(env.comm, ExchangeComm)
        parts = env.comm.exchange(x, env.group("tp"), "a collective")
        if me("tp") == 0:
            x.fill_(7.0)
            written.set()
        assert written.wait(30)
        return [part.tolist() for part in parts]

    assert run(f, Mesh(tp=2)) == [[[1.0, 1.0], [1.0, 1.0]]] * 2


def test_random_delays_are_no_deadlock():
    """Ranks that run far apart, over groups of every kind, in programs drawn at random."""
    axes = ["a", "b", "c", ("a", "b"), ("c", "a"), ("a", "b", "c")]
    mesh = Mesh(a=2, b=2, c=2)
    ranks = ThreadRanks(mesh)
    for seed in range(12):
        program = random.Random(seed).choices(axes, k=40)

        def f(seed=seed, program=program):
            delays = random.Random(seed * 100 + me(("a", "b", "c")))
            total = torch.zeros(())
            for axis in program:
                if delays.random() < 0.3:
                    time.sleep(delays.random() * 0.002)
                total = total + psum(torch.ones(()), axis)
            return total.item()

        expected = float(sum(mesh.size(axis) for axis in program))
        assert ranks.run(f) == [expected] * 8


def test_a_run_of_one_rank_stays_in_the_calling_thread():
    ranks = ThreadRanks(Mesh(tp=1, dp=1))
    assert ranks.run(threading.get_ident) == [threading.get_ident()]
    assert ranks.run(lambda: axis_index(("tp", "dp"))) == [0]
    assert current() is None

    def loss(x):
        f = shard_map(lambda x: psum(x * x, "tp").sum(), Mesh(tp=1), (P("tp"),), P())
        return f(x)

    x = torch.arange(3.0)
    torch.testing.assert_close(torch.func.grad(loss)(x), 2 * x)
    batched = torch.func.vmap(loss)(torch.stack([x, x + 1]))
    torch.testing.assert_close(batched, torch.tensor([5.0, 14.0]))


def test_runs_from_several_threads_do_not_disturb_each_other():
    ranks = ThreadRanks(Mesh(tp=3))
    found: dict[int, list[float]] = {}

    def caller(k: int) -> None:
        for _ in range(20):
            outs = ranks.run(lambda: psum(torch.tensor(float(k)), "tp").item())
            found.setdefault(k, []).extend(outs)

    callers = [threading.Thread(target=caller, args=(k,)) for k in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(60)
    assert found == {k: [3.0 * k] * 60 for k in range(4)}


def test_a_rank_may_run_the_same_ranks_and_other_meshes_again():
    inner = shard_map(lambda x: psum(x, "ep"), Mesh(ep=3), (P("ep"),), P(None))
    x = torch.arange(3.0)

    def f(depth: int, x: torch.Tensor) -> torch.Tensor:
        before = current()
        if depth:
            x = outer(depth - 1)(x)
        y = psum(inner(x), "tp")
        assert current() is before and axis_index("tp") in (0, 1)
        return y

    ranks = ThreadRanks(Mesh(tp=2))

    def outer(depth: int):
        return shard_map(
            lambda x: f(depth, x), ranks.mesh, (P(None),), P(None), ranks=ranks, check=True
        )

    assert outer(0)(x).tolist() == [6.0]
    with pytest.raises(ValueError, match="dim 0 of shape"):
        outer(1)(x)  # the inner sum is one number, which three ranks can't share
    assert outer(0)(x).tolist() == [6.0]


def rank_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("rank-")}


def ended(threads: set[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def test_threads_are_kept_between_runs_and_end_with_their_ranks():
    before = rank_threads()
    ranks = ThreadRanks(Mesh(tp=4))
    assert rank_threads() == before
    idents = [ranks.run(threading.get_ident) for _ in range(3)]
    assert idents[0] == idents[1] == idents[2] and len(set(idents[0])) == 4
    mine = rank_threads() - before
    assert len(mine) == 4
    del ranks
    gc.collect()
    assert ended(mine)


def test_a_failed_run_keeps_neither_tensors_nor_threads():
    before = rank_threads()
    ranks = ThreadRanks(Mesh(tp=2))
    x = torch.ones(1000)
    alive = weakref.ref(x)

    def f(x):
        raise ValueError("no")

    with contextlib.suppress(ValueError):
        ranks.run(f, [x, x])
    del x
    gc.disable()
    try:
        limit = time.monotonic() + 10
        while alive() is not None and time.monotonic() < limit:
            time.sleep(0.01)
        assert alive() is None, "something still holds the argument, and not in a cycle"
    finally:
        gc.enable()
    mine = rank_threads() - before
    del ranks
    assert ended(mine)


def test_an_interrupt_of_the_caller_ends_the_run(monkeypatch):
    from funcinfer.sharding import comm_threads

    def interrupted(self, grace=5.0):
        raise KeyboardInterrupt

    go_on = threading.Event()
    ranks = ThreadRanks(Mesh(tp=2))
    before = rank_threads()
    with monkeypatch.context() as patch:
        patch.setattr(comm_threads.Rendezvous, "wait_for_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.run(lambda: (go_on.wait(30), psum(ONE, "tp")))
    left = rank_threads() - before
    go_on.set()
    assert ended(left), "threads of an interrupted run end once their function lets them"
    assert [x.tolist() for x in ranks.run(lambda: psum(ONE, "tp"))] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("bad", [[ONE], ONE, (ONE, ONE)], ids=["short", "tensor", "tuple"])
def test_locals_that_are_not_one_a_rank_are_refused(bad):
    ranks = ThreadRanks(Mesh(tp=2))
    with pytest.raises(ValueError, match="must be a list with one entry for each of 2 ranks"):
        ranks.run(lambda x: x, bad)
    with pytest.raises(ValueError, match="must be a list with one entry for each of 2 ranks"):
        ranks.join(bad, P("tp"))
