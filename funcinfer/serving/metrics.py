"""What an engine has done and is doing, as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from funcinfer.serving.request import Plan, ScheduleState, Work


@dataclass
class Metrics:
    """How things stand after the last step, and sums since the engine was made.

    waiting, running: live requests. pages: those that requests can hold; pages_free: those that can
    be handed out now, pages_idle of them kept for what they hold. step_seconds: of the last step,
    from planning to committing. steps: those that ran the model. tokens: committed ones.
    cached_positions: positions that requests needed not compute, because others had.
    prompt_positions: those of prompts that were computed. preemptions: requests that gave back
    their pages. verified: rows with drafts; drafted: their drafts; accepted: those accepted.
    """

    waiting: int = 0
    running: int = 0
    pages: int = 0
    pages_free: int = 0
    pages_idle: int = 0
    step_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    cached_positions: int = 0
    prompt_positions: int = 0
    preemptions: int = 0
    verified: int = 0
    drafted: int = 0
    accepted: int = 0

    def look(self, states: Sequence[ScheduleState], step_seconds: float) -> None:
        """Take in how things stand after a step."""
        self.step_seconds = step_seconds
        self.waiting = sum(len(state.waiting) for state in states)
        self.running = sum(len(state.running) for state in states)
        self.pages_free = sum(state.pool.num_free for state in states)
        self.pages_idle = sum(state.pool.num_idle for state in states)

    @property
    def hit_rate(self) -> float:
        """The part of the positions of prompts that was found in the prefix cache."""
        return self.cached_positions / max(self.cached_positions + self.prompt_positions, 1)

    @property
    def accepted_length(self) -> float:
        """How many tokens a row with drafts gives on average: the accepted ones and one more; 0.0
        where no row had drafts.
        """
        return 1 + self.accepted / self.verified if self.verified else 0.0


def count_plan(metrics: Metrics, state: ScheduleState, plan: Plan) -> None:
    """Add what a plan says."""
    metrics.cached_positions += plan.num_hit
    metrics.preemptions += len(plan.preempted)
    for work in plan.works:
        left = state.running[work.request_id].prompt_len - work.start
        if left > 0:
            metrics.prompt_positions += min(left, work.num_tokens)


def count_row(metrics: Metrics, work: Work, emitted: int, committed: int) -> None:
    """Add what a row gave: tokens that were emitted, and as many of them as were committed."""
    metrics.tokens += committed
    if work.num_drafts:
        metrics.verified += 1
        metrics.drafted += work.num_drafts
        metrics.accepted += emitted - 1
