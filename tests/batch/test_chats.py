"""Options for the template of chat messages: tools, thinking, how the prompt ends."""

import pytest
from transformers import CLIPImageProcessor, LlavaProcessor

from pagedkv.batch.chats import require_known, told
from tests.batch.generating import generator, tokens_alone
from tests.batch.letters import LETTERS, letters, tokens
from tests.hf.tiny import tiny

CHAT = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}y{% endif %}"
    "{% if add_generation_prompt %}z{% endif %}"
)
MESSAGES = [{"role": "user", "content": "dbe"}]
PLAIN, QUIET, TOOLED = (LETTERS.index(x) for x in "zyt")
IDS = [3, 1, 4]
TOOLS = [{"name": "t", "type": "function"}]
GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def spoken(model):
    tokenizer = letters()
    tokenizer.chat_template = CHAT
    with generator(model, tokenizer) as spoken:
        yield spoken


def alone(model, *more):
    return tokens_alone(model, [*IDS, *more], max_new_tokens=4)


def test_a_template_is_told_what_the_call_says(model, spoken):
    for said, ids in (
        ({"enable_thinking": False}, [QUIET, PLAIN]),
        ({"enable_thinking": True, "tools": None}, [PLAIN]),
        ({"tools": TOOLS}, [TOOLED, PLAIN]),
        ({"add_generation_prompt": False}, []),
        ({"chat_template": "{{ word }}z", "word": "dbey"}, [QUIET, PLAIN]),
    ):
        (result,) = spoken.generate([MESSAGES], chat_template_kwargs=said, **GREEDY)
        assert result.tokens == alone(model, *ids), said


@pytest.mark.parametrize("lazy", [False, True])
def test_each_prompt_may_have_its_own(model, spoken, lazy):
    every = [{"tools": TOOLS}, None, {"enable_thinking": False}, {}]
    prompts = [MESSAGES, MESSAGES, MESSAGES, IDS]
    if lazy:
        results = spoken.generate(iter(prompts), chat_template_kwargs=iter(every), **GREEDY)
    else:
        results = spoken.generate(prompts, chat_template_kwargs=every, **GREEDY)
    ends = [[TOOLED, PLAIN], [PLAIN], [QUIET, PLAIN], []]
    assert tokens(results) == [alone(model, *end) for end in ends]


def test_scores_are_those_behind_what_the_template_was_told(spoken):
    said = {"enable_thinking": False}
    (expected,) = spoken.score([[*IDS, QUIET, PLAIN]], [[5], [6, 7]])
    (other,) = spoken.score([MESSAGES], [[5], [6, 7]])
    for every in (said, [said]):
        (found,) = spoken.score([MESSAGES], [[5], [6, 7]], chat_template_kwargs=every)
        for one, right, wrong in zip(found, expected, other, strict=True):
            assert one.logprobs == pytest.approx(right.logprobs, abs=1e-3)
            assert one.logprobs != pytest.approx(wrong.logprobs, abs=1e-2)


REFUSED = [
    (3, TypeError, "chat_template_kwargs: expected a dict"),
    ({3: 4}, TypeError, "chat_template_kwargs: expected a dict"),
    ("enable_thinking", TypeError, "chat_template_kwargs: expected a dict"),
    ([{}, {}], ValueError, "chat_template_kwargs: expected one value for each of 1 prompts, got 2"),
    ({"enable_thinkng": True}, ValueError, "got 'enable_thinkng'"),
    ({"documents": []}, ValueError, "got 'documents'"),  # of which this template says nothing
    ({"tokenize": False}, ValueError, "got 'tokenize'"),
    ({"messages": []}, ValueError, "got 'messages'"),
    ({"tools": {"name": "t"}}, TypeError, "chat_template_kwargs: tools: expected a list"),
    ({"add_generation_prompt": 1}, TypeError, "add_generation_prompt: expected True or False"),
]


@pytest.mark.parametrize(("wrong", "error", "why"), REFUSED, ids=lambda x: str(x)[:25])
def test_what_a_template_cannot_be_told_is_refused_by_name(spoken, wrong, error, why):
    for call in (
        lambda: spoken.stream([MESSAGES], chat_template_kwargs=wrong, **GREEDY),
        lambda: spoken.score([MESSAGES], [[5]], chat_template_kwargs=wrong),
    ):
        with pytest.raises(error, match=why):
            call()


def test_a_call_without_chats_has_no_template_to_tell(spoken):
    said = {"chat_template_kwargs": {"enable_thinking": False}}
    for prompts in (["dbe"], [IDS]):
        with pytest.raises(ValueError, match="chat_template_kwargs: expected chat messages"):
            spoken.stream(prompts, **said, **GREEDY)
        with pytest.raises(ValueError, match="chat_template_kwargs: expected chat messages"):
            spoken.score(prompts, [[5]], **said)
    assert spoken.generate([], **said, **GREEDY) == []


def test_of_prompts_that_are_read_each_mistake_is_its_rows_error(model, spoken):
    every = [{}, {"enable_thinkng": 1}, {"tools": 3}]
    results = spoken.generate(iter([MESSAGES] * 4), chat_template_kwargs=iter(every), **GREEDY)
    assert results[0].tokens == alone(model, PLAIN)
    for result, why in zip(results[1:], ("enable_thinkng", "tools: expected", "got 3")):
        assert why in result.error


def test_what_comes_behind_the_last_message_may_be_said(spoken, model):
    begun = [*MESSAGES, {"role": "assistant", "content": "y"}]
    for said, end in (({}, [QUIET]), ({"add_generation_prompt": True}, [QUIET, PLAIN])):
        (result,) = spoken.generate([begun], chat_template_kwargs=said, **GREEDY)
        assert result.tokens == alone(model, *end)


def test_the_template_of_a_processor_is_told_as_well():
    pytest.importorskip("PIL")
    model, tokenizer = tiny(), letters()
    processor = LlavaProcessor(CLIPImageProcessor(), tokenizer, chat_template=CHAT)
    processor.tokenizer.chat_template = None
    with generator(model, processor) as batched:
        said = {"enable_thinking": False}
        found = batched.generate([MESSAGES], chat_template_kwargs=said, **GREEDY)
        assert tokens(found) == [alone(model, QUIET, PLAIN)]
        with pytest.raises(ValueError, match="got 'enable_thinkng'"):
            batched.stream([MESSAGES], chat_template_kwargs={"enable_thinkng": 1}, **GREEDY)


def test_templates_by_name_are_all_looked_at():
    tokenizer = letters()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    require_known(tokenizer, {"tools": TOOLS, "chat_template": "tool_use"})
    with pytest.raises(ValueError, match="got 'thinking'"):
        require_known(tokenizer, {"thinking": True})
    tokenizer.chat_template = None  # one that renders in a way of its own says itself what it knows
    require_known(tokenizer, {"reasoning_effort": "high"})
    assert told(None) == {}
