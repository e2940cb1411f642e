"""`pagedkv check` finds a model whose answers over pages are others, and says which way gives them.

Finds a door that computes something else on the installed transformers, whatever release that is.
"""

import json
import re
import shutil

import pytest
import torch

from pagedkv import PagedCache
from pagedkv.cli.check import _alone, _rounding
from pagedkv.models.facts import FACTS
from tests.hf.tiny import tiny
from tests.hf.unsupported import unsupported
from tests.hybrids import tiny_hybrid


def test_a_model_is_held_against_its_own_cache(pagedkv, model):
    done = pagedkv("check", model, "-n", 6, "--dtype", "float32")
    assert done.exit_code == 0, done.stderr
    own, *ways = done.stdout.splitlines()[-4:]
    assert "rounds its logits by" in own
    assert [way[:14].strip() for way in ways] == ["PagedCache", "a second turn", "BatchGenerator"]
    assert all("3 of 3 answers equal" in way and way.endswith(": right") for way in ways)


def test_a_text_that_is_longer_than_the_model_takes_is_refused_before_it_is_computed(
    pagedkv, model
):
    done = pagedkv("check", model, "--length", 100_000)
    assert done.exit_code == 2
    assert done.stderr.endswith("has 100049 tokens with its answer, and the model takes 256\n")


def test_a_text_that_holds_the_padding_is_answered_whole():
    # Alone finds: a second turn that is called WRONG because the first one's answer held token 0.
    model, ids = tiny(), torch.tensor([5, 0, 9, 7])
    logits = model(ids[None], use_cache=False).logits[0, -1]
    assert _alone(model, ids, 1).logits[0].allclose(logits, atol=1e-4)


@pytest.mark.parametrize("way", ["PagedCache", "BatchGenerator"])
def test_other_answers_are_told_by_the_exit_code(pagedkv, model, monkeypatch, way):
    from pagedkv.batch.packed_cache import PackedCache
    from pagedkv.hf.cache import PagedCache

    of = {"PagedCache": PagedCache, "BatchGenerator": PackedCache}[way]
    right = of.unpacked
    monkeypatch.setattr(of, "unpacked", lambda *given: 1.01 * right(*given))
    done = pagedkv("check", model, "-n", 6, "--dtype", "float32")
    assert done.exit_code == 1
    wrong = [line[:14].strip() for line in done.stdout.splitlines() if line.endswith("WRONG")]
    assert wrong == ([way, "a second turn"] if way == "PagedCache" else [way])


def test_a_model_that_cannot_use_pages_is_refused_with_the_reason(pagedkv, tmp_path):
    unsupported("CpmAntForCausalLM").save_pretrained(tmp_path)
    done = pagedkv("check", tmp_path)
    assert done.exit_code == 2
    assert "does not go through transformers' attention interface" in done.stderr


def test_a_model_that_no_list_knows_is_looked_at(pagedkv, checkpoints, monkeypatch):
    folder = checkpoints("unlisted", model=tiny_hybrid("lfm2"))
    monkeypatch.delitem(FACTS, "lfm2")
    done = pagedkv("check", folder, "-n", 6)
    assert done.exit_code == 0, done.stderr
    found, *_, last = done.stdout.splitlines()
    assert found.startswith("no list knows Lfm2ForCausalLM (lfm2). ")
    assert found.endswith("served: 3 layers with states 32 x 3; 1 layer with K and V of 2 x 8")
    assert re.fullmatch("BatchGenerator .*: right", last)
    right = PagedCache.unpacked
    monkeypatch.setattr(PagedCache, "unpacked", lambda *given: 1.01 * right(*given))
    done = pagedkv("check", folder, "-n", 6)
    assert done.exit_code == 2
    assert re.search(r"layer 1 .* another by .*e-\d+ of it for rows alone in pages", done.stderr)


def test_a_folder_that_is_not_there_is_a_plain_sentence(pagedkv, tmp_path):
    done = pagedkv("check", tmp_path / "nothing")
    assert done.exit_code == 2
    assert done.stderr.startswith("pagedkv: MODEL: ")
    assert "Traceback" not in done.stderr


def test_rounding_is_the_models_own():
    model, prompt = tiny("llama"), torch.arange(3, 12)
    answer = _alone(model, prompt, 4)
    assert 0 < _rounding(model, prompt, answer) < 1e-4
    shifted = answer._replace(logits=answer.logits + 0.5)
    assert _rounding(model, prompt, shifted) == pytest.approx(0.5, rel=0.01)


def test_rules_of_a_checkpoint_are_left_out(pagedkv, checkpoints):
    model = tiny(vocab_size=101)
    model.generation_config.update(repetition_penalty=1.3, no_repeat_ngram_size=2, top_k=5)
    model.generation_config.do_sample = True
    done = pagedkv("check", checkpoints("ruled", model=model), "-n", 6)
    assert done.exit_code == 0, done.output


def test_a_window_that_no_prompt_reaches_is_told(pagedkv, checkpoints):
    folder = checkpoints("windowed", model=tiny("mistral", vocab_size=101, sliding_window=40))
    said = "window of 40 tokens is not reached"
    assert said in pagedkv("check", folder, "-n", 6).stdout
    longer = pagedkv("check", folder, "--length", 48, "-n", 6)
    assert longer.exit_code == 0
    assert said not in longer.stdout


def test_a_model_whose_rounding_hides_everything_is_not_judged(pagedkv, checkpoints):
    model = tiny(vocab_size=101)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    done = pagedkv("check", checkpoints("zeros", model=model), "-n", 4)
    assert done.exit_code == 2
    assert "too much to judge" in done.stderr


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("num_hidden_layers", "the tensors of its files"),
        ("vocab_size", "the bits of its files"),
        ("num_attention_heads", "the bits of its files"),
    ],
)
def test_a_configuration_that_promises_what_no_file_holds_is_not_built(
    pagedkv, model, tmp_path, monkeypatch, field, said
):
    # Alone finds: a model that is built as large as its configuration says, until memory ends.
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8")) | {field: 10**9}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    done = pagedkv("check", folder)
    assert done.exit_code == 2
    assert re.search(f"{field}: expected at most [0-9]+, {said}, got {10**9}$", done.stderr.strip())
