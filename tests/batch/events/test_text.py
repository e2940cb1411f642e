"""The text of events is the text of the result, in pieces that are whole."""

from functools import cache
from itertools import accumulate

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagedkv.batch.events.text import CUT, Text
from tests.effort import examples, sampled

SENTENCES = ["The sea is salt. naïve 漢字 🧊🐟!", "stop here, or stop there: STOP", "a b c ."]


@cache
def of_bytes(**fields):
    """A tokenizer whose tokens are bytes and pairs of bytes, as those of most models."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **fields)


@cache
def with_fallback():
    """A tokenizer of words, and of bytes for what is none."""
    words = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "op", "字"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    spaces, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    every = [spaces, decoders.ByteFallback(), decoders.Fuse(), first]
    tokenizer.decoder = decoders.Sequence(every)
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


class Slow:
    """A tokenizer of which nothing is known but `decode`."""

    def __init__(self, tokenizer):
        self.decode = tokenizer.decode
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens


def pieces(tokenizer, ids, stops=()):
    text = Text(tokenizer, stops)
    found = [text.add(token) for token in ids]
    return [*found, text.end(tokenizer.decode(ids, skip_special_tokens=True))]


@sampled
@pytest.mark.parametrize("as_given", [lambda t: t, Slow], ids=["stream", "window"])
@settings(max_examples=examples(200, 20), deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_pieces_are_whole_and_give_the_text_of_all_tokens(as_given, data):
    """Alone finds a character or a stop string that is given in two pieces, or twice."""
    tokenizer = of_bytes()
    words = tokenizer(data.draw(st.sampled_from(SENTENCES)))["input_ids"]
    loose = st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)  # also halves of characters
    ids = data.draw(loose) + words[: data.draw(st.integers(0, len(words)))] + data.draw(loose)
    stops = data.draw(st.lists(st.sampled_from(["stop", "op her", "字", "!", " "]), max_size=2))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    found = pieces(as_given(tokenizer), ids, stops)
    assert "".join(found) == whole
    assert not any(CUT in piece for piece in found[:-1]) or CUT in whole
    ends = [(whole.find(stop) + len(stop), stop) for stop in stops if stop in whole]
    if ends:  # the first that is whole ends a row
        end, stop = min(ends)
        cuts = accumulate(map(len, found))
        assert not any(end - len(stop) < cut < end for cut in cuts)


def test_what_may_become_a_stop_string_waits_until_it_is_known():
    ids = of_bytes()("stay; stop")["input_ids"]
    found = pieces(of_bytes(), ids, ["stop"])
    shown = [piece for piece in found if piece]
    assert "".join(shown) == "stay; stop"
    assert shown[-1].endswith("stop")
    assert not any(piece.endswith(("s", "st", "sto")) for piece in shown)


def test_spaces_that_a_tokenizer_cleans_up_are_not_given():
    tokenizer = of_bytes(clean_up_tokenization_spaces=True)
    ids = tokenizer("a b .")["input_ids"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("as_given", [lambda t: t, Slow], ids=["stream", "window"])
@settings(max_examples=examples(200, 40), deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([0, 11, 66, 241, 160, 168, 139, 257, 258, 259, 261]), max_size=9))
def test_bytes_that_are_no_character_spoil_those_beside_them(as_given, ids):
    """Alone finds a line's end that was given before half a character behind it made it none."""
    tokenizer = with_fallback()
    assert "".join(pieces(as_given(tokenizer), ids)) == tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_quotes_that_a_tokenizer_joins_wait_for_one_another():
    words = {"a": 0, ",": 1, "'": 2}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(words, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    ids = [1, 2, 2, 0]
    assert "".join(pieces(fast, ids)) == fast.decode(ids)


def test_without_a_tokenizer_there_is_no_text():
    text = Text(None)
    assert (text.add(5), text.end(None)) == ("", "")
