"""Functions on real processes: n of them on this machine, with the environment that torchrun gives.

    from tests.launch import Processes, process_ranks, run_on_processes

    def rank_sum(mesh, value):                 # in a module of the test-suite, not inside a test
        ranks = process_ranks(mesh)            # a ProcessRanks; made once for each mesh
        return ranks.run(lambda: psum(torch.tensor(value), "tp"))[0]

    # One start for one call; the result is a list with one entry a rank.
    sums = run_on_processes(2, "tests.some.module:rank_sum", Mesh(tp=2), 3)

    # Starting takes some seconds, so many calls share one start; a fixture of module scope will do.
    with Processes(2) as processes:
        processes.call("tests.some.module:rank_sum", Mesh(tp=2), 3)
        processes.call("tests.some.module:rank_sum", Mesh(tp=2), 4)

Arguments and results are pickled, so assertions belong into the function. When a rank raises,
`call` fails with the traceback of every rank that did and the stacks of those that are stuck. Then
the processes are ended unless all of them answered, and the next call starts new ones.
"""

import contextlib
import faulthandler
import functools
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from funcinfer.sharding import Mesh, ProcessRanks, end_process, init_process

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class ProcessesFailed(AssertionError):
    """Some ranks of a call raised, died or did not end in time; the message has what each said."""


class Processes:
    """`count` processes that wait for calls. They start at the first call and end with `close`."""

    def __init__(self, count: int, *, timeout: float = 120.0, grace: float = 10.0) -> None:
        self.count, self.timeout, self.grace = count, timeout, grace
        self._workers: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`module:function` called with these arguments in every process; the results, by rank.

        A rank gets `timeout` seconds, or `grace` once another one has raised.
        """
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((path, args, kwargs)))
        answers = self._collect()
        if len(answers) == self.count and all(kind == "result" for kind, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.count)]
        report = "\n".join(
            f"--- rank {rank}: {answers[rank][1] if rank in answers else self._stack(rank)}"
            for rank in range(self.count)
            if answers.get(rank, ("",))[0] != "result"
        )
        if len(answers) < self.count or any(kind == "death" for kind, _ in answers.values()):
            self.close()
        raise ProcessesFailed(f"{path} on {self.count} processes failed\n{report}")

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(0.5)
            worker.kill()
            worker.join()
        if self._workers:
            self._folder.cleanup()
            del self._store
        self._workers, self._pipes = [], []

    def _start(self) -> None:
        # As torchrun does, the parent keeps the store in which the ranks find each other.
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False
        )
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            if sys.platform in LOOPBACK:
                variables["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
            stacks = str(self._stacks(rank))
            worker = context.Process(target=_work, args=(theirs, variables, stacks), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)

    def _collect(self) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        limit = time.monotonic() + self.timeout
        while len(answers) < self.count and time.monotonic() < limit:
            waiting = [rank for rank in range(self.count) if rank not in answers]
            pipes = [self._pipes[rank] for rank in waiting]
            ready = connection.wait(pipes, limit - time.monotonic())
            for rank in (r for r in waiting if self._pipes[r] in ready):
                answers[rank] = self._receive(rank)
                if answers[rank][0] != "result":
                    limit = min(limit, time.monotonic() + self.grace)
        return answers

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._workers[rank].join(5)
            return "death", f"ended with exit code {self._workers[rank].exitcode}"

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stacks-{rank}"

    def _stack(self, rank: int) -> str:
        os.kill(self._workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"did not end in time; it is at\n{self._stacks(rank).read_text()}"


def run_on_processes(count: int, path: str, *args: Any, **kwargs: Any) -> list[Any]:
    """`module:function` called once in `count` new processes; the results, by rank."""
    with Processes(count) as processes:
        return processes.call(path, *args, **kwargs)


@functools.cache
def process_ranks(mesh: Mesh) -> ProcessRanks:
    """In a function that `Processes` calls: the rank that this process is."""
    return ProcessRanks(mesh, init_process(mesh, timeout=60))


def resolve(path: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _work(pipe: connection.Connection, variables: dict[str, str], stacks: str) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        with contextlib.suppress(EOFError, OSError):  # the parent closed its end
            while True:
                pipe.send_bytes(_answer(pipe.recv_bytes()))
    end_process()


def _answer(message: bytes) -> bytes:
    try:
        path, args, kwargs = pickle.loads(message)
        return pickle.dumps(("result", resolve(path)(*args, **kwargs)))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))
