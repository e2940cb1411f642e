"""Probes of quality: each asks for what it says it asks for."""

from __future__ import annotations

import pytest
import torch

from pagedkv.quality import probes
from pagedkv.quality.probes import WARM


class Letters:
    """A tokenizer of one token for each character, without a first one."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})

    def decode(self, token):
        return chr(int(token))


class NoDigits(Letters):
    def decode(self, token):
        return "?"


LONG = "".join(chr(ord("a") + (i * i) % 23) for i in range(4000))


def test_the_passage_comes_again_and_its_beginning_does_not_count():
    probe = probes.probes(Letters(), 1024, {"one": LONG})["recall"]
    length = int(probes.PASSAGE * 1024)
    first, again = probe.ids[:length], probe.ids[-length:]
    assert len(probe.ids) == 1024
    assert torch.equal(first, again)
    assert torch.equal(probe.ids[probe.scored], first[length // 8 :])
    assert int(probe.scored[-1]) == len(probe.ids) - 1


def test_who_never_saw_the_passage_reads_the_same_text_without_it():
    found = probes.probes(Letters(), 1024, {"one": LONG, "two": LONG[::-1]})
    recall, unseen = found["recall"], found["unseen"]
    length = int(probes.PASSAGE * 1024)
    assert torch.equal(recall.ids[length:], unseen.ids)
    assert torch.equal(recall.ids[recall.scored], unseen.ids[unseen.scored])
    assert [name for name, probe in found.items() if probe.full_only] == ["unseen"]


def test_the_passage_is_of_the_first_text_and_what_lies_between_of_the_last():
    found = probes.probes(Letters(), 512, {"one": LONG, "two": LONG.upper()})
    length = int(probes.PASSAGE * 512)
    text = "".join(map(chr, found["recall"].ids.tolist()))
    assert text[:length] == LONG[-length:]
    assert text[length:-length] == LONG.upper()[: 512 - 2 * length]


def test_every_needle_lies_in_the_text_and_is_asked_for_behind_it(few_layers):
    tokenizer, probe = few_layers.tokenizer, few_layers.probes["needles"]
    digits = tokenizer.decode(probe.ids[probe.scored]).replace(" ", "")
    assert digits == "".join(map(str, probes.NUMBERS))
    text = tokenizer.decode(probe.ids)
    places = [text.index(city) for city in probes.CITIES]
    assert places == sorted(places)
    assert all(text.count(city) == 2 for city in probes.CITIES)
    assert len(probe.ids) == 256


def test_no_needles_are_hidden_where_they_do_not_fit_or_cannot_be_told():
    assert "needles" in probes.probes(Letters(), 1024, {"one": LONG})
    assert "needles" not in probes.probes(Letters(), 256, {"one": LONG})
    assert "needles" not in probes.probes(NoDigits(), 1024, {"one": LONG})


def test_a_short_text_is_read_whole():
    found = probes.probes(Letters(), 1024, {"short": LONG[:300], "long": LONG})
    assert len(found["short"].ids) == 300
    assert len(found["long"].ids) == 1024
    assert found["short"].scored.tolist() == list(range(WARM, 300))


@pytest.mark.parametrize(
    ("tokens", "texts", "says"),
    [
        (64, {"one": LONG}, "length: expected at least 128 tokens, got 64"),
        (1024, {"one": LONG[:100]}, "one: expected at least 128 tokens, got 100"),
        (1024, {"one": ""}, "one: expected at least 128 tokens, got 0"),
        (1024, {}, "texts: expected one or more, none of them called .*, got none"),
        (1024, {"recall": LONG}, "none of them called needles, recall, unseen, got recall"),
    ],
)
def test_texts_that_tell_nothing_are_refused(tokens, texts, says):
    with pytest.raises(ValueError, match=says):
        probes.probes(Letters(), tokens, texts)


def test_a_text_that_was_changed_is_refused(monkeypatch, tmp_path):
    (tmp_path / "docs.txt").write_text("something else")
    monkeypatch.setattr(probes, "DATA", tmp_path)
    with pytest.raises(ValueError, match=r"docs\.txt: expected sha256 509e51cf"):
        probes.built_in.__wrapped__("docs")
