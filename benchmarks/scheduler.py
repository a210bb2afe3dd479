"""Cost of the scheduler: microseconds per running request and step, of `schedule` and `commit`.

    python benchmarks/scheduler.py [--running 64,256,1024] [--steps 200] [--repeats 5]

No model: every row is answered at once. Processor time, so other work on the machine counts little.
Columns are the least of `--repeats` rounds of `--steps` decode steps: `plain`; `prefix` with the
prefix cache, all blocks different; `ahead` with rows planned before the tokens of the step before
are known; `drafts`, three of them proposed for every row, and all accepted or all rejected; `stop
texts`: each token also goes to a detokeniser that looks for two stop texts, where the tokenizer is
most of the cost. In brackets the tokens per row. The lines vary what must not matter: the context
of each request, and the requests that wait. `objects` is by how much the number of objects that the
garbage collector tracks has grown over the rounds of a column: at most one for each page filled,
with the prefix cache. `loop` is the time of an empty pass of a `for` loop in nanoseconds, before
the line: how fast the machine is just then.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.layout import pages_needed
from funcinfer.kvcache.prefix import PrefixCache
from funcinfer.serving.detokenise import TextStream
from funcinfer.serving.schedule import ScheduleState, add, commit, propose, schedule
from funcinfer.serving.text import Text

PAGE_SIZE = 16
NUM_DRAFTS = 3
TOKEN = 7


class Cost(NamedTuple):
    """What the rounds of one column came to."""

    microseconds: float
    rows: int
    tokens: int
    objects: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", default="64,256,1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'loop':>6}{'running':>9}{'context':>9}{'waiting':>9}", end="")
    print("".join(f"{name:>20}" for name in FEATURES), f"{'objects':>24}")
    for running in map(int, args.running.split(",")):
        for context, waiting in ((512, 0), (4096, 0), (512, 4096)):
            loop = loop_nanoseconds()
            costs = [
                measure(feature, running, context, waiting, args.steps, args.repeats)
                for feature in FEATURES.values()
            ]
            cells = [f"{c.microseconds:.2f} ({c.tokens / c.rows:.1f})" for c in costs]
            objects = "/".join(str(c.objects) for c in costs)
            print(f"{loop:6.1f}{running:9}{context:9}{waiting:9}", end="")
            print("".join(f"{cell:>20}" for cell in cells), f"{objects:>24}", flush=True)


def loop_nanoseconds(passes: int = 100_000, repeats: int = 5) -> float:
    least = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(passes):
            pass
        least = min(least, time.process_time() - start)
    return least / passes * 1e9


def measure(
    step: Callable[[ScheduleState, int], int],
    running: int,
    context: int,
    waiting: int,
    steps: int,
    repeats: int,
) -> Cost:
    """Decode with `running` requests of `context` tokens, while `waiting` others wait."""
    most = context + (1 + NUM_DRAFTS) * (steps * (repeats + 1) + 2)
    pages = 1 + running * pages_needed(most + NUM_DRAFTS, PAGE_SIZE)
    pool = PagePool(pages)
    prefix = PrefixCache(pool, PAGE_SIZE) if step is FEATURES["prefix"] else None
    state = ScheduleState(pool, PAGE_SIZE, prefix=prefix)
    for number in range(running + waiting):
        add(state, number, [number, *[TOKEN] * (context - 1)], max_total=most)
    for work in schedule(state, running * context, running).works:  # all prompts in one step
        commit(state, work, [TOKEN])
    for _ in range(steps):
        step(state, running)
    gc.collect()
    gc.freeze()  # as a serving loop does: the collector looks no more at what is there
    objects = gc.get_freeze_count()
    least, tokens = float("inf"), 0
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(steps):
            tokens += step(state, running)
        least = min(least, time.process_time() - start)
    assert len(state.running) == running, "nobody has ended"
    gc.collect()
    rows = running * steps * repeats
    objects = gc.get_freeze_count() + len(gc.get_objects()) - objects
    gc.unfreeze()
    return Cost(least / (running * steps) * 1e6, rows, tokens, objects)


def plain(state: ScheduleState, running: int) -> int:
    plan = schedule(state, running, running)
    for work in plan.works:
        commit(state, work, (TOKEN,))
    return plan.num_tokens


class Ahead:
    """Steps whose tokens are committed after the next one has been planned."""

    def __init__(self) -> None:
        self.state: ScheduleState | None = None

    def __call__(self, state: ScheduleState, running: int) -> int:
        if self.state is not state:
            self.state, self.works = state, ()
        plan = schedule(state, running, running, ahead=1)
        for work in self.works:
            commit(state, work, (TOKEN,))
        self.works = plan.works
        return plan.num_tokens


def drafted(state: ScheduleState, running: int, wrong: int) -> int:
    drafts = (TOKEN + wrong,) * NUM_DRAFTS
    for request_id in state.running:
        propose(state, request_id, drafts)
    plan = schedule(state, running * (1 + NUM_DRAFTS), running)
    answer = (TOKEN,) * (1 if wrong else 1 + NUM_DRAFTS)
    for work in plan.works:
        commit(state, work, answer)
    return plan.num_tokens


class StopTexts:
    """Plain steps whose tokens become text, in which two texts are looked for."""

    def __init__(self) -> None:
        self.state: ScheduleState | None = None
        tokenizer = Tokenizer(models.WordLevel({"?": 0, "so ": TOKEN}, unk_token="?"))
        tokenizer.decoder = decoders.Fuse()
        self.text = Text(tokenizer)

    def __call__(self, state: ScheduleState, running: int) -> int:
        if self.state is not state:
            self.state = state
            self.streams = {i: TextStream(self.text, ("\n\n", "so so on")) for i in state.running}
        plan = schedule(state, running, running)
        for work in plan.works:
            commit(state, work, (TOKEN,))
            self.streams[work.request_id].push(TOKEN)
        return plan.num_tokens


FEATURES: dict[str, Callable[[ScheduleState, int], int]] = {
    "plain": plain,
    "prefix": lambda state, running: plain(state, running),
    "ahead": Ahead(),
    "drafts accepted": lambda state, running: drafted(state, running, wrong=0),
    "drafts rejected": lambda state, running: drafted(state, running, wrong=1),
    "stop texts": StopTexts(),
}


if __name__ == "__main__":
    main()
