"""Kernels are off until a card has shown them right: who turns them on, and how they compile."""

import json

import pytest

pytest.importorskip("triton")

from pagedkv.kernels.triton import proved


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Writes what cards have shown, and forgets what was read before."""

    def write(text, asked=""):
        file = tmp_path / "proved.json"
        file.write_text(json.dumps(text))
        monkeypatch.setattr(proved, "FILE", file)
        monkeypatch.setenv(proved.TRY, asked)
        proved._noted.cache_clear()
        proved._asked.cache_clear()

    yield write
    proved._noted.cache_clear()
    proved._asked.cache_clear()


def test_what_is_shipped_names_all_that_waits_and_nothing_else():
    assert tuple(json.loads(proved.FILE.read_text())) == proved.NAMES


def test_it_is_on_where_a_card_has_shown_it(noted):
    noted({"gluon_prefill": {"90": {"card": "one"}}, "gluon_decode": {}})
    assert proved.is_on("gluon_prefill", 90)
    assert not proved.is_on("gluon_prefill", 100)
    assert not proved.is_on("gluon_decode", 90)


def test_the_environment_tries_it_before(noted):
    noted({"gluon_prefill": {}, "gluon_decode": {}}, asked="gluon_decode, gluon_prefill")
    assert proved.is_on("gluon_decode", 90)
    assert proved.is_on("gluon_prefill", 90)
    assert not proved.is_on("gluon_decode", 80)  # whose hardware has no such thing
    assert not proved.is_on("gluon_decode", 0)  # the interpreter's


def test_a_compiler_that_nobody_tried_it_with_leaves_it_off(noted, monkeypatch):
    # Alone finds: a kernel in Gluon offered to a Triton with which no card has run it.
    noted({"gluon_prefill": {"90": {}}, "gluon_decode": {}})
    for version, on in (("3.6.0", True), ("3.8.1", True), ("3.9.0", False), ("4.0.0", False)):
        monkeypatch.setattr(proved.triton, "__version__", version)
        assert proved.is_on("gluon_prefill", 90) == on


def test_a_name_that_nothing_has_is_refused(noted):
    noted({"gluon_prefill": {}, "gluon_decode": {}}, asked="gluon_dekode")
    with pytest.raises(
        ValueError,
        match=r"PAGEDKV_TRY: expected some of gluon_prefill, .*, gluon_latents, got",
    ):
        proved.is_on("gluon_decode", 90)
    with pytest.raises(ValueError, match="names: expected some of"), proved.trying("gluon"):
        pass


def test_what_is_tried_inside_hides_what_is_on_outside(noted):
    noted({"gluon_prefill": {"90": {}}, "gluon_decode": {"90": {}}})
    with proved.trying("gluon_decode"):
        assert proved.is_on("gluon_decode", 90)
        assert not proved.is_on("gluon_prefill", 90)
    with proved.trying():
        assert not proved.is_on("gluon_decode", 90)
    assert proved.is_on("gluon_prefill", 90)
