"""The emulator of all that comes before latent attention, against a loop over tokens and heads."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from tests.npu.emulators.rules import Unsupported
from tests.npu.simulator import Simulation
from tests.npu.test_emulators import BF16, call, normal

T, HE, HCQ, N, D, HCKV, DR, SIZE = 3, 1024, 1536, 2, 128, 512, 64, 16
SLOTS = [2 * SIZE + 1, 7, 3 * SIZE - 1]
EPS_Q, EPS_KV = 0.25, 0.125


def arguments() -> dict[str, Tensor]:
    angles = normal(T, DR // 2, seed=9) * 3
    tables = (torch.cat([t, t], -1).to(BF16) for t in (angles.sin(), angles.cos()))
    sin, cos = tables
    return dict(
        token_x=normal(T, HE, dtype=BF16),
        weight_dq=normal(HE, HCQ, seed=1, dtype=BF16) / 32,
        weight_uq_qr=normal(HCQ, N * (D + DR), seed=2, dtype=BF16) / 32,
        weight_uk=normal(N, D, HCKV, seed=3, dtype=BF16) / 8,
        weight_dkv_kr=normal(HE, HCKV + DR, seed=4, dtype=BF16) / 32,
        rmsnorm_gamma_cq=normal(HCQ, seed=5, dtype=BF16),
        rmsnorm_gamma_ckv=normal(HCKV, seed=6, dtype=BF16),
        rope_sin=sin,
        rope_cos=cos,
        kv_cache=torch.full((4, SIZE, 1, HCKV), 8.0, dtype=BF16),
        kr_cache=torch.full((4, SIZE, 1, DR), 8.0, dtype=BF16),
        cache_index=torch.tensor(SLOTS),
    )


def normed(row: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + eps) * gamma.double()


def turned(row: Tensor, sin: Tensor, cos: Tensor) -> list[float]:
    """Neighbours are a complex number; real parts come before imaginary ones."""
    pairs = [complex(*p) for p in row.view(-1, 2).tolist()]
    turns = [complex(c, s) for c, s in zip(cos.tolist(), sin.tolist(), strict=False)]
    out = [p * t for p, t in zip(pairs, turns, strict=False)]
    assert all(cmath.isfinite(z) for z in out)
    return [z.real for z in out] + [z.imag for z in out]


def near(found: Tensor, wanted: Tensor | list[float]) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=2**-8, atol=2**-8 * 1e-2)


def test_mla_prolog(npu: Simulation):
    a = arguments()
    on_npu = {k: v.npu() for k, v in a.items()}
    query, rope, _, latent, _ = call.npu_mla_prolog_v3(
        **on_npu,
        rmsnorm_epsilon_cq=EPS_Q,
        rmsnorm_epsilon_ckv=EPS_KV,
        query_norm_flag=True,
        qc_qr_scale=0.5,
        kc_scale=2.0,
    )
    caches = {k: on_npu[k].cpu().flatten(0, 2) for k in ("kv_cache", "kr_cache")}
    wide = {k: v.double() for k, v in a.items()}
    for t, x in enumerate(wide["token_x"]):
        tables = wide["rope_sin"][t], wide["rope_cos"][t]
        c = normed(x @ wide["weight_dq"], wide["rmsnorm_gamma_cq"], EPS_Q) * 0.5
        near(latent[t], c)
        for n in range(N):
            start = n * (D + DR)
            q = c @ wide["weight_uq_qr"][:, start : start + D + DR]
            near(query[t, n], q[:D] @ wide["weight_uk"][n])
            near(rope[t, n], turned(q[D:], *tables))
        kv = x @ wide["weight_dkv_kr"]
        near(
            caches["kv_cache"][SLOTS[t]],
            normed(kv[:HCKV], wide["rmsnorm_gamma_ckv"], EPS_KV) * 2.0,
        )
        near(caches["kr_cache"][SLOTS[t]], turned(kv[HCKV:], *tables))
    for cache in caches.values():
        rest = [i for i in range(4 * SIZE) if i not in SLOTS]
        assert (cache[rest] == 8.0).all()


@pytest.mark.parametrize(
    ("name", "bad", "rule"),
    [
        ("token_x", lambda x: x[:, :1000].contiguous(), "He 1000"),
        ("weight_uq_qr", lambda x: x[:, 1:].contiguous(), "shapes"),
        ("weight_uk", lambda x: x[:, :64].contiguous(), "D 64"),
        ("cache_index", lambda x: x.int(), "int64"),
        ("cache_index", lambda x: x + 4 * SIZE, "slots in 0"),
        ("kv_cache", lambda x: x[:, :8].contiguous(), "block size 8"),
        ("weight_dq", lambda x: x.T.contiguous().T, "strided"),
    ],
)
def test_what_the_documentation_forbids(npu: Simulation, name: str, bad, rule: str):
    a = {k: v.npu() for k, v in arguments().items()}
    a[name] = bad(a[name])
    with pytest.raises((Unsupported, RuntimeError), match=rule):
        call.npu_mla_prolog_v3(**a)
