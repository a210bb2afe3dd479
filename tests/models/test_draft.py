"""Draft modules against transformers' MtpModel, and against its decoder layers wired by hand.

T positions, D width. The row of position i carries token i + 1 and the main model's hidden state
of position i; at depth k it carries token i + 1 + k and the hidden state of the module before.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import funcinfer
from funcinfer import Mesh, Model
from funcinfer.kvcache.batch import Batch, Rows
from funcinfer.models import draft as draft_module
from funcinfer.models.decoder import Output
from tests import oracles

T, STEPS = 21, 2
TOLERANCE = 5e-5


def hub_name(name: str, num_layers: int) -> str:
    """A parameter of MtpModel in the names of Hub checkpoints."""
    _, index, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    rest = "post_attention_layernorm.weight" if "post_attention" in rest else rest
    return f"model.layers.{num_layers + int(index)}.{rest}"


def export(mtp: Any, num_layers: int) -> dict[str, torch.Tensor]:
    """The module's own weights, without embedding and head, which the main model has."""
    own = {n: t for n, t in mtp.state_dict().items() if n.startswith("layers.")}
    return {hub_name(n, num_layers): t.detach().clone().contiguous() for n, t in own.items()}


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts taken apart, as Hub checkpoints hold them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for which, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    place = name.replace("gate_up_proj", f"{e}.{which}_proj.weight")
                    out[place] = part.clone()
        elif name.endswith("experts.down_proj"):
            for e, part in enumerate(tensor):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = part.clone()
        else:
            out[name] = tensor
    return out


def add_tensors(folder: Path, target: Path, extra: dict[str, torch.Tensor], **config: Any) -> Path:
    """A copy of a checkpoint with more tensors and other config fields."""
    shutil.copytree(folder, target)
    with safe_open(target / "model.safetensors", "pt") as f:
        tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    save_file(tensors | extra, target / "model.safetensors")
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    return target


def run_drafts(model: Model, ids_T: torch.Tensor, depths: int, cuts: list[int]) -> list[Output]:
    """Outputs of the first `depths` modules for all rows, the prompt fed in chunks that end at
    `cuts`.
    """
    rows = T - depths
    cache = [model.local_cache(9, 4, fill=float("nan"))]
    made: list[list[Output]] = [[] for _ in range(depths)]
    for start, end in zip([0, *cuts], [*cuts, rows], strict=True):
        part = Rows(ids_T[start:end].tolist(), start, [5, 2, 7, 1, 8, 3], wanted=end - start)
        batch = model.place([[part]], page_size=4, decode=False)
        (out,), cache = model.step(cache, batch)
        for depth in range(depths):
            shifted = ids_T[start + 1 + depth : end + 1 + depth].to(torch.int32)
            batch = dataclasses.replace(batch, tokens=shifted)
            out, cache[0] = model.fns.prefill_draft(
                model.params, cache[0], batch, out.hidden, depth=depth
            )
            made[depth].append(out)
    return [
        Output(torch.cat([o.logits for o in outs]), torch.cat([o.hidden for o in outs]))
        for outs in made
    ]


@pytest.fixture(scope="module")
def with_drafts(
    tiny_model: Callable[..., tuple[Any, Any]],
    tiny_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Any, Any, Path]]:
    def get(name: str, depths: int, *, stacked: bool = True) -> tuple[Any, Any, Path]:
        config, reference = tiny_model(name, num_nextn_predict_layers=depths)
        mtp = oracles.build_mtp(reference)
        weights = export(mtp, config.num_hidden_layers)
        folder = tiny_folder(name, num_nextn_predict_layers=depths)
        target = tmp_path_factory.mktemp("mtp") / "folder"
        extra = weights if stacked else per_expert(weights)
        return reference, mtp, add_tensors(folder, target, extra)

    return get


def reference_drafts(reference: Any, mtp: Any, ids_T: torch.Tensor, depths: int) -> list[Any]:
    from transformers.cache_utils import MtpCache

    rows = T - depths
    with torch.no_grad():
        out = reference(input_ids=ids_T[None, :rows], output_hidden_states=True, use_cache=False)
        hidden, made = out.hidden_states[-1], []
        for depth in range(depths):
            hidden = mtp.forward_layer(
                depth,
                hidden,
                torch.arange(1 + depth, 1 + depth + rows)[None],
                MtpCache(config=mtp.config),
                input_ids=ids_T[None, 1 + depth : 1 + depth + rows],
            )
            made.append((reference.lm_head(hidden)[0], hidden[0]))
    return made


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("depths", [1, 2])
def test_equals_transformers(name: str, depths: int, with_drafts: Callable[..., Any]) -> None:
    reference, mtp, folder = with_drafts(name, depths, stacked=depths == 1)
    ids_T = oracles.token_ids(reference.config, 1, T, 3)[0]
    wanted = reference_drafts(reference, mtp, ids_T, depths)
    model = funcinfer.load(folder, dtype=torch.float32)
    assert model.fns.num_drafts == depths
    for cuts in ([], [6], [1, 4, 11]):
        found = run_drafts(model, ids_T, depths, cuts)
        for out, (logits, hidden) in zip(found, wanted, strict=True):
            torch.testing.assert_close(out.logits, logits, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(out.hidden, hidden, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_draft_equals_layers_wired_by_hand(
    name: str, tiny_model: Callable[..., Any], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config, reference = tiny_model(name)
    draws = torch.Generator().manual_seed(5)
    layer = type(reference.model.layers[-1])(config, config.num_hidden_layers - 1).eval()
    weights = {}
    for key, tensor in layer.state_dict().items():
        noise = torch.randn(tensor.shape, generator=draws)
        one = 1 + 0.3 * noise if "norm.weight" in key else 0.3 * noise
        tensor.copy_(one if tensor.ndim == 1 else noise * tensor.shape[-1] ** -0.5)
        weights[key] = tensor
    D = config.hidden_size
    norms = {n: 1 + 0.3 * torch.randn(D, generator=draws) for n in ("enorm", "hnorm", "norm")}
    eh_proj = torch.randn(D, 2 * D, generator=draws) * D**-0.5

    def norm(x: torch.Tensor, which: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * norms[which]

    ids_T = oracles.token_ids(config, 1, T, 3)[0]
    rows = T - 1
    with torch.no_grad():
        main = reference.model(input_ids=ids_T[None, :rows], use_cache=False).last_hidden_state
        e = reference.model.embed_tokens(ids_T[None, 1:])
        x = torch.cat([norm(e, "enorm"), norm(main, "hnorm")], -1) @ eh_proj.T
        positions = torch.arange(1, T)[None]
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        tables = reference.model.rotary_emb(x, position_ids=positions)
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=tables)
        y = y[0] if isinstance(y, tuple) else y
        wanted = reference.lm_head(norm(y, "norm"))[0]

    prefix = f"model.layers.{config.num_hidden_layers}."
    extra = {prefix + k: t.clone().contiguous() for k, t in weights.items()}
    extra |= {f"{prefix}{n}.weight": norms[n] for n in ("enorm", "hnorm")}
    extra |= {f"{prefix}shared_head.norm.weight": norms["norm"], f"{prefix}eh_proj.weight": eh_proj}
    folder = add_tensors(tiny_folder(name), tmp_path / "folder", extra, num_nextn_predict_layers=1)
    model = funcinfer.load(folder, dtype=torch.float32)
    for cuts in ([], [1, 7]):
        (out,) = run_drafts(model, ids_T, 1, cuts)
        torch.testing.assert_close(out.logits, wanted, atol=TOLERANCE, rtol=0)


def test_names_under_mtp(with_drafts: Callable[..., Any], tmp_path: Path) -> None:
    reference, _, folder = with_drafts("deepseek_v3", 1)
    called = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
        "eh_proj": "fc",
    }
    prefix = f"model.layers.{reference.config.num_hidden_layers}."
    renamed = {}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            rest = name.removeprefix(prefix)
            own = called.get(rest.removesuffix(".weight"))
            target = f"mtp.{own}.weight" if own else f"mtp.layers.0.{rest}"
            renamed[target if name.startswith(prefix) else name] = f.get_tensor(name)
    shutil.copytree(folder, tmp_path / "folder")
    save_file(renamed, tmp_path / "folder" / "model.safetensors")
    ids_T = oracles.token_ids(reference.config, 1, T, 3)[0]
    outs = [
        run_drafts(funcinfer.load(of, dtype=torch.float32), ids_T, 1, [])[0]
        for of in (folder, tmp_path / "folder")
    ]
    assert torch.equal(outs[0].logits, outs[1].logits)


def test_copies_beside_the_module_are_checked(
    with_drafts: Callable[..., Any], tmp_path: Path
) -> None:
    reference, _, folder = with_drafts("deepseek_v3", 1)
    prefix = f"model.layers.{reference.config.num_hidden_layers}."
    table = reference.model.embed_tokens.weight.detach().clone()
    extra = {
        f"{prefix}embed_tokens.weight": table,
        f"{prefix}shared_head.head.weight": reference.lm_head.weight.detach().clone(),
    }
    funcinfer.load(add_tensors(folder, tmp_path / "equal", extra), dtype=torch.float32)
    extra[f"{prefix}embed_tokens.weight"] = table + 1
    with pytest.raises(ValueError, match=r"embed_tokens\.weight' must repeat"):
        funcinfer.load(add_tensors(folder, tmp_path / "other", extra), dtype=torch.float32)


def test_missing_weights_are_an_error(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("deepseek_v3", num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.enorm\.weight.*mtp\.0\.enorm"):
        funcinfer.load(folder, dtype=torch.float32)


def test_without_modules_a_draft_is_an_error(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("deepseek_v3", num_nextn_predict_layers=0)
    model = funcinfer.load(folder, dtype=torch.float32)
    assert "mtp" not in model.params and model.fns.num_drafts == 0
    batch = model.place([[Rows([1], 0, [1])]], page_size=4, decode=False)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        model.fns.prefill_draft(model.params, {}, batch, torch.zeros(1, 1), depth=0)


def test_zero_first_changes_what_position_zero_gives(with_drafts: Callable[..., Any]) -> None:
    reference, _, folder = with_drafts("deepseek_v3", 1)
    ids_T = oracles.token_ids(reference.config, 1, T, 3)[0]
    model = funcinfer.load(folder, dtype=torch.float32)
    (plain,) = run_drafts(model, ids_T, 1, [])
    zeroed_table = model.params | {"embed": torch.zeros_like(model.params["embed"])}
    decoder = model.fns.prefill_draft.args[0]
    zero_first = dataclasses.replace(
        decoder, drafts=(dataclasses.replace(decoder.drafts[0], zero_first=True),)
    )
    rules = model.rules

    def first_row(decoder: Any, params: Any, hidden: torch.Tensor) -> torch.Tensor:
        batch: Batch = model.place([[Rows([int(ids_T[1])], 0, [1])]], page_size=4, decode=False)
        cache = model.local_cache(2, 4)
        out, _ = draft_module.draft(decoder, params, cache, batch, hidden, depth=0, rules=rules)
        return out.logits[0]

    hidden = torch.randn(1, model.cfg.embed_dim, generator=torch.Generator().manual_seed(0))
    zeroed = first_row(zero_first, model.params, hidden)
    torch.testing.assert_close(zeroed, first_row(decoder, zeroed_table, hidden))
    assert not torch.allclose(zeroed, first_row(decoder, model.params, hidden), atol=1e-3)
    assert plain.logits.shape[0] == T - 1


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=4)])
def test_sharded_equals_one_rank(mesh: Mesh, with_drafts: Callable[..., Any]) -> None:
    reference, _, folder = with_drafts("glm4_moe", 1)
    ids_T = oracles.token_ids(reference.config, 1, T, 3)[0]
    one = funcinfer.load(folder, dtype=torch.float32)
    (wanted,) = run_drafts(one, ids_T, 1, [])
    model = funcinfer.load(folder, dtype=torch.float32, mesh=mesh)
    part = Rows(ids_T[: T - 1].tolist(), 0, [5, 2, 7, 1, 8], wanted=T - 1)
    batch = model.place([[part]], page_size=4, decode=False)
    caches = [model.local_cache(9, 4, fill=float("nan")) for _ in model.shards]
    outs, caches = model.step(caches, batch)
    shifted = dataclasses.replace(batch, tokens=ids_T[1:].to(torch.int32))
    made = model.runner.run(
        lambda p, c, h: model.fns.prefill_draft(p, c, shifted, h, depth=0)[0].logits,
        model.shards,
        caches,
        [o.hidden for o in outs],
    )
    for logits in made:
        torch.testing.assert_close(logits, wanted.logits, atol=TOLERANCE, rtol=0)
