"""Checkpoints that stream: the model's, packed or not; others are refused by name."""

import json
import os
from contextlib import suppress

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedkv.errors import CheckpointError, CheckpointMismatch
from pagedkv.stream.skeleton import build
from tests.stream.models import assert_bits, in_memory, make, placed, save, stream


def rewrite(folder, change):
    """Saves a checkpoint's tensors in one file, after a change to them."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def change(name, how):
    return lambda tensors: tensors.update({name: how(tensors[name]).contiguous()})


NORM = "model.layers.1.input_layernorm.weight"
Q = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("family", "what", "named"),
    [
        ("llama", drop(NORM), f"without a tensor: {NORM}"),
        ("llama", drop("model.norm.weight"), "without a tensor: model.norm.weight"),
        ("llama", drop("lm_head.weight"), "without a tensor: lm_head.weight"),
        ("llama", add("model.layers.1.extra", 3), "without a parameter: model.layers.1.extra"),
        ("llama", add("model.layers.3.input_layernorm.weight", 32), "layers.3.input_layernorm"),
        ("llama", change(Q, lambda t: t[:-1]), rf"{Q} has shape \[31, 32\], expected \[32, 32\]"),
        ("llama", change(Q, lambda t: t.to(torch.int8)), f"{Q} is I8, expected torch.float32"),
        ("llama", change(NORM, lambda t: t.to(torch.float8_e4m3fn)), f"{NORM} is F8_E4M3"),
        ("gpt_neox", drop("embed_out.weight"), "lm_head.weight"),
        (
            "mixtral",
            drop("model.layers.0.block_sparse_moe.experts.1.w1.weight"),
            "tensors for model.layers.0.mlp.experts.gate_up_proj do not fit",
        ),
        (
            "qwen3_moe",
            change("model.layers.0.mlp.experts.1.up_proj.weight", lambda t: t.to(torch.int32)),
            r"experts.1.up_proj.weight is I32",
        ),
        ("gpt2", drop("transformer.wte.weight"), "transformer.wte.weight|lm_head.weight"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(family, what, named, tmp_path):
    folder = rewrite(save(make(family), tmp_path), what)
    with pytest.raises(CheckpointMismatch, match=named) as caught:
        stream(folder)
    assert str(folder) in str(caught.value)
    assert not isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_same_tensors_in_another_order_are_the_same_model(family, tmp_path):
    expected = in_memory(save(make(family), tmp_path))
    with stream(rewrite(tmp_path, lambda tensors: None)) as streamer:
        assert_bits(streamer.model, expected)


def test_tensors_the_model_ignores_are_ignored(tmp_path):
    folder = save(make("llama"), tmp_path)
    expected = in_memory(folder)
    rewrite(folder, add("model.layers.0.self_attn.rotary_emb.inv_freq", 4))
    with stream(folder) as streamer:
        assert_bits(streamer.model, expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_file_cut_while_it_is_streamed_is_a_named_error_and_heals(ahead, tmp_path):
    folder = rewrite(save(make("llama"), tmp_path), lambda tensors: None)
    file, ids = folder / "model.safetensors", torch.tensor([[5, 6, 7]])
    expected = in_memory(folder)(ids).logits
    whole, stamp = file.read_bytes(), file.stat()
    with stream(folder) as streamer:
        if ahead:
            streamer._store.reader._can_ask = False
        streamer.model(ids)
        first = streamer.model.model.layers[0]
        hook = first.register_forward_hook(lambda *_: os.truncate(file, len(whole) // 2))
        # What is read ahead may be past layer 1 by then, or past all of them.
        layer, told = (r"\d", "|was written to") if ahead else ("1", "")
        named = rf"layer ({layer}): tensor model\.layers\.\1\..*at offset" + told
        with pytest.raises(CheckpointError, match=named) as caught:
            streamer.model(ids)
        assert str(file) in str(caught.value)
        hook.remove()
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"{file}: was written to"):
                streamer.model(ids)
        with file.open("r+b") as stream_:
            stream_.write(whole)
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with suppress(CheckpointError):  # of what was read ahead before it was mended
            streamer.model(ids)
        assert torch.equal(streamer.model(ids).logits, expected)


@pytest.mark.parametrize(
    "glue",
    [
        {},
        {"embedding": False, "head": False, "head_rows": 101},
        {"embedding": False, "embedding_in_host": True},
    ],
)
def test_a_file_written_over_while_it_streams_is_noticed_in_the_next_pass(glue, tmp_path):
    folder = rewrite(save(make("llama"), tmp_path / "a"), lambda tensors: None)
    other = rewrite(save(make("llama"), tmp_path / "b"), lambda tensors: None)
    file, ids = folder / "model.safetensors", torch.tensor([[5, 6, 7]])
    assert file.stat().st_size == (other / file.name).stat().st_size
    with placed(folder, **glue) as streamer, torch.no_grad():
        streamer.model(ids)
        file.write_bytes((other / file.name).read_bytes())
        for call in (streamer.model, streamer.model.model):
            with pytest.raises(CheckpointError, match=rf"{file}: was written to"):
                call(ids)
        with pytest.raises(CheckpointError, match="was written to"):
            streamer.model.model.layers[0](torch.ones(1, 2, 32))
    with stream(folder) as streamer:
        assert_bits(streamer.model, in_memory(other))


def test_a_file_whose_author_set_the_time_of_writing_back_is_noticed(tmp_path):
    """As tools do that copy files with their times. Another link or mode is no write."""
    folder = rewrite(save(make("llama"), tmp_path / "a"), lambda tensors: None)
    other = rewrite(save(make("llama"), tmp_path / "b"), lambda tensors: None)
    file, ids = folder / "model.safetensors", torch.tensor([[5, 6, 7]])
    stamp = file.stat()
    with stream(folder) as streamer, torch.no_grad():
        expected = streamer.model(ids).logits
        file.chmod(0o600)
        os.link(file, tmp_path / "link")
        assert torch.equal(streamer.model(ids).logits, expected)
        file.write_bytes((other / file.name).read_bytes())
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with pytest.raises(CheckpointError, match=rf"{file}: was written to"):
            streamer.model(ids)


def test_a_file_written_over_within_a_pass_is_noticed_as_it_ends(tmp_path):
    folder = rewrite(save(make("llama"), tmp_path / "a"), lambda tensors: None)
    other = rewrite(save(make("llama"), tmp_path / "b"), lambda tensors: None)
    file = folder / "model.safetensors"
    content = (other / file.name).read_bytes()
    with stream(folder) as streamer:
        first = streamer.model.model.layers[0]
        first.register_forward_hook(lambda *_: file.write_bytes(content) and None)
        with pytest.raises(CheckpointError, match="was written to"):
            streamer.model(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("how", [os.replace, lambda new, old: os.remove(old)])
def test_a_file_replaced_or_deleted_as_a_whole_streams_on(how, tmp_path):
    folder = rewrite(save(make("llama"), tmp_path / "a"), lambda tensors: None)
    other = rewrite(save(make("llama"), tmp_path / "b"), lambda tensors: None)
    expected, name = in_memory(folder), "model.safetensors"
    with stream(folder) as streamer:
        how(other / name, folder / name)
        assert_bits(streamer.model, expected)


def moved(file):
    """Writes the tensors of a file to other places in it."""
    save_file(load_file(file), f"{file}.new", metadata={"format": "pt", "more": "x" * 1000})
    os.replace(f"{file}.new", file)


def same(file):
    file.with_suffix(".new").write_bytes(file.read_bytes())
    os.replace(file.with_suffix(".new"), file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (moved, "00002-.*was replaced while it was opened"),
        (os.unlink, "00002-.*No such file"),
        (lambda file: os.truncate(file, 100), "00002-.*the header claims"),
        (same, None),
    ],
)
def test_a_file_that_changes_while_it_is_opened_is_never_read_at_its_old_places(
    change, said, tmp_path, monkeypatch
):
    expected = in_memory(save(make("llama"), tmp_path))
    opened = len(os.listdir("/proc/self/fd"))

    def slow(*args, **kwargs):
        built = build(*args, **kwargs)
        change(sorted(tmp_path.glob("*.safetensors"))[1])
        return built

    monkeypatch.setattr("pagedkv.stream.streamer.build", slow)
    if said is None:
        with stream(tmp_path) as streamer:
            assert_bits(streamer.model, expected)
        return
    with pytest.raises(CheckpointError, match=said):
        stream(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_gguf_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match=r"GGUF weights are not read.*save_pretrained"):
            stream(path)


# ---- packed weights


def packed(folder, linear_class, mode):
    """A checkpoint with four weights of three values in a byte, and one scale a matrix."""
    model = make("llama", hidden_size=64, intermediate_size=128)
    save(model, folder)

    def pack(tensors):
        for name in [n for n in tensors if "proj" in n]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.randint(0, 255, (rows // 4, columns), dtype=torch.uint8)
            for bits in (0, 2, 4, 6):  # three of four codes are used
                tensors[name] &= ~(((tensors[name] >> bits & 3) == 3).to(torch.uint8) << bits)
            tensors[name + "_scale"] = torch.rand(1) + 0.5

    rewrite(folder, pack)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": mode,
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.compiler.set_stance("force_eager")  # it unpacks compiled, which takes a minute
def test_packed_weights_move_packed_and_compute_as_in_memory(tmp_path):
    folder = packed(tmp_path, "bitlinear", "offline")
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for module in expected.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    tensor.data = tensor.data.clone()
    with stream(folder, resident_layers=[0]) as streamer:
        weight = streamer.model.model.layers[1].mlp.up_proj.weight
        assert weight.dtype == torch.uint8
        assert weight.is_meta
        assert_bits(streamer.model, expected, max_new_tokens=2)
        passes, read = streamer.stats().passes, streamer.stats().bytes_read
    weights = 4 * 64 * 64 // 4 - 2 * 64 * 32 // 4 + 3 * 64 * 128 // 4
    assert read == passes * 2 * (weights + 7 * 4 + 2 * 64 * 4)


@pytest.mark.parametrize(
    "how", [lambda t: t.float(), lambda t: t[:-1], lambda t: t.to(torch.int32)]
)
def test_packed_weights_of_another_form_are_refused(how, tmp_path):
    folder = packed(tmp_path, "bitlinear", "offline")
    rewrite(folder, change(Q, how))
    with pytest.raises(CheckpointMismatch, match=Q):
        stream(folder)


@pytest.mark.parametrize("layers", [10**6, 10**15])
@pytest.mark.parametrize("budget", [{}, {"device_memory": "1 GiB"}])
def test_layers_that_are_only_said_are_refused_before_one_is_made(layers, budget, tmp_path):
    folder = save(make("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with pytest.raises(CheckpointError, match=f"num_hidden_layers: expected .*got {layers}"):
        stream(folder, **budget)
