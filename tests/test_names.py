"""Names of other libraries: taken, or answered with the name that there is."""

from dataclasses import fields

import pytest

from pagedkv import CacheConfig
from pagedkv.config import DTYPE_BYTES, KV_FORMATS
from pagedkv.names import DTYPES, FIELDS, FORMATS, OPTIONS, POLICIES, meant
from pagedkv.retention import POLICIES as KNOWN_POLICIES

SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": "float32", "max_tokens": 64}
KNOWN_FIELDS = {field.name for field in fields(CacheConfig)}
KNOWN = [
    (DTYPES, DTYPE_BYTES),
    (FIELDS, KNOWN_FIELDS),
    (FORMATS, KV_FORMATS),
    (POLICIES, KNOWN_POLICIES),
]


def test_every_name_leads_to_one_that_is_there_and_none_is_taken_from_us():
    for borrowed, known in KNOWN:
        assert {*borrowed.values()} <= {*known}
        assert not {*borrowed} & {*known}


def test_options_lead_to_those_of_transformers():
    known = vars(pytest.importorskip("transformers").GenerationConfig())
    assert {*OPTIONS.values()} <= {*known}
    assert not {*OPTIONS} & {*known}


@pytest.mark.parametrize("name", DTYPES)
def test_a_cache_takes_dtypes_by_their_short_names(name):
    assert CacheConfig(**SHAPE | {"dtype": name}).dtype == DTYPES[name]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"block_size": 16}, "block_size: CacheConfig has no such field; did you mean page_size?"),
        ({"kv_cache_dtype": "q8"}, "did you mean kv_format?"),
        ({"temperature": 1.0}, "it is an option of generate, temperature"),
        ({"n": 8}, "n: CacheConfig has no such field; it is an option of generate, num_return_seq"),
        ({"kv_format": "q4"}, "got 'q4'; did you mean int4?"),
        ({"kv_format": ("int8", "q8_0")}, r"got \('int8', 'q8_0'\); did you mean int8?"),
        ({"kv_format": None}, "got None; did you mean dense?"),
        ({"retention": "H2O", "budget": 64}, "got 'H2O'; did you mean importance?"),
        ({"retention": "streaming-llm", "budget": 64}, "; did you mean sinks?"),
    ],
)
def test_a_cache_answers_other_names_with_its_own(given, says):
    with pytest.raises((TypeError, ValueError), match=says.replace("?", r"\?")):
        CacheConfig(**SHAPE | given)


def test_a_pair_of_known_formats_too_many_is_answered_with_none():
    with pytest.raises(ValueError, match=r"got \('int8', 'int8', 'int8'\)$"):
        CacheConfig(**SHAPE, kv_format=("int8", "int8", "int8"))


def test_a_slip_is_answered_with_what_is_spelt_nearly_like_it():
    assert meant("top-k", ["top_k", "top_p"]) == "; did you mean top_k?"
    assert meant("colunm", ["Column"], before="--") == "; did you mean --Column?"
    assert meant("nothing", ["page_size"], FIELDS) == ""
