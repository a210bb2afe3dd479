"""The simulated device itself: torch_npu on stand-ins, memory, dispatch, and what it refuses."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.npu.emulators.rules import EMULATORS, Unsupported, emulator
from tests.npu.simulator import Disagreement, Simulation

rms_norm = torch.ops.npu.npu_rms_norm


def test_the_real_torch_npu_sees_one_device():
    assert torch.npu.is_available() and torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B2"
    assert torch.empty(3, device="npu").device == torch.device("npu:0")


def test_tier_1_fake_tensors_know_the_shapes():
    with FakeTensorMode():
        x = torch.empty(3, 5, 8, device="npu", dtype=torch.bfloat16)
        y, rstd = rms_norm(x, torch.empty(8, device="npu", dtype=torch.bfloat16))
    assert (y.shape, y.dtype, str(y.device)) == ((3, 5, 8), torch.bfloat16, "npu:0")
    assert (rstd.shape, rstd.dtype) == ((3, 5, 1), torch.float32)


def test_tier_1_refuses_a_keyword_that_the_op_does_not_have():
    x = torch.empty(3, 8, device="meta")
    with pytest.raises(RuntimeError, match="eps"):
        rms_norm(x, x[0], eps=1e-6)


def test_tier_2_launches_the_kernel_and_computes_nothing(launched: Callable[[], list[str]]):
    x = torch.ones(3, 8).npu()
    launched()
    y, _ = rms_norm(x, x[0])
    assert launched() == ["aclnnRmsNorm"]
    assert y.shape == (3, 8)


def test_tier_2_runs_the_checks_of_the_host_code():
    """The meta kernel of this op takes any mode; the C++ doesn't."""
    x = torch.ones(2, 4, 2, 64)
    assert torch.ops.npu.npu_rotary_mul(x.to("meta"), x.to("meta"), x.to("meta"), "foo").is_meta
    with pytest.raises(RuntimeError, match="rotary_mode"):
        torch.ops.npu.npu_rotary_mul(x.npu(), x.npu(), x.npu(), "foo")


def test_arithmetic_views_and_writes_share_memory(npu: Simulation):
    x = torch.arange(12.0).view(3, 4).npu()
    assert torch.equal((x @ x.T + 1).cpu(), x.cpu() @ x.cpu().T + 1)
    x[:, 1:3].mul_(0)
    x[0].copy_(torch.ones(4))
    assert x.cpu().tolist() == [[1, 1, 1, 1], [4, 0, 0, 7], [8, 0, 0, 11]]
    y = torch.zeros(3, device="npu")
    torch.add(x[:, 0], 1.0, out=y)
    assert y.device.type == "npu" and y.cpu().tolist() == [2, 5, 9]
    assert x.cpu().device.type == "cpu" and x.to(torch.bfloat16).device.type == "npu"
    assert torch.full((2,), 3, device="npu").cpu().tolist() == [3, 3]


def test_gradients_of_real_autograd_functions(npu: Simulation):
    torch.manual_seed(0)
    x, w = torch.randn(3, 7), torch.randn(7)
    cpu = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    sim = [x.npu().requires_grad_(), w.npu().requires_grad_()]
    torch.nn.functional.rms_norm(cpu[0], (7,), cpu[1], 1e-6).square().sum().backward()
    y = rms_norm(*sim)[0]
    assert "NpuRmsNorm" in type(y.grad_fn).__name__
    y.square().sum().backward()
    assert npu.calls == ["npu_rms_norm", "npu_rms_norm_backward"]
    for a, b in zip(sim, cpu, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-5)


def test_memory_that_nobody_wrote_is_poisoned(npu: Simulation):
    assert torch.empty(4, device="npu").isnan().all()
    x = torch.ones(4, device="npu")
    assert torch.empty_like(x).isnan().all() and x.new_empty(2).isnan().all()
    assert (torch.empty(4, dtype=torch.int32, device="npu") < -(2**29)).all()


def test_an_op_without_emulator_and_an_argument_it_does_not_know_are_refused(npu: Simulation):
    x = torch.ones(2, 4, 2, 64, device="npu")
    with pytest.raises(Unsupported, match="no emulator of npu_geglu"):
        torch.ops.npu.npu_geglu(x)
    with pytest.raises(Unsupported, match="does not know rotate="):
        torch.ops.npu.npu_rotary_mul(x, x, x, "half", torch.eye(64).npu())


@pytest.mark.parametrize("fault", ("shape", "dtype"))
def test_an_emulator_that_differs_from_the_host_code_is_caught(
    npu: Simulation, fault: str, monkeypatch: pytest.MonkeyPatch
):
    def npu_rms_norm(input: Any, gamma: Any, epsilon: float) -> Any:
        y, rstd = input.clone(), torch.ones(len(input), 1)
        return (y[:1], rstd) if fault == "shape" else (y, rstd.double())

    monkeypatch.setitem(EMULATORS, "npu_rms_norm", npu_rms_norm)
    with pytest.raises(Disagreement, match="C\\+\\+"):
        rms_norm(torch.ones(3, 8).npu(), torch.ones(8).npu())


def test_defaults_come_from_the_schema_of_the_wheel(npu: Simulation, monkeypatch: Any):
    monkeypatch.setitem(EMULATORS, "npu_rms_norm", None)
    seen = []

    @emulator
    def npu_rms_norm(input: Any, gamma: Any, epsilon: float) -> Any:
        seen.append(epsilon)
        return input, torch.ones(len(input), 1)

    rms_norm(torch.ones(3, 8).npu(), torch.ones(8).npu())
    rms_norm(torch.ones(3, 8).npu(), torch.ones(8).npu(), 0.5)
    assert seen == [1e-6, 0.5]


@pytest.mark.parametrize("name", sorted(EMULATORS))
def test_emulators_name_arguments_of_the_schema_and_have_no_defaults(name: str):
    known = {a.name for a in getattr(torch.ops.npu, name).default._schema.arguments}
    parameters = inspect.signature(EMULATORS[name]).parameters.values()
    assert {p.name for p in parameters} <= known
    assert all(p.default is inspect.Parameter.empty for p in parameters)
