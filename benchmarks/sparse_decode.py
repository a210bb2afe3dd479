"""Growth of sparse latent attention's decode step with the context, in parts, side by side with
dense.

    python benchmarks/sparse_decode.py [--topk 256] [--contexts 512,1024,2048,4096,8192]

One token of one request on the CPU, in float32, in each context. Columns are microseconds (the
least of `--repeats` rounds, all columns in turn in each round) and, in brackets, the ratio to the
first context: `select` writes and scores the indexer's keys (linear in the context), `attend` is
the rest of the layer over the selected positions (flat once the context is past topk), `dense` the
same layer over all positions in the absorbed form. Dims are those of DeepSeek-V3.2 with fewer
heads.
"""

import argparse
import time
from collections.abc import Callable

import torch

from funcinfer.kvcache.batch import Rows, Step, make_batch, prepare
from funcinfer.kvcache.layout import pages_needed
from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import IndexerConfig, indexer_cache_specs, select
from funcinfer.layers.mla import (
    MLAConfig,
    mla_absorbed,
    mla_cache_specs,
    shared_sparse_mla,
    sparse_mla_specs,
)
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.sharding import Rules
from funcinfer.spec import init, with_dtype

PAGE_SIZE = 64
RULES = Rules.none()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--contexts", default="512,1024,2048,4096,8192")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--index-heads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cfg = MLAConfig(
        1024, args.heads, 512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5, q_lora=512
    )
    index = IndexerConfig(1024, 512, args.index_heads, 128, args.topk, ops.rotate_half_split)
    print(f"topk {args.topk}, {args.heads} heads, {args.index_heads} indexer heads, 1 thread")
    print(f"{'context':>8}  {'select':>16}  {'attend':>16}  {'dense':>16}")
    first: dict[str, float] = {}
    for context in map(int, args.contexts.split(",")):
        times = least_times(step_parts(cfg, index, context), args.repeats)
        cells = [f"{t:9.0f} ({t / first.setdefault(n, t):4.2f})" for n, t in times.items()]
        print(f"{context:8}  " + "  ".join(c.rjust(16) for c in cells))


def step_parts(
    cfg: MLAConfig, index: IndexerConfig, context: int
) -> dict[str, Callable[[], object]]:
    """The parts of one decode step at position context - 1, over a cache filled at random."""
    p = init(with_dtype(sparse_mla_specs(cfg, index), torch.float32))
    pages = pages_needed(context, PAGE_SIZE) + 1
    kv = init(with_dtype(mla_cache_specs(cfg, pages, PAGE_SIZE), torch.float32), seed=1)
    keys = init(with_dtype(indexer_cache_specs(index, pages, PAGE_SIZE), torch.float32), seed=2)
    step = decode_step(cfg, context, pages)
    x_TD = torch.randn(1, cfg.embed_dim, generator=torch.Generator().manual_seed(3))
    a_TQ = torch.randn(1, index.q_lora, generator=torch.Generator().manual_seed(4))
    chosen_TK, keys = select(p["indexer"], x_TD, a_TQ, keys, step, rules=RULES, cfg=index)
    shared = {"selection": chosen_TK}
    return {
        "select": lambda: select(p["indexer"], x_TD, a_TQ, keys, step, rules=RULES, cfg=index),
        "attend": lambda: shared_sparse_mla(
            p, x_TD, {"kv": kv}, step, shared, rules=RULES, cfg=cfg
        ),
        "dense": lambda: mla_absorbed(p, x_TD, kv, step, rules=RULES, cfg=cfg),
    }


def decode_step(cfg: MLAConfig, context: int, pages: int) -> Step:
    """The Step of the last token of a request of this length."""
    rows = Rows([0], context - 1, range(1, pages))
    batch = make_batch([[rows]], page_size=PAGE_SIZE)
    rope = Rope(10000.0, cfg.rope_dim)
    return prepare(batch, rules=RULES, rope=lambda positions: rope_tables(rope, positions))


def least_times(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Microseconds of each part: the least of several rounds in which the parts take turns."""
    least = {name: float("inf") for name in parts}
    with torch.no_grad():
        for _ in range(repeats):
            for name, part in parts.items():
                start = time.perf_counter()
                part()
                least[name] = min(least[name], (time.perf_counter() - start) * 1e6)
    return least


if __name__ == "__main__":
    main()
