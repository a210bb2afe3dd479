"""The training example: its functions against transformers and against slow loops; both stages on
the CPU.

The text is a made-up one of verses. B sequences, T tokens of each, V vocabulary.
"""

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import funcinfer
from examples.train_tiny import __main__ as command
from examples.train_tiny import data, evaluate, export, model, sample, training
from examples.train_tiny.dense import BACKEND
from funcinfer.checkpoint import save_params
from funcinfer.kvcache.batch import Rows, make_batch
from funcinfer.layers.primitives import use_backend
from funcinfer.models import deepseek_v3
from funcinfer.models.decoder import Cache, Params, cache_specs, decoder_specs, forward
from funcinfer.models.draft import draft
from funcinfer.spec import empty, with_dtype
from funcinfer.tree import leaves_with_path, map_with_path
from tests import oracles
from tests.models.test_draft import hub_name, per_expert

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "max_position_embeddings": 128,
}
CFG = model.config(**SMALL)
PLAIN = deepseek_v3.decoder(CFG)
QUIET = model.training_decoder(CFG, 0.0)
B, T, DEPTHS = 2, 19, 3


def shaken(cfg: Any = CFG, seed: int = 0) -> Params:
    """Parameters away from where they start: logits spread, and no two biases are equal."""
    draws = torch.Generator().manual_seed(seed)
    return map_with_path(
        lambda path, w: w + 0.15 * torch.randn(w.shape, generator=draws),
        model.new_params(cfg, seed, "cpu"),
    )


def some_tokens(rows: int = B, length: int = T, seed: int = 3) -> torch.Tensor:
    return torch.randint(
        1, CFG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def chain_one_by_one(
    params: Params, tokens_T: torch.Tensor, place: int, depths: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the main logits [place + 1, V], the logits [V] of each draft of a chain from `place`).

    As a serving loop does it: pages out of order, the reference primitives, one row a draft, which
    takes the page slot behind the last one.
    """
    pages = [3, 1, 5, 7, 2, 8]
    specs = with_dtype(cache_specs(PLAIN, 9, 4), torch.float32)
    cache: Cache = empty(specs, fill=float("nan"))
    first = Rows(tokens_T[: place + 1].tolist(), 0, pages, wanted=place + 1)
    batch = make_batch([[first]], page_size=4)
    main, cache = forward(PLAIN, params, cache, batch, rules=model.ONE_RANK)
    batch = dataclasses.replace(batch, tokens=tokens_T[1 : place + 2].int())
    out, cache = draft(PLAIN, params, cache, batch, main.hidden, depth=0, rules=model.ONE_RANK)
    found = [out.logits[-1]]
    for depth in range(1, depths):
        row = Rows([int(tokens_T[place + 1 + depth])], place + depth, pages)
        batch, hidden = make_batch([[row]], page_size=4), out.hidden[-1:]
        out, cache = draft(PLAIN, params, cache, batch, hidden, depth=depth, rules=model.ONE_RANK)
        found.append(out.logits[0])
    return main.logits, found


@torch.no_grad()
def chains(params: Params, tokens_BT: torch.Tensor, depths: int) -> list[torch.Tensor]:
    """Logits [B, T, V] of the main model, then of the drafts of each depth, all places at once."""
    with use_backend(BACKEND):
        out, cache = model.whole(QUIET, params, tokens_BT, depths=depths)
        found = [out.logits]
        for depth in range(depths):
            out, cache = model.chained(
                QUIET,
                params,
                cache,
                tokens_BT.roll(-1 - depth, 1),
                out.hidden,
                depth=depth,
                depths=depths,
            )
            found.append(out.logits)
    return [x.unflatten(0, tokens_BT.shape) for x in found]


def test_chains_from_all_places_equal_chains_one_by_one() -> None:
    params, tokens_BT = shaken(), some_tokens()
    main, *drafts = chains(params, tokens_BT, DEPTHS)
    for row in range(B):
        for place in (0, 3, 7, T - 2 - DEPTHS):
            with torch.no_grad():
                wanted, each = chain_one_by_one(params, tokens_BT[row], place, DEPTHS)
            torch.testing.assert_close(main[row, : place + 1], wanted, atol=2e-5, rtol=0)
            for found, logits in zip(drafts, each, strict=True):
                torch.testing.assert_close(found[row, place], logits, atol=2e-5, rtol=0)


def test_the_loss_of_stage_two_is_the_divergence_of_chains() -> None:
    params, tokens_BT = shaken(), some_tokens(length=11)
    sums, counts = [0.0] * DEPTHS, [0] * DEPTHS
    for tokens_T in tokens_BT:
        with torch.no_grad():
            law = chain_one_by_one(params, tokens_T, 9, 1)[0].softmax(-1)
            last = chain_one_by_one(params, torch.cat([tokens_T, tokens_T[:1]]), 10, 1)[0][-1]
            law = torch.cat([law, last.softmax(-1)[None]])
            for place in range(10):
                depths = min(DEPTHS, 10 - place)
                for depth, logits in enumerate(
                    chain_one_by_one(params, tokens_T, place, depths)[1]
                ):
                    p, q = law[place + 1 + depth], logits.softmax(-1)
                    sums[depth] += float((p * (p / q).log()).sum())
                    counts[depth] += 1
    with use_backend(BACKEND):
        found, _ = training.chain_losses(QUIET, params, tokens_BT, DEPTHS)
    for value, total, count in zip(found, sums, counts, strict=True):
        assert float(value.detach()) == pytest.approx(total / count, rel=1e-4)
        assert float(value.detach()) > 0.05


def text_gradients(params: Params, tokens_BT: torch.Tensor) -> tuple[float, Params]:
    """(loss of stage 1, its gradient by every parameter) without a back end of its own."""
    params = map_with_path(lambda path, w: w.clone().requires_grad_(), params)
    next_token, after, _ = training.text_losses(QUIET, params, tokens_BT)
    (next_token + training.MTP_WEIGHT * after).backward()
    zero = torch.zeros_like
    return float((next_token + after).detach()), map_with_path(
        lambda path, w: zero(w) if w.grad is None else w.grad, params
    )


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """The same weights through a folder; main model and draft module in one loss."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    export.write_folder(tmp_path, shaken(), tiny_tokenizer(), SMALL)
    params = funcinfer.load(tmp_path, dtype=torch.float32).params
    tokens_BT = some_tokens(1)
    main = oracles.read_deepseek_v3(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
    mtp = MtpModel.from_pretrained(main)
    for weight in (*main.parameters(), *mtp.parameters()):
        weight.requires_grad_()
    out = main(input_ids=tokens_BT[:, :-2], output_hidden_states=True, use_cache=False)
    hidden = mtp.forward_layer(
        0,
        out.hidden_states[-1],
        torch.arange(1, T - 1)[None],
        MtpCache(config=mtp.config),
        input_ids=tokens_BT[:, 1:-1],
    )
    next_token = cross_entropy(out.logits[0], tokens_BT[0, 1:-1])
    after = cross_entropy(main.lm_head(hidden)[0], tokens_BT[0, 2:])
    (next_token + training.MTP_WEIGHT * after).backward()
    wanted = {n: w.grad for n, w in main.named_parameters()}
    wanted |= {
        hub_name(n, CFG.num_layers): w.grad
        for n, w in mtp.named_parameters()
        if n.startswith("layers.")
    }
    wanted = per_expert({n: g for n, g in wanted.items() if g is not None})

    hit = {n.split(".experts.")[1][0] for n, g in wanted.items() if ".experts." in n and g.any()}
    assert len(hit) > 4  # an expert that no token chose has no gradient

    for backend in (None, BACKEND):
        with use_backend(backend):
            loss, gradients = text_gradients(params, tokens_BT)
        assert loss == pytest.approx(float((next_token + after).detach()), abs=1e-5)
        folder = tmp_path / f"gradients_{backend is None}"
        save_params(gradients, decoder_specs(PLAIN), deepseek_v3.name_map(CFG), folder)
        found = stored(folder)
        biases = {n for n in found if n.endswith("e_score_correction_bias")}
        assert set(found) - biases == set(wanted) and len(biases) == 2
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
            assert ".experts." in name or gradient.abs().max() > 1e-5, name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_experts_are_counted_and_balanced() -> None:
    """Loads are what the router says, and biases move against them, those of one stage only."""
    params, tokens_BT = shaken(), some_tokens()
    counts: list[torch.Tensor] = []

    def spied(route: Callable[..., Any]) -> Callable[..., Any]:
        def run(p: Params, x_TD: torch.Tensor, **settings: Any) -> Any:
            weights, ids = route(p, x_TD, **settings)
            counts.append(torch.bincount(ids.flatten(), minlength=8).float())
            return weights, ids

        return run

    from funcinfer.layers.moe import moe
    from funcinfer.models.decoder import pure
    from funcinfer.models.experts import route_of

    route = spied(route_of(CFG.experts))
    spy = pure(lambda p, u, *, rules: moe(p, u, rules=rules, route=route), None)
    watched = PLAIN.replace(1, mlp=spy)
    with torch.no_grad():
        model.whole(watched, params, tokens_BT)
        out, cache = model.whole(QUIET, params, tokens_BT)
        _, cache = model.chained(QUIET, params, cache, tokens_BT.roll(-1, 1), out.hidden, depth=0)
    (wanted,) = counts
    assert torch.equal(cache["layers.1.mlp.load"], wanted) and wanted.sum() == 2 * B * T
    assert cache["mtp.0.mlp.load"].sum() == 2 * B * T
    for prefix, moved in (("", (True, True)), ("mtp.", (False, True))):
        after = copy.deepcopy(params)
        training.balance(after, cache, prefix)
        steps = [
            (b["mlp"]["router"]["bias"] - a["mlp"]["router"]["bias"]) / training.BIAS_RATE
            for a, b in (
                (params["layers"][1], after["layers"][1]),
                (params["mtp"][0]["layer"], after["mtp"][0]["layer"]),
            )
        ]
        assert tuple(bool(step.any()) for step in steps) == moved
        if moved[0]:
            torch.testing.assert_close(steps[0], (wanted.mean() - wanted).sign(), atol=1e-3, rtol=0)


def test_dropout_acts_and_keeps_the_mean() -> None:
    params, tokens_BT = shaken(), some_tokens()
    torch.manual_seed(0)
    with torch.no_grad():
        plain, *_ = training.text_losses(QUIET, params, tokens_BT)
        noisy = [
            training.text_losses(model.training_decoder(CFG, 0.2), params, tokens_BT)[0]
            for _ in range(2)
        ]
        y = model.dropped({}, torch.zeros(9999), lambda x: (x + 1, ({}, {})), rate=0.2)[0]
    assert len({float(x) for x in (plain, *noisy)}) == 3
    assert set(y.tolist()) == {0.0, 1.25} and abs(float(y.mean()) - 1) < 0.03


def test_chances_of_acceptance_are_those_of_rejection_sampling() -> None:
    """By enumeration: over the tokens that may come out, the chance is the sum of min(p, q)."""
    params, place, depth, temperature = shaken(seed=5), 6, 1, 0.7
    V, prefix_T = CFG.vocab_size, some_tokens(1, place + 2 + depth)[0]
    ends_VT = torch.cat([prefix_T.expand(V, -1), torch.arange(V)[:, None]], 1)
    with use_backend(BACKEND):
        chances = evaluate.acceptance_chances(QUIET, params, ends_VT, 2, temperature)
        greedy = evaluate.acceptance_chances(QUIET, params, ends_VT, 2, 0.0)
    with torch.no_grad():
        longer = torch.cat([prefix_T, prefix_T[:1]])
        main, _ = chain_one_by_one(params, longer, place + 1 + depth, 1)
        _, drafts = chain_one_by_one(params, prefix_T, place, 2)
    p = (main[place + 1 + depth] / temperature).softmax(-1)
    q = (drafts[depth] / temperature).softmax(-1)
    found = chances[depth, :, place]
    torch.testing.assert_close(p * found, torch.minimum(p, q), atol=1e-5, rtol=1e-3)
    assert 0.05 < float((p * found).sum()) < 0.95
    assert greedy[depth, :, place].nonzero().flatten().tolist() == [int(drafts[depth].argmax())]
    assert not chances[depth, :, place + 1 :].any()


def test_steps_follow_one_another() -> None:
    """A table of certain accepts and rejects, walked by hand."""
    chance = torch.tensor([[[1, 1, 1, 0, 1, 1, 0, 0]], [[0, 0, 1, 1, 1, 0, 0, 0]]]).float()
    two = evaluate.walked(chance, 1, 2, 0.0)  # from 1: 1 accepted; 3: none; 4: both; 7: the end
    assert (two.drafts, two.prefixes, two.length) == (3 / 6, (2 / 3, 1 / 3), 2.0)
    one = evaluate.walked(chance, 0, 1, 0.0)  # from 0, 2, 4: accepted; 6 would pass the end
    assert (one.drafts, one.length) == (1.0, 2.0)
    half = evaluate.walked(torch.full((1, 500, 41), 0.5), 0, 1, 1.0)
    assert half.drafts == pytest.approx(0.5, abs=0.02)


def test_samples_are_greedy_at_zero_and_follow_the_law_at_one() -> None:
    params, prompt = shaken(), some_tokens(1, 5)
    zero = torch.zeros(1)
    with use_backend(BACKEND):
        found = sample.continued(PLAIN, params, prompt, 6, zero, seed=0)
    ids = prompt
    for _ in range(6):
        with torch.no_grad():
            out, _ = model.whole(PLAIN, params, ids)
        ids = torch.cat([ids, out.logits[-1:].argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0])
    draws, n = torch.Generator().manual_seed(0), 20_000
    taken = sample.drawn(logits_V.expand(n, -1), torch.full((n,), 2.0), draws)
    wanted = (logits_V / 2).softmax(-1) * n
    seen = torch.bincount(taken, minlength=4)
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 16.3  # chi-square, 3 degrees, 0.1 %


NAMES = ("Abel", "Seth", "Enos", "Noah", "Shem", "Levi", "Ruth", "Saul", "Amos", "Anna")
VERBS = ("went up to", "spake unto", "wept before", "begat", "dwelt with", "blessed", "smote")


def verses(chapters: int = 60) -> str:
    """Lines as `bible -f` prints them, of a grammar with little to learn."""
    draws = random.Random(0)
    lines = []
    for chapter in range(1, chapters + 1):
        for verse in range(1, 13):
            who, whom = draws.sample(NAMES, 2)
            text = f"And {who} {draws.choice(VERBS)} {whom}, and it was so; and {whom} rejoiced."
            lines.append(f"2Sm{chapter}:{verse} {text}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "verses.txt"
    path.write_text(verses())
    return path


def tiny_tokenizer() -> Any:
    return data.train_tokenizer(["a b"], 257)


def test_chapters_and_split(text: Path, tmp_path: Path) -> None:
    found = data.chapters(text)
    assert len(found) == 60 and all(x.count("\n") == 11 for x in found)
    assert "2Sm" not in "".join(found)
    trained, held = data.split(found)
    assert len(held) == 3 and held[0] == found[10] and sorted(trained + held) == sorted(found)
    bad = tmp_path / "bad.txt"
    bad.write_text("Ge1:1 In the beginning\nGenesis\n")
    with pytest.raises(ValueError, match=r"bad\.txt:2: 'Genesis' is no verse"):
        data.chapters(bad)


def test_the_tokenizer_loses_nothing_and_marks_ends(text: Path) -> None:
    tokenizer = data.train_tokenizer(data.chapters(text), 300)
    assert tokenizer.get_vocab_size() == 300 and tokenizer.id_to_token(data.END_ID) == data.END
    for string in (data.chapters(text)[0], "  naïve\n\t☃ ", ""):
        ids = tokenizer.encode(string).ids
        assert ids[0] == data.END_ID and tokenizer.decode(ids) == string
    ids = data.stream(tokenizer, ["And", "And it"])
    assert (ids == data.END_ID).nonzero().flatten().tolist() == [0, len(ids) // 2 - 1, len(ids) - 1]


def test_windows() -> None:
    ids = torch.arange(23)
    drawn = data.random_windows(ids, 50, 7, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, drawn[:, :1] + torch.arange(7))
    assert {0, 16} <= set(drawn[:, 0].tolist())
    with pytest.raises(ValueError, match="23 tokens has no window of 24"):
        data.random_windows(ids, 1, 24, torch.Generator())
    rows = torch.cat(list(data.all_windows(ids, 2, 7, overlap=2)))
    assert rows[:, 0].tolist() == [0, 5, 10, 15]


def learnt(text: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    trained, held = data.split(data.chapters(text))
    tokenizer = data.train_tokenizer(trained, 300)
    return model.config(**SMALL | {"vocab_size": 300}), *(
        data.stream(tokenizer, part) for part in (trained, held)
    )


def test_a_small_model_learns(text: Path) -> None:
    """30 steps on the CPU; then the draft module alone, on the model's own samples."""
    cfg, ids, held_out = learnt(text)
    settings = training.Settings(
        steps=30, batch=8, length=48, lr=1e-2, warmup=5, dropout=0.1, every=5
    )
    start = training.State(model.new_params(cfg, 0, "cpu"))
    state = training.train_model(cfg, start, ids, held_out, settings)
    curve = state.curve
    assert [point["step"] for point in curve] == [5, 10, 15, 20, 25, 30]
    for name in ("held_out", "held_out_draft", "train", "train_draft"):
        assert curve[-1][name] < curve[0][name] - 1, name

    before = copy.deepcopy(state.params)
    plain, draws = deepseek_v3.decoder(cfg), torch.Generator().manual_seed(0)
    with use_backend(BACKEND):
        own = sample.continued(
            plain, state.params, data.random_windows(ids, 40, 8, draws), 24, torch.ones(40), seed=0
        )
    settings = training.Settings(steps=10, batch=8, length=0, lr=3e-3, warmup=2, every=5)
    second = training.train_draft(cfg, training.State(state.params), own, settings)
    assert all(
        second.curve[-1][f"held_out_{d}"] < second.curve[0][f"held_out_{d}"] for d in (0, 1, 2)
    )
    after = dict(leaves_with_path(second.params))
    changed = {name for name, w in leaves_with_path(before) if not torch.equal(w, after[name])}
    assert changed == {name for name in after if name.startswith("mtp.")}


def test_an_interrupted_training_goes_on_as_if_it_were_not(text: Path, tmp_path: Path) -> None:
    cfg, ids, held_out = learnt(text)
    settings = training.Settings(
        steps=6, batch=2, length=16, lr=1e-2, warmup=2, dropout=0.1, every=2
    )

    def run(state: training.State, until: int | None = None) -> training.State:
        path = tmp_path / "state.pt"
        return training.train_model(cfg, state, ids, held_out, settings, path, until=until)

    whole = run(training.State(model.new_params(cfg, 0, "cpu")))
    run(training.State(model.new_params(cfg, 0, "cpu")), until=4)
    resumed = run(training.State.load(tmp_path / "state.pt", "cpu"))
    assert resumed.curve == whole.curve and resumed.step == 6
    for (path, a), (_, b) in zip(
        leaves_with_path(whole.params), leaves_with_path(resumed.params), strict=True
    ):
        assert torch.equal(a, b), path


def test_the_rate_rises_and_falls() -> None:
    settings = training.Settings(steps=100, batch=1, length=1, lr=2.0, warmup=10)
    rates = [training.rate_at(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates.index(max(rates)) in (9, 10)
    assert max(rates) == 2.0 and rates[-1] == pytest.approx(0.1, abs=0.01)


def test_the_command_writes_a_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (SMALL | {"vocab_size": 300}).items():
        monkeypatch.setitem(model.CONFIG, name, value)
    monkeypatch.setattr(command, "MODEL", dataclasses.replace(command.MODEL, length=24, every=2))
    monkeypatch.setattr(command, "DRAFT", dataclasses.replace(command.DRAFT, batch=2, length=40))
    out, arguments = tmp_path / "out", ["--text", str(text), "--device", "cpu"]
    arguments += [
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(out),
        "--steps",
        "2",
        "--batch",
        "2",
    ]
    arguments += ["--draft-steps", "1", "--samples", "4", "--prompts", "2", "--new", "8"]
    assert command.main(arguments) == 0
    loaded = funcinfer.load(out, dtype=torch.bfloat16)
    assert loaded.stop_ids == (0,) and loaded.max_length == 128 and loaded.fns.num_drafts == 1
    card = (out / "README.md").read_text()
    assert "| 1 | 3 |" in card and "60\n  chapters" in card and "{" not in card
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    text_of = funcinfer.serving.text.Text.from_folder(out)
    assert (
        text_of.encode("And")[0] == 0 and text_of.decode(text_of.encode("And Noah")) == "And Noah"
    )
    capsys.readouterr()
    assert command.main(arguments) == 2
    assert "holds files" in capsys.readouterr().err
