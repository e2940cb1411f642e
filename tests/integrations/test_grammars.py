"""Grammars of other libraries over rows that are sampled, drafted and put back.

The model is random, so that nothing but the grammars makes texts what they are.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from pagedkv import BatchGenerator
from tests.docs.pages import DOCS, blocks
from tests.hf.tiny import tiny

# Short, middling and long, so that rows outgrow what is set aside for them.
REGEXES = [r"(yes|no)", r"[0-9]{3}-[0-9]{4}", r'\{"age":[1-9][0-9],"words":("[a-c]{3}",){2}0\}']
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "mood": {"enum": ["good", "bad"]}},
    "required": ["ok", "mood"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def model(tokenizer) -> Any:
    ends = tokenizer.eos_token_id
    return tiny(vocab_size=len(tokenizer), eos_token_id=ends, pad_token_id=ends)


def xgrammar(model: Any, tokenizer: Any) -> tuple[Callable[[int], Any], Callable[[str], Any]]:
    """Returns makers of processors: of the i-th regex, and of a JSON schema."""
    xgr = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgr.GrammarCompiler(info)
    compiled = [compiler.compile_regex(regex) for regex in REGEXES]
    schema = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda i: LogitsProcessor(compiled[i]), lambda _: LogitsProcessor(schema)


def outlines(name: str) -> Callable[[Any, Any], Any]:
    """Returns a function like `xgrammar`, for a backend of outlines."""

    def make(model: Any, tokenizer: Any) -> tuple[Callable[[int], Any], Callable[[str], Any]]:
        library = pytest.importorskip("outlines")
        pytest.importorskip("llguidance" if name == "LLGuidanceBackend" else "outlines_core")
        from outlines import backends

        backend = getattr(backends, name)(library.from_transformers(model, tokenizer))
        return (
            lambda i: backend.get_regex_logits_processor(REGEXES[i]),
            backend.get_json_schema_logits_processor,
        )

    return make


LIBRARIES = {
    "xgrammar": xgrammar,
    "llguidance": outlines("LLGuidanceBackend"),
    "outlines_core": outlines("OutlinesCoreBackend"),
}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["xgrammar", "llguidance", "outlines_core"])
@pytest.mark.parametrize(
    "sizes", [{}, {"verify_width": 4}, {"verify_width": 4, "max_tokens": 512, "page_size": 4}]
)
def test_sixty_four_rows_of_three_grammars_are_all_valid(model, tokenizer, library, sizes):
    make, _ = LIBRARIES[library](model, tokenizer)
    prompts = [f"Prompt {i}:" for i in range(32)]
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 1, "top_k": 0}
    options["max_new_tokens"] = 48
    with BatchGenerator(model, tokenizer, max_sequences=64, **sizes) as generator:
        results = generator.generate(prompts, processors=lambda i, k: [make(i % 3)], **options)
        stats = generator.stats
    wrong = [r for r in results if not re.fullmatch(REGEXES[r.index % 3], r.text)]
    assert not wrong
    assert {r.error for r in results} == {None}
    assert len(results) == 64
    assert (stats.preemptions > 0) == ("max_tokens" in sizes)
    assert (stats.drafted > stats.accepted) == ("verify_width" in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["xgrammar", "llguidance", "outlines_core"])
def test_a_json_schema_holds_and_one_object_for_several_rows_is_refused(model, tokenizer, library):
    _, make = LIBRARIES[library](model, tokenizer)
    options = {"do_sample": True, "seed": 1, "top_k": 0}
    options["max_new_tokens"] = 48
    schema = json.dumps(SCHEMA)
    with BatchGenerator(model, tokenizer) as generator:
        with pytest.raises(ValueError, match="follows the text of one row, and there are 2"):
            generator.generate(["One:", "Two:"], logits_processor=[make(schema)], **options)
        results = generator.generate(
            ["One:", "Two:"], processors=lambda index, sample: [make(schema)], **options
        )
    for result in results:
        assert result.error is None
        answer = json.loads(result.text)
        assert set(answer) == {"ok", "mood"}
        assert answer["mood"] in ("good", "bad")


@pytest.mark.slow
def test_the_blocks_of_the_how_to_run(model, tokenizer):
    for library in ("xgrammar", "outlines", "llguidance"):
        pytest.importorskip(library)
    shown = [block for block in blocks(DOCS / "howto" / "grammar.md") if block.not_run]
    assert len(shown) == 2
    names = {"model": model, "tokenizer": tokenizer}
    for block in shown:
        exec(block.body, names)
        assert [answer.error for answer in names["answers"]] == [None, None]
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", names["answers"][1].text)
