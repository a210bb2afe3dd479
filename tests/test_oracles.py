"""The tiny reference models can be trusted: informative weights, a cache that changes nothing."""

import subprocess
import sys

import pytest
import torch

from tests import oracles

EVERY_FAMILY = pytest.mark.parametrize("name", oracles.NAMES)


@EVERY_FAMILY
def test_every_parameter_and_saved_buffer_is_random(name, tiny_model):
    _, model = tiny_model(name)
    state = model.state_dict()
    assert state
    for path, tensor in state.items():
        assert tensor.dtype == torch.float32, path
        assert tensor.unique().numel() > 0.9 * tensor.numel(), f"{path} is constant or coarse"
        assert tensor.abs().min() > 0, path


@EVERY_FAMILY
def test_cached_greedy_equals_recomputation(name, tiny_model):
    config, model = tiny_model(name)
    ids_BS = oracles.token_ids(config)
    tokens_BN, logits_BNV = oracles.greedy(model, ids_BS, 6)
    whole = torch.cat([ids_BS, tokens_BN[:, :-1]], 1)
    again_BNV = oracles.full_logits(model, whole)[:, ids_BS.shape[1] - 1 :]
    torch.testing.assert_close(logits_BNV, again_BNV, atol=5e-5, rtol=0)
    assert torch.equal(again_BNV.argmax(-1), tokens_BN)
    assert logits_BNV.std() > 0.1


@EVERY_FAMILY
def test_the_seed_decides_the_weights(name):
    _, one = oracles.build(name, seed=3)
    _, same = oracles.build(name, seed=3)
    _, other = oracles.build(name, seed=4)
    for path, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[path]), path
        assert not torch.equal(tensor, other.state_dict()[path]), path


@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (24, 8)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2"])
def test_head_counts_can_be_overridden(name, heads):
    query, kv = heads
    config, model = oracles.build(name, num_attention_heads=query, num_key_value_heads=kv)
    width = getattr(config, "head_dim", None) or config.hidden_size // query
    attention = model.model.layers[0].self_attn
    assert width % 2 == 0
    assert attention.q_proj.weight.shape[0] == query * width
    assert attention.k_proj.weight.shape[0] == kv * width
    assert oracles.full_logits(model, oracles.token_ids(config, 1, 5)).isfinite().all()


def test_latent_attention_keeps_one_key_per_head():
    config, model = oracles.build("deepseek_v3", num_attention_heads=6)
    assert config.num_key_value_heads == 6
    assert oracles.full_logits(model, oracles.token_ids(config, 1, 5)).isfinite().all()


def test_token_ids_are_ordinary_tokens_and_follow_the_seed(tiny_model):
    config, _ = tiny_model("llama")
    ids_BS = oracles.token_ids(config, 3, 50, seed=2)
    assert ids_BS.shape == (3, 50)
    assert ids_BS.min() >= 3 and ids_BS.max() < config.vocab_size
    assert torch.equal(ids_BS, oracles.token_ids(config, 3, 50, seed=2))
    assert not torch.equal(ids_BS, oracles.token_ids(config, 3, 50, seed=3))


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "minimax_m2"])
def test_a_saved_folder_loads_to_the_same_logits(name, tiny_model, tiny_folder):
    import transformers

    config, model = tiny_model(name)
    folder = tiny_folder(name)
    assert (folder / "config.json").is_file() and list(folder.glob("*.safetensors"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_BS = oracles.token_ids(config)
    torch.testing.assert_close(
        oracles.full_logits(loaded, ids_BS), oracles.full_logits(model, ids_BS), atol=5e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_mtp_model_shares_the_main_weights_and_draws_its_own(name):
    config, model = oracles.build(name)
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    mtp = oracles.build_mtp(model)
    assert len(mtp.layers) == 1
    assert all(torch.equal(before[path], tensor) for path, tensor in model.state_dict().items())
    assert mtp.shared_head is model.lm_head and mtp.embed_tokens is model.model.embed_tokens
    for path, tensor in mtp.state_dict().items():
        assert tensor.unique().numel() > 0.9 * tensor.numel(), f"{path} is constant or coarse"

    ids_BS = oracles.token_ids(config, 1, 9)
    with torch.no_grad():
        hidden = model.model(input_ids=ids_BS[:, :-1]).last_hidden_state
        drafts, logits, _ = mtp(ids_BS[:, 1:], hidden, None, torch.arange(1, 9)[None], None)
    assert drafts.shape == (1, 1) and logits.isfinite().all()


def test_an_unknown_family_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"no family 'lama'; there are llama, qwen2"):
        oracles.build("lama")


def test_importing_the_oracles_does_not_import_transformers():
    code = "import sys, tests.oracles; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
