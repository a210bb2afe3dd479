"""Verifiers by exact enumeration: the law of what is emitted, continued by the target, is the
target's; and the drawing function at every break point of the laws.

A target and a drafter over V = 5 tokens are tables of laws, one for each prefix. Every sequence of
drafts is verified in one batch. Nothing is sampled.
"""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
import torch

from funcinfer.serving.edits import History, RowEdits, stack_edits
from funcinfer.serving.params import SamplingParams
from funcinfer.serving.processors import edit_logits, processed_probabilities
from funcinfer.serving.sampling import choose, stack_params, uniform
from funcinfer.serving.verify import (
    BLOCK,
    TOKENWISE,
    Emitted,
    Verdict,
    Verifier,
    draw_verdict,
    judge_block,
    judge_tokenwise,
    match,
    typical,
    verify,
)
from tests.serving.laws import scalar_block, scalar_edit, scalar_law, scalar_tokenwise

F64 = torch.float64
V = 5
RULES = {"tokenwise": TOKENWISE, "block": BLOCK}
EXACT = {name: verifier.judge for name, verifier in RULES.items()}

# One table of laws [V**n, V] for each length n of the prefix; prefixes in lexical order.
Tables = list[torch.Tensor]


def digits(length: int) -> torch.Tensor:
    """Every sequence of tokens of one length, in lexical order: [V**length, length]."""
    columns = torch.cartesian_prod(*[torch.arange(V)] * length) if length else torch.zeros(1, 0)
    return columns.reshape(V**length, length).long()


def place(sequences: torch.Tensor) -> torch.Tensor:
    """Where each sequence stands in lexical order."""
    places = torch.zeros(len(sequences), dtype=torch.int64)
    for column in sequences.unbind(1):
        places = places * V + column
    return places


def random_tables(seed: int, lengths: int, kind: str) -> Tables:
    """Laws of one kind for each prefix of length 0..lengths - 1."""
    source = np.random.default_rng(seed)

    def law() -> np.ndarray:
        if kind == "random":
            return source.dirichlet(np.ones(V))
        if kind == "peaked":
            return source.dirichlet(np.full(V, 0.15))
        if kind == "zeros":
            weights = source.dirichlet(np.ones(V)) * (source.random(V) < 0.5)
            return weights / weights.sum() if weights.sum() else np.eye(V)[source.integers(V)]
        if kind == "one-hot":
            return np.eye(V)[source.integers(V)]
        if kind == "ties":
            weights = source.integers(0, 3, V) + np.eye(V)[source.integers(V)]
            return weights / weights.sum()
        if kind == "low half":
            return np.append(source.dirichlet(np.ones(2)), np.zeros(3))
        if kind == "high half":
            return np.append(np.zeros(2), source.dirichlet(np.ones(3)))
        weights = source.random(V) ** 40  # "tiny": down to about 1e-200
        return weights / weights.sum()

    return [torch.tensor(np.array([law() for _ in range(V**n)]), dtype=F64) for n in range(lengths)]


def continuations(tables: Tables) -> list[torch.Tensor]:
    """For each length n of a prefix, the law of how the target goes on: [V**n, V**(L - n)]."""
    laws = [torch.ones(V ** len(tables), 1, dtype=F64)]
    for table in reversed(tables):
        following = laws[0].reshape(*table.shape, -1)
        laws.insert(0, (table[..., None] * following).flatten(1))
    return laws


def target_rows(tables: Tables, sequences: torch.Tensor) -> torch.Tensor:
    """The laws at each place of each sequence, given what precedes: [B, len(tables), V]."""
    return torch.stack([table[place(sequences[:, :n])] for n, table in enumerate(tables)], 1)


def emitted_law(judge, target: Tables, drafter: Tables | None, ends=lambda prefix: False):
    """The law of the first K + 1 tokens, where drafts are verified once: [V**(K + 1)].

    drafter: None: the drafts are the argmax of the target's laws, declared one-hot. ends: whether
    the drafter stops after a prefix, so that rows have fewer drafts.
    """
    K = len(target) - 1
    tokens_BK = digits(K)
    p_BLV = target_rows(target, tokens_BK)
    q_BKV = None if drafter is None else target_rows(drafter, tokens_BK)
    proposed_BKV = one_hot(p_BLV[:, :-1].argmax(-1)) if q_BKV is None else q_BKV
    counts = [next((n for n in range(K) if ends(row[:n])), K) for row in tokens_BK.tolist()]
    drafted_BK = torch.arange(K) < torch.tensor(counts)[:, None]
    chances_BK = proposed_BKV.gather(-1, tokens_BK[..., None])[..., 0]
    # Behind the end of its drafts a row stands for 1 of V sequences.
    weights_B = torch.where(drafted_BK, chances_BK, 1 / V).prod(-1)
    verdict = judge(p_BLV, torch.where(drafted_BK, tokens_BK, -1), q_BKV)
    total = torch.zeros(V ** (K + 1), dtype=F64)
    for n, going_on in enumerate(continuations(target)[1:]):
        paths_BV = (weights_B * verdict.accepted_BL[:, n])[:, None] * verdict.last_BLV[:, n]
        prefixes_BV = place(tokens_BK[:, :n])[:, None] * V + torch.arange(V)
        reached = torch.zeros(V ** (n + 1), dtype=F64)
        reached.index_add_(0, prefixes_BV.flatten(), paths_BV.flatten())
        total += (reached[:, None] * going_on).flatten()
    return total


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, V).to(F64)


def distance(judge, target: Tables, drafter: Tables | None, **options) -> float:
    """The largest error of the law of any sequence."""
    law = emitted_law(judge, target, drafter, **options)
    return (law - continuations(target)[0][0]).abs().max().item()


KINDS = ("random", "peaked", "zeros", "one-hot", "ties", "low half", "high half", "tiny")


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_emitted_law_is_the_target_law(rule, k):
    for seed, (kind, other) in enumerate(itertools.product(KINDS, [*KINDS, None])):
        target = random_tables(seed, k + 1, kind)
        drafter = other and random_tables(seed + 1000, k, other)
        assert distance(EXACT[rule], target, drafter) < 1e-12, (kind, other)


@pytest.mark.parametrize("rule", EXACT)
def test_rows_may_end_their_drafts_by_what_precedes(rule):
    """Fewer drafts, or none, as a function of the tokens before; the others are placeholders."""
    target, drafter = random_tables(1, 4, "random"), random_tables(2, 3, "peaked")
    for modulus, rest in ((1, 0), (2, 0), (3, 1), (3, 2)):

        def ends(prefix, modulus=modulus, rest=rest):
            return (len(prefix) + sum(prefix)) % modulus == rest

        assert distance(EXACT[rule], target, drafter, ends=ends) < 1e-12
        assert distance(EXACT[rule], target, None, ends=ends) < 1e-12


@pytest.mark.parametrize("rule", EXACT)
def test_a_drafter_that_looks_at_its_own_draft_is_caught(rule):
    """Dropping a draft for what it is changes the law; so the test above is about something."""
    target, drafter = random_tables(1, 4, "random"), random_tables(2, 3, "peaked")

    def judge(target_BLV, drafts_BK, draft_BKV):
        even_BK = (drafts_BK % 2 == 0).cumprod(-1).bool()
        return EXACT[rule](target_BLV, torch.where(even_BK, drafts_BK, -1), draft_BKV)

    assert distance(judge, target, drafter) > 1e-3


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_target_as_its_own_drafter_is_always_accepted(rule, kind):
    target = random_tables(7, 4, kind)
    p_BLV = target_rows(target, digits(3))
    drawn_B = p_BLV[:, :-1].gather(-1, digits(3)[..., None]).prod(1)[:, 0] > 0
    verdict = EXACT[rule](p_BLV, digits(3), p_BLV[:, :-1])
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=F64)
    assert torch.equal(verdict.accepted_BL[drawn_B], expected.expand(int(drawn_B.sum()), 4))


def test_block_verification_accepts_no_fewer_drafts():
    """On average; and strictly more where the laws differ."""
    gains = []
    for seed in range(20):
        target, drafter = random_tables(seed, 4, "random"), random_tables(seed + 50, 3, "random")
        p_BLV, q_BKV = target_rows(target, digits(3)), target_rows(drafter, digits(3))
        weights_B = q_BKV.gather(-1, digits(3)[..., None]).prod(1)[:, 0]
        token, block = (
            weights_B @ judge(p_BLV, digits(3), q_BKV).accepted_BL @ torch.arange(4.0, dtype=F64)
            for judge in EXACT.values()
        )
        gains.append((block - token).item())
    assert min(gains) > 1e-3


# --- rules that are not exact, by the same test


def judge_whole_residual(target_BLV, drafts_BK, draft_BKV) -> Verdict:
    """Draws the last token from p instead of from what q left over."""
    verdict = judge_tokenwise(target_BLV, drafts_BK, draft_BKV)
    return verdict._replace(last_BLV=target_BLV)


def judge_last_hit(target_BLV, drafts_BK, draft_BKV) -> Verdict:
    """Block verification with hits of probability P_i, not h_i."""
    exact = judge_block(target_BLV, drafts_BK, draft_BKV)
    p_BK, q_BK = (x.gather(-1, drafts_BK[..., None])[..., 0] for x in (target_BLV, draft_BKV))
    reach = [torch.ones(len(drafts_BK), dtype=F64)]
    for ratio_B in (p_BK / q_BK).unbind(1):
        reach.append((reach[-1] * ratio_B).clamp(max=1))
    accepted, missed_B = [], torch.ones(len(drafts_BK), dtype=F64)
    for reach_B in reversed(reach):
        accepted.insert(0, missed_B * reach_B)
        missed_B = missed_B * (1 - reach_B)
    return exact._replace(accepted_BL=torch.stack(accepted, 1))


def judge_joint_uniforms(target_BLV, drafts_BK, draft_BKV) -> Verdict:
    """For two drafts: up to the last i with c_i >= u_1 ... u_i, where c_i = prod min(1, p / q)."""
    exact = judge_tokenwise(target_BLV, drafts_BK, draft_BKV)
    p_BK, q_BK = (x.gather(-1, drafts_BK[..., None])[..., 0] for x in (target_BLV, draft_BKV))
    c1_B, c2_B = (p_BK / q_BK).clamp(max=1).cumprod(-1).unbind(1)
    both_B = c2_B * (1 - c2_B.log())  # the product of two uniform numbers is at most c_2
    first_B = c1_B - c2_B - c2_B * (c1_B / c2_B).log()  # u_1 <= c_1, but the product above c_2
    accepted_BL = torch.stack([1 - first_B - both_B, first_B, both_B], 1)
    return exact._replace(accepted_BL=accepted_BL)


BIASED = {
    "whole residual": judge_whole_residual,
    "last hit": judge_last_hit,
    "joint uniforms": judge_joint_uniforms,
    "typical": typical().judge,
    "block rule with token-wise residuals": lambda *laws: judge_block(*laws)._replace(
        last_BLV=judge_tokenwise(*laws).last_BLV
    ),
}


@pytest.mark.parametrize("rule", BIASED)
def test_biased_rules_are_caught(rule):
    target, drafter = random_tables(3, 3, "random"), random_tables(4, 2, "random")
    verdict = BIASED[rule](
        target_rows(target, digits(2)), digits(2), target_rows(drafter, digits(2))
    )
    torch.testing.assert_close(verdict.accepted_BL.sum(-1), torch.ones(V**2, dtype=F64))
    assert distance(BIASED[rule], target, drafter) > 1e-3


def test_a_draft_that_was_not_drawn_from_its_declared_law_is_biased():
    """p = (.2, .8), the draft always 0: declared one-hot, token 0 keeps .2; as (.6, .4), 1/3."""
    target_BLV = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]], dtype=F64)
    drafts_BK = torch.tensor([[0]])
    declared = torch.tensor([[[0.6, 0.4]]], dtype=F64)
    for judge, (laws, expected) in itertools.product(
        EXACT.values(), ((None, 0.2), (declared, 1 / 3))
    ):
        verdict = judge(target_BLV, drafts_BK, laws)
        first = verdict.accepted_BL[0, 1] + verdict.accepted_BL[0, 0] * verdict.last_BLV[0, 0, 0]
        assert first.item() == pytest.approx(expected, abs=1e-15)


def test_rules_that_are_not_exact_must_be_asked_for():
    target_BLV = torch.full((1, 2, V), 1 / V)
    arguments = target_BLV, torch.tensor([[0]]), target_BLV[:, :1], torch.tensor([0.5])
    lossy = typical(alpha=0.3, threshold=0.9)
    assert (TOKENWISE.exact, BLOCK.exact, lossy.exact) == (True, True, False)
    with pytest.raises(ValueError, match=r"'typical\(0.3, 0.9\)' changes the law .* exact=False"):
        verify(lossy, *arguments)
    assert verify(lossy, *arguments, exact=False).num_accepted_B.tolist() == [1]
    mine = Verifier("mine", True, judge_tokenwise)
    assert verify(mine, *arguments).num_accepted_B.tolist() == [1]


@pytest.mark.parametrize(
    ("alpha", "threshold"), [(-0.1, 0.9), (0.4, 0.0), (0.4, 1.1), (math.nan, 1)]
)
def test_typical_acceptance_names_what_is_out_of_range(alpha, threshold):
    with pytest.raises(ValueError, match=f"alpha is {alpha} and threshold {threshold}: expected"):
        typical(alpha, threshold)


def test_typical_acceptance_by_hand():
    """Four equally likely tokens, q = 1: the ratio is 1/4, the bar exp(-.4 ln 4)."""
    target_BLV = torch.full((1, 2, 4), 0.25, dtype=F64)
    verdict = typical().judge(target_BLV, torch.tensor([[1]]), None)
    accept = 0.25 / 4**-0.4
    torch.testing.assert_close(verdict.accepted_BL, torch.tensor([[1 - accept, accept]], dtype=F64))
    sure_BLV = torch.tensor([[[0.96, 0.04], [0.5, 0.5]]], dtype=F64)
    verdict = typical(alpha=0.0).judge(sure_BLV, torch.tensor([[1]]), None)
    torch.testing.assert_close(verdict.accepted_BL[0, 1].item(), 0.04 / 0.95)


# --- after all processors, with the history that includes earlier drafts

PROCESSED = {
    "temperature": SamplingParams(temperature=0.5),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.25, top_p=0.75),
    "min_p": SamplingParams(temperature=0.75, min_p=0.25),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
    ),
    "bias and min_tokens": SamplingParams(
        temperature=1.0, logit_bias={2: -math.inf, 0: 0.5}, min_tokens=3
    ),
    "all": SamplingParams(
        temperature=0.75,
        top_k=4,
        top_p=0.875,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={3: 1.0},
        min_tokens=4,
    ),
    "greedy": SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, min_tokens=3),
}
PROMPT, OUTPUT, STOP = [1, 1, 4], [3, 0], [4]


def processed_tables(logits: Tables, params: SamplingParams) -> tuple[Tables, Tables]:
    """The laws by scalar loops over the whole history; and by the library, in one batch each."""
    scalar, shipped = [], []
    history = History(PROMPT, OUTPUT)
    filters = params.temperature, params.top_k, params.top_p, params.min_p
    for n, logits_BV in enumerate(logits):
        prefixes = digits(n).tolist()
        laws = [
            scalar_law(scalar_edit(row, params, PROMPT, OUTPUT + prefix, STOP), *filters)
            for row, prefix in zip(logits_BV.tolist(), prefixes, strict=True)
        ]
        scalar.append(torch.tensor(laws, dtype=F64))
        edits = stack_edits(
            [RowEdits(params, len(OUTPUT), history, prefix, STOP) for prefix in prefixes]
        )
        temperature_B, *rest = stack_params([params] * len(prefixes))
        if temperature_B is None:
            temperature_B = torch.zeros(len(prefixes))
        edited_BV = edit_logits(logits_BV, edits)
        shipped.append(processed_probabilities(edited_BV, temperature_B, *rest))
    return scalar, shipped


def logits_tables(seed: int, lengths: int) -> Tables:
    generator = torch.Generator().manual_seed(seed)
    return [1.5 * torch.randn(V**n, V, generator=generator, dtype=F64) for n in range(lengths)]


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", PROCESSED)
def test_the_emitted_law_is_that_of_the_processed_target(name, rule):
    """The oracle decodes one token at a time, by scalar loops over its own history."""
    scalar, shipped = processed_tables(logits_tables(5, 4), PROCESSED[name])
    raw = [table.softmax(-1) for table in logits_tables(6, 3)]
    _, own = processed_tables(logits_tables(6, 3), PROCESSED[name])
    expected = continuations(scalar)[0][0]
    for drafter in (raw, own, None):
        law = emitted_law(EXACT[rule], shipped, drafter)
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)


def test_a_history_without_the_earlier_drafts_is_caught():
    """Each position of the verification edited by the history before the drafts."""
    params = PROCESSED["penalties"]
    scalar, shipped = processed_tables(logits_tables(5, 4), params)
    edits = stack_edits([RowEdits(params, len(OUTPUT), History(PROMPT, OUTPUT))])
    stale = []
    for table in logits_tables(5, 4):
        edited = [edit_logits(row[None], edits) for row in table]
        stale.append(processed_probabilities(torch.cat(edited), torch.ones(len(table))))
    assert torch.equal(stale[0], shipped[0])
    law = emitted_law(judge_tokenwise, stale, None)
    assert (law - continuations(scalar)[0][0]).abs().max() > 1e-3


# --- drawing


def grid_cases() -> list[tuple]:
    """(rule, p, q, drafts) for every kind of target and drafter, drafts that q can give."""
    source, cases = random.Random(0), []
    for seed, (kind, other, k) in enumerate(itertools.product(KINDS, [*KINDS, None], (1, 2, 3))):
        p = [random_tables(seed * 10 + i, 1, kind)[0][0].tolist() for i in range(k + 1)]
        if other is None:
            drafts = [source.randrange(V) for _ in range(k)]
            q = one_hot(torch.tensor(drafts)).tolist()
        else:
            q = [random_tables(seed * 10 + i + 5, 1, other)[0][0].tolist() for i in range(k)]
            drafts = [source.choices(range(V), law)[0] for law in q]
        cases.append((p, q, drafts, other is None))
    return cases


def outcomes(accepted: list[float], last: list[list[float]], drafts: list[int]) -> list[tuple]:
    """(from, to, tokens): which uniform numbers emit what, by laying the outcomes end to end."""
    found, low = [], 0.0
    for n, chance in enumerate(accepted):
        inner = 0.0
        for token, weight in enumerate(last[n]):
            start, inner = low + chance * inner, inner + weight
            found.append((start, low + chance * inner, [*drafts[:n], token]))
        low += chance
    return found


@pytest.mark.parametrize(
    ("rule", "scalar"), [("tokenwise", scalar_tokenwise), ("block", scalar_block)]
)
def test_what_is_drawn_changes_exactly_at_the_break_points(rule, scalar):
    """Just inside both ends of every outcome's interval; so the measure of an outcome is its law.

    The intervals come from scalar loops. Outcomes too unlikely for a uniform number are left out.
    """
    for k in (1, 2, 3):
        rows = []
        for p, q, drafts, undrawn in grid_cases():
            if len(drafts) != k:
                continue
            for low, high, tokens in outcomes(*scalar(p, q, drafts), drafts):
                if high - low > 1e-10:
                    padded = tokens + [-1] * (k + 1 - len(tokens))
                    rows += [
                        (p, q, drafts, undrawn, u, padded) for u in (low + 1e-12, high - 1e-12)
                    ]
        for undrawn in (False, True):
            p, q, drafts, _, u, expected = zip(*(r for r in rows if r[3] == undrawn), strict=True)
            emitted = verify(
                RULES[rule],
                torch.tensor(p, dtype=F64),
                torch.tensor(drafts),
                None if undrawn else torch.tensor(q, dtype=F64),
                torch.tensor(u, dtype=F64),
            )
            assert emitted.tokens_BL.tolist() == list(expected)
            lengths = [sum(token >= 0 for token in row) - 1 for row in expected]
            assert emitted.num_accepted_B.tolist() == lengths


def test_a_uniform_at_the_ends_of_the_unit_interval_draws_something_possible():
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, F64):
        target_BLV = torch.rand(50, 4, V, generator=generator, dtype=dtype)
        target_BLV[target_BLV < 0.5] = 0
        target_BLV[..., 2] += 0.01
        target_BLV /= target_BLV.sum(-1, keepdim=True)
        drafts_BK = torch.randint(V, (50, 3), generator=generator)
        for u, judge in itertools.product((0.0, 1 - 2**-53, 1.0), EXACT.values()):
            verdict = judge(target_BLV, drafts_BK, None)
            emitted = draw_verdict(verdict, drafts_BK, torch.full((50,), u, dtype=F64))
            for row, n in enumerate(emitted.num_accepted_B.tolist()):
                assert verdict.accepted_BL[row, n] > 0
                assert verdict.last_BLV[row, n, emitted.tokens_BL[row, n]] > 0
                assert emitted.tokens_BL[row, :n].tolist() == drafts_BK[row, :n].tolist()
                assert (emitted.tokens_BL[row, n + 1 :] == -1).all()


# --- matching


def matching_law(target: Tables, drafts: list[int]) -> torch.Tensor:
    """The law of the first K + 1 tokens, with one uniform number for each place.

    What `choose` draws at each place, given the drafts before it, is enumerated.
    """
    K = len(target) - 1
    drafts_BK = torch.tensor([drafts]).expand(V ** (K + 1), K)
    sampled_BL = digits(K + 1)
    chances_BL = target_rows(target, drafts_BK).gather(-1, sampled_BL[..., None])[..., 0]
    emitted = match(sampled_BL, drafts_BK)
    total = torch.zeros(V ** (K + 1), dtype=F64)
    for n, going_on in enumerate(continuations(target)[1:]):
        mine_B = emitted.num_accepted_B == n
        places_B = place(emitted.tokens_BL[mine_B, : n + 1])
        reached = torch.zeros(V ** (n + 1), dtype=F64)
        reached.index_add_(0, places_B, chances_BL[mine_B].prod(-1))
        total += (reached[:, None] * going_on).flatten()
    return total


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_matching_is_the_target_law(kind, k):
    target = random_tables(9, k + 1, kind)
    expected = continuations(target)[0][0]
    for drafts in ([0] * k, [4, 2, 1][:k], [3, -1, 3][:k], [-1] * k):
        law = matching_law(target, drafts)
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_matching_emits_the_tokens_of_plain_decoding(temperature):
    """Any drafts, seeds and processors: the same tokens as one at a time, step after step."""
    params = SamplingParams(
        temperature=temperature, top_k=4, repetition_penalty=1.25, frequency_penalty=0.5
    )
    generator = torch.Generator().manual_seed(3)
    table_VVV = torch.randn(V, V, V, generator=generator)  # the logits after two tokens

    def sample(seed, output, drafts):
        """The token at each place behind the drafts, [1, L]."""
        tokens = [1, 2, *output, *drafts]
        places = range(len(output), len(output) + len(drafts) + 1)
        logits_LV = torch.stack([table_VVV[tokens[j], tokens[j + 1]] for j in places])
        history = History([1, 2], output)
        edits = [RowEdits(params, len(output), history, drafts[:j]) for j in range(len(drafts) + 1)]
        uniforms_L = torch.tensor([uniform(seed, j) for j in places], dtype=F64)
        rows = stack_params([params] * len(places))
        return choose(edit_logits(logits_LV, stack_edits(edits)), *rows, uniforms_L)[None]

    source = random.Random(1)
    for seed in range(10):
        plain: list[int] = []
        while len(plain) < 14:
            plain += sample(seed, plain, [])[0].tolist()
        output: list[int] = []
        while len(output) < 14:
            right = source.randrange(4)
            drafts = [*plain[len(output) :][:right], source.randrange(V), source.randrange(V)][:3]
            emitted = match(sample(seed, output, drafts), torch.tensor([drafts]))
            output += [token for token in emitted.tokens_BL[0].tolist() if token >= 0]
        assert output[:14] == plain


def test_greedy_verification_uses_no_randomness():
    """One-hot target laws: accepted up to the first token that is no argmax, whatever u is."""
    generator = torch.Generator().manual_seed(2)
    logits_BLV = torch.randn(200, 4, V, generator=generator)
    best_BL = choose(logits_BLV.flatten(0, 1)).unflatten(0, (200, 4))
    drafts_BK = torch.where(
        torch.rand(200, 3, generator=generator) < 0.7,
        best_BL[:, :3],
        torch.randint(V, (200, 3), generator=generator),
    )
    expected = match(best_BL, drafts_BK)
    law_BV = processed_probabilities(logits_BLV.flatten(0, 1), torch.zeros(800))
    target_BLV = law_BV.unflatten(0, (200, 4))
    draft_BKV = torch.rand(200, 3, V, generator=generator).softmax(-1)
    for u, laws, judge in itertools.product(
        (0.0, 0.5, 1.0, math.nan), (None, draft_BKV), EXACT.values()
    ):
        verdict = judge(target_BLV, drafts_BK, laws)
        emitted = draw_verdict(verdict, drafts_BK, torch.full((200,), u))
        assert torch.equal(emitted.num_accepted_B, expected.num_accepted_B)
        assert torch.equal(emitted.tokens_BL, expected.tokens_BL)
    assert set(expected.num_accepted_B.tolist()) == {0, 1, 2, 3}


# --- degenerate rows


def random_case(rows: int, K: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(11)
    target_BLV = torch.randn(rows, K + 1, V, generator=generator, dtype=dtype).softmax(-1)
    draft_BKV = torch.randn(rows, K, V, generator=generator, dtype=dtype).softmax(-1)
    drafts_BK = torch.randint(V, (rows, K), generator=generator)
    return target_BLV, drafts_BK, draft_BKV


@pytest.mark.parametrize("rule", EXACT)
def test_a_position_without_a_law_ends_the_drafts(rule):
    """Row b has none from position b on: it may emit up to b drafts, and -1 at that place."""
    target_BLV, drafts_BK, draft_BKV = random_case(5, 3, F64)
    for b in range(4):
        target_BLV[b, b:] = 0
    for laws in (None, draft_BKV):
        verdict = EXACT[rule](target_BLV, drafts_BK, laws)
        torch.testing.assert_close(verdict.accepted_BL.sum(-1), torch.ones(5, dtype=F64))
        for b in range(4):
            assert (verdict.accepted_BL[b, b + 1 :] == 0).all()
            assert verdict.accepted_BL[b, b] > 0
            assert (verdict.last_BLV[b, b] == 0).all()
            cut = EXACT[rule](
                target_BLV[b : b + 1, : b + 1],
                drafts_BK[b : b + 1, :b],
                None if laws is None else laws[b : b + 1, :b],
            )
            assert torch.equal(verdict.accepted_BL[b, : b + 1], cut.accepted_BL[0])
            assert torch.equal(verdict.last_BLV[b, :b], cut.last_BLV[0, :b])
        emitted = draw_verdict(verdict, drafts_BK, torch.full((5,), 1 - 1e-9, dtype=F64))
        assert emitted.num_accepted_B.tolist()[:4] == [0, 1, 2, 3]
        assert [emitted.tokens_BL[b, b].item() for b in range(4)] == [-1] * 4
        assert emitted.tokens_BL[4, emitted.num_accepted_B[4]] >= 0


@pytest.mark.parametrize("rule", EXACT)
def test_a_draft_behind_a_hole_is_none(rule):
    """Behind a placeholder, and behind a place without a law, whatever stands there."""
    target_BLV, drafts_BK, draft_BKV = random_case(50, 3, F64)
    target_BLV[25:, 1] = 0
    drafts_BK[:25, 1] = -1
    for laws in (None, draft_BKV):
        verdict = EXACT[rule](target_BLV, drafts_BK, laws)
        none_BK = torch.cat([drafts_BK[:, :1], torch.full((50, 2), -1)], 1)
        expected = EXACT[rule](target_BLV, none_BK, laws)
        assert torch.equal(verdict.accepted_BL, expected.accepted_BL)
        assert torch.equal(verdict.last_BLV[:, :2], expected.last_BLV[:, :2])
        assert not verdict.accepted_BL[:, 2:].any()


def test_a_place_without_a_token_ends_the_matching():
    sampled_BL = torch.tensor([[-1, 3, 4], [2, -1, 4], [2, 3, -1]])
    drafts_BK = torch.tensor([[-1, 3], [2, -1], [2, 3]])
    emitted = match(sampled_BL, drafts_BK)
    assert emitted.num_accepted_B.tolist() == [0, 1, 2]
    assert emitted.tokens_BL.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 3, -1]]


@pytest.mark.parametrize("rule", EXACT)
def test_a_draft_that_its_law_cannot_give_is_not_accepted(rule):
    target_BLV = torch.tensor([[[0.5, 0.5, 0.0]] * 2], dtype=F64)
    draft_BKV = torch.tensor([[[0.0, 0.25, 0.75]]], dtype=F64)
    verdict = EXACT[rule](target_BLV, torch.tensor([[0]]), draft_BKV)
    assert verdict.accepted_BL.tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(verdict.last_BLV[0, 0].tolist(), [2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("rule", EXACT)
def test_without_drafts_the_target_is_drawn_from(rule):
    target_BLV, drafts_BK, draft_BKV = random_case(3, 0)
    for laws in (None, draft_BKV):
        verdict = EXACT[rule](target_BLV, drafts_BK, laws)
        assert verdict.accepted_BL.tolist() == [[1.0]] * 3
        assert torch.equal(verdict.last_BLV, target_BLV)
    assert match(torch.tensor([[4]]), torch.zeros(1, 0, dtype=torch.int64)).tokens_BL.item() == 4


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rule", EXACT)
def test_a_row_does_not_depend_on_its_neighbours(rule):
    target_BLV, drafts_BK, draft_BKV = random_case(9, 3)
    wide_BLV = torch.randn(9, 4, 40_001, generator=torch.Generator().manual_seed(4)).softmax(-1)
    wide_BKV = torch.randn(9, 3, 40_001, generator=torch.Generator().manual_seed(5)).softmax(-1)
    drafts_BK[2:4, 1:] = -1
    uniforms_B = torch.linspace(0, 0.999, 9, dtype=F64)
    long, one = (wide_BLV, wide_BKV), (wide_BLV[:, :2], wide_BKV[:, :1])
    for p, q in ((target_BLV, draft_BKV), (target_BLV, None), long, one):
        drafts_BK = drafts_BK[:, : p.shape[1] - 1]
        judge = partial(EXACT[rule], p, drafts_BK, q)
        verdict, emitted = judge(), draw_verdict(judge(), drafts_BK, uniforms_B)
        for b in range(9):
            row = slice(b, b + 1)
            solo = EXACT[rule](p[row], drafts_BK[row], None if q is None else q[row])
            assert torch.equal(solo.accepted_BL, verdict.accepted_BL[row])
            assert torch.equal(solo.last_BLV, verdict.last_BLV[row])
            drawn = draw_verdict(solo, drafts_BK[row], uniforms_B[row])
            assert torch.equal(drawn.tokens_BL, emitted.tokens_BL[row])


@pytest.mark.parametrize("rule", EXACT)
def test_laws_that_do_not_quite_sum_to_one_still_give_tokens(rule):
    """In float32 p and q differ in their last bits where they should be equal."""
    target_BLV, _, _ = random_case(400, 3)
    draft_BKV = (target_BLV[:, :-1].log() + 1e-7).softmax(-1) * (1 + 1e-7)
    drafts_BK = torch.randint(V, (400, 3), generator=torch.Generator().manual_seed(8))
    verdict = EXACT[rule](target_BLV, drafts_BK, draft_BKV)
    torch.testing.assert_close(verdict.accepted_BL[:, 3], torch.ones(400), rtol=0, atol=1e-5)
    torch.testing.assert_close(verdict.last_BLV.sum(-1), torch.ones(400, 4), rtol=0, atol=1e-5)
    for u in (0.0, 1e-9, 0.5):
        emitted: Emitted = draw_verdict(verdict, drafts_BK, torch.full((400,), u, dtype=F64))
        assert (emitted.tokens_BL[:, 0] >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: judge_tokenwise(torch.ones(2, 3, V), torch.zeros(2, 3, dtype=torch.int64)),
            r"target_BLV has shape \[2, 3, 5\]: expected \[2, 4, V\]",
        ),
        (
            lambda: judge_block(
                torch.ones(2, 4, V), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, V + 1)
            ),
            r"draft_BKV has shape \[2, 3, 6\]: expected \[2, 3, 5\]",
        ),
        (
            lambda: match(torch.zeros(2, 3), torch.zeros(2, 3)),
            r"sampled_BL has shape \[2, 3\]: expected \[2, 4\]",
        ),
    ],
)
def test_shapes_that_do_not_match_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
