"""Tables of n-grams, or of embeddings for each layer: only the rows come from their files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv import BatchGenerator, LayerStreamer, PagedCache, plan_memory
from pagedkv.models.skeleton import tables_of
from pagedkv.stream import embedding_head
from tests.hf.tiny import generate, prompts, tiny
from tests.hybrids import tiny_hybrid
from tests.stream.models import assert_bits, in_memory, placed, ragged, save

SIZES = {"max_tokens": 512, "page_size": 4}
# A table of 4 hashes of n-grams in 8 pieces; tables with a part for each layer.
GRAMS = {"ngram_vocab_size_base": 1000, "split_ngram_parts": 8}
KINDS = {"qwen4_exp": GRAMS, "gemma4": {}, "gemma3n": {}}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    make = tiny_hybrid if request.param == "qwen4_exp" else tiny
    return save(make(request.param, **KINDS[request.param]), tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("tables", [True, False])
def test_rows_of_tables_give_the_bits_of_the_model_in_memory(folder, tables):
    with placed(folder, resident=(1,), tables=tables) as streamer:
        (table,) = tables_of(streamer.model)
        assert table.weight.is_meta != tables
        assert_bits(streamer.model, in_memory(folder))


def test_learned_positions_are_no_table_though_a_small_vocabulary_has_fewer_rows(tmp_path):
    """Their own forward makes indices of a mask, and would look these up among the rows read."""
    folder = save(tiny("opt"), tmp_path)
    with placed(folder, tables=False, embedding=False) as streamer:
        assert_bits(streamer.model, in_memory(folder))


def test_a_pass_reads_the_rows_that_its_tokens_look_up_and_no_others(folder):
    """Counted against what the model in memory looks up; each row is read once a pass."""
    known, (row,) = in_memory(folder), prompts(11)
    ids = torch.stack([row, row])
    (table,) = tables_of(known)
    asked = []
    hook = table.register_forward_pre_hook(lambda _, args: asked.append(args[0].unique()))
    expected = known(ids, use_cache=False).logits
    hook.remove()
    with placed(folder, resident=range(len(known.model.layers)), tables=False) as streamer:
        assert torch.equal(streamer.model(ids, use_cache=False).logits, expected)
        read = sum(len(rows) for rows in asked)
        assert streamer.stats().bytes_read == read * table.embedding_dim * 4
        assert read < table.num_embeddings


def test_rows_in_any_order_and_all_rows_come_from_their_pieces(folder, tmp_path):
    """Neighbours are read at once, but not beyond a piece: here each has a file of its own."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    files: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            files[name] = f"{len(files)}.safetensors"
            save_file({name: tensor}, tmp_path / files[name], {"format": "pt"})
        (tmp_path / file.name).unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (known,) = tables_of(in_memory(folder))
    count = known.num_embeddings
    with placed(tmp_path, tables=False) as streamer, torch.no_grad():
        (table,) = tables_of(streamer.model)
        for ids in (torch.arange(count), torch.randint(count, (3, count // 2))):
            assert torch.equal(table(ids), known(ids))


def test_generators_and_caches_run_over_rows_of_tables(folder):
    known, batch = in_memory(folder), ragged()
    texts = [row.tolist() for row in prompts(9, 4, 13)]
    with PagedCache(known, **SIZES) as cache:
        expected = generate(known, batch, cache).sequences
    with BatchGenerator(known, **SIZES) as batched:
        packed = [r.tokens for r in batched.generate(texts, max_new_tokens=5)]
    with placed(folder, embedding=False, head=False, head_rows=101, tables=False) as streamer:
        with PagedCache(streamer.model, **SIZES) as cache:
            assert torch.equal(generate(streamer.model, batch, cache).sequences, expected)
        with BatchGenerator(streamer.model, **SIZES) as batched:
            assert [r.tokens for r in batched.generate(texts, max_new_tokens=5)] == packed


def test_a_plan_leaves_tables_in_their_files_where_not_all_fits(folder, monkeypatch):
    """Its bytes are those of the tensors on the device, and of the rows that a pass gathers."""
    model = in_memory(folder)
    (table,), options = tables_of(model), {"device": "cpu", "page_size": 4, "step_tokens": 32}
    whole = plan_memory(folder, device_memory="1GiB", **options)
    nbytes = table.weight.nbytes
    assert 0 <= whole.shape.tables - nbytes <= 8 * 256  # each piece begins at a multiple of 256
    assert whole.tables_resident
    assert plan_memory(model.config, device_memory="1GiB", **options).shape.tables >= nbytes
    room = sum(whole.device_bytes.values()) - 1
    plan = plan_memory(folder, device_memory=room, **options)
    assert plan.streams
    assert not plan.tables_resident
    glue = [x.device_bytes["glue"] for x in (whole, plan)]
    assert glue[0] - glue[1] >= whole.shape.tables
    sizes = []
    made = embedding_head.HostArena
    monkeypatch.setattr(embedding_head, "HostArena", lambda n, **_: sizes.append(n) or made(n))
    with LayerStreamer.from_pretrained(folder, plan=plan, device="cpu") as streamer:
        assert tables_of(streamer.model)[0].weight.is_meta
        ids = torch.arange(2, 34)[None]
        assert torch.equal(streamer.model(ids).logits, model(ids).logits)
    planned = plan.host_bytes["embedding rows"]
    assert planned / 2 <= max(sizes) <= planned
