"""The latent cache and the cache of indexer keys: sizes, layouts, writes, reads."""

import dataclasses
import math

import pytest
import torch

from funcinfer.kvcache.latent import (
    IndexKeys,
    LatentKV,
    gather_latents,
    index_keys_specs,
    latent_kv_specs,
    write_index_keys,
    write_latents,
)
from funcinfer.sharding import Mesh, P, Rules
from funcinfer.spec import empty, init, nbytes, with_dtype
from funcinfer.tree import tree_leaves

PAGES, PAGE, C, E = 5, 3, 7, 2


def caches() -> LatentKV:
    specs = with_dtype(latent_kv_specs(PAGES, PAGE, kv_lora=C, rope_dim=E), torch.float64)
    return empty(specs, fill=math.nan)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_lora", "rope_dim"), [(512, 64), (7, 2), (256, 0)])
def test_a_token_costs_exactly_its_latent_and_rotated_part(dtype, kv_lora, rope_dim):
    specs = with_dtype(latent_kv_specs(9, 16, kv_lora=kv_lora, rope_dim=rope_dim), dtype)
    expected = 9 * 16 * (kv_lora + rope_dim) * dtype.itemsize
    assert nbytes(specs) == expected
    assert sum(x.numel() * x.element_size() for x in tree_leaves(init(specs))) == expected


def test_a_deepseek_v3_token_costs_1152_bytes():
    assert nbytes(latent_kv_specs(1, 1, kv_lora=512, rope_dim=64)) == 1152


def test_an_index_key_costs_its_width():
    assert nbytes(index_keys_specs(9, 16, head_dim=128)) == 9 * 16 * 128 * 2


def test_tensor_parallelism_holds_copies_and_says_so():
    specs = latent_kv_specs(8, 4, kv_lora=6, rope_dim=2)
    rules = Rules(heads="tp", o_heads="tp")
    assert all(spec == P(None, None, None) for spec in tree_leaves(rules.specs(specs), is_p))
    table = rules.explain(specs, Mesh(tp=4))
    row = next(line for line in table.splitlines() if line.startswith("ckv"))
    assert "4" in row.split() and str(8 * 4 * 6 * 2) in row


def test_page_tokens_deal_the_latents_and_leave_index_keys_whole():
    rules, mesh = Rules(page_tokens="dcp", pages="dp"), Mesh(dp=2, dcp=2)
    latents = latent_kv_specs(8, 4, kv_lora=6, rope_dim=2)
    assert mesh.local_shape(latents.ckv.shape, rules.spec(*latents.ckv.axes)) == (4, 2, 6)
    assert mesh.local_shape(latents.kpe.shape, rules.spec(*latents.kpe.axes)) == (4, 2, 2)
    keys = index_keys_specs(8, 4, head_dim=6)
    assert mesh.local_shape(keys.k.shape, rules.spec(*keys.k.axes)) == (4, 4, 6)


def is_p(x: object) -> bool:
    return isinstance(x, P)


def test_a_write_touches_exactly_its_slots_and_the_scratch_row():
    slots = torch.tensor([4, 0, 14, 0, 9], dtype=torch.int32)
    ckv, kpe = rows(5, C), rows(5, E)
    ckv[1] = kpe[3] = math.nan  # padding
    cache = write_latents(caches(), ckv, kpe, slots)
    for pages, new in ((cache.ckv, ckv), (cache.kpe, kpe)):
        flat = pages.flatten(0, 1)
        for slot in range(PAGES * PAGE):
            if slot == 0:
                assert (flat[slot] == 0).all()
            elif slot in (4, 14, 9):
                assert torch.equal(flat[slot], new[slots.tolist().index(slot)])
            else:
                assert flat[slot].isnan().all()


def test_the_cache_given_is_donated():
    cache = caches()
    new = write_latents(cache, rows(1, C), rows(1, E), torch.tensor([4]))
    assert new.ckv.data_ptr() == cache.ckv.data_ptr()
    assert new.kpe.data_ptr() == cache.kpe.data_ptr()


def test_rows_take_the_dtype_of_the_cache():
    specs = with_dtype(latent_kv_specs(PAGES, PAGE, kv_lora=C, rope_dim=E), torch.bfloat16)
    cache = write_latents(empty(specs), rows(1, C), rows(1, E), torch.tensor([4]))
    assert torch.equal(cache.ckv[1, 1], rows(1, C)[0].bfloat16())


def test_a_latent_without_a_rotated_part():
    cache = empty(latent_kv_specs(PAGES, PAGE, kv_lora=C, rope_dim=0), fill=math.nan)
    cache = write_latents(cache, rows(1, C), rows(1, 0), torch.tensor([4]))
    assert torch.equal(cache.ckv[1, 1], rows(1, C)[0].bfloat16())
    ckv, kpe = gather_latents(cache, torch.tensor([[1, 2]]), torch.tensor([2]))
    assert (ckv.shape, kpe.shape) == ((1, 2 * PAGE, C), (1, 2 * PAGE, 0))


def test_gather_gives_requests_in_order_and_zeros_beyond_their_length():
    table, lengths = [[3, 1], [2, 0], [0, 0]], [5, 2, 0]
    slots = [3 * 3, 3 * 3 + 1, 3 * 3 + 2, 1 * 3, 1 * 3 + 1, 2 * 3, 2 * 3 + 1]
    ckv, kpe = rows(7, C), rows(7, E)
    cache = write_latents(caches(), ckv, kpe, torch.tensor(slots))
    got = gather_latents(cache, torch.tensor(table, dtype=torch.int32), torch.tensor(lengths))
    for values, new in zip(got, (ckv, kpe), strict=True):
        assert torch.equal(values[0, :5], new[:5])
        assert torch.equal(values[1, :2], new[5:])
        assert (values[0, 5:] == 0).all() and (values[1, 2:] == 0).all() and (values[2] == 0).all()


def test_what_a_request_holds_is_not_hidden():
    cache = write_latents(caches(), rows(1, C) * math.nan, rows(1, E), torch.tensor([4]))
    ckv, _ = gather_latents(cache, torch.tensor([[1]]), torch.tensor([2]))
    assert ckv[0, 1].isnan().all()


def test_index_keys_are_written_to_their_slots():
    keys = IndexKeys(torch.full((PAGES, PAGE, C), math.nan).double())
    keys = write_index_keys(keys, rows(2, C), torch.tensor([7, 0]))
    flat = keys.k.flatten(0, 1)
    assert torch.equal(flat[7], rows(2, C)[0]) and (flat[0] == 0).all()
    assert flat[[s for s in range(1, PAGES * PAGE) if s != 7]].isnan().all()


@pytest.mark.parametrize(
    ("name", "ckv", "kpe"), [("ckv", C + 1, E), ("kpe", C, E + 1), ("kpe", C, 0)]
)
def test_rows_of_another_width_are_refused(name, ckv, kpe):
    message = rf"new rows of {name} have shape \(1, .*wanted \[tokens, {dict(ckv=C, kpe=E)[name]}\]"
    with pytest.raises(ValueError, match=message):
        write_latents(caches(), rows(1, ckv), rows(1, kpe), torch.tensor([4]))


def test_keys_of_another_width_are_refused():
    keys = IndexKeys(torch.zeros(PAGES, PAGE, C))
    with pytest.raises(
        ValueError, match=r"new rows of k have shape \(1, 8\).*wanted \[tokens, 7\]"
    ):
        write_index_keys(keys, rows(1, C + 1), torch.tensor([4]))


def test_caches_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        caches().ckv = torch.zeros(1)  # type: ignore[misc]
