"""The command line: `funcinfer generate`. Bad input gets one line on stderr and exit code 2."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from funcinfer.default import default_model
from funcinfer.hf_config import DTYPES, dtype_of, read_config
from funcinfer.layers import primitives as ops
from funcinfer.plan.command import add_plan
from funcinfer.serving.engine import Completion, Engine
from funcinfer.serving.load import load
from funcinfer.serving.metrics import Metrics
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.text import Text
from funcinfer.sharding import Mesh, Ranks, ThreadRanks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, or 2 for bad input.

    >>> main(["generate", "--model", "no/such/folder", "--prompt", "Hello"])  # and says so
    2
    """
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"funcinfer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage above an error, which makes more than one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="funcinfer", description="Functional LLM inference.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="continue prompts with a Hugging Face checkpoint",
        description="Continue prompts with a Hugging Face checkpoint, or with the small model that"
        " comes with funcinfer. With --mesh, ranks are"
        " threads of this process or, started by torchrun, one process each.",
    )
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "--model", metavar="DIR", help="a Hugging Face folder (the model that comes with funcinfer)"
    )
    prompts = generate.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompts.add_argument("--file", type=Path, metavar="PROMPTS.TXT", help="one prompt a line")
    generate.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (64)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)"
    )
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all")
    generate.add_argument(
        "--seed", type=int, metavar="S", help="makes the draws of each prompt repeatable"
    )
    generate.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before it; may recur",
    )
    generate.add_argument(
        "--speculate", type=int, default=0, metavar="K", help="most drafts to verify in a step (0)"
    )
    generate.add_argument(
        "--mesh", default="", metavar="tp=2,dp=2", help="sizes of mesh axes (one device)"
    )
    generate.add_argument(
        "--chat", action="store_true", help="apply the chat template to each prompt"
    )
    generate.add_argument(
        "--json", action="store_true", help="print a list of {prompt, text, tokens, finish_reason}"
    )
    generate.add_argument(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="auto: that of config.json"
    )
    generate.add_argument("--device", default="cpu", help="as torch names it (cpu)")
    add_plan(commands)
    return parser


def _generate(args: argparse.Namespace) -> int:
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    mesh, device = Mesh.parse(args.mesh), _device(args.device)
    prompts = [args.prompt] if args.file is None else _read_prompts(args.file)
    folder = args.model or default_model()
    dtype = dtype_of(read_config(folder)) if args.dtype == "auto" else DTYPES[args.dtype]
    text = Text.from_folder(folder)
    ids = [text.chat(p) if args.chat else text.encode(p) for p in prompts]
    model = load(
        folder,
        dtype=dtype,
        device=device,
        mesh=mesh,
        ranks=_ranks(device),
        progress=sys.stderr.isatty(),
    )
    runs: list[Run | None] = []
    for drafts in dict.fromkeys([args.speculate, 0]):  # without drafts too, to compare
        engine = Engine.sized_for(model, ids, sampling, speculate=drafts, text=text)
        runs.append(_run(engine, ids, sampling, warm=args.speculate > 0))
    with_drafts, plain = runs[0], runs[-1]
    if with_drafts is not None and plain is not None:
        _report(prompts, with_drafts.completions, args.json)
        print(_speed(with_drafts, plain, args.speculate), file=sys.stderr)
    if "RANK" in os.environ:
        from funcinfer.sharding import end_process

        end_process()
    return 0


class Run(NamedTuple):
    """What came of the prompts, and how fast."""

    completions: list[Completion]
    seconds: float
    metrics: Metrics

    @property
    def num_tokens(self) -> int:
        """Of all completions."""
        return sum(len(c.tokens) for c in self.completions)

    @property
    def rate(self) -> float:
        """Tokens in a second."""
        return self.num_tokens / self.seconds


def _run(
    engine: Engine, ids: Sequence[list[int]], sampling: SamplingParams, *, warm: bool
) -> Run | None:
    """Serve the prompts; None on a process that follows. warm: once before, not timed, so that two
    runs compare.
    """
    if not engine.leads:
        engine.follow()
        return None
    try:
        if warm:
            engine.generate(ids, dataclasses.replace(sampling, max_tokens=4))
        started = time.perf_counter()
        completions = engine.generate(ids, sampling)
        return Run(completions, time.perf_counter() - started, engine.metrics)
    finally:
        engine.close()


def _speed(run: Run, plain: Run, drafts: int) -> str:
    """How fast the answers came and, with drafts, what these brought."""
    said = f"{run.num_tokens} tokens, {run.rate:.1f} tokens per second"
    if drafts:
        said += (
            f"\nup to {drafts} drafts a step: {run.metrics.accepted_length:.2f} tokens a verified"
            f" row, {run.rate / plain.rate:.2f} times as fast as without drafts in the same run"
            f" ({plain.rate:.1f} tokens per second)"
        )
    return said


def _report(prompts: Sequence[str], completions: Sequence[Completion], as_json: bool) -> None:
    if as_json:
        rows = [
            dict(prompt=p, text=c.text, tokens=c.tokens, finish_reason=c.finish_reason)
            for p, c in zip(prompts, completions, strict=True)
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"> {prompt}\n{completion.text}\n")


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} is not there, or no file")
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8: {error}") from None
    if prompts := [line for line in lines if line.strip()]:
        return prompts
    raise ValueError(f"prompt file {path} has no line with a prompt")


def _device(name: str) -> torch.device:
    """The device, without an index where none is given: each process takes its own."""
    try:
        device = ops.find_device(name)
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise ValueError(f"--device {name}: this machine or this build of torch has none")
    return device


def _ranks(device: torch.device) -> Callable[[Mesh], Ranks]:
    """Processes where torchrun started this one, else threads."""
    if "RANK" not in os.environ:
        return ThreadRanks
    from funcinfer.sharding import ProcessRanks, init_process

    def make(mesh: Mesh) -> Ranks:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != mesh.num_ranks:
            raise ValueError(
                f"--mesh: {mesh!r} has {mesh.num_ranks} ranks, but {world} processes were started"
            )
        return ProcessRanks(mesh, init_process(mesh, device=device))

    return make


if __name__ == "__main__":
    sys.exit(main())
