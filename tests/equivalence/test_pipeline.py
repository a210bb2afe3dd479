"""Layers in pipeline stages give what one rank gives; a rank holds and reads its own stage only.

Which stage has which layer is written out here, for models whose layers do not divide evenly.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import funcinfer
from funcinfer.checkpoint import load_params, save_params
from funcinfer.checkpoint.files import Reader
from funcinfer.models import mla
from funcinfer.models.decoder import Decoder, Layer, Sublayer, cache_specs
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, Rules, bind, presets, solo
from funcinfer.sharding.comm import ExchangeComm, Group
from funcinfer.spec import is_spec, with_dtype
from funcinfer.tree import leaves_with_path, tree_leaves
from tests.equivalence import layouts, small, tiny
from tests.equivalence.families import family
from tests.equivalence.harness import (
    ONE_RANK,
    TOLERANCE,
    Layout,
    Logits,
    Runner,
    Trace,
    assert_same,
    draw,
    run,
    run_drafts,
)
from tests.equivalence.layouts import tensor
from tests.equivalence.small import attention_sublayer, decoder_of, mlp_sublayer
from tests.launch import Processes, process_ranks

Model = tuple[int | None, Decoder, Any]

# The layers of each stage, by (number of layers, number of stages).
STAGES = {
    (3, 2): [[0, 1], [2]],
    (3, 3): [[0], [1], [2]],
    (4, 2): [[0, 1], [2, 3]],
    (4, 3): [[0, 1], [2], [3]],
    (5, 2): [[0, 1, 2], [3, 4]],
    (5, 3): [[0, 1], [2, 3], [4]],
}


def of_family(name: str, num_layers: int) -> Model:
    cfg, decoder, params = family(name, num_hidden_layers=num_layers)
    return cfg.num_kv_heads, decoder, params


def latent(num_layers: int, **options: Any) -> Model:
    decoder = mla.decoder(tiny.latent(num_layers, **options))
    return None, decoder, draw(decoder)


ONE_SELECTION = "sparse, one selection"
MODELS: dict[str, Callable[[], Model]] = {
    "dense": lambda: of_family("llama", 5),
    "tied head": lambda: of_family("qwen2", 3),
    "experts": lambda: of_family("deepseek_v3", 4),
    "sparse": lambda: of_family("deepseek_v32", 3),
    # Layers 0 and 2 select; layer 1 takes what layer 0 selected, across a boundary of 3 stages.
    "sparse, a shared selection": lambda: of_family("glm_moe_dsa", 3),
    # Layer 0 selects for all: the selection goes through stages that are not its last readers.
    ONE_SELECTION: lambda: latent(5, experts=True, index_layers=(0,)),
}
LAYOUTS: dict[str, Callable[[int | None], presets.Preset]] = {
    "pp2": lambda kv: presets.for_mesh(kv, Mesh(pp=2)),
    "pp3": lambda kv: presets.for_mesh(kv, Mesh(pp=3)),
    "pp2 tp2": lambda kv: presets.for_mesh(kv, Mesh(pp=2, tp=2)),
    "dp2 pp3": lambda kv: presets.for_mesh(kv, Mesh(dp=2, pp=3)),
    "tp2 pp2, axes turned, sequence": lambda kv: presets.for_mesh(kv, Mesh(tp=2, pp=2), sp=True),
    "dp2 pp2 tp2, experts over both": lambda kv: presets.for_mesh(
        kv, Mesh(dp=2, pp=2, tp=2), sp=True, expert_parallel=True
    ),
    "pp2 pcp2 dcp2": lambda kv: presets.for_mesh(kv, Mesh(pp=2, pcp=2, dcp=2)),
}


@functools.cache
def one_rank(name: str) -> tuple[Model, Logits]:
    kv_heads, decoder, params = MODELS[name]()
    return (kv_heads, decoder, params), run(decoder, params, ONE_RANK)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_stages_are_the_same_as_one_rank(name: str, layout: str) -> None:
    """Chunks, prompts, decode and verify rows; caches are checked too, and start as NaN."""
    (kv_heads, decoder, params), wanted = one_rank(name)
    assert_same(run(decoder, params, Layout(*LAYOUTS[layout](kv_heads))), wanted)


SMALL_LAYOUTS = [name for name, x in layouts.LAYOUTS.items() if x.mesh.num_ranks <= 4]


@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_each_parallelism_inside_stages(layout: str) -> None:
    decoder, inside = small.DECODERS["whole layers"], layouts.LAYOUTS[layout]
    mesh = Mesh(pp=2, **dict(inside.mesh.axes))
    staged = dataclasses.replace(inside, mesh=mesh).replace(layers="pp")
    params = draw(decoder)
    assert_same(run(decoder, params, staged), run(decoder, params, ONE_RANK))


def test_logits_stay_sharded_where_the_rules_say_so() -> None:
    (_, decoder, params), wanted = one_rank("dense")
    rules = Rules(**tensor("tp"), layers="pp", logits="tp", residual_tokens="tp")
    assert_same(run(decoder, params, Layout(Mesh(pp=2, tp=2), rules)), wanted)


def test_stages_over_a_product_of_axes() -> None:
    (_, decoder, params), wanted = one_rank("dense")
    layout = Layout(Mesh(node=2, tp=2, pp=2), Rules(**tensor("tp"), layers=("node", "pp")))
    assert_same(run(decoder, params, layout), wanted)


# What a rank holds.


def stages_of(path: str, num_layers: int, stages: int, *, both_ends: bool) -> list[int]:
    """The stages that hold a leaf or a cache entry, by its path."""
    parts = path.split(".")
    if parts[0] == "layers":
        of_stage = STAGES[num_layers, stages]
        return [s for s in range(stages) if int(parts[1]) in of_stage[s]]
    if parts[0] == "embed":
        return [0, stages - 1] if both_ends else [0]
    return [stages - 1]


@pytest.mark.parametrize("stages", (2, 3))
@pytest.mark.parametrize(
    ("model", "both_ends"),
    [
        (partial(of_family, "llama", 5), False),
        (partial(of_family, "qwen2", 3), True),
        (partial(latent, 4, experts=True, index_layers=(0, 2), num_drafts=1), True),
    ],
)
def test_a_rank_holds_its_stage_and_nothing_else(
    model: Callable[[], Model], both_ends: bool, stages: int
) -> None:
    _, decoder, params = model()
    mesh, num_layers = Mesh(pp=stages, x=2), len(decoder.layers)
    rules = Rules(layers="pp")
    runner = Runner(decoder, params, Layout(mesh, rules))
    caches = cache_specs(decoder, 1, 1)
    assert {path.split(".")[0] for path, _ in leaves_with_path(params)} >= {"embed", "norm"}
    for tree, locals_ in ((params, runner.shards), (caches, runner.caches)):
        paths = [path for path, _ in leaves_with_path(tree, is_leaf=is_spec)]
        for coord, local in zip(mesh.coords(), locals_, strict=True):
            leaves = dict(leaves_with_path(local))
            held = [path for path in paths if leaves[path] is not None]
            assert list(leaves) == paths
            assert held == [
                path
                for path in paths
                if coord["pp"] in stages_of(path, num_layers, stages, both_ends=both_ends)
            ]
    # The table of `explain` counts the same bytes.
    table = rules.explain(with_dtype(runner.fns.specs, torch.float32), mesh)
    for coord, local in zip(mesh.coords(), runner.shards, strict=True):
        nbytes = sum(x.nbytes for x in tree_leaves(local) if x is not None)
        assert f"{nbytes:,} bytes a rank where pp={coord['pp']}, {nbytes:,} of them also" in table


@pytest.mark.parametrize("num_drafts", (0, 1))
def test_of_a_checkpoint_only_the_tensors_of_the_stage_are_read(
    num_drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny.latent(3, experts=True, num_drafts=num_drafts)
    decoder, names = mla.decoder(cfg), mla.name_map(cfg)
    specs = with_dtype(build(decoder).specs, torch.float32)
    whole = draw(decoder)
    save_params(whole, specs, names, tmp_path)
    read: dict[str, int] = {}
    original = Reader.read

    def spy(self: Reader, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        values = original(self, name, part)
        read[name] = read.get(name, 0) + values.nbytes
        return values

    monkeypatch.setattr(Reader, "read", spy)
    mesh, rules = Mesh(pp=2), Rules(layers="pp")
    for stage, layers in enumerate(([0, 1], [2, 3] if num_drafts else [2])):
        read.clear()
        local = load_params(tmp_path, specs, names, mesh, rules, {"pp": stage})
        wanted = dict(leaves_with_path(whole))
        for path, leaf in leaves_with_path(local):
            held = stage in stages_of(path, 3, 2, both_ends=bool(num_drafts))
            assert (leaf is not None) == held, path
            assert leaf is None or torch.equal(leaf, wanted[path]), path
        held_bytes = sum(x.nbytes for x in tree_leaves(local) if x is not None)
        assert sum(read.values()) == held_bytes
        assert layers == sorted(
            {int(name.split(".")[2]) for name in read if name.startswith("model.layers.")}
        )


# Serving.


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [40, 30, 20, 10, 12]]
OPTIONS = funcinfer.SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    "mesh", [Mesh(pp=2), Mesh(pp=3), Mesh(pp=2, tp=2), Mesh(dp=2, pp=2)], ids=repr
)
@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa"])
def test_an_engine_says_the_same(name: str, mesh: Mesh, tiny_folder: Callable[..., Path]) -> None:
    """The pool is small, so that pages are freed and used again; what is freed becomes NaN."""
    folder = tiny_folder(name, num_hidden_layers=3)
    whole = funcinfer.load(folder, dtype=torch.float32)
    wanted = whole.generate(PROMPTS, OPTIONS)
    model = funcinfer.load(folder, dtype=torch.float32, mesh=mesh)
    engine = funcinfer.Engine(
        model, num_pages=5, page_size=4, token_budget=5, max_running=2, poison=True
    )
    assert [done.tokens for done in engine.generate(PROMPTS, OPTIONS)] == wanted
    tokens = torch.tensor(PROMPTS[:1])
    torch.testing.assert_close(model.logits(tokens), whole.logits(tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["pp2", "pp3", "pp2 tp2", "dp2 pp3"])
def test_drafts_run_on_the_last_stage(layout: str) -> None:
    """Logits, and caches and hidden states alike on the ranks that hold or get them."""
    _, decoder, params = latent(3, experts=True, index_layers=(0, 2), num_drafts=1)
    placed = Layout(*LAYOUTS[layout](None))
    assert_same(run_drafts(decoder, params, placed), run_drafts(decoder, params, ONE_RANK))


# What it costs.


def calls_of(decoder: Decoder, params: Any, mesh: Mesh, rules: Rules, rank: int) -> list[str]:
    """The collectives that one rank calls in a step; it is answered with copies of its own."""
    calls: list[str] = []

    def exchange(x: torch.Tensor, group: Group, what: str) -> list[torch.Tensor]:
        calls.append(f"{what} over {','.join(group.axes)} of {tuple(x.shape)}")
        return [x] * group.size

    trace = Trace({0: 4}, ((False, {0: 4}),))
    runner = Runner(decoder, params, Layout(mesh, rules), trace)
    batch, _ = runner.place(*trace.steps[0])
    with bind(mesh, ExchangeComm(rank, exchange)), torch.no_grad():
        runner.fns.prefill(runner.shards[rank], runner.caches[rank], batch)
    return calls


def test_a_step_hands_on_once_a_boundary_and_sums_at_the_end() -> None:
    """4 tokens of width 20, of which one chooses among 8 positions of a page, 5 at most."""
    _, decoder, params = latent(5, index_layers=(0, 4))
    hidden, logits, chosen = "(4, 20)", "(4, 45)", "(4, 5)"
    wanted = [
        f"ppermute ((0, 1),) over pp of {chosen}",
        f"ppermute ((0, 1),) over pp of {hidden}",
        f"ppermute ((1, 2),) over pp of {chosen}",
        f"ppermute ((1, 2),) over pp of {hidden}",
        f"psum over pp of {logits}",
        f"psum over pp of {hidden}",
    ]
    wanted.remove(f"ppermute ((1, 2),) over pp of {chosen}")  # the last stage selects anew
    for rank in range(3):
        assert calls_of(decoder, params, Mesh(pp=3), Rules(layers="pp"), rank) == wanted


def test_on_one_stage_nothing_is_called() -> None:
    (_, decoder, params), _ = one_rank(ONE_SELECTION)
    assert calls_of(decoder, params, Mesh(pp=1), Rules(layers="pp"), 0) == []


def test_one_stage_traces_as_one_graph() -> None:
    decoder = decoder_of(Layer(dict(attn=attention_sublayer(), mlp=mlp_sublayer())))
    trace = Trace({0: 5}, ((False, {0: 5}),))
    runner = Runner(decoder, draw(decoder), Layout(Mesh(pp=1), Rules(layers="pp")), trace)
    wanted = run(decoder, draw(decoder), ONE_RANK, trace)
    batch, keys = runner.place(*trace.steps[0])
    torch.compiler.reset()
    step = torch.compile(runner.fns.prefill, fullgraph=True, backend="eager")
    with bind(Mesh(pp=1), solo()), torch.no_grad():
        out, _ = step(runner.shards[0], runner.caches[0], batch)
    torch.compiler.reset()
    found = {key: row for key, row in zip(keys, out.logits, strict=True) if key is not None}
    assert_same(found, wanted)


# What is refused.


def refused(decoder: Decoder, mesh: Mesh, message: str, **rules: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Runner(decoder, draw(decoder), Layout(mesh, Rules(**rules)))


def test_more_stages_than_layers_are_refused() -> None:
    decoder = mla.decoder(tiny.latent(3))
    message = r"layers='pp' makes 4 stages of a list of 3: .* give it at most 3 ranks"
    refused(decoder, Mesh(pp=4), message, layers="pp")


@pytest.mark.parametrize(
    "rules",
    [dict(mlp="pp"), dict(tensor("tp"), vocab_out=("tp", "pp")), dict(residual_tokens="pp")],
)
def test_an_axis_of_stages_shards_nothing_else(rules: dict[str, Any]) -> None:
    decoder = decoder_of(*[Layer(dict(attn=attention_sublayer(), mlp=mlp_sublayer()))] * 2)
    message = r"layers='pp' and \w+=.* share 'pp': the axes of layers are those of"
    refused(decoder, Mesh(pp=2, tp=2), message, layers="pp", **rules)


def test_stages_in_one_phase_only_are_refused() -> None:
    decoder = mla.decoder(tiny.latent(2))
    with pytest.raises(ValueError, match=r"embed would lie as .*on=.* rule layers is 'pp' and"):
        build(decoder, Rules(layers="pp"), Rules())


def test_a_cache_is_not_read_across_stages() -> None:
    """The message says how many stages would do: here those that leave layers 1 and 2 together."""

    def peek(p, u, cache, step, shared, *, rules):
        return 0 * u + cache["layers.1.attn.kv"].k[0, 0].nansum() * 0, cache, shared

    plain = Layer(dict(attn=attention_sublayer()))
    reader = Layer(dict(peek=Sublayer({}, peek, reads=("layers.1.attn.kv",))))
    decoder = decoder_of(plain, plain, reader, plain, plain)
    message = (
        r"3 pipeline stages part caches from their readers: layer 2 reads 'layers.1.attn.kv'\."
        r" These layers can be cut into 1, 2 stages"
    )
    refused(decoder, Mesh(pp=3), message, layers="pp")
    params = draw(decoder)
    two = Layout(Mesh(pp=2), Rules(layers="pp"))
    assert_same(run(decoder, params, two), run(decoder, params, ONE_RANK))


def shared_by(gives: dict[str, Any], takes: tuple[str, ...]) -> Decoder:
    """A decoder whose first layer leaves what its second one adds to its input."""

    def leave(p, u, cache, step, shared, *, rules):
        return u, cache, {**shared, "left": u[:, :1]}

    def take(p, u, cache, step, shared, *, rules):
        return u + shared["left"], cache, shared

    first = Layer(dict(leave=Sublayer({}, leave, gives=gives)))
    return decoder_of(first, Layer(dict(take=Sublayer({}, take, takes=takes))))


def column(u: torch.Tensor, step: Any) -> torch.Tensor:
    return u[:, :1]


PP2 = Layout(Mesh(pp=2), Rules(layers="pp"))


def test_what_a_layer_shares_goes_along() -> None:
    decoder = shared_by({"left": column}, ("left",))
    params = draw(decoder)
    assert_same(run(decoder, params, PP2), run(decoder, params, ONE_RANK))


@pytest.mark.parametrize(
    ("decoder", "error", "message"),
    [
        (shared_by({"left": column}, ()), KeyError, "left"),
        (shared_by({}, ("left",)), KeyError, "left"),
        (
            shared_by({"left": lambda u, step: u}, ("left",)),
            ValueError,
            r"'left' is torch.float32 \[\d+, 1\], but by the `gives` of its sublayer .* 20\]",
        ),
        (
            shared_by({"left": column, "lost": column}, ("left", "lost")),
            ValueError,
            "a later stage takes 'lost', but no layer of this step left it",
        ),
        (
            decoder_of(
                Layer(
                    dict(mlp=mlp_sublayer()),
                    connect=lambda p, x, branch: (torch.stack([x, x], 1), branch(x)[1]),
                ),
                Layer(dict(mlp=mlp_sublayer()), connect=lambda p, x, branch: branch(x[:, 0])),
            ),
            ValueError,
            r"a stage hands on what it is given, torch.float32 \[\d+, 20\], but .*2, 20\]",
        ),
    ],
    ids=["not taken", "not given", "another shape", "not left", "another stream"],
)
def test_what_cannot_be_handed_on_is_an_error(
    decoder: Decoder, error: type[Exception], message: str
) -> None:
    params = draw(decoder)
    with pytest.raises(error, match=message):
        run(decoder, params, PP2)


# Processes.


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def on_processes(mesh: Mesh, name: str) -> None:
    (kv_heads, decoder, params), wanted = one_rank(name)
    layout = Layout(*presets.for_mesh(kv_heads, mesh))
    assert_same(run(decoder, params, layout, ranks=process_ranks(mesh)), wanted)


def test_stages_as_processes(processes: Processes) -> None:
    processes.call("tests.equivalence.test_pipeline:on_processes", Mesh(pp=2), ONE_SELECTION)


def serve(mesh: Mesh, folder: str) -> tuple[list[list[int]], bool]:
    """The tokens that a process's engine says, and whether it has the embedding."""
    model = funcinfer.load(folder, dtype=torch.float32, mesh=mesh, ranks=process_ranks)
    return model.generate(PROMPTS, OPTIONS), model.params["embed"] is not None


def test_an_engine_says_the_same_on_processes(
    processes: Processes, tiny_folder: Callable[..., Path]
) -> None:
    folder = tiny_folder("llama", num_hidden_layers=3)
    wanted = funcinfer.load(folder, dtype=torch.float32).generate(PROMPTS, OPTIONS)
    told = processes.call("tests.equivalence.test_pipeline:serve", Mesh(pp=2), str(folder))
    assert told == [(wanted, True), (wanted, False)]
