"""Folders that transformers wrote give the parameters that its models hold, whole and in slices."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from funcinfer.checkpoint import NameMap, Stored, load_params, load_ranks, save_params
from funcinfer.checkpoint.files import Reader
from funcinfer.sharding import Mesh, Rules, pad, shard
from funcinfer.spec import ParamSpec, init, is_spec
from funcinfer.tree import leaves_with_path, tree_leaves, tree_map
from tests.checkpoint.tiny import DIVISIBLE, TP, describe, reference, stored_tensors

FAMILIES = ("llama", "qwen2", "deepseek_v3")


def assert_same(found: Any, wanted: Any) -> None:
    """Equal trees: paths, dtypes and every value."""
    found, wanted = leaves_with_path(found), leaves_with_path(wanted)
    assert [p for p, _ in found] == [p for p, _ in wanted]
    for (path, x), (_, y) in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), path


def load_over_nan(*args: Any) -> tuple[Any, int]:
    """What `load_params` makes of leaves that start as NaN, and the number of those leaves."""
    made: list[int] = []

    def empty(shape: list[int], **options: Any) -> torch.Tensor:
        made.append(1)
        return torch.full(shape, torch.nan, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        return load_params(*args), len(made)


@pytest.fixture
def nbytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read."""
    sizes: list[int] = []
    read = Reader.read

    def spy(self: Reader, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        values = read(self, name, part)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(Reader, "read", spy)
    return sizes


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_leaf_is_what_transformers_saved(
    name: str, shard_size: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config, model = tiny_model(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard_size == "40KB")
    specs, names = describe(config)
    params, count = load_over_nan(tmp_path, specs, names)
    assert count == len(tree_leaves(specs, is_leaf=is_spec))
    assert not any(x.isnan().any() for x in tree_leaves(params))
    assert_same(params, reference(config, model))


def test_packed_experts_give_the_same_leaves(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config, model = tiny_model("deepseek_v3")
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    assert "model.layers.2.mlp.experts.gate_up_proj" in stored_tensors(tmp_path)
    assert_same(load_params(tmp_path, *describe(config)), reference(config, model))


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        (Mesh(tp=2), TP),
        (Mesh(tp=3), TP),
        (Mesh(tp=4), TP),
        (Mesh(tp=4), TP.replace(experts=None, expert_mlp="tp")),
        (Mesh(dp=3, tp=2), TP.replace(experts=("dp", "tp"), vocab_in="dp", mlp=("tp", "dp"))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_slices_are_shards_of_the_whole_and_no_other_byte_is_read(
    name: str,
    mesh: Mesh,
    rules: Rules,
    tiny_model: Callable[..., Any],
    tiny_folder: Callable[..., Path],
    nbytes_read: list[int],
) -> None:
    sizes = DIVISIBLE | {"num_key_value_heads": 12}
    sizes |= {"n_routed_experts": 12, "moe_intermediate_size": 36} if name == "deepseek_v3" else {}
    config, model = tiny_model(name, **sizes)
    folder = tiny_folder(name, **sizes)
    specs, names = describe(config)
    whole, layouts = reference(config, model), rules.specs(specs)
    everyone = load_ranks(folder, specs, names, mesh, rules)
    for coord, mine in zip(mesh.coords(), everyone, strict=True):
        wanted = tree_map(lambda x, p, at=coord: shard(x, p, mesh, at), whole, layouts)
        assert_same(mine, wanted)
        nbytes_read.clear()
        assert_same(load_params(folder, specs, names, mesh, rules, coord), wanted)
        assert sum(nbytes_read) == sum(x.nbytes for x in tree_leaves(wanted))
    replicated = mesh.num_ranks // mesh.size(rules["heads"])
    queries = [ranks["layers"]["0"]["attn"]["wo"].data_ptr() for ranks in everyone]
    assert len(set(queries)) == mesh.num_ranks // replicated


def test_rows_past_the_true_shape_are_zero(tmp_path: Path) -> None:
    specs = {"embed": ParamSpec((5, 3), ("vocab_in", "embed"), torch.float32)}
    names = NameMap({"embed": Stored("w", (5, 3))})
    whole = init(specs)
    save_params(whole, specs, names, tmp_path)
    mesh, rules = Mesh(tp=4), Rules(vocab_in="tp")
    padded = pad(specs, mesh, rules)
    ranks = load_ranks(tmp_path, padded, names, mesh, rules)
    joined = torch.cat([r["embed"] for r in ranks])
    assert torch.equal(joined, torch.cat([whole["embed"], torch.zeros(3, 3)]))
    again = tmp_path / "again"
    save_params({"embed": joined}, padded, names, again)
    assert torch.equal(stored_tensors(again)["w"], whole["embed"])


def test_a_float32_bias_never_passes_through_bfloat16(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    config, model = tiny_model("deepseek_v3", n_routed_experts=200)
    bias = torch.linspace(6.80, 7.05, 200)
    assert bias.bfloat16().unique().numel() == 9
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    model.save_pretrained(tmp_path)
    specs, names = describe(config)
    narrow = tree_map(lambda s: replace(s, dtype=torch.bfloat16), specs, is_leaf=is_spec)
    for layer in ("1", "2"):
        narrow["layers"][layer]["moe"]["router_bias"] = specs["layers"][layer]["moe"]["router_bias"]
    params = load_params(tmp_path, narrow, names, Mesh(tp=2), TP, {"tp": 1})
    found = params["layers"]["1"]["moe"]["router_bias"]
    assert found.dtype == torch.float32 and torch.equal(found, bias)
    assert found.unique().numel() == 200
    audit = {x.dtype for path, x in leaves_with_path(params) if not path.endswith("router_bias")}
    assert audit == {torch.bfloat16}
    assert torch.equal(params["norm"], model.model.norm.weight.bfloat16())


def test_the_number_of_threads_changes_nothing(
    tiny_model: Callable[..., Any], tiny_folder: Callable[..., Path]
) -> None:
    config, _ = tiny_model("deepseek_v3")
    folder = tiny_folder("deepseek_v3")
    specs, names = describe(config)
    one = load_params(folder, specs, names, threads=1)
    assert_same(load_params(folder, specs, names, threads=4), one)
    with pytest.raises(ValueError, match="threads=0"):
        load_params(folder, specs, names, threads=0)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_saving_writes_the_tensors_that_transformers_wrote(
    name: str,
    max_shard_bytes: int,
    tiny_model: Callable[..., Any],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config, _ = tiny_model(name)
    specs, names = describe(config)
    params = load_params(tiny_folder(name), specs, names)
    save_params(params, specs, names, tmp_path / "new", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "new").glob("*.safetensors"))
    assert (len(files) > 3) == (max_shard_bytes < 10**9)
    assert_same(load_params(tmp_path / "new", specs, names), params)
    found, wanted = stored_tensors(tmp_path / "new"), stored_tensors(tiny_folder(name))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_saving_refuses_what_it_could_not_load_again(tmp_path: Path) -> None:
    spec = ParamSpec((2, 3), (None, None), torch.float32)
    whole = Stored("w", (4, 3))
    names = NameMap({"low": whole[:2], "high": whole[2:]})
    params = {"low": torch.zeros(2, 3), "high": torch.ones(2, 3)}
    both = {"low": spec, "high": spec}
    with pytest.raises(ValueError, match=r"tensor 'w': 6 of 12 elements, by leaf 'low'"):
        save_params({"low": params["low"]}, {"low": spec}, NameMap({"low": whole[:2]}), tmp_path)
    with pytest.raises(ValueError, match=r"params\.high: has shape \(3,\), its spec \(2, 3\)"):
        save_params(params | {"high": torch.ones(3)}, both, names, tmp_path)
    with pytest.raises(
        ValueError, match=r"'w': torch\.float64 from leaf 'high', but torch\.float32"
    ):
        save_params(params | {"high": torch.ones(2, 3).double()}, both, names, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save_params(params, both, names, tmp_path)
    with pytest.raises(FileExistsError, match=r"already holds model\.safetensors"):
        save_params(params, both, names, tmp_path)


def test_draft_layers_beside_the_main_ones(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    config, model = tiny_model("deepseek_v3")
    state = {n: x.clone() for n, x in model.state_dict().items()}
    embed, D = state["model.embed_tokens.weight"], config.hidden_size
    projection = torch.randn(D, 2 * D)
    state |= {
        "model.layers.3.eh_proj.weight": projection,
        "model.layers.3.embed_tokens.weight": embed.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    specs, names = describe(config)
    specs |= {"mtp": {"eh_proj": ParamSpec((D, 2, D), ("embed", None, "embed"), torch.float32)}}
    draft = Stored("model.layers.3.eh_proj.weight", (D, (2, D)))
    names = NameMap(
        {**names.sources, "mtp.eh_proj": draft},
        copies={
            "model.layers.3.embed_tokens.weight": "embed",
            "model.layers.3.shared_head.head.weight": "head",
        },
        ignored=("*.rotary_emb.inv_freq",),
    )
    save_file(state, tmp_path / "model.safetensors")
    params = load_params(tmp_path, specs, names)
    assert torch.equal(params["mtp"]["eh_proj"], projection.view(D, 2, D))
    assert torch.equal(params["embed"], embed)
    state["model.layers.3.embed_tokens.weight"][200, 5] += 1
    save_file(state, tmp_path / "model.safetensors")
    load_params(tmp_path, specs, names, Mesh(tp=2), TP, {"tp": 0})
    with pytest.raises(
        ValueError, match=r"layers\.3\.embed_tokens.* must repeat 'model\.embed_tok"
    ):
        load_params(tmp_path, specs, names, Mesh(tp=2), TP, {"tp": 1})


def test_a_bar_of_all_bytes(
    tiny_model: Callable[..., Any],
    tiny_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _ = tiny_model("llama")
    load_params(tiny_folder("llama"), *describe(config), progress=True)
    assert "100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"pip install 'funcinfer\[text\]'"):
        load_params(tiny_folder("llama"), *describe(config), progress=True)


def test_a_mesh_needs_rules_and_a_legal_coordinate(
    tiny_model: Callable[..., Any], tiny_folder: Callable[..., Path]
) -> None:
    config, _ = tiny_model("llama")
    folder, (specs, names) = tiny_folder("llama"), describe(config)
    mesh = Mesh(tp=2)
    with pytest.raises(ValueError, match=r"Mesh\(tp=2\) needs rules and a coord"):
        load_params(folder, specs, names, mesh, TP)
    with pytest.raises(ValueError, match="without a mesh"):
        load_params(folder, specs, names, rules=TP)
    for coord in ({"tp": 2}, {"tp": 0, "dp": 0}, {}):
        with pytest.raises(ValueError, match=r"is none of Mesh\(tp=2\)"):
            load_params(folder, specs, names, mesh, TP, coord)
    with pytest.raises(ValueError, match=r"embed: dim 0 of shape \(256, 64\) is 256"):
        load_params(folder, specs, names, Mesh(tp=3), TP, {"tp": 0})
