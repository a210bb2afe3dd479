"""The command line: `funcinfer generate`. Bad input gets one line on stderr and exit code 2."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from funcinfer.hf_config import read_config
from funcinfer.kvcache.layout import pages_needed
from funcinfer.serving.engine import Completion, Engine
from funcinfer.serving.load import load
from funcinfer.serving.model import Model
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.text import Text
from funcinfer.sharding import Mesh, Ranks, ThreadRanks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0, or 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, NotADirectoryError, ImportError) as error:
        print(f"funcinfer: {_one_line(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="funcinfer", description="Functional LLM inference.")
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
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    generate.add_argument("--top-k", type=int, default=0, help="0 (default) keeps all")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, help="fixes the draws")
    generate.add_argument("--mesh", default="", metavar="tp=2,dp=2", help="sizes of mesh axes")
    generate.add_argument(
        "--chat", action="store_true", help="apply the chat template to each prompt"
    )
    generate.add_argument("--json", action="store_true", help="print a list of objects")
    generate.add_argument("--dtype", choices=["auto", *DTYPES], default="auto")
    generate.add_argument("--device", default="cpu")
    return parser


def _generate(args: argparse.Namespace) -> int:
    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    prompts = [args.prompt] if args.file is None else _read_prompts(args.file)
    model = load(
        args.model,
        dtype=_dtype(args.dtype, args.model),
        device=args.device,
        mesh=Mesh.parse(args.mesh),
        ranks=_ranks(args.device),
        progress=sys.stderr.isatty(),
    )
    text = Text.from_folder(args.model)
    ids = [text.chat(p) if args.chat else text.encode(p) for p in prompts]
    started = time.perf_counter()
    done = _engine(model, ids, sampling).generate(ids, sampling)
    seconds = time.perf_counter() - started
    if int(os.environ.get("RANK", "0")) == 0:
        _report(prompts, done, text, args.json)
        count = sum(len(c.tokens) for c in done)
        print(f"{count} tokens, {count / seconds:.1f} tokens per second", file=sys.stderr)
    return 0


def _engine(model: Model, ids: list[list[int]], sampling: SamplingParams) -> Engine:
    """An engine that serves the prompts together, up to 64 at a time."""
    running = min(len(ids), 64)
    longest = max(len(i) for i in ids) + sampling.max_tokens
    pages = running * pages_needed(longest, model.page_size)
    return Engine(model, num_pages=1 + pages, page_size=model.page_size, max_running=running)


def _report(prompts: list[str], done: list[Completion], text: Text, as_json: bool) -> None:
    texts = [text.decode(_without_stop(c)) for c in done]
    if as_json:
        rows = [
            dict(prompt=p, text=t, tokens=c.tokens, finish_reason=c.finish_reason)
            for p, t, c in zip(prompts, texts, done, strict=True)
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for prompt, answer in zip(prompts, texts, strict=True):
        print(f"> {prompt}\n{answer}\n")


def _without_stop(completion: Completion) -> list[int]:
    return completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} does not exist")
    prompts = [line for line in path.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {path} has no line with a prompt")
    return prompts


def _dtype(name: str, folder: str) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    config = read_config(folder)
    stored = str(config.get("dtype", config.get("torch_dtype", "bfloat16")))
    return DTYPES.get(stored.removeprefix("torch."), torch.bfloat16)


def _ranks(device: str) -> Callable[[Mesh], Ranks]:
    """Processes where torchrun started this one, else threads."""
    if "RANK" not in os.environ:
        return ThreadRanks
    from funcinfer.sharding.comm_torch import ProcessRanks, init_process

    return lambda mesh: ProcessRanks(mesh, init_process(mesh, device=device))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
