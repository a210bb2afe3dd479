"""A decode step captured and replayed, against the same step called, side by side.

    python benchmarks/captured_decode.py --device cuda [--batch 1,8,64] [--context 1024]

Random parameters of Qwen3-0.6B's widths in bfloat16, `--layers` of them. For each batch: whether
logits and caches are equal to the last bit, milliseconds a step of both (the least of `--repeats`
rounds of `--steps` steps, both in turn in each round), and the ratio. On a device without graphs a
captured step is called again, and the ratio is about 1.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from funcinfer import build
from funcinfer.kvcache.batch import Batch, Rows, make_batch
from funcinfer.kvcache.layout import pages_needed
from funcinfer.layers import primitives as ops
from funcinfer.models import qwen3
from funcinfer.serving.capture import CapturedStep
from funcinfer.spec import init, with_dtype
from funcinfer.tree import tree_leaves, tree_map

PAGE_SIZE = 128
VOCAB = 151936


def config(layers: int) -> dict[str, Any]:
    """A config.json of Qwen3-0.6B with another number of layers."""
    return dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=True,
    )


def decode_batch(batch: int, context: int, token: int, device: torch.device) -> Batch:
    """A step of `batch` requests at positions below `context`."""
    pages = pages_needed(context, PAGE_SIZE)
    rows = [
        Rows([token + i], context - 1 - i, range(1 + i * pages, 1 + (i + 1) * pages))
        for i in range(batch)
    ]
    made = make_batch([rows], page_size=PAGE_SIZE, segments=ops.wants_segments(device))
    return tree_map(lambda x: x.to(device), made)


def milliseconds(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """The time of a step, with the device's work."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - started) / steps * 1000


def compare(args: argparse.Namespace, batch: int) -> str:
    """One line of the table."""
    device = ops.find_device(args.device)
    fns = build(qwen3.decoder(qwen3.from_hf(config(args.layers))))
    torch.manual_seed(0)
    params = tree_map(lambda x: x.to(device), init(with_dtype(fns.specs, torch.bfloat16)))
    num_pages = 1 + batch * pages_needed(args.context, PAGE_SIZE)
    specs = with_dtype(fns.cache_specs(num_pages, PAGE_SIZE), torch.bfloat16)
    called = tree_map(lambda x: x.to(device), init(specs))
    first, *others = (decode_batch(batch, args.context, t, device) for t in (11, 503, 7))
    captured = CapturedStep(fns.decode, params, tree_map(torch.clone, called), first)

    equal = True
    with torch.no_grad():
        for step in (first, *others):
            found = captured(step)
            wanted, called = fns.decode(params, called, step)
            equal &= torch.equal(found.logits, wanted.logits)
        pairs = zip(tree_leaves(captured.cache), tree_leaves(called), strict=True)
        equal &= all(torch.equal(a, b) for a, b in pairs)
        times = [
            (
                milliseconds(lambda: fns.decode(params, called, first), args.steps, device),
                milliseconds(lambda: captured(first), args.steps, device),
            )
            for _ in range(args.repeats)
        ]
    plain, replayed = (min(t) for t in zip(*times, strict=True))
    return f"{batch:5d}  {equal!s:5}  {plain:9.3f}  {replayed:9.3f}  {plain / replayed:6.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("batch  equal   called ms  replayed ms  ratio")
    for batch in map(int, args.batch.split(",")):
        print(compare(args, batch), flush=True)


if __name__ == "__main__":
    main()
