"""The subcommand `funcinfer plan`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from funcinfer.hf_config import read_config, read_json
from funcinfer.plan.hardware import HARDWARE, find
from funcinfer.plan.planning import PAGE_SIZE, UTILISATION, Setting, Subject, plan
from funcinfer.plan.report import data, text
from funcinfer.plan.sweep import sweep, sweep_data, sweep_text
from funcinfer.sharding import Mesh, Rules, presets
from funcinfer.sharding.mesh import Axis, axis_of
from funcinfer.sharding.presets import Preset

RULE_OPTIONS = {
    "--rule": "both phases",
    "--prefill-rule": "prefill",
    "--decode-rule": "decode",
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def add_plan(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="what a model costs on a mesh, without running it",
        description="Memory, collectives, work and floor times of a config.json on a mesh, worked"
        " out on meta tensors. Counts are of one rank; requests are counted over the whole mesh."
        " Times are the least possible: max(compute, memory) + communication.",
    )
    parser.set_defaults(run=run_plan)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="PATH", help="a config.json, or its folder")
    add("--mesh", default="", metavar="dp=4,tp=16", help="sizes of mesh axes (one device)")
    add("--sp", action="store_true", help="deal the residual stream's tokens over tp, rep, dcp")
    add("--ep", action="store_true", help="lay experts over all axes of the mesh")
    for option, phases in RULE_OPTIONS.items():
        what = f"another rule in {phases}, as experts=dp,tp or mlp= for none"
        add(option, action="append", default=[], metavar="NAME=AXES", help=what)
    add("--no-preset", action="store_true", help="only the rules given, nothing by axis names")
    add("--hardware", default="h200", choices=list(HARDWARE), help="whose figures (h200)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIGURE=NUMBER",
        help="a figure of the hardware, as link_bandwidth=2e11",
    )
    add("--batch", type=int, metavar="N", help="requests that decode (one a requests group)")
    add("--context", type=int, default=4096, metavar="N", help="their context (4096)")
    add("--prompts", type=int, metavar="N", help="prompts of a prefill (one a requests group)")
    add("--prompt", type=int, default=4096, metavar="N", help="tokens of a prompt (4096)")
    add("--page-size", type=int, default=PAGE_SIZE, metavar="N", help=f"({PAGE_SIZE})")
    add("--interleave", type=int, default=1, metavar="N", help="run of offsets of a dcp rank (1)")
    add(
        "--utilisation",
        type=float,
        default=UTILISATION,
        metavar="X",
        help=f"part of the memory for parameters and caches ({UTILISATION})",
    )
    add("--dtype", choices=list(DTYPES), default="bfloat16")
    add("--sweep", type=int, metavar="N", help="compare all presets of N devices instead")
    add("--json", action="store_true", help="print data instead of text")


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan or the sweep; 0. ValueError and FileNotFoundError for bad input."""
    config = read_json(args.model) if args.model.is_file() else read_config(args.model)
    subject = Subject.from_config(config)
    setting = Setting(
        find(args.hardware).replace(**_numbers(args.set)),
        DTYPES[args.dtype],
        args.page_size,
        args.interleave,
        args.utilisation,
    )
    if args.sweep is not None:
        found = sweep(subject, args.sweep, setting, context=args.context, prompt=args.prompt)
        if args.json:
            print(json.dumps(sweep_data(found, subject.name), indent=2))
        else:
            print(sweep_text(found, subject.name, setting))
        return 0
    preset = preset_of(args, subject)
    groups = preset.mesh.size(preset.decode["requests"])
    made = plan(
        subject,
        preset,
        setting,
        batch=groups if args.batch is None else args.batch,
        context=args.context,
        prompts=groups if args.prompts is None else args.prompts,
        prompt=args.prompt,
    )
    print(json.dumps(data(made), indent=2) if args.json else text(made))
    return 0


def preset_of(args: argparse.Namespace, subject: Subject) -> Preset:
    """The preset of the mesh with the rules that were given in place of its own."""
    mesh = Mesh.parse(args.mesh)
    if args.no_preset:
        preset = Preset(mesh, Rules.none(), Rules.none())
    else:
        preset = presets.for_mesh(
            subject.cfg.num_kv_heads, mesh, sp=args.sp, expert_parallel=args.ep
        )
    both = rules_of(args.rule)
    return Preset(
        preset.mesh,
        preset.prefill.replace(**both, **rules_of(args.prefill_rule)),
        preset.decode.replace(**both, **rules_of(args.decode_rule)),
    )


def rules_of(given: Sequence[str]) -> dict[str, Axis]:
    """Rules as they are written on the command line. ValueError for one that can't be read.

    >>> rules_of(["experts=dp,tp", "mlp="])
    {'experts': ('dp', 'tp'), 'mlp': None}
    """
    rules: dict[str, Axis] = {}
    for part in given:
        name, equals, axes = part.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(f"can't read the rule {part!r}; write name=axes, as experts=dp,tp")
        rules[name] = axis_of(a.strip() for a in axes.split(",") if a.strip())
    return rules


def _numbers(given: Sequence[str]) -> dict[str, float]:
    numbers = {}
    for part in given:
        name, _, number = part.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise ValueError(
                f"can't read the figure {part!r}; write name=number, as memory=64e9"
            ) from None
    return numbers
