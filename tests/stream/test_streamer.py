import gc
import json
import logging
import shutil
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from pagedkv import BudgetExceeded, LayerStreamer, plan_memory
from pagedkv.errors import (
    CheckpointError,
    GradModeError,
    LayersNotFound,
    StreamError,
    UnsupportedModelError,
)
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.skeleton import find_layers
from pagedkv.stream import WeightStore
from pagedkv.stream.arena import HostArena
from pagedkv.stream.skeleton import UNSAID, _kept_report, build
from tests.effort import each_pair, each_value
from tests.hf.tiny import generate, prompts
from tests.stream.models import CPU, assert_bits, in_memory, make, placed, ragged, save, stream


def cold(streamer: LayerStreamer) -> LayerStreamer:
    """One whose file system cannot say what it has at hand: the reader thread works throughout."""
    streamer._store.reader._can_ask = False
    return streamer


# ---- right whatever the ring does


@pytest.mark.parametrize(
    ("ahead", "layers", "depth"), each_value([False, True], [1, 3, 4], [3, 1, 2, 5])
)
def test_layers_need_not_be_a_multiple_of_the_depth(depth, layers, ahead, tmp_path):
    folder = save(make("llama", num_hidden_layers=layers), tmp_path)
    expected = in_memory(folder)
    with placed(folder, depth=depth) as streamer:
        if ahead:
            cold(streamer)
        for _ in range(3):
            assert_bits(streamer.model, expected)
        assert (streamer.stats().cold_bytes > 0) == ahead


@pytest.mark.parametrize(
    ("ahead", "rows", "family"),
    each_value([False, True], [7, 101], ["llama", "gpt2", "cohere", "gpt_neox", "phi"]),
)
def test_embedding_and_head_may_stay_in_their_file(family, rows, ahead, tmp_path):
    folder = save(make(family), tmp_path)
    expected = in_memory(folder)
    with placed(folder, embedding=False, head=False, head_rows=rows) as streamer:
        if ahead:
            cold(streamer)
        model = streamer.model
        assert model.get_input_embeddings().weight.is_meta
        assert model.get_output_embeddings().weight.is_meta
        assert model.device == CPU
        batch = ragged()
        actual, known = generate(model, batch), generate(expected, batch)
        assert torch.equal(actual.sequences, known.sequences)
        for x, y in zip(actual.logits, known.logits, strict=True):
            if rows >= 101:  # one block is the whole
                assert torch.equal(x, y)
            # Narrower products may add in another order: 32 terms, each rounded once.
            bound = 32 * torch.finfo(torch.float32).eps * y.abs().max()
            assert (x - y).abs().max() <= bound


@pytest.mark.parametrize("held", [True, False])
def test_ids_beyond_the_vocabulary_are_named(folder, held):
    with placed(folder, embedding=False, embedding_in_host=held) as streamer:
        for wrong in (101, -1):
            with pytest.raises(IndexError, match=f"input_ids: expected ids below 101, got {wrong}"):
                streamer.model(torch.tensor([[5, wrong]]))


@pytest.mark.parametrize("held", [(), (1,), (0, 1, 2)])
def test_layers_may_be_held_in_host_memory(folder, held):
    with placed(folder, host=held) as streamer:
        assert_bits(streamer.model, in_memory(folder))
        if len(held) == 3:
            assert streamer.stats().bytes_read == 0


def test_a_head_may_be_held_in_host_memory(folder):
    with placed(folder, embedding=False, head=False, head_rows=7, head_in_host=True) as streamer:
        assert_bits(streamer.model, in_memory(folder))


def test_a_cast_checkpoint_streams_its_glue_too(folder):
    expected = in_memory(folder, dtype=torch.bfloat16)
    glue = {"embedding": False, "head": False, "head_rows": 101}
    with placed(folder, torch.bfloat16, **glue) as streamer:
        assert_bits(streamer.model, expected)


def test_a_plan_is_kept_to(tmp_path):
    model = make("llama", hidden_size=128, intermediate_size=512, vocab_size=2000)
    folder = save(model, tmp_path)
    options = {"device": "cpu", "batch": 3, "length": 64, "page_size": 4, "step_tokens": 32}
    whole = plan_memory(folder, device_memory="1GiB", **options)
    layer = whole.shape.layers[0]
    least = sum(whole.device_bytes.values()) - whole.device_bytes["KV pages"]
    seen, known = set(), in_memory(folder)
    for spare in range(-6 * layer, 2 * layer, layer // 2):
        try:
            plan = plan_memory(folder, device_memory=least + spare, **options)
        except MemoryError:
            continue
        seen.add((len(plan.resident_layers), plan.head_resident, plan.embedding_resident))
        with LayerStreamer.from_pretrained(folder, plan=plan, device="cpu") as streamer:
            meta = {n for n, p in streamer.model.named_parameters() if p.is_meta}
            layers = {int(n.split(".")[2]) for n in meta if ".layers." in n}
            assert layers == set(plan.streamed_layers)
            assert ("lm_head.weight" in meta) == (not plan.head_resident)
            assert ("model.embed_tokens.weight" in meta) == (not plan.embedding_resident)
            ids = torch.randint(2, 2000, (2, 9))
            with torch.no_grad():
                torch.testing.assert_close(streamer.model(ids).logits, known(ids).logits)
    assert len(seen) > 2, "the budgets did not make different plans"


# ---- a model like any other


def test_a_plain_call_needs_no_grad_mode_of_its_own(folder):
    ids = torch.stack(prompts(6, 6))
    with stream(folder) as streamer:
        logits = streamer.model(ids).logits
        assert not logits.requires_grad
        assert torch.equal(logits, in_memory(folder)(ids).logits)
        with pytest.raises(GradModeError, match="no_grad"):
            streamer.model.model(ids)
        with torch.no_grad():
            streamer.model.model(ids)


def test_parts_called_out_of_order_find_their_weights(folder):
    ids = torch.stack(prompts(6))
    known = in_memory(folder)
    with torch.no_grad(), cold(placed(folder, head=False, head_rows=101)) as streamer:
        for _ in range(3):
            hidden = streamer.model.model(ids).last_hidden_state  # never asks for the head
            assert torch.equal(hidden, known.model(ids).last_hidden_state)
        assert torch.equal(streamer.model(ids).logits, known(ids).logits)


def test_what_happened_is_reported(folder):
    with stream(folder, resident_layers=1) as streamer:
        generate(streamer.model, ragged(), max_new_tokens=4)
        stats = streamer.stats()
        layer = sum(p.nbytes for n, p in streamer.model.named_parameters() if ".layers.0." in n)
    assert (stats.passes, stats.tokens) == (4, 27 + 3 * 3)
    assert stats.bytes_read == 4 * 2 * layer
    assert stats.bytes_copied == 0
    assert 0 < stats.read_seconds <= stats.stall_seconds < stats.pass_seconds
    for word in ("passes", "read", "waiting", "computing", "tokens each"):
        assert word in str(stats)


def test_memory_stays_flat_over_many_steps(folder):
    ids = torch.stack(prompts(4, 4))
    with cold(stream(folder)) as streamer, torch.no_grad():
        for _ in range(50):
            streamer.model(ids)
        gc.collect()
        objects, before = len(gc.get_objects()), psutil.Process().memory_info().rss
        for _ in range(200):
            streamer.model(ids)
        grown = psutil.Process().memory_info().rss - before
        gc.collect()
        assert len(gc.get_objects()) - objects < 100
    assert grown < 200 * 1024, f"{grown} bytes in 200 steps"


# ---- what goes wrong


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_the_next_pass_right(folder, ahead, error):
    ids = torch.stack(prompts(5, 5))
    expected = in_memory(folder)(ids).logits
    with stream(folder) as streamer:
        if ahead:
            cold(streamer)
        for layer in range(3):
            module = streamer.model.model.layers[layer].mlp
            with (
                mock.patch.object(module, "forward", side_effect=error("boom")),
                pytest.raises(error, match="boom"),
            ):
                streamer.model(ids)
            assert all(p.is_meta for p in streamer.model.model.layers.parameters())
            assert torch.equal(streamer.model(ids).logits, expected)


def test_nothing_runs_after_close(folder):
    with stream(folder) as streamer:
        model = streamer.model
        before = type(model)
    streamer.close()
    for call in (model, model.model):
        with pytest.raises(StreamError, match="closed"), torch.no_grad():
            call(torch.tensor([[5]]))
    with pytest.raises(StreamError, match="closed"):
        model.generate(torch.tensor([[5]]), max_new_tokens=2)
    assert type(model) is before
    assert threading.active_count() == 1 or not any(
        thread.name == "pagedkv" for thread in threading.enumerate()
    )


def test_a_model_has_one_streamer(folder):
    checkpoint = Checkpoint.open(folder)
    built = build(checkpoint, "auto")
    model = built.model
    store = WeightStore.open(checkpoint, built)
    with LayerStreamer(model, store, device=CPU) as first:
        with pytest.raises(StreamError, match="streamed already"):
            LayerStreamer(model, store, device=CPU)
        assert_bits(first.model, in_memory(folder))


def test_layers_that_cannot_be_told_are_refused(folder):
    model = make("llama")
    assert find_layers(model)[0] == "model.layers"
    model.config.num_hidden_layers = 7  # as if its list were another one
    with (
        mock.patch("pagedkv.models.skeleton._planned", return_value=set()),
        pytest.raises(LayersNotFound, match=r"expected one list of 7 layers.*layers_path="),
    ):
        find_layers(model)
    assert find_layers(model, "model.layers")[1] is model.model.layers
    with pytest.raises(LayersNotFound, match=r"layers_path: expected a list.*'model.h'"):
        stream(folder, layers_path="model.h")
    with stream(folder, layers_path="model.layers") as streamer:
        assert_bits(streamer.model, in_memory(folder))


def test_a_failed_pin_is_a_warning_and_copies_go_on():
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 2
    with (
        mock.patch("torch.cuda.cudart", return_value=runtime),
        mock.patch("torch.zeros", side_effect=RuntimeError("the error of the pin")),
        pytest.warns(UserWarning, match="could not be pinned .CUDA error 2"),
    ):
        arena = HostArena(100, pin=True)
    assert not arena.pinned
    arena.close()
    runtime.cudaHostUnregister.assert_not_called()


def test_a_pinned_arena_is_given_back():
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 0
    with mock.patch("torch.cuda.cudart", return_value=runtime):
        arena = HostArena(100, pin=True)
        arena.close()
        arena.close()
    runtime.cudaHostUnregister.assert_called_once_with(arena.tensor.data_ptr())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, "device: expected auto, cpu, .* got 'gpu'"),
        ({"device_map": "cpu"}, ValueError, "device_map"),
        ({"device": "mps"}, ValueError, "device: expected"),
        ({"device_memory": "1kB"}, MemoryError, "device_memory"),
    ],
)
def test_options_that_make_no_sense_are_named(folder, options, error, message):
    with pytest.raises(error, match=message), warnings.catch_warnings():
        LayerStreamer.from_pretrained(folder, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("hidden_act", "unheard of", "KeyError: 'unheard of'"),
        ("attention_bias", "x", "StrictDataclassFieldValidationError: .*expected bool, got str"),
        ("dtype", 3, "AttributeError: "),
        ("head_dim", 0, "ZeroDivisionError: "),
        ("model_type", [1], "TypeError: unhashable"),
    ],
)
def test_a_configuration_that_makes_no_model_is_told_with_its_file(
    folder, field, value, why, tmp_path
):
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {field: value}))
    said = rf"^{changed}/config\.json: transformers makes no model of it \({why}[^\n]*$"
    with pytest.raises(CheckpointError, match=said):
        LayerStreamer.from_pretrained(changed, device="cpu")


def test_opening_is_silent_though_transformers_loader_tells_of_weights(folder, capfd):
    transformers_logging.enable_progress_bar()
    capfd.readouterr()
    with LayerStreamer.from_pretrained(folder, device="cpu"):
        said = capfd.readouterr()
    assert said == ("", "")
    assert transformers_logging.is_progress_bar_enabled()


@pytest.mark.parametrize("said", UNSAID)
def test_what_is_told_of_weights_that_are_divided_is_kept_while_a_model_is_opened(said):
    logger = logging.getLogger("transformers.distributed.tensor_parallel")
    record = logging.LogRecord("", logging.WARNING, "", 0, f"The following {said}: a.*", (), None)
    assert logger.filter(record)
    with _kept_report():
        assert not logger.filter(record)
    assert logger.filter(record)


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    save(make("llama"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"vit"'))
    with pytest.raises(UnsupportedModelError, match="vit is no causal language model"):
        stream(tmp_path)


def test_a_pass_that_takes_long_shows_how_far_it_is(folder, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, **options):
            bars.append(self)
            self.steps, self.closed, self.options = options["initial"], False, options

        def update(self):
            self.steps += 1

        def close(self):
            self.closed = True

    monkeypatch.setattr("pagedkv.stream.progress.tqdm", Bar)
    ids = torch.tensor([[5, 6, 7]])
    with stream(folder) as streamer:
        streamer.model(ids)
        assert not bars  # it was quick
        assert (streamer.bar.done, streamer.bar.total) == (3, 3)
        monkeypatch.setattr("pagedkv.stream.progress.PATIENCE", 0.0)
        streamer.model(ids)
        (bar,) = bars
        assert (bar.steps, bar.closed, bar.options["total"]) == (3, True, 3)
    with stream(folder, progress=False) as streamer:
        streamer.model(ids)
    assert len(bars) == 1


@pytest.mark.parametrize(
    ("head_in_host", "embedding", "family"),
    each_pair([True, False], [True, False], ["gemma2", "cohere", "gpt2"]),
)
def test_a_tied_head_may_be_anywhere(family, embedding, head_in_host, tmp_path):
    folder = save(make(family), tmp_path)
    rows = make(family).get_output_embeddings().weight.shape[0]
    glue = {"head": False, "head_rows": rows, "head_in_host": head_in_host}
    with placed(folder, embedding=embedding, **glue) as streamer:
        assert_bits(streamer.model, in_memory(folder))


def test_a_head_of_its_own_is_used_though_the_configuration_says_tied(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    expected = in_memory(place)
    assert expected.lm_head.weight is not expected.model.embed_tokens.weight
    for glue in ({}, {"embedding": False}, {"head": False, "head_rows": 101}):
        with placed(place, **glue) as streamer:
            assert_bits(streamer.model, expected)


def test_of_a_tied_pair_a_file_may_have_either(tmp_path):
    make("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = in_memory(tmp_path)
    for glue in ({}, {"embedding": False}, {"head": False, "head_rows": 101}):
        with placed(tmp_path, **glue) as streamer:
            assert_bits(streamer.model, expected)


def test_a_reader_that_fails_at_the_first_layer_again_and_again_can_be_asked_again(folder):
    ids, expected = torch.tensor([[5, 6, 7]]), in_memory(folder)
    with placed(folder) as streamer:
        cold(streamer).model(ids)
        reader = streamer._store.reader
        with mock.patch.object(reader, "read", side_effect=CheckpointError("gone")):
            for _ in range(4):
                with pytest.raises(CheckpointError, match="gone"):
                    [streamer.model(ids) for _ in range(3)]  # what was read ahead is right
        with suppress(CheckpointError):  # of what was read ahead before it was mended
            streamer.model(ids)
        assert_bits(streamer.model, expected)


def test_plans_of_other_models_and_dtypes_are_refused(folder, tmp_path):
    other = save(make("llama", num_hidden_layers=5), tmp_path / "five")
    for wrong, options in ((other, {}), (folder, {"weight_dtype": "bfloat16"})):
        with pytest.raises(BudgetExceeded) as refused:
            plan_memory(wrong, device_memory="4KiB", device="cpu", **options)
        memory = refused.value.needed
        plan = plan_memory(wrong, device_memory=memory, device="cpu", **options)
        with pytest.raises(ValueError, match=r"^plan: expected one for this model and dtype"):
            LayerStreamer.from_pretrained(folder, plan=plan, device="cpu", dtype=torch.float32)
    resident = plan_memory(other, device_memory="64MiB", device="cpu")
    with pytest.raises(ValueError, match=r"^plan: expected one .*, got five with 5 layers"):
        LayerStreamer.from_pretrained(folder, plan=resident, device="cpu")


def test_closing_leaves_nothing_of_its_own_on_the_model(folder):
    with placed(folder, embedding=False, head=False, head_rows=7) as streamer:
        model = streamer.model
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        mine = [hook.__name__ for hook in module._forward_pre_hooks.values()]
        assert mine in ([], ["refuse_closed"])
    assert (
        model.get_input_embeddings().padding_idx
        == in_memory(folder).get_input_embeddings().padding_idx
    )


@pytest.mark.parametrize("wrong", [-1, True, [1.5], ["a"], [3]])
def test_resident_layers_that_are_none_are_refused(folder, wrong):
    with pytest.raises(ValueError, match=r"^resident_layers: expected"):
        stream(folder, resident_layers=wrong)
