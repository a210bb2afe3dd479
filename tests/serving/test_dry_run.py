"""A step on paper refuses what no rank could do, before anything is loaded; what it lets through
runs.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import funcinfer
from funcinfer.models import mla
from funcinfer.models.decoder import Decoder, pure
from funcinfer.serving.dry_run import abstract_batch, dry_run, smallest_shape
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, P, Rules, pad, presets, reshard
from funcinfer.sharding import presets_parallel as parallel
from funcinfer.sharding.presets import Preset
from funcinfer.spec import ParamSpec
from tests.equivalence import tiny
from tests.equivalence.harness import ONE_RANK, Layout, assert_same, draw, run, whole_prompts

ABC = Mesh(a=2, b=2, c=2)


def fns_of(decoder: Decoder, preset: Preset) -> funcinfer.ModelFns:
    return build(decoder, preset.prefill, preset.decode)


@pytest.mark.parametrize("model", tiny.DECODERS)
def test_legal_presets_pass(model: str) -> None:
    kv_heads = tiny.CONFIGS[model].num_kv_heads
    for preset in (
        presets.for_mesh(kv_heads, Mesh()),
        presets.for_mesh(kv_heads, Mesh(dp=2, pcp=2, tp=2, dcp=2), sp=True),
        presets.for_mesh(kv_heads, Mesh(dp=3, tp=2), sp=True, expert_parallel=True),
        parallel.pipeline_parallelism(kv_heads, pp=2, tp=2),
    ):
        dry_run(fns_of(tiny.DECODERS[model], preset), preset.mesh, page_size=8)


def test_draft_modules_run_too() -> None:
    decoder = mla.decoder(tiny.latent(experts=True, num_drafts=1))
    preset = parallel.expert_parallelism(None, dp=2, tp=2, sp=True)
    dry_run(fns_of(decoder, preset), preset.mesh)
    # A draft module like the rest, but for an MLP that moves what it is given where it can't go.
    (module,) = decoder.drafts
    broken = module.layer.replace(mlp=pure(_wrong_move, {"w": ParamSpec((1,), (None,))}))
    wrong = dataclasses.replace(decoder, drafts=(dataclasses.replace(module, layer=broken),))
    with pytest.raises(ValueError, match=r"prefill on .*'tp' leaves dim 1, but it is not the last"):
        dry_run(fns_of(wrong, preset), preset.mesh)


def _wrong_move(p: dict, u_TD: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    return reshard(u_TD, P(None, ("tp", "dp")), P(None, "dp"))


# The laws of rules know nothing of an indexer's heads.
LATE = Rules(
    **dict.fromkeys(("requests", "pages", "tokens", "moe_tokens"), ("a", "b")),
    **dict.fromkeys(("residual_tokens", "q_tokens"), ("a", "b", "c")),
    index_heads=("b", "a"),
)


def test_a_move_that_no_law_forbids_is_refused_with_its_layouts() -> None:
    decoder = tiny.DECODERS["sparse"]
    fns = build(decoder, LATE)
    fns.check(ABC, page_size=8, specs=pad(fns.specs, ABC, LATE))
    with pytest.raises(
        ValueError, match=r"prefill on Mesh\(a=2.*P\('c', \('b', 'a'\), None\) to P\(\('a', 'b'"
    ):
        dry_run(fns, ABC)
    with pytest.raises(ValueError, match="can't go from layout"):
        run(decoder, draw(decoder), Layout(ABC, LATE), whole_prompts({0: 8}))


def test_decode_alone_can_be_refused() -> None:
    mesh, prefill = Mesh(a=2, b=2), Rules(index_heads=("b", "a"), q_tokens=("b", "a"))
    fns = build(tiny.DECODERS["sparse"], prefill, prefill.replace(q_tokens=("a", "b")))
    with pytest.raises(ValueError, match=r"^decode on .*axes reach dim 0 in the order"):
        dry_run(fns, mesh)


def test_loading_refuses_before_it_reads(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("deepseek_v32", num_attention_heads=8)
    with pytest.raises(ValueError, match="can't go from layout"):
        funcinfer.load(folder, dtype=torch.float32, mesh=ABC, rules=LATE)


def test_what_passes_runs() -> None:
    """Random rules of a sparse model with experts: those that pass give the one-rank logits."""
    decoder, rng = tiny.DECODERS["sparse"], random.Random(4)
    params = draw(decoder)
    trace = whole_prompts({0: 7, 1: 3})
    wanted = run(decoder, params, ONE_RANK, trace)
    ran = refused = 0
    for _ in range(60):
        rules = random_rules(rng)
        try:
            fns = build(decoder, rules)
            fns.check(ABC, page_size=8, specs=pad(fns.specs, ABC, rules))
            dry_run(fns, ABC, page_size=8)
        except ValueError:
            refused += 1
            continue
        ran += 1
        if ran <= 12:
            assert_same(run(decoder, params, Layout(ABC, rules), trace), wanted)
    assert ran >= 12
    assert refused >= 12


def random_rules(rng: random.Random) -> Rules:
    def few(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(rng.sample(axes, min(rng.choice([0, 1, 1, 2]), len(axes))))

    requests = few(ABC.names)
    others = tuple(a for a in ABC.names if a not in requests)
    tokens = requests + few(others)[:1]
    finer = tokens + tuple(a for a in ABC.names if a not in tokens and rng.random() < 0.5)
    heads = few(tuple(a for a in ABC.names if a not in finer))
    return Rules(
        requests=requests,
        pages=requests,
        tokens=tokens,
        q_tokens=rng.choice([tokens, finer]),
        residual_tokens=finer,
        moe_tokens=rng.choice([(), requests, tokens, finer]),
        heads=heads,
        o_heads=rng.choice([heads, few(ABC.names)]),
        index_heads=few(ABC.names),
        page_tokens=rng.choice([(), heads[-1:]]),
        experts=few(ABC.names),
        expert_mlp=few(ABC.names)[:1],
        mlp=few(ABC.names),
        vocab_in=few(ABC.names),
        vocab_out=few(ABC.names),
    )


def test_a_batch_on_paper_has_the_shapes_of_a_real_one() -> None:
    mesh, rules, _ = presets.for_mesh(4, Mesh(dp=2, pcp=2, tp=2), sp=True)
    batch = abstract_batch(smallest_shape(rules, mesh), rules, mesh, page_size=8)
    assert batch.tokens.is_meta
    assert (batch.tokens.shape, batch.slots.shape) == ((2,), (4,))
    assert (batch.page_table.shape, batch.out.shape, batch.page_size) == ((1, 1), (1,), 8)
