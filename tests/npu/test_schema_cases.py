"""The primitives that the back end for NPUs and its cases must have: those of the reference."""

import torch

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import npu, reference
from funcinfer.layers.primitives.npu_limits import FORMS
from tests.npu.cases import CASES, Draw


def test_every_primitive_has_a_case_and_an_answer_of_the_table():
    names = set(reference.__all__)
    assert {CASES[name](Draw(torch.bfloat16)).primitive for name in CASES} == names
    assert names <= set(FORMS)
    assert names <= set(npu.__all__)
    assert names <= set(ops.__all__)
