"""The command line: `funcinfer generate`. Bad input gets one line on stderr and exit code 2."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from funcinfer.hf_config import read_config
from funcinfer.layers import primitives as ops
from funcinfer.plan.command import add_plan
from funcinfer.serving.engine import Completion, Engine
from funcinfer.serving.load import load
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.text import Text
from funcinfer.sharding import Mesh, Ranks, ThreadRanks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        description="Continue prompts with a Hugging Face checkpoint. With --mesh, ranks are"
        " threads of this process or, started by torchrun, one process each.",
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
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
    dtype = _dtype(args.dtype, read_config(args.model))
    text = Text.from_folder(args.model)
    ids = [text.chat(p) if args.chat else text.encode(p) for p in prompts]
    model = load(
        args.model,
        dtype=dtype,
        device=device,
        mesh=mesh,
        ranks=_ranks(device),
        progress=sys.stderr.isatty(),
    )
    engine = Engine.sized_for(model, ids, sampling, speculate=args.speculate, text=text)
    if engine.leads:
        try:
            _answer(engine, prompts, ids, sampling, as_json=args.json)
        finally:
            engine.close()
    else:
        engine.follow()
    if "RANK" in os.environ:
        from funcinfer.sharding import end_process

        end_process()
    return 0


def _answer(
    engine: Engine,
    prompts: Sequence[str],
    ids: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    as_json: bool,
) -> None:
    """Print the answers, and on stderr how fast they came."""
    completions, rate = _timed(engine, ids, sampling)
    _report(prompts, completions, as_json)
    count = sum(len(c.tokens) for c in completions)
    print(f"{count} tokens, {rate:.1f} tokens per second", file=sys.stderr)


def _timed(
    engine: Engine, ids: Sequence[list[int]], sampling: SamplingParams
) -> tuple[list[Completion], float]:
    """The completions, and how many tokens came in a second."""
    started = time.perf_counter()
    completions = engine.generate(ids, sampling)
    seconds = time.perf_counter() - started
    return completions, sum(len(c.tokens) for c in completions) / seconds


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


def _dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    if name == "auto":
        name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"config.json: dtype is {name}: choose one with --dtype: {', '.join(DTYPES)}"
        )
    return DTYPES[name]


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
