"""Which op the rule chooses, and what the table says where it doesn't fit."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import npu, reference
from funcinfer.layers.primitives.npu_device import assume_soc, choice
from funcinfer.layers.primitives.npu_facts import FACTS
from funcinfer.layers.primitives.npu_limits import (
    FORMS,
    SOCS,
    between,
    choose,
    one_of,
    require,
    soc_of_device_name,
)

ATTENTION: dict[str, Any] = dict(
    tokens=9,
    dtype="bfloat16",
    same_dtype=True,
    heads=8,
    group=4,
    head_dim=128,
    equal_widths=True,
    widths=(128, 128, "gqa"),
    kv_width=256,
    page_size=128,
    pages=4,
    positions=512,
    spare_pages=3,
    segments=2,
)
INDEXER: dict[str, Any] = dict(
    tokens=9,
    dtype="bfloat16",
    same_dtype=True,
    gate_dtype="float32",
    heads=64,
    head_dim=128,
    page_size=128,
    topk=2048,
    lo="none",
)


def test_limits():
    even = between("n", 4, 10, step=2)
    assert [n for n in range(14) if even.holds(n)] == [4, 6, 8, 10]
    assert even.refusal({"n": 12}) == "n 12 is not a multiple of 2, 4 to 10"
    assert between("n", 1).refusal({"n": 0}) == "n 0 is not at least 1"
    assert one_of("d", "a", "b").refusal({"d": "c"}) == "d c is not one of a, b"
    assert one_of("d", "a").refusal({"d": "a"}) is None


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "ragged"),
        ({"page_size": 16}, "ragged"),
        ({"widths": (64, 64, "mha")}, "ragged"),
        ({"widths": (64, 64, "gqa")}, "masked"),
        ({"segments": 0}, "masked"),
        ({"segments": 0, "page_size": 16}, "composed"),
        ({"segments": 0, "spare_pages": -1}, "composed"),
        ({"segments": 4097}, "masked"),
        ({"page_size": 2048, "pages": 1}, "packed"),
        ({"widths": (192, 128, "mha"), "equal_widths": False, "pages": 1}, "packed"),
        ({"widths": (192, 128, "mha"), "equal_widths": False}, "composed"),
        ({"dtype": "float32"}, "composed"),
        ({"same_dtype": False}, "composed"),
        ({"group": 65}, "composed"),
    ],
)
@pytest.mark.parametrize("soc", SOCS)
def test_attention(facts: dict[str, Any], name: str, soc: str):
    assert choose("paged_attention", soc, **(ATTENTION | facts)).name == name


def test_a_soc_may_ask_for_less_or_more():
    assert choose("lightning_indexer", "ascend910b", **INDEXER).form is not None
    refused = choose("lightning_indexer", "ascend950", **INDEXER)
    assert refused.form is None
    assert "gate_dtype float32 is not one of float16, bfloat16" in str(refused)
    halves = INDEXER | dict(gate_dtype="bfloat16")
    assert choose("lightning_indexer", "ascend950", **halves).form is not None
    assert choose("lightning_indexer", "ascend950", **(halves | dict(heads=5))).form is None
    assert choose("lightning_indexer", "ascend910c", **(halves | dict(heads=5))).form is not None
    gated = dict(tokens=1, dtype="float32", same_dtype=True)
    assert "not on ascend950, only on" in str(choose("swiglu_oai", "ascend950", **gated))


def test_every_limit_matters():
    """Each fact that a form names decides it: what is given as None fits no limit."""
    for forms in FORMS.values():
        for form in forms:
            for soc in form.socs:
                limits = (*form.limits, *form.by_soc.get(soc, ()))
                facts = {limit.fact: None for limit in limits}
                numbers = dict.fromkeys(facts, -1)
                found = form.refusals(soc, numbers | {"same_dtype": False, "equal_widths": False})
                assert len(found) == len(limits)


def test_facts_are_those_that_limits_name():
    assert set(FACTS) == set(FORMS) - {"fractal"}
    assert {name for name in npu.__all__ if name != "load_torch_npu"} <= set(FORMS)


def test_names_and_signatures_are_those_of_the_reference():
    import inspect

    assert set(reference.__all__) == set(npu.__all__) - {"load_torch_npu"}
    for name in reference.__all__:
        mine, its = (inspect.signature(getattr(m, name)) for m in (npu, reference))
        assert mine == its, name


def test_a_call_takes_the_soc_that_is_assumed():
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    chosen = []
    for soc in SOCS:
        with assume_soc(soc):
            chosen.append(choice("swiglu_clamped", x, x, limit=1.0).name)
    assert chosen == ["halves", "halves", "composed"]


def test_composed_calls_are_the_reference():
    x = torch.randn(3, 4, dtype=torch.float64)
    with ops.use_backend(npu):
        assert torch.equal(ops.rms(x, eps=1e-6), reference.rms(x, eps=1e-6))


def test_socs_of_device_names():
    names = {"Ascend910B4": "ascend910b", "Ascend910_9362": "ascend910c"}
    for name, soc in {**names, "Ascend950PR_9589": "ascend950"}.items():
        assert soc_of_device_name(name) == soc
    with pytest.raises(ValueError, match="no limits are known for the device 'Ascend310P3'"):
        soc_of_device_name("Ascend310P3")


def test_messages():
    with pytest.raises(ValueError, match="unknown SoC 'a100': known are ascend910b"):
        choose("swiglu", "a100", tokens=1, dtype="float32", same_dtype=True)
    with pytest.raises(ValueError, match="fractal: npu_format_cast can't take this on ascend910b"):
        require("fractal", "cast", "ascend910b", dims=3, dtype="float32", rows=0, columns=0)


# ---- fractal weights


def test_weights_elsewhere_stay_as_they_are():
    params = {"layers": [{"wkv_a": torch.ones(3, 5)}]}
    assert (
        ops.fractal_weights(params, ["wkv_a"])["layers"][0]["wkv_a"] is params["layers"][0]["wkv_a"]
    )


# ---- device npu without torch_npu, without CANN


def test_without_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ImportError, match="needs torch_npu, which is not installed: pip install"):
        ops.find_device("npu:0")


def test_without_cann(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu.importlib, "import_module", fail)
    with pytest.raises(
        ImportError, match=r"can't be loaded: libhccl.so: .* needs the CANN toolkit"
    ):
        ops.find_device("npu")


def test_a_broken_dependency_of_torch_npu_is_not_hidden(monkeypatch):
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(npu.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        ops.find_device("npu")


# ---- the documentation


def test_the_documentation_names_each_primitive_with_its_ops():
    text = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text("utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    said: dict[str, str] = {}
    for names, op in rows:
        for name in re.findall(r"`(\w+(?:\.\w+)?)`", names) or list(said)[-1:]:
            said[name] = said.get(name, "") + op
    for primitive, forms in FORMS.items():
        for form in forms:
            assert form.op in said[primitive], f"{primitive}: {form.op}"
        if not forms:
            assert "composed" in said[primitive], primitive
