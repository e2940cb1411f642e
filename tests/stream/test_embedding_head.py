"""An embedding and a head that host memory holds."""

import gc
import weakref

import pytest
import torch

from pagedkv import plan_memory
from pagedkv.stream import placement
from tests.effort import each_value
from tests.hf.tiny import generate
from tests.planner.models import GIB
from tests.stream.models import assert_bits, in_memory, make, placed, ragged, save, stream

ROWS = 101  # of the vocabulary: the head is one block
HELD = {"embedding": False, "embedding_in_host": True}


@pytest.fixture
def as_on_a_card(monkeypatch):
    """The memory of the CPU stands for a card's: what host memory holds is copied to it."""
    monkeypatch.setattr(placement, "has_own_memory", lambda device: True)


@pytest.mark.parametrize(
    ("family", "dtype"),
    each_value(["llama", "gemma2", "gpt2", "opt", "granite"], ["auto", torch.bfloat16]),
)
def test_a_held_embedding_gives_the_bits_of_the_model_in_memory(family, dtype, tmp_path):
    """Tied or not, scaled, with padding or without, and in another dtype than its file."""
    folder = save(make(family), tmp_path)
    with placed(folder, dtype, **HELD, head=False, head_rows=ROWS) as streamer:
        assert streamer.model.get_input_embeddings().weight.is_meta
        assert_bits(streamer.model, in_memory(folder, dtype=dtype))


@pytest.mark.parametrize("held", [True, False])
def test_passes_of_any_width_and_mode_gather_into_the_same_memory(folder, held):
    """A tensor that was made in inference mode cannot be written outside of it."""
    known, ids = in_memory(folder), torch.arange(2, 50)[None]
    with placed(folder, embedding=False, embedding_in_host=held) as streamer:
        modes = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode)
        for mode, width in zip(modes, (9, 4, 48, 48), strict=True):
            with mode():
                logits = streamer.model(ids[:, :width]).logits
            assert torch.equal(logits, known(ids[:, :width]).logits)


@pytest.mark.parametrize("rows", [7, ROWS])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_head_that_is_held_is_that_in_the_file(family, rows, as_on_a_card, tmp_path):
    folder, batch = save(make(family), tmp_path), ragged()
    glue = {"embedding": False, "head": False, "head_rows": rows}
    with placed(folder, torch.bfloat16, **glue) as streamer:
        expected = generate(streamer.model, batch).logits
    with placed(folder, torch.bfloat16, **glue, head_in_host=True) as streamer:
        found = generate(streamer.model, batch).logits
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_a_tied_head_and_the_embedding_are_held_once(as_on_a_card, tmp_path):
    folder = save(make("gemma2"), tmp_path)
    glue = {"head": False, "head_rows": ROWS, "head_in_host": True}
    with placed(folder, **HELD, **glue) as streamer:
        places = streamer._passes._places
        ((_, table),) = places.by_row
        assert table.data_ptr() == places.held[len(places.layers)].data_ptr()
        assert_bits(streamer.model, in_memory(folder))


def test_a_plan_with_room_on_the_host_is_kept_to_and_nothing_is_read_in_a_pass(tmp_path):
    folder = save(make("llama", hidden_size=128, vocab_size=2000), tmp_path)
    options = {"device": "cpu", "length": 64, "step_tokens": 32}
    whole = plan_memory(folder, device_memory=GIB, **options)
    room = sum(whole.device_bytes.values()) - whole.shape.embedding
    plan = plan_memory(folder, device_memory=room, host_memory=GIB, **options)
    assert plan.embedding_in_host
    with stream(folder, plan=plan) as streamer:
        ((site, table),) = streamer._passes._places.by_row
        assert 0 <= plan.host_bytes["held embedding"] - table.nbytes < 256
        ids = torch.arange(32)[None]
        assert torch.equal(streamer.model(ids).logits, in_memory(folder)(ids).logits)
        assert streamer.stats().bytes_read == 0
        assert site.tensor.is_meta


def test_closing_frees_the_held_embedding_though_the_streamer_stays(folder):
    streamer = placed(folder, **HELD)
    table = weakref.ref(streamer._passes._places.by_row[0][1])
    gc.collect()
    assert table() is not None
    streamer.close()
    gc.collect()
    assert table() is None
