"""Whatever is wrong with a folder is an error that names file and tensor, before a leaf is made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funcinfer.checkpoint import Either, NameMap, Stored, load_params, read_entries
from funcinfer.checkpoint.files import Reader
from funcinfer.spec import ParamSpec
from tests.checkpoint.tiny import describe

INDEX = "model.safetensors.index.json"
VICTIM = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here gets as far as reading a tensor."""

    def read(self: Reader, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Reader, "read", read)


@pytest.fixture
def sharded(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    """A tiny llama in several files."""
    tiny_model("llama")[1].save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


@pytest.fixture
def described(tiny_model: Callable[..., Any]) -> tuple[Any, NameMap]:
    """Its specs and name map."""
    return describe(tiny_model("llama")[0])


def shard_of(folder: Path, name: str = VICTIM) -> Path:
    """The file that holds a tensor."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Change the weight map of a folder."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def another(folder: Path) -> Path:
    """A file that does not hold the victim."""
    return next(f for f in sorted(folder.glob("*.safetensors")) if f != shard_of(folder))


def delete_shard(folder: Path) -> None:
    shard_of(folder).unlink()


def cut_one_byte(folder: Path) -> None:
    file = shard_of(folder, "model.norm.weight")
    file.write_bytes(file.read_bytes()[:-1])


def cut_to_seven_bytes(folder: Path) -> None:
    file = shard_of(folder)
    file.write_bytes(file.read_bytes()[:7])


def add_one_byte(folder: Path) -> None:
    file = shard_of(folder)
    file.write_bytes(file.read_bytes() + b"\0")


def spoil_header(folder: Path) -> None:
    file = shard_of(folder)
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"[" + data[9:])


def drop_from_shard(folder: Path) -> None:
    rewrite(shard_of(folder), lambda tensors: tensors.pop(VICTIM))


def drop_everywhere(folder: Path) -> None:
    drop_from_shard(folder)
    edit_index(folder, lambda names: names.pop(VICTIM))


def drop_from_index(folder: Path) -> None:
    edit_index(folder, lambda names: names.pop(VICTIM))


def add_to_shard(folder: Path) -> None:
    rewrite(another(folder), lambda tensors: tensors.update(surplus=torch.ones(3)))


def add_everywhere(folder: Path) -> None:
    add_to_shard(folder)
    edit_index(folder, lambda names: names.update(surplus=another(folder).name))


def repeat_in_another(folder: Path) -> None:
    rewrite(another(folder), lambda tensors: tensors.update({VICTIM: torch.ones(3)}))


def reshape(folder: Path) -> None:
    rewrite(shard_of(folder), lambda tensors: tensors.update({VICTIM: torch.ones(95, 64)}))


def make_integer(folder: Path) -> None:
    rewrite(shard_of(folder), lambda t: t.update({VICTIM: torch.ones(96, 64, dtype=torch.int8)}))


def quantise(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[VICTIM] = tensors[VICTIM].to(torch.float8_e4m3fn)
        tensors[f"{VICTIM}_scale_inv"] = torch.ones(1, 1)

    rewrite(shard_of(folder), change)
    edit_index(folder, lambda names: names.update({f"{VICTIM}_scale_inv": names[VICTIM]}))


def drop_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def spoil_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text[:-2])


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def name_twice_in_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')


def point_index_outside(folder: Path) -> None:
    edit_index(folder, lambda names: names.update({VICTIM: "../other.safetensors"}))


def add_shard(folder: Path) -> None:
    save_file({"surplus": torch.ones(3)}, folder / "model-00009-of-00009.safetensors")


def leave_only_pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not opened")


def leave_nothing(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def rename_shards(folder: Path) -> None:
    (folder / INDEX).unlink()
    for i, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(folder / f"part{i}.safetensors")


UP = r"'model\.layers\.1\.mlp\.up_proj\.weight'"
FILE = r"model-0000\d-of-0000\d\.safetensors"
CORRUPTIONS: dict[Callable[[Path], None], tuple[type[Exception], str]] = {
    delete_shard: (FileNotFoundError, rf"missing: '{FILE}'; one would hold tensor 'model\.layers"),
    cut_one_byte: (ValueError, rf"{FILE}: truncated: .* not whole: 'model\.norm\.weight'"),
    cut_to_seven_bytes: (ValueError, rf"{FILE}: has 7 bytes"),
    add_one_byte: (ValueError, rf"{FILE}: has \d+ bytes, 1 more than its header"),
    spoil_header: (ValueError, rf"{FILE}: its header can't be read"),
    drop_from_shard: (ValueError, rf"tensor {UP}: said to be in {FILE}"),
    drop_everywhere: (ValueError, rf"missing tensors \(1\):\s+tensor {UP} of leaf 'layers\.1\.mlp"),
    drop_from_index: (ValueError, rf"index\.json does not name \(1\):\s+tensor {UP} of {FILE}"),
    add_to_shard: (ValueError, rf"does not name \(1\):\s+tensor 'surplus' of {FILE}"),
    add_everywhere: (ValueError, rf"nothing reads \(1\):\s+'surplus' of {FILE}"),
    repeat_in_another: (ValueError, rf"tensor {UP}: in {FILE} and in {FILE}"),
    reshape: (
        ValueError,
        rf"tensor {UP} of {FILE}: \(95, 64\), leaf 'layers\.1\.mlp\.gate_up' needs \(96, 64\)",
    ),
    make_integer: (ValueError, rf"another dtype \(1\):\s+tensor {UP} of {FILE}: I8, leaf"),
    quantise: (ValueError, rf"not supported yet \(1\):\s+tensor {UP} of {FILE} has dtype F8_E4M3"),
    drop_index: (FileNotFoundError, rf"neither model\.safetensors nor .* only '{FILE}'"),
    spoil_index: (ValueError, r"index\.json: not valid JSON"),
    empty_index: (ValueError, r"index\.json: needs a 'weight_map'"),
    name_twice_in_index: (ValueError, r"index\.json: .*the key 'a' is there twice"),
    point_index_outside: (ValueError, rf"places tensor {UP} in '\.\./other\.safetensors'"),
    add_shard: (ValueError, r"'model-00009-of-00009\.safetensors' would not be read"),
    leave_only_pickle: (ValueError, r"pickle files \('pytorch_model\.bin'\).* never read"),
    leave_nothing: (FileNotFoundError, r"no model\.safetensors and no"),
    rename_shards: (FileNotFoundError, r"only 'part0\.safetensors'"),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_a_broken_folder_is_refused(
    corrupt: Callable[[Path], None], sharded: Path, described: tuple[Any, NameMap]
) -> None:
    error, message = CORRUPTIONS[corrupt]
    with pytest.raises(AssertionError, match="was read"):
        load_params(sharded, *described)
    corrupt(sharded)
    with pytest.raises(error, match=message) as caught:
        load_params(sharded, *described)
    assert str(sharded) in str(caught.value)


def test_no_folder_and_a_file_for_a_folder(sharded: Path, described: tuple[Any, NameMap]) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load_params(sharded / "nowhere", *described)
    with pytest.raises(NotADirectoryError, match="is a file"):
        load_params(sharded / INDEX, *described)


def test_all_problems_come_together_and_are_counted(
    sharded: Path, described: tuple[Any, NameMap]
) -> None:
    rewrite(shard_of(sharded), lambda tensors: tensors.update({VICTIM: torch.ones(96, 63)}))
    specs, names = described
    fewer = {path: s for path, s in names.sources.items() if not path.startswith("layers.0")}
    more = {f"extra{i}": Stored(f"extra{i}", (2,)) for i in range(7)}
    specs = {key: value for key, value in specs.items() if key != "layers"} | {
        "layers": {"1": specs["layers"]["1"]},
        **{path: ParamSpec((2,), (None,)) for path in more},
    }
    with pytest.raises(ValueError) as caught:
        load_params(sharded, specs, NameMap(fewer | more))
    text = str(caught.value)
    assert "missing tensors (7):" in text and "and 2 more" in text and "'extra4'" in text
    assert "tensors that nothing reads (9):" in text and "tensors of another shape (1):" in text


def test_specs_and_name_map_must_fit(sharded: Path, described: tuple[Any, NameMap]) -> None:
    specs, names = described
    without = {path: s for path, s in names.sources.items() if path != "norm"}
    with pytest.raises(ValueError, match=r"leaves without a source \(1\):\s+'norm'"):
        load_params(sharded, specs, NameMap(without))
    with pytest.raises(ValueError, match=r"sources without a leaf \(1\):\s+'surplus'"):
        load_params(sharded, specs, NameMap({**names.sources, "surplus": Stored("s", (2,))}))
    with pytest.raises(ValueError, match=r"copies of no leaf \(1\):\s+tensor 'x' of 'heaad'"):
        load_params(sharded, specs, NameMap(names.sources, copies={"x": "heaad"}))
    wrong = {**names.sources, "norm": Stored("model.norm.weight", ((8, 8),))}
    with pytest.raises(ValueError, match=r"leaf 'norm' has \(64,\), its source \(8, 8\)"):
        load_params(sharded, specs, NameMap(wrong))


def test_a_tensor_that_is_read_in_part_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    specs = {"w": ParamSpec((2, 3), (None, None))}
    with pytest.raises(ValueError, match=r"read in part \(1\):\s+tensor 'w': 6 of 15 elements"):
        load_params(tmp_path, specs, NameMap({"w": Stored("w", (5, 3))[1:3]}))


def test_two_alternatives_in_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    names = NameMap({"w": Either((Stored("a", (3,)), Stored("b", (3,))))})
    with pytest.raises(ValueError, match=r"leaf 'w': the checkpoint holds both 'a' and 'b'"):
        load_params(tmp_path, {"w": ParamSpec((3,), (None,))}, names)


def test_a_copy_of_another_shape_and_integers(tmp_path: Path) -> None:
    table = torch.ones(3, dtype=torch.int64)
    save_file({"a": torch.ones(3), "b": torch.ones(4), "t": table}, tmp_path / "model.safetensors")
    sources = {"a": Stored("a", (3,)), "t": Stored("t", (3,))}
    specs = {"a": ParamSpec((3,), (None,)), "t": ParamSpec((3,), (None,), torch.int64)}
    with pytest.raises(ValueError, match=r"tensor 'b' of model\.safetensors is F32 \(4,\), 'a' is"):
        load_params(tmp_path, specs, NameMap(sources, copies={"b": "a"}))
    specs["t"] = ParamSpec((3,), (None,), torch.int32)
    with pytest.raises(ValueError, match=r"tensor 't' of model\.safetensors: I64, leaf 't' needs"):
        load_params(tmp_path, specs, NameMap(sources, ignored=("b",)))


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": entry([3], 0, 12), "b": entry([3], 8, 20)}, "'b' begins at byte 8 .* ends at 12"),
        ({"a": entry([3], 0, 12), "b": entry([2], 16, 24)}, "'b' begins at byte 16 .* ends at 12"),
        ({"a": entry([3], 4, 16)}, "'a' begins at byte 4 .* ends at 0"),
        ({"a": entry([3], 0, 16)}, r"'a', F32 of shape \[3\], has 16 bytes, not 12"),
        ({"a": entry([2, 2], 0, 16, "BF16")}, r"'a', BF16 of shape \[2, 2\], has 16 bytes, not 8"),
        ({"a": entry([3], 12, 0, "F8_E5M2")}, "'a', F8_E5M2 of shape"),
        ({"a": entry([-3], 0, 12)}, "'a' is described by"),
        ({"a": entry([True], 0, 4)}, "'a' is described by"),
        ({"a": {"dtype": "F32", "shape": [3]}}, "header can't be read: .*data_offsets"),
        ({"a": [3]}, "header can't be read"),
        ([1], "header can't be read"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tensors: Any, message: str, tmp_path: Path
) -> None:
    header = json.dumps(tensors).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(24)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        read_entries(tmp_path)


def test_any_spoilt_byte_of_a_header_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"gate": torch.ones(3, 2), "up": torch.ones(3)}, file)
    good = file.read_bytes()
    assert set(read_entries(tmp_path)) == {"gate", "up"}
    specs = {"gate": ParamSpec((3, 2), (None, None)), "up": ParamSpec((3,), (None,))}
    names = NameMap({"gate": Stored("gate", (3, 2)), "up": Stored("up", (3,))})
    length = int.from_bytes(good[:8], "little")
    for i in range(8 + length):
        replacements = [0xFF, good[i] ^ 0x01] if good[i : i + 1].strip() and i >= 8 else [0xFF]
        for byte in replacements:
            file.write_bytes(good[:i] + bytes([byte]) + good[i + 1 :])
            with pytest.raises(ValueError, match=r"model\.safetensors"):
                load_params(tmp_path, specs, names)
