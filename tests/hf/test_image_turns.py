"""Forks and later turns of models whose images have positions of their own (M-RoPE).

Finds what goes wrong where a cache cannot tell what its rows show, or where their positions are
made without the images before them. What rows alone say, over transformers' own cache, is right.
"""

import copy
import random
from contextlib import contextmanager

import pytest
import torch

from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.hf.mrope import PREPARE
from tests.effort import each_value, examples, few, sampled
from tests.hf.conversations import Image, answers, drawn, encoded, require_right, turned
from tests.hf.images import behind, pictured, seeing_model
from tests.hf.tiny import assert_close, assert_same_tokens, generate, named, padded, prompts

SIZES = {"max_tokens": 4096, "page_size": 4}
KINDS = ["qwen3_vl", "qwen2_5_vl", "qwen3_5", "glm4v", "paddleocr_vl", "ernie4_5_vl_moe"]
PAGES = [kind for kind in KINDS if kind != "qwen3_5"]  # which can be cut anywhere
every = pytest.mark.parametrize("model", few(KINDS, "qwen3_vl", "ernie4_5_vl_moe"), indirect=True)
in_pages = pytest.mark.parametrize("model", few(PAGES, "qwen2_5_vl", "glm4v"), indirect=True)
CAT, DOG = Image(4, 0), Image(4, 1)  # the same ids


@pytest.fixture
def model(request):
    return seeing_model(getattr(request, "param", "qwen2_5_vl"))


def texts(*lengths):
    draw = random.Random(3)
    return [drawn(draw, n, n) for n in lengths]


@contextmanager
def forked(model, start, n):
    """A fork of what a row begins with, and how many tokens are computed over it."""
    with PagedCache.prefill(model, encoded(model, [start]), **SIZES) as shared:
        shared.computed = shared.stats().tokens_computed
        with shared.fork(n) as cache:
            yield cache, lambda: cache.stats().tokens_computed - shared.computed
            cache.kv.check()


# ------------------------------------------------------------------ forks


@every
def test_texts_of_any_length_share_a_prefix(model):
    """Texts of these models that are unknown, and refused: "forks of PagedCache.prefill"."""
    start, *tails = texts(9, 5, 2, 8)
    rows = [[start, tail] for tail in tails] + [[start[:4], tails[0]]]
    with forked(model, [start], 4) as (cache, computed):
        batch = encoded(model, rows)
        require_right(model, rows, answers(model, batch, cache, new=1)[0])
        left = sum(len(tail) for tail in (*tails, tails[0]))
        states = cache.kv.config.states  # whose rows of other lengths are computed anew
        assert computed() == (batch["attention_mask"].sum() if states else left)


@every
def test_rows_with_images_share_a_prefix_of_text(model):
    """Three axes of positions that are asked to be equal, also where a row's image begins."""
    start, *tails = texts(7, 4, 6, 3)
    rows = [[start, tails[0], Image(8, 2), tails[1]], [start, tails[2]], [start, CAT, tails[0]]]
    with forked(model, [start], 3) as (cache, _):
        require_right(model, rows, answers(model, encoded(model, rows), cache)[0])


@every
@pytest.mark.parametrize("shown", ["none", "all"])
def test_rows_share_a_prefix_with_an_image(model, shown):
    """Pixels that `prefill` drops, and rows counted as text behind an image they do not give."""
    start, *tails = [texts(5)[0], CAT, texts(3)[0]], *texts(4, 4)
    rows = [[*start, tail] for tail in tails]
    with forked(model, start, 2) as (cache, computed):
        require_right(model, rows, answers(model, encoded(model, rows, shown), cache, new=1)[0])
        assert computed() == 8


def test_a_prefix_with_an_image_of_any_model():
    """Pixels that are dropped where positions are those of text."""
    model, (text, more) = seeing_model("llava"), prompts(9, 5)
    row = pictured(model, text)
    whole = behind(row, more, model)
    with PagedCache.prefill(model, row, **SIZES) as shared, shared.fork(1) as cache:
        ids = {name: whole[name] for name in ("input_ids", "attention_mask")}
        assert_same_tokens(generate(model, ids, cache), generate(model, whole))


@pytest.mark.parametrize(
    ("model", "mode"),
    [("qwen2_5_vl", "beams"), ("glm4v", "lookup"), ("qwen2_5_vl", "assistant")],
    indirect=["model"],
)
def test_any_mode_of_generate_behind_a_prefix(model, mode):
    """Positions of a prompt for several rows, and drafts behind types of tokens."""
    options = {
        "beams": {"num_beams": 3},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": model},
    }[mode]
    n = 3 if mode == "beams" else 1
    start, *tails = texts(5, 4, 3)
    row = [start, tails[0], CAT, tails[1]]
    with forked(model, [start], n) as (cache, _):
        for _ in range(2):
            said = answers(model, encoded(model, [row]), cache, **options)[0]
            assert torch.equal(said, answers(model, encoded(model, [row]), **options)[0])
            row = [*row, said[0], tails[0]]


def test_samples_of_several_prompts_go_on_behind_images_of_their_own(model):
    """Rows that take the offset of the image of another prompt."""
    start, *tails = texts(5, 4, 6)
    rows = [[start, CAT, tails[0]], [start, Image(8, 0), tails[1]]]
    options = {"do_sample": True, "num_return_sequences": 2}
    with PagedCache(model, **SIZES) as cache:
        for shown in ("all", "none"):
            torch.manual_seed(5)
            said = answers(model, encoded(model, rows, shown), cache, **options)[0]
            torch.manual_seed(5)
            assert torch.equal(said, answers(model, encoded(model, rows), **options)[0])
        cache.kv.check()


def test_a_stored_prefix_is_loaded(model, tmp_path):
    """Prefixes of these models that are never stored."""
    start, tail = texts(148, 5)
    row, loaded = [start, tail], []
    for _ in range(2):
        model = copy.deepcopy(model)  # with pages of its own
        ids = encoded(model, [[start]])
        with PagedCache.prefill(model, ids, prefix_store=tmp_path, **SIZES) as shared:
            loaded.append(shared.stats().tokens_from_store)
            with shared.fork(1) as cache:
                require_right(model, [row], answers(model, encoded(model, [row]), cache)[0])
    assert loaded == [0, 128]


# ------------------------------------------------------------------ later turns


def turns(said):
    """By name: what a row becomes behind an answer to `[a, CAT, b]`, and tokens left to compute."""
    a, b, more = texts(6, 5, 4)
    held = [a, CAT, b, said]
    edited = b.clone()
    edited[2] = 2 + (edited[2] - 1) % 90
    return {
        "goes on": ([*held, more], 5),
        "answers again": (held[:3], 1),
        "an edited text behind the image": ([a, CAT, edited, said, more], 12),
        "an edited text before the image": ([more, CAT, b], None),
        "another image of the same size": ([a, DOG, b, said, more], None),
        "a larger image": ([a, Image(8, 0), b], None),
        "no image": ([a, b, more], None),
        "one more image": ([*held, DOG, more], None),
        "another beginning": ([more], None),
    }


TURNS = list(turns(torch.tensor([2])))
without_their_image = ["goes on", "answers again", "an edited text behind the image", "no image"]
without_their_image += ["another beginning"]


@contextmanager
def answered(model):
    """A cache behind an answer to an image, and the answer."""
    a, b, _ = texts(6, 5, 4)
    with PagedCache(model, **SIZES) as cache:
        yield cache, answers(model, encoded(model, [[a, CAT, b]]), cache)[0][0]
        cache.kv.check()


@pytest.mark.parametrize(("model", "turn"), each_value(KINDS, TURNS), indirect=["model"])
def test_whole_rows_with_their_images_are_right_wherever_they_leave(model, turn):
    """Images of equal ids taken for one another, and positions made without those before them."""
    with answered(model) as (cache, said):
        row, left = turns(said)[turn]
        before = cache.stats().tokens_computed
        require_right(model, [row], answers(model, encoded(model, [row]), cache, new=1)[0])
        if left is not None and not cache.kv.config.states:
            assert cache.stats().tokens_computed - before == left
        require_right(model, [row], answers(model, encoded(model, [row]), cache)[0])


@in_pages
@pytest.mark.parametrize("turn", few(TURNS, "goes on", "one more image", TURNS[2], TURNS[3]))
def test_rows_without_their_images_are_right_or_refused_by_name(model, turn):
    """An edit behind an image that is not seen, and tokens of images computed as text."""
    with answered(model) as (cache, said):
        row, _ = turns(said)[turn]
        if turn == "another image of the same size":
            return  # nobody could tell
        batch, length = encoded(model, [row], "none"), cache.kv.length(cache.rows[0])
        if turn in without_their_image:
            require_right(model, [row], answers(model, batch, cache)[0])
        else:
            with pytest.raises(UnsupportedModelError, match=r"no image was given.*Give generate"):
                answers(model, batch, cache)
            assert cache.kv.length(cache.rows[0]) == length
            require_right(model, [row], answers(model, encoded(model, [row]), cache)[0])


@every
def test_new_ids_alone_go_on_behind_an_image(model):
    """Rows that are taken to be whole, since their positions are fewer than what is held."""
    with answered(model) as (cache, said):
        row, _ = turns(said)["goes on"]
        batch = encoded(model, [row], "none")
        batch["input_ids"] = batch["input_ids"][:, cache.seen :]  # the mask is of all
        require_right(model, [row], answers(model, batch, cache)[0])


@every
def test_the_latest_image_alone_is_refused_by_name(model):
    """An image placed without those before it: wrong tokens, or StopIteration (transformers)."""
    with answered(model) as (cache, said):
        row, _ = turns(said)["one more image"]
        batch, seen = encoded(model, [row], "last"), cache.seen
        with pytest.raises(ValueError, match=r"grids of all images.*the whole conversation"):
            answers(model, batch, cache)
        for name in ("input_ids", "mm_token_type_ids"):
            batch[name] = batch[name][:, seen:]
        with pytest.raises(ValueError, match=r"grids of all images.*the whole conversation"):
            answers(model, batch, cache)
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="the whole conversation"):
            model(**batch, **named(cache))
        require_right(model, [row], answers(model, encoded(model, [row]), cache)[0])


def test_images_beside_tokens_that_nobody_told_of_are_refused(model):
    """A row that begins with embeddings, and an image that is placed behind them as text."""
    start, tail = texts(6, 4)
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(start[None]), **named(cache))
        with pytest.raises(UnsupportedModelError, match="with a new cache"):
            answers(model, encoded(model, [[start, CAT, tail]]), cache)


def test_images_in_chunks_that_are_not_given_again_are_refused(model):
    """A first chunk that cuts off the image, which later ones compute as text."""
    # 5.17 cuts positions of several axes along their rows, and has none left.
    with answered(model) as (cache, said):
        row, _ = turns(said)["goes on"]
        refused = (UnsupportedModelError, ValueError)
        with pytest.raises(refused, match=r"^prefill_chunk_size|^batch: .* got 0"):
            answers(model, encoded(model, [row], "none"), cache, prefill_chunk_size=4)


@pytest.mark.parametrize("kind", few(["llava", "internvl", "smolvlm"], "llava"))
def test_images_that_have_no_grid_are_given_again(kind):
    """Image tokens cut off while their pixels are given, or computed as text before; other images.

    Embeddings that are taken for what stands before an image.
    """
    model, (text, more) = seeing_model(kind), prompts(9, 5)
    row, other = pictured(model, text), pictured(model, text, seed=1)
    with PagedCache(model, **SIZES) as cache:
        generate(model, row, cache)
        for batch in (row, behind(row, more, model), behind(other, more, model)):
            assert_same_tokens(generate(model, batch, cache), generate(model, batch))
    with PagedCache.prefill(model, row["input_ids"], **SIZES) as cache:  # as text
        assert_same_tokens(generate(model, row, cache), generate(model, row))
    with PagedCache(model, **SIZES) as cache:
        with torch.no_grad():
            embedded = model.get_input_embeddings()(more[None, :1])
            model(inputs_embeds=embedded, **named(cache))
            model(input_ids=row["input_ids"][:, 1:2], **named(cache))
        assert_same_tokens(generate(model, row, cache), generate(model, row))


def test_a_turn_that_fails_takes_no_image_for_another(model):
    """If the first turn never ran, the next must not use what was prepared for its image."""
    a, b, _ = texts(6, 5, 4)

    def fail(*_):
        raise RuntimeError("planted")

    with PagedCache(model, **SIZES) as cache:
        hook = model.model.language_model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            answers(model, encoded(model, [[a, CAT, b]]), cache)
        hook.remove()
        for row in ([a, DOG, b], [a, CAT, b]):
            require_right(model, [row], answers(model, encoded(model, [row]), cache)[0])


@torch.no_grad()
@pytest.mark.parametrize("change", ["another image", "chosen", "cropped"])
def test_forwards_by_hand_go_on_at_the_positions_of_their_rows(model, change):
    """Offsets that were read once and are those of other rows or images."""
    a, b, more = texts(6, 5, 4)
    rows = [[a, CAT, b], [a, Image(8, 0), b]]
    with PagedCache(model, **SIZES) as cache:
        begun = rows if change == "chosen" else rows[:1]
        answers(model, encoded(model, begun), cache, new=1)
        cache.get_seq_length()  # which puts the offsets on the model
        if change == "chosen":
            cache.batch_select_indices(torch.tensor([1]))
        elif change == "cropped":
            cache.crop(2 + len(a))
        else:
            answers(model, encoded(model, rows[1:]), cache, new=1)
        row = [a, more] if change == "cropped" else [*rows[1], more]
        actual = model(input_ids=more[None], **named(cache)).logits[:, -1]
    assert_close(actual, model(**encoded(model, [row])).logits[:, -1])


def test_positions_of_a_callers_own_that_differ_by_axis_are_compared_whole(model):
    """Axes of positions of which only one is compared."""
    (text,) = texts(9)
    batch, at = padded([text]), torch.arange(9).expand(3, 1, 9)
    with PagedCache(model, **SIZES) as cache:
        for axis in (0, 1, None, 2):
            own = at.clone()
            if axis is not None:
                own[axis, :, 3:6] = 0
            batch["position_ids"] = own
            assert_same_tokens(generate(model, batch, cache), generate(model, batch))


def test_a_copy_of_the_model_and_the_model_afterwards_place_rows_by_themselves(model):
    """A copy that asks the cache of the first model, and what stays on a model behind its cache."""
    batch = encoded(model, [[texts(5)[0], CAT]])
    expected = answers(model, batch)[0]
    with PagedCache(model, **SIZES):
        twin = copy.deepcopy(model)
    assert PREPARE not in vars(model)
    for one in (model, twin):
        assert torch.equal(answers(one, batch)[0], expected)


# ------------------------------------------------------------------ any turns


@sampled
@every
def test_any_turns_with_images_are_those_of_rows_alone(model):
    """Appends, sees, swaps and drops images, edits, regenerates, forks, starts over.

    Refusals leave what is held, so the same rows are right with all of their images.
    """
    draw = random.Random(f"turns {model.config.model_type}")
    begin = texts(5)[0]
    cache = PagedCache(model, **SIZES)
    rows = [[begin, drawn(draw)], [begin, CAT, drawn(draw)]]
    shown = "all"
    for _ in range(examples(60, 5)):
        try:
            said = answers(model, encoded(model, rows, shown), cache)[0]
        except (UnsupportedModelError, ValueError):
            assert shown != "all"
            cache.kv.check()
            said = answers(model, encoded(model, rows), cache)[0]
        require_right(model, rows, said)
        held = [[*row, ids] for row, ids in zip(rows, said)]
        rows = [turned(row, draw) for row in held]
        shown = draw.choice(["all", "all", "none", "last"])
        if any(images(new) != images(row)[: len(images(new))] for new, row in zip(rows, held)):
            shown = "all"  # nobody could tell another image of the same size
        if draw.random() < 0.2:
            fork = cache.fork(1)
            cache.close()
            cache = fork
    cache.close()


def images(row):
    return [piece for piece in row if isinstance(piece, Image)]
