"""The command line: what it prints, what it refuses, and that a mesh does not change the tokens.

The checkpoint is a tiny Llama of transformers, which also says what must come out. Its tokenizer
has one token for each byte.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from funcinfer import cli
from tests import oracles

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["The sea", "x", "Über die Berge"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<go>"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with its tokenizer."""
    made = tmp_path_factory.mktemp("cli") / "model"
    shutil.copytree(tiny_folder("llama"), made)
    byte_tokenizer().save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return made


@pytest.fixture(scope="module")
def answer(tiny_model: Callable[..., tuple[Any, Any]]) -> Callable[..., dict[str, Any]]:
    """What --json must say of a prompt, by transformers."""
    config, model = tiny_model("llama")
    tokenizer = byte_tokenizer()

    def get(prompt: str, count: int, text: str | None = None) -> dict[str, Any]:
        ids = torch.tensor([tokenizer.encode(text or prompt).ids])
        tokens = oracles.greedy(model, ids, count)[0][0].tolist()
        reason, shown = "length", tokens
        if config.eos_token_id in tokens:
            tokens = tokens[: tokens.index(config.eos_token_id) + 1]
            reason, shown = "stop", tokens[:-1]
        text = tokenizer.decode(shown)
        return {"prompt": prompt, "text": text, "tokens": tokens, "finish_reason": reason}

    return get


def prompts_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prompts.txt"
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def generate(folder: Path, *args: str) -> int:
    return cli.main(["generate", "--model", str(folder), *args])


# What it prints


def test_a_prompt_and_its_answer(folder, answer, capsys):
    assert generate(folder, "--prompt", PROMPTS[0], "--max-tokens", "5") == 0
    out, err = capsys.readouterr()
    assert out == f"> {PROMPTS[0]}\n{answer(PROMPTS[0], 5)['text']}\n\n"
    assert err.startswith("5 tokens, ")
    assert err.endswith(" tokens per second\n")


@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=4", "dp=2", " dp=2, tp=2 "])
def test_json_of_a_file_of_prompts(mesh, folder, answer, tmp_path, capsys):
    file = prompts_file(tmp_path, "\n" + "\r\n\n".join(PROMPTS) + "\n \n")
    args = ["--file", file, "--max-tokens", "9", "--json", "--mesh", mesh]
    assert generate(folder, *args) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == [answer(prompt, 9) for prompt in PROMPTS]


def test_a_stop_token_is_counted_but_not_shown(folder, answer, tmp_path, capsys):
    plain = answer(PROMPTS[0], 6)["tokens"]
    stopping = tmp_path / "model"
    shutil.copytree(folder, stopping)
    index = next(i for i in range(1, 6) if plain[i] not in plain[:i])
    config = {"eos_token_id": [255, plain[index]]}
    (stopping / "generation_config.json").write_text(json.dumps(config))
    assert generate(stopping, "--prompt", PROMPTS[0], "--max-tokens", "6", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tokens"], row["finish_reason"]) == (plain[: index + 1], "stop")
    assert row["text"] == byte_tokenizer().decode(plain[:index])


def test_chat_applies_the_template(folder, answer, capsys):
    assert generate(folder, "--prompt", "Hi", "--chat", "--max-tokens", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [answer("Hi", 4, text="<user>Hi<go>")]


def test_a_seed_makes_draws_repeatable(folder, capsys):
    def tokens(*args: str) -> list[int]:
        sampling = ["--temperature", "1.5", "--max-tokens", "12", "--json", "--dtype", "bfloat16"]
        assert generate(folder, "--prompt", "x", *sampling, *args) == 0
        return json.loads(capsys.readouterr().out)[0]["tokens"]

    seeded = tokens("--seed", "7")
    assert tokens("--seed", "7") == seeded
    assert tokens("--seed", "8") != seeded
    assert tokens() != tokens()
    assert tokens("--seed", "7", "--top-k", "1") == tokens("--top-p", "0")


def test_more_tokens_than_the_context_has_are_cut(folder, answer, capsys):
    args = ["--prompt", "a" * 250, "--max-tokens", "1000000", "--json"]
    assert generate(folder, *args) == 0
    assert json.loads(capsys.readouterr().out) == [answer("a" * 250, 6)]


def test_the_model_of_the_package_drafts_and_stops_at_a_text(capsys):
    args = ["generate", "--prompt", "In the beginning", "--dtype", "float32", "--max-tokens", "12"]
    assert cli.main(args) == 0
    plain, said = capsys.readouterr()
    assert said.startswith("12 tokens, ")
    assert cli.main([*args, "--speculate", "2"]) == 0
    drafted, said = capsys.readouterr()
    assert drafted == plain
    assert re.search(r"up to 2 drafts a step: [\d.]+ tokens a verified row, [\d.]+ times", said)
    shown = plain.removeprefix("> In the beginning\n").rstrip("\n")
    assert cli.main([*args, "--stop", shown[5:9], "--stop", "\0", "--speculate", "3"]) == 0
    stopped, _ = capsys.readouterr()
    assert stopped == f"> In the beginning\n{shown[: shown.index(shown[5:9])]}\n\n"


def test_torchrun_gives_the_same_and_prints_once(folder, answer, tmp_path):
    file = prompts_file(tmp_path, "\n".join(PROMPTS))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    args = ["--model", str(folder), "--file", file, "--max-tokens", "9", "--mesh", "tp=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "funcinfer.cli", "generate", *args, "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [answer(prompt, 9) for prompt in PROMPTS]
    assert done.stderr.count("tokens per second") == 1


# What it refuses


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that ends with 2 and prints nothing."""
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("funcinfer: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "x", "--max-tokens", "many"], "argument --max-tokens: invalid int value"),
        (["--prompt", "x", "--temperature", "-0.5"], "temperature is -0.5"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "x", "--top-k", "-1"], "top_k is -1"),
        (["--prompt", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["--prompt", "x", "--seed", "-1"], "seed is -1"),
        (["--prompt", "x", "--speculate", "-1"], "speculate -1"),
        (["--prompt", "x", "--stop", ""], "stop is ['']"),
        (["--prompt", "x", "--mesh", "tp"], "mesh 'tp': can't read 'tp'"),
        (["--prompt", "x", "--mesh", "tp=0"], "mesh axis tp=0"),
        (["--prompt", "x", "--mesh", "tp=3"], "tp=3 and 2 KV heads do not divide one another"),
        (["--prompt", "x", "--mesh", "tb=2"], "no preset for axis 'tb'"),
        (["--prompt", "x", "--device", "abacus"], "--device abacus: Expected one of cpu"),
        (["--prompt", "x", "--device", "cpu:1"], "--device cpu:1: this machine"),
        (["--prompt", "x", "--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "a\udc80"], "'a\\udc80' is no text"),
        (["--prompt", "a" * 256], "prompt has 256 tokens; the model's max_length is 256"),
        (["--prompt", "x", "--file", "y"], "argument --file: not allowed with argument --prompt"),
        (["--file", "no/such/prompts.txt"], "prompt file no/such/prompts.txt is not there"),
        ([], "one of the arguments --prompt --file is required"),
    ],
)
def test_bad_arguments(args, said, folder, capsys):
    assert said in refused(["generate", "--model", str(folder), *args], capsys)


def test_no_command(capsys):
    assert "required: command" in refused([], capsys)


@pytest.mark.parametrize("text", ["", "\n \n\t\n"])
def test_a_file_without_prompts(text, folder, tmp_path, capsys):
    args = ["generate", "--model", str(folder), "--file", prompts_file(tmp_path, text)]
    assert "has no line with a prompt" in refused(args, capsys)


def test_a_file_that_is_no_text(folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(b"fine\n\xff\n")
    args = ["generate", "--model", str(folder), "--file", str(tmp_path / "prompts.txt")]
    assert "prompts.txt is not UTF-8" in refused(args, capsys)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "is a file, not a folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"a": '), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "holds a list"),
        (
            lambda folder: edit_config(folder, architectures=["LamaForCausalLM"]),
            "unknown architecture 'LamaForCausalLM'; near ones: LlamaForCausalLM",
        ),
        (lambda folder: edit_config(folder, hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda folder: edit_config(folder, dtype="gone"), "dtype is None: choose one"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json can't be"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text(
                "{{ raise_exception('no\\nusers') }}"
            ),
            "refuses these messages: no users",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(bytes(99)),
            "model.safetensors",
        ),
    ],
)
def test_bad_folders(change, said, folder, tmp_path, capsys):
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    change(broken)
    assert said in refused(["generate", "--model", str(broken), "--prompt", "x", "--chat"], capsys)


def test_a_mesh_of_another_size_than_the_processes(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for mesh, ranks in (("", 1), ("tp=4", 4)):
        args = ["generate", "--model", str(folder), "--prompt", "x", "--mesh", mesh]
        assert f"has {ranks} ranks, but 2 processes were started" in refused(args, capsys)


def test_a_fault_of_the_program_is_not_called_bad_input(folder, monkeypatch):
    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "load", broken)
    with pytest.raises(KeyError, match="a bug"):
        generate(folder, "--prompt", "x")


def test_help_and_the_module_run_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "funcinfer.cli", "generate", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    options = "--model --prompt --file --max-tokens --temperature --seed --mesh --chat --json"
    assert all(option in done.stdout for option in options.split())
