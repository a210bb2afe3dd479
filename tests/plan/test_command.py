"""`funcinfer plan`: the whole command on public models, and what it says to bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from funcinfer.cli import main
from funcinfer.models.decoder import decoder_specs
from funcinfer.plan import Setting, Subject, data, find, plan
from funcinfer.sharding import Mesh, Rules, presets
from funcinfer.spec import nbytes
from tests.plan import configs


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "config.json"
    path.write_text(json.dumps(configs.DEEPSEEK_V3))
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(configs.QWEN3_06B))
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    return json.loads(run(capsys, *args, "--json"))


def test_deepseek_on_four_groups_of_sixteen(
    deepseek: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """671 billion parameters on dp 4 x tp 16, experts over all 64."""
    mesh = ("--model", str(deepseek), "--mesh", "dp=4,tp=16", "--ep", "--hardware", "910c")
    made = planned(capsys, *mesh, "--batch", "128", "--context", "4096")
    assert (made["ranks"], made["rules"]["decode"]["experts"]) == (64, ["dp", "tp"])
    assert made["notes"] == ["quantization_config (fp8) is not counted: weights have the dtype"]
    # 58 layers and the draft module of 4 experts each, of 3 x 7168 x 2048 weights.
    experts = 59 * 4 * 3 * 7168 * 2048 * 2
    assert experts < made["memory"]["parameters"] < 1.3 * experts
    assert made["memory"]["cache_per_token"] == 62 * 576 * 2
    assert made["memory"]["cache_copies"] == 16
    assert made["memory"]["fits"] is True
    largest = made["memory"]["largest_context"]
    assert largest % 128 == 0
    per_request = (64e9 * 0.9 - made["memory"]["parameters"]) / (62 * 576 * 2) / 32
    assert per_request - 256 < largest <= per_request
    decode = made["decode"]
    assert (decode["requests"], decode["requests_per_group"]) == (128, 32)
    calls = {(c["op"], *c["axes"]): c for c in decode["collectives"]}
    # embedding, o_proj of 61 layers, 3 dense MLPs, 58 shared and 58 routed experts' parts
    assert calls["psum", "tp"]["count"] == 1 + 61 + 3 + 58 + 58
    assert calls["psum", "tp"]["bytes"] == 32 * 7168 * 2
    assert calls["psum_scatter", "dp"] | {"seconds": None} == {
        "op": "psum_scatter",
        "call": "psum_scatter dim=0",
        "axes": ["dp"],
        "ranks": 4,
        "shape": [128, 7168],
        "dtype": "bfloat16",
        "bytes": 128 * 7168 * 2,
        "count": 58,
        "seconds": None,
    }
    seconds = decode["seconds"]
    work = max(seconds["compute"], seconds["memory"])
    assert seconds["floor"] == pytest.approx(work + seconds["communication"])
    assert seconds["memory"] == pytest.approx(sum(decode["bytes"].values()) / 1.6e12)
    rate = 128 / 64 / seconds["floor"]
    assert decode["tokens_per_second_per_device"] == pytest.approx(rate)
    assert decode["latency_counted"] is False
    assert made["hardware"]["latency"] is None
    assert made["hardware"]["memory"]["value"] == 64e9


def test_a_plan_in_words(deepseek: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--model", str(deepseek), "--mesh", "dp=4,tp=16", "--ep", "--hardware", "910b")
    text = run(capsys, *mesh, "--batch", "2048", "--context", "100000")
    for words in (
        "DeepseekV3ForCausalLM on Mesh(dp=4, tp=16): 64 ranks, bfloat16, Ascend 910B",
        "note: quantization_config (fp8) is not counted",
        "of which",
        "DOES NOT FIT in 57.6 GB",
        "prefill: 4 requests, 4,096 tokens each",
        "decode: 2048 requests, context 100,000",
        "their latency is not published, not counted",
        "psum_scatter dim=0",
        "latency            -",
        "not published",
    ):
        assert words in text, words


def test_one_device_has_no_collectives(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--model", str(qwen), "--hardware", "cpu", "--batch", "8")
    assert "no collectives" in text
    assert "the device's memory is not known" in text
    made = planned(capsys, "--model", str(qwen), "--hardware", "cpu")
    specs = decoder_specs(Subject.from_config(configs.QWEN3_06B).decoder)
    assert made["memory"]["parameters"] == nbytes(specs)
    assert (made["memory"]["parameters_copied"], made["memory"]["copied"]) == (0, [])
    assert (made["memory"]["fits"], made["memory"]["largest_context"]) == (None, None)
    assert made["decode"]["collectives"] == []


def test_without_a_link_the_floor_says_what_it_lacks(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", str(qwen), "--mesh", "tp=2", "--hardware", "cpu")
    assert "(without communication: no figure)" in run(capsys, *args)
    assert planned(capsys, *args)["decode"]["seconds"]["communication"] is None
    made = planned(capsys, *args, "--set", "link_bandwidth=1e9", "--set", "latency=1e-4")
    count = sum(c["count"] for c in made["decode"]["collectives"])
    assert made["decode"]["seconds"]["communication"] > count * 1e-4
    assert made["hardware"]["link_bandwidth"] == {"value": 1e9, "source": "given"}


def test_rules_on_the_command_line_replace_those_of_the_preset(
    deepseek: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", str(deepseek), "--mesh", "dp=4,tp=16")
    rules = ("--rule", "experts=dp,tp", "--rule", "expert_mlp=", "--prefill-rule", "moe_tokens=")
    made = planned(capsys, *args, *rules, "--decode-rule", "moe_tokens=")
    assert made["rules"] == planned(capsys, *args, "--ep")["rules"]
    bare = planned(capsys, *args, "--no-preset", "--rule", "mlp=tp")
    assert bare["rules"]["decode"] == {"mlp": ["tp"]}


def test_prefill_and_decode_rules_differ_where_the_mesh_says_so(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", str(qwen), "--mesh", "pcp=2,tp=2,dcp=2", "--sp")
    text = run(capsys, *args)
    assert "rules of prefill: " in text
    assert "rules of decode:  " in text
    made = planned(capsys, *args)
    assert made["rules"]["prefill"]["tokens"] == ["pcp"]
    assert "tokens" not in made["rules"]["decode"]
    assert made["rules"]["decode"]["page_tokens"] == ["pcp", "dcp"]
    assert {c["op"] for c in made["decode"]["collectives"]} >= {"all_gather", "all_to_all"}


def test_stages_hold_a_part_each_and_work_in_turn(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = planned(capsys, "--model", str(qwen))
    made = planned(capsys, "--model", str(qwen), "--mesh", "pp=3")
    assert "memory of a rank of stage" in run(capsys, "--model", str(qwen), "--mesh", "pp=3")
    assert made["decode"]["flops"] == pytest.approx(alone["decode"]["flops"])
    # The tied embedding is read whole by the last stage, and for a token's row by the first.
    assert made["decode"]["bytes"]["weights"] == alone["decode"]["bytes"]["weights"] + 1024 * 2
    assert made["memory"]["parameters"] < 0.6 * alone["memory"]["parameters"]
    moves = [c for c in made["decode"]["collectives"] if c["op"] == "ppermute"]
    assert [c["count"] for c in moves] == [1, 1]


def test_a_sweep(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", str(qwen), "--sweep", "4", "--hardware", "910b", "--context", "1024")
    text = run(capsys, *args)
    assert "Qwen3ForCausalLM on 4 devices, Ascend 910B" in text
    found = planned(capsys, *args)
    assert found["devices"] == 4
    assert found["decode"][0]["requests"] >= 1
    labels = text[text.index("decode") : text.index("prefill")]
    assert labels.count(" ms ") == len(found["decode"])
    assert "not published, so not counted" in run(capsys, *args[:-3], "cpu", "--prompt", "256")


def test_the_function_behind_the_command() -> None:
    subject, setting = Subject.from_config(configs.QWEN3_8B), Setting(find("h200"))
    preset = presets.for_mesh(8, Mesh(dp=2, tp=4))
    made = plan(subject, preset, setting, batch=5, context=512, prompts=2, prompt=100)
    assert (made.decode.requests, made.decode.load.requests) == (6, 3)  # filled up to two groups
    assert made.fits
    assert data(made)["memory"]["used"] == made.used_bytes
    with pytest.raises(ValueError, match="at least one request"):
        plan(subject, preset, setting, batch=0, context=512, prompts=2, prompt=100)
    with pytest.raises(ValueError, match=r"utilisation 1\.5"):
        Setting(find("h200"), utilisation=1.5)
    wrong = preset._replace(decode=Rules(heads="tp"))
    with pytest.raises(ValueError, match="would lie as"):
        plan(subject, wrong, setting, batch=1, context=512, prompts=1, prompt=100)


BAD = {
    "no file": (["--model", "nowhere"], "nowhere: no such folder"),
    "axis": (["--mesh", "tq=2"], "no preset for axis 'tq'"),
    "unreadable mesh": (["--mesh", "tp2"], "can't read 'tp2'"),
    "rule": (["--rule", "experts"], "can't read the rule 'experts'"),
    "rule name": (["--rule", "expertz=tp", "--mesh", "tp=2"], "did you mean 'experts'"),
    "used twice": (["--rule", "experts=tp", "--mesh", "tp=2"], "mesh axis 'tp' is used twice"),
    "uneven": (["--mesh", "tp=3"], "does not divide into 3 even parts"),
    "page size": (["--mesh", "dcp=3", "--page-size", "16"], "page_size 16 must be a multiple of 3"),
    "figure": (["--set", "memory=lots"], "can't read the figure 'memory=lots'"),
    "figure name": (["--set", "ram=1"], "hardware has no figure 'ram'"),
    "hardware": (["--hardware", "tpu"], "invalid choice"),
    "batch": (["--batch", "-1"], "at least one request"),
    "sweep": (["--sweep", "0"], "a sweep over 0 devices"),
    "utilisation": (["--utilisation", "0"], "utilisation 0.0 must be above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_two(
    name: str, deepseek: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, message = BAD[name]
    model = [] if "--model" in args else ["--model", str(deepseek)]
    assert main(["plan", *model, *args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err
