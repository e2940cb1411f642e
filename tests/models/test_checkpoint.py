"""Where tensors lie, read from headers: right ranges, or an error that names file and tensor."""

import json
import os
import random

import pytest

from pagedkv.errors import CheckpointError
from pagedkv.models.checkpoint import Checkpoint
from tests.effort import examples, sampled


def write(file, tensors, data=None, **changes):
    """A safetensors file: name -> (dtype, shape, bytes)."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        header[name] |= changes.get(name, {})
        at += len(content)
    text = json.dumps(header).encode()
    body = b"".join(content for _, _, content in tensors.values()) if data is None else data
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return file


TENSORS = {
    "a.weight": ("F32", [2, 3], bytes(range(24))),
    "b.packed": ("F4", [5, 2], b"fives"),
    "c.empty": ("BF16", [0, 7], b""),
    "d.scale": ("F8_E4M3", [3], b"abc"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def sharded(folder):
    names = list(TENSORS)
    shards = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, members in shards.items():
        write(folder / file, {name: TENSORS[name] for name in members})
    places = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def content(tensor):
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return stream.read(tensor.nbytes)


def assert_right(checkpoint):
    assert {t.name: (t.dtype, list(t.shape), content(t)) for t in checkpoint.tensors.values()} == (
        TENSORS
    )
    assert checkpoint.nbytes == sum(len(data) for _, _, data in TENSORS.values())
    assert checkpoint.config == {"model_type": "llama"}


def test_one_file_is_read_where_it_lies(folder):
    write(folder / "model.safetensors", TENSORS)
    assert_right(Checkpoint.open(folder))


def test_shards_are_found_through_the_index(sharded):
    assert_right(Checkpoint.open(str(sharded)))


def test_shards_without_an_index_are_refused_as_transformers_refuses_them(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"or shards with model\.safetensors\.index\.json"):
        Checkpoint.open(sharded)


def test_other_files_beside_the_whole_model_are_left_alone(folder):
    write(folder / "model.safetensors", TENSORS)
    write(folder / "adapter.safetensors", {"a.weight": ("U8", [1], b"x")})
    assert_right(Checkpoint.open(folder))


def test_the_later_of_two_files_that_have_a_tensor_has_it(sharded):
    write(sharded / "model-0.safetensors", {"c.empty": ("U8", [1], b"x")})
    index = sharded / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | {"c.empty": "model-0.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    assert_right(Checkpoint.open(sharded))


def test_the_index_must_name_files_that_are_there_and_have_what_it_says(sharded):
    index = sharded / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for change, words in [
        ({"z": "model-2.safetensors"}, "model-2.safetensors.*says tensor z is here"),
        ({"z": "model-3.safetensors"}, "z is said to be in model-3.safetensors, which is not"),
        ({"z": "../model-2.safetensors"}, "z: expected a file of this folder"),
        ({"z": 2}, "z: expected a file of this folder"),
        ({"z": "z" * 5000}, "z is said to be in z{300}, which is not"),
    ]:
        index.write_text(json.dumps({"weight_map": places | change}))
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(sharded)
    for text in ('{"weight_map": {}}', "[]", "{", "{}"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"data_offsets": [0, 20]},
            r"a\.weight at offset \d+: its 20 bytes are not those of F32 \[2, 3\]",
        ),
        ({"data_offsets": [8, 32]}, "leaves a gap|overlaps"),
        ({"data_offsets": [10**9, 10**9 + 24]}, r"b\.packed at \d+ leaves a gap"),
        ({"data_offsets": [-24, 0]}, "expected whole numbers"),
        ({"data_offsets": [24, 0]}, "its -24 bytes"),
        ({"data_offsets": [0.0, 24.0]}, "expected whole numbers"),
        ({"data_offsets": 24}, "expected dtype, shape and data_offsets"),
        ({"shape": [2, 4]}, r"its 24 bytes are not"),
        ({"shape": [True, 6]}, "expected whole numbers"),
        ({"shape": [-2, -3]}, "expected whole numbers"),
        ({"shape": [10**4000, 6]}, "expected whole numbers"),
        ({"shape": [10**18] * 300}, "its 24 bytes are not those of F32"),
        ({"dtype": "F128"}, "expected dtype"),
        ({"dtype": ["F32"]}, "expected dtype"),
        ({"dtype": "F4", "shape": [49]}, r"its 24 bytes are not"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(folder, change, words):
    file = write(folder / "model.safetensors", TENSORS, **{"a.weight": change})
    with pytest.raises(CheckpointError, match=words) as refused:
        Checkpoint.open(folder)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "claims 0 bytes"),
        (b"\x01\x00", "the file has 2"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "the header claims"),
        ((2).to_bytes(8, "little") + b"[]", "expected a JSON object, got list"),
        ((2).to_bytes(8, "little") + b"{}tail", "the file at 14"),
        ((6).to_bytes(8, "little") + b"\xff" * 6, "expected JSON"),
        ((60_000).to_bytes(8, "little") + b"[" * 60_000, "expected JSON"),
        ((15).to_bytes(8, "little") + b'{"a":1,"a":[2]}', "stands twice"),
    ],
)
def test_a_file_that_is_none_is_refused(folder, raw, words):
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(folder)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: expected a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_no_file_of_json_is_not_read(name, sharded):
    file, size = sharded / name, 10**12
    with file.open("ab") as stream:
        stream.truncate(size)  # holes; who reads it whole runs out of memory
    with pytest.raises(CheckpointError, match=rf"{name}: expected a file of at most"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])  # without an end, and without a beginning
def test_a_configuration_that_is_no_file_is_not_read(place, folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "pipe")
    (folder / "config.json").symlink_to(place)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "kind"), [("model-Q4_K_M.gguf", "GGUF"), ("pytorch_model.bin", "pickle")]
)
def test_other_formats_are_refused_with_the_way_out(folder, name, kind):
    (folder / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=rf"{kind} .*save_pretrained"):
        Checkpoint.open(folder)
    if kind == "GGUF":
        with pytest.raises(CheckpointError, match=r"GGUF .*save_pretrained"):
            Checkpoint.open(folder / name)


@sampled
def test_a_damaged_file_gives_an_error_or_ranges_inside_of_it(folder):
    whole = write(folder / "model.safetensors", TENSORS).read_bytes()
    length = len(whole) - sum(len(data) for _, _, data in TENSORS.values())
    rng = random.Random(0)
    refused, files = 0, examples(3000)
    for _ in range(files):
        damaged = bytearray(whole)
        if rng.random() < 0.2:
            damaged = damaged[: rng.randrange(len(damaged))]
        else:
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(length)] = rng.randrange(256)
        (folder / "model.safetensors").write_bytes(damaged)
        try:
            tensors = Checkpoint.open(folder).tensors.values()
        except CheckpointError:
            refused += 1
        else:
            assert sum(t.nbytes for t in tensors) <= len(damaged)
            assert all(t.offset + t.nbytes <= len(damaged) for t in tensors)
    assert refused > 2 / 3 * files


def test_safetensors_own_files_are_read_alike(folder):
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    arrays = {f"layers.{i}.w": numpy.arange(i, i + 6, dtype="int16") for i in range(5)}
    library.save_file(arrays, folder / "model.safetensors")
    found = Checkpoint.open(folder).tensors
    assert {name: content(t) for name, t in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
