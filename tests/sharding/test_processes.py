"""Ranks as processes: the cases on gloo, how they start, find their groups and report faults."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from funcinfer.sharding import Mesh, P, ProcessRanks, TorchComm, init_process, psum, shard_map
from funcinfer.sharding.comm import bind
from funcinfer.sharding.comm_torch import _made
from tests.launch import Processes, ProcessesFailed, process_ranks
from tests.sharding import cases_trees  # noqa: F401  (adds its cases)
from tests.sharding.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.sharding.test_processes"


def test_a_mesh_of_one_rank_needs_no_other_process():
    for mesh in (Mesh(), Mesh(tp=1)):
        ranks = ProcessRanks(mesh, init_process(mesh))
        f = shard_map(
            lambda x: psum(x, "tp") * 2,
            Mesh(tp=1),
            (P("tp"),),
            P("tp"),
            ranks=ProcessRanks(Mesh(tp=1), init_process(Mesh(tp=1))),
        )
        assert f(torch.ones(2)).tolist() == [2.0, 2.0]
        assert ranks.coords == mesh.coords()
    assert not torch.distributed.is_initialized()


def test_a_process_that_torchrun_did_not_start_is_told(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError,
        match=r"Mesh\(tp=2\) needs 2 processes, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is"
        r" not set: start them with `torchrun --nproc-per-node 2 \.\.\.`, or use shard_map",
    ):
        init_process(Mesh(tp=2))
    with pytest.raises(ValueError, match=r"Mesh\(tp=2\) needs a process group: call init_process"):
        TorchComm(Mesh(tp=2))


def test_a_wrong_number_of_processes_is_told(monkeypatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"Mesh\(dp=2, tp=2\) has 4 ranks, but 3 processes were started"
    ):
        init_process(Mesh(dp=2, tp=2))


def test_an_unknown_device_is_told():
    with pytest.raises(ValueError, match="no back end for device mps: use one of cpu, cuda, npu"):
        init_process(Mesh(tp=1), device="mps")
    with pytest.raises(ValueError, match=r"a comm of Mesh\(\) does not fit Mesh\(tp=1\)"):
        ProcessRanks(Mesh(tp=1), init_process(Mesh()))


def groups_are_made_for_the_products_that_are_named() -> None:
    mesh = Mesh(dp=2, tp=2)
    process_ranks(mesh)
    comm = TorchComm(mesh, axes=["tp"])
    with bind(mesh, comm):
        assert psum(torch.ones(1), "tp").item() == 2
        assert psum(torch.ones(1), ("tp", "dp")).item() == 4  # all ranks always have a group
        with pytest.raises(
            ValueError,
            match=r"psum over 'dp': no process group was made for it on Mesh\(dp=2, tp=2\);"
            r" name 'dp' in TorchComm\(mesh, axes=\[...\]\)",
        ):
            psum(torch.ones(1), "dp")


def a_second_mesh_takes_the_groups_that_are_there() -> None:
    process_ranks(Mesh(dp=2, tp=2))
    (made,) = _made.values()
    before = dict(made)
    for mesh in (Mesh(dp=2, tp=2), Mesh(a=2, b=2), Mesh(a=2, one=1, b=2), Mesh(tp=4)):
        with bind(mesh, TorchComm(mesh)):
            assert psum(torch.ones(1), mesh.names).item() == 4
    assert made == before and len(made) == 4


def another_device_is_told() -> None:
    with (
        bind(Mesh(dp=2, tp=2), process_ranks(Mesh(dp=2, tp=2)).comm),
        pytest.raises(
            ValueError, match=r"psum over 'tp': the tensor is on meta, the process groups"
        ),
    ):
        psum(torch.ones(1, device="meta"), "tp")


def a_fault_of_the_back_end_says_where_it_comes_from() -> None:
    mesh = Mesh(dp=2, tp=2)
    comm = process_ranks(mesh).comm
    with (
        bind(mesh, comm),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match="connection closed") as caught,
    ):
        patch.setattr(torch.distributed, "all_reduce", _closed)
        psum(torch.ones(2, 3), "dp")
    ranks = (0, 2) if comm.rank % 2 == 0 else (1, 3)
    (note,) = caught.value.__notes__
    assert note == (
        f"in psum over 'dp' of torch.float32 [2, 3], on rank {comm.rank} of ranks {ranks[0]} (dp=0,"
        f" tp={ranks[0] % 2}) and {ranks[1]} (dp=1, tp={ranks[0] % 2}) of Mesh(dp=2, tp=2)"
    )


def _closed(*args, **kwargs):
    raise RuntimeError("connection closed by peer")


def an_error_in_a_rank_is_noted() -> None:
    ranks = process_ranks(Mesh(dp=2, tp=2))

    def f(x):
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause") as caught:
        ranks.run(f, [torch.ones(1)])
    rank = ranks.comm.rank
    assert caught.value.__notes__ == [
        f"raised on rank {rank} (dp={rank // 2}, tp={rank % 2}) of Mesh(dp=2, tp=2)"
    ]


def one_rank_raises() -> int:
    if os.environ["RANK"] == "1":
        raise RuntimeError("only here")
    return 7


def one_rank_hangs() -> None:
    ranks = process_ranks(Mesh(tp=2))
    if os.environ["RANK"] == "1":
        raise RuntimeError("only here")
    ranks.run(lambda: psum(torch.ones(1), "tp"))


def one_rank_dies() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)


def on_this_process(name: str, size: int) -> None:
    CASES[name](process_ranks, size)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n}-processes")
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_on_processes(processes, name):
    processes.call(f"{HERE}:on_this_process", name, processes.count)


@pytest.mark.parametrize("processes", [4], indirect=True)
@pytest.mark.parametrize(
    "function",
    [
        groups_are_made_for_the_products_that_are_named,
        a_second_mesh_takes_the_groups_that_are_there,
        another_device_is_told,
        a_fault_of_the_back_end_says_where_it_comes_from,
        an_error_in_a_rank_is_noted,
    ],
    ids=lambda f: f.__name__,
)
def test_on_four_processes(processes, function):
    processes.call(f"{HERE}:{function.__name__}")


def test_the_launcher_reports_what_went_wrong():
    with Processes(2, grace=1.0) as processes:
        assert processes.call("os:getenv", "RANK") == ["0", "1"]
        before = [worker.pid for worker in processes._workers]
        with pytest.raises(ProcessesFailed) as caught:
            processes.call(f"{HERE}:one_rank_raises")
        assert "RuntimeError: only here" in str(caught.value)
        assert "--- rank 1" in str(caught.value) and "--- rank 0" not in str(caught.value)
        assert before == [worker.pid for worker in processes._workers]
        with pytest.raises(
            ProcessesFailed, match=r"(?s)--- rank 0: did not end in time; it is at.*psum"
        ):
            processes.call(f"{HERE}:one_rank_hangs")
        assert processes.call("os:getenv", "RANK") == ["0", "1"]
        assert before != [worker.pid for worker in processes._workers]
        with pytest.raises(ProcessesFailed, match="--- rank 0: ended with exit code 3"):
            processes.call(f"{HERE}:one_rank_dies")


TORCHRUN = r"""
import sys, torch
from funcinfer.sharding import Mesh, P, ProcessRanks, init_process, psum, shard_map
mesh = Mesh(tp=2)
f = shard_map(lambda x: psum(x, "tp"), mesh, (P("tp"),), P(None),
              ranks=ProcessRanks(mesh, init_process(mesh)))
sys.stdout.write(f"sum {f(torch.tensor([1.0, 2.0])).item()}\n")
"""


def test_torchrun_starts_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2
