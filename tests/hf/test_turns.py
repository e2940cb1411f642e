"""Later turns of `generate` on a cache that was used: whole rows, whatever they have in common.

Finds what goes wrong where a cache believes that rows go on from what it holds: answers computed
again, edited or shortened texts, thoughts that a template drops, rows padded anew, drafts.
"""

import random
import warnings

import pytest
import torch

from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.effort import examples, few, sampled
from tests.hf.adapted import adapted, add
from tests.hf.images import pictured, seeing_model
from tests.hf.modes import made
from tests.hf.tiny import assert_same_tokens, generate, named, padded, prompts, tiny
from tests.hybrids import HYBRIDS, STEPWISE

SIZES = {"max_tokens": 4096, "page_size": 4}
FAMILIES = ["llama", "mistral", "gemma3", "deepseek_v3", "qwen3_next"]
families = pytest.mark.parametrize("family", few(FAMILIES, "llama"))


def said(model, batch, cache, **options):
    """Runs a turn, compares it, and returns what it adds to each row."""
    actual = generate(model, batch, cache, **options)
    assert_same_tokens(actual, generate(model, batch, **options))
    return actual.sequences[:, batch["input_ids"].shape[1] :]


def computed_by(cache, turn):
    """Tokens that a turn computes, and what it gives."""
    counted, prepare = [], cache.kv.prepare

    def count(seqs, **given):
        counted.append(int(sum(given["num_new"])))
        return prepare(seqs, **given)

    cache.kv.prepare = count
    try:
        return sum(counted, 0) if turn() is None else sum(counted)
    finally:
        cache.kv.prepare = prepare


@families
@pytest.mark.parametrize("turn", ["again", "shorter", "regenerate", "edited", "without thoughts"])
def test_a_row_is_right_wherever_it_leaves_what_is_held(family, turn):
    model, (text, more) = made(family), prompts(21, 6)
    with PagedCache(model, **SIZES) as cache:
        answer = said(model, padded([text]), cache)[0]
        whole, edited = torch.cat([text, answer, more]), text.clone()
        edited[10] = 2 + (edited[10] - 1) % 90
        row = {
            "again": text,
            "shorter": text[:15],
            "regenerate": torch.cat([text, answer[:3]]),
            "edited": torch.cat([edited, answer, more]),
            "without thoughts": torch.cat([whole[:23], whole[27:]]),
        }[turn]
        said(model, padded([row]), cache)
        cache.kv.check()


def test_what_is_held_is_not_computed_again():
    model, (text, more) = made("llama"), prompts(40, 6)
    with PagedCache(model, **SIZES) as cache:
        answer = said(model, padded([text]), cache)[0]
        for row, new in ((text, 1), (torch.cat([text, answer, more]), 7), (text[:30], 1)):
            steps = computed_by(cache, lambda row=row: said(model, padded([row]), cache))
            assert steps == new + 9  # the answer's tokens but for the last


@families
def test_rows_that_ended_at_other_lengths_are_padded_anew(family):
    model, rows = made(family), prompts(9, 17, 4)
    more = prompts(3, 8, 5, 2, 6, 1)
    with PagedCache(model, **SIZES) as cache:
        for turn in range(2):
            answers = said(model, padded(rows), cache)
            rows = [
                torch.cat([row, answer[: 3 + 2 * i], more[3 * turn + i]])
                for i, (row, answer) in enumerate(zip(rows, answers))
            ]
        said(model, padded(rows), cache)
        cache.kv.check()


@pytest.mark.parametrize("family", few(["llama", "mistral", "gemma3", "deepseek_v3"], "llama"))
@pytest.mark.parametrize("how", ["lookup", "assistant", "chunks", "beams"])
def test_a_later_turn_may_be_generated_in_any_way(family, how):
    model, (text, more) = made(family), prompts(21, 9)
    options = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": model},
        "chunks": {"prefill_chunk_size": 4},
        "beams": {},
    }[how]
    with PagedCache(model, **SIZES) as cache:
        answer = said(model, padded([text]), cache, **options)[0]
        for _ in range(2):
            text = torch.cat([text, answer, more])
            answer = said(model, padded([text]), cache, **options)[0]
        if how == "beams":
            rows = padded([text] * 3)
            with cache.fork(3) as beams:
                expected = generate(model, padded([text]), num_beams=3)
                actual = generate(model, padded([text]), beams, num_beams=3)
                assert_same_tokens(actual, expected)
                said(model, rows, beams)


@pytest.mark.parametrize("given", ["ids", "by position", "embeddings"])
def test_tokens_of_forwards_by_hand_are_known_as_well(given):
    model, (text, more) = made("llama"), prompts(21, 6)
    with PagedCache(model, **SIZES) as cache, torch.no_grad():
        if given == "embeddings":
            model(inputs_embeds=model.get_input_embeddings()(text[None]), **named(cache))
        elif given == "ids":
            model(input_ids=text[None, :9], **named(cache))
            model(input_ids=text[None, 9:], **named(cache))
        else:
            model(text[None], **named(cache))
        said(model, padded([torch.cat([text, more])]), cache)
        other = torch.cat([text[:5], more])
        if given != "embeddings":
            said(model, padded([other]), cache)
            return
        for leaving in (other, text, torch.cat([text[:20], more])):
            with pytest.raises(UnsupportedModelError, match="given as embeddings"):
                generate(model, padded([leaving]), cache)
        said(model, padded([torch.cat([text, more[:2], text[:3]])]), cache)
        cache.reset()
        said(model, padded([other]), cache)


@pytest.mark.parametrize("places", ["from 26 on", "some twice"])
def test_positions_of_a_callers_own_are_a_part_of_the_text(places):
    model, (text, more) = made("llama"), prompts(20, 7)
    first = torch.arange(20) + 26 if places == "from 26 on" else torch.arange(20).clamp(max=10)
    with PagedCache(model, **SIZES) as cache:
        for row in (text, text, torch.cat([text, more]), text[:9], text):
            at = torch.cat([first, first[-1] + 1 + torch.arange(99)])[None, : len(row)]
            said(model, padded([row]), cache, position_ids=at)
        said(model, padded([text]), cache)  # none given: other positions, which are computed anew


@pytest.mark.parametrize("family", few(sorted({*HYBRIDS} - STEPWISE), "qwen3_next", "falcon_h1"))
def test_padding_as_wide_as_a_prefix_that_another_row_keeps(family):
    model = made(family)
    rows = [torch.tensor([50, 7, 85, 52]), torch.tensor([21, 12, 82, 8, 88, 62])]
    with PagedCache.prefill(model, rows[1][:2], **SIZES) as shared, shared.fork(2) as cache:
        said(model, padded(rows), cache)


def test_new_ids_alone_behind_a_prefix_are_told():
    model, (prefix, question) = made("llama"), prompts(21, 6)
    with PagedCache.prefill(model, prefix, **SIZES) as shared:
        with shared.fork(1) as cache, pytest.warns(UserWarning, match=r"torch\.cat\(\[prefix"):
            generate(model, padded([question]), cache)
        with shared.fork(1) as cache, warnings.catch_warnings():
            warnings.simplefilter("error")
            said(model, padded([torch.cat([prefix, question])]), cache)


def test_an_answer_behind_an_image_is_gone_on_from_and_edited():
    model, (text, more) = seeing_model("llava"), prompts(9, 5)
    row = pictured(model, text)
    with PagedCache(model, **SIZES) as cache:
        found = generate(model, row, cache).sequences
        for held in (found, found[:, :-4], found[:, :-12]):
            ids = torch.cat([held, more[None]], 1)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            assert_same_tokens(generate(model, batch, cache), generate(model, {**row, **batch}))
        before = {name: row[name].clone() for name in ("input_ids", "attention_mask")}
        before["input_ids"][0, 1] = 7
        with pytest.raises((ValueError, UnsupportedModelError)):
            generate(model, before, cache)


def test_a_turn_that_fails_leaves_what_was_held():
    model, (text, more) = made("llama"), prompts(21, 6)
    with PagedCache(model, **SIZES) as cache:
        answer = said(model, padded([text, text[:9]]), cache)

        def fail(*_):
            raise RuntimeError("planted")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            generate(model, padded([text[:15], text[:4]]), cache)
        hook.remove()
        cache.kv.check()
        rows = [torch.cat([text, answer[0], more]), torch.cat([text[:9], answer[1], more])]
        assert computed_by(cache, lambda: said(model, padded(rows), cache)) == 2 * (7 + 9)


@pytest.mark.parametrize(
    "change",
    few(["scaled", "an element", "loaded", "set_adapter", "disabled"], "an element", "set_adapter"),
)
def test_a_turn_on_k_and_v_of_other_weights_is_refused(change):
    (text, more), weights = prompts(21, 6), tiny("llama")
    model = adapted(weights)
    add(model, "two")
    proj = weights.model.layers[0].self_attn.k_proj.base_layer
    batch = padded([torch.cat([text, more])])

    @torch.no_grad()
    def changed():
        if change == "scaled":
            proj.weight *= 1.5
        elif change == "an element":
            weights.model.norm.weight[0] += 1
        elif change == "loaded":
            weights.load_state_dict({name: 1.01 * x for name, x in weights.state_dict().items()})
        elif change == "set_adapter":
            model.set_adapter("two")
        else:
            model.base_model.disable_adapter_layers()

    with PagedCache(model, **SIZES) as cache:
        generate(weights, padded([text]), cache)
        with cache.fork(1) as fork:
            said(weights, batch, fork)
        with cache.fork(1) as fork:
            changed()
            for held in (cache, fork):
                with pytest.raises(ModelChangedError, match="have changed since this PagedCache"):
                    generate(weights, batch, held)
                assert held.seen == 21 + 9
        cache.reset()
        said(weights, batch, cache)


def test_rows_of_sequences_that_exist_belong_to_the_weights_they_are_given_with():
    model, (text, more) = tiny("llama"), prompts(21, 6)
    with PagedCache(model, **SIZES) as cache:
        generate(model, padded([text]), cache)
        seqs = cache.kv.fork(cache.rows[0])
        with PagedCache.of(model, cache.kv, seqs) as held:
            model.model.norm.weight.data[0] += 1
            with pytest.raises(ModelChangedError, match="have changed since this PagedCache"):
                generate(model, padded([torch.cat([text, more])]), held)


def test_angles_that_every_forward_writes_are_no_change_of_weights_below_their_border():
    # Alone finds: longrope's own writes taken for another's, and K of one side read on the other.
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope["original_max_position_embeddings"] = 60
    model = tiny(rope_parameters=rope, max_position_embeddings=120)
    text, more, other = prompts(21, 6, 40)
    with PagedCache(model, **SIZES) as cache, PagedCache(model, **SIZES) as beside:
        answer = said(model, padded([text]), cache)[0]
        said(model, padded([torch.cat([other, other])]), beside)  # writes the long angles
        text = torch.cat([text, answer, more])
        with cache.fork(1) as fork:
            said(model, padded([text]), fork)
        said(model, padded([text]), cache)
        generate(model, padded([torch.cat([text, other])]), cache)
        with pytest.raises(ModelChangedError, match="beyond 60 tokens, and this PagedCache had"):
            generate(model, padded([text]), cache)
        cache.reset()
        said(model, padded([text]), cache)
        said(model, padded([torch.cat([text, more])]), cache)


@sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_any_turns_are_those_of_rows_alone(family):
    """Appends, regenerates, edits, shortens, pads anew, forks and starts over."""
    model, draw = made(family), random.Random(f"turns {family}")
    rows = prompts(*(draw.randint(2, 12) for _ in range(draw.randint(1, 3))))
    cache = PagedCache(model, **SIZES)
    for _ in range(examples(60, 4)):
        answers = said(model, padded(rows), cache, max_new_tokens=4)
        whole = [torch.cat([row, answer]) for row, answer in zip(rows, answers)]
        rows = [turned(row, draw) for row in whole]
        if draw.random() < 0.2:
            n = draw.randint(1, 2)
            forked = cache.fork(n)
            cache.close()
            cache, rows = forked, [row.clone() for row in rows for _ in range(n)][:6]
            if len(rows) != len(cache.rows):
                cache.batch_select_indices(torch.arange(len(rows)))
        cache.kv.check()
    cache.close()


def turned(row, draw):
    """The next text of a row."""
    row = row[-60:] if len(row) > 80 else row
    more = torch.tensor([draw.randint(2, 90) for _ in range(draw.randint(1, 6))])
    at = draw.randrange(1, len(row))
    ways = {
        "append": lambda: torch.cat([row, more]),
        "regenerate": lambda: row[:-4] if len(row) > 5 else row,
        "edit": lambda: torch.cat([row[:at], more, row[at + 1 :]]),
        "drop": lambda: torch.cat([row[:at], row[at + 2 :], more]),
        "shorten": lambda: row[:at],
        "other": lambda: more,
    }
    return ways[draw.choice(["append", "append", *ways])]()
