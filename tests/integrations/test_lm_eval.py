"""`--model pagedkv` gives what lm-eval's own `hf` model gives, and computes a context once."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integrations.conftest import asked, made

# Not `importorskip`: to import lm-eval takes seconds, for which the fast tests do not wait.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: make test-eval"),
]

CONTEXTS = ("the quick brown fox jumps over", "the quick brown cat ", "a", "")
CHOICES = (" the dog", " it", " again and again.", "x")
PAIRS = asked(*((context, choice) for context in CONTEXTS for choice in CHOICES))


def agree(ours: list[Any], theirs: list[Any]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [logprob for logprob, _ in ours] == pytest.approx([a for a, _ in theirs], rel=1e-5)


def test_scores_are_those_of_the_stock_model(paged, stock):
    agree(paged().loglikelihood(PAIRS), stock().loglikelihood(PAIRS))


def test_the_order_of_requests_decides_only_the_order_of_answers(paged):
    lm = paged()
    agree(lm.loglikelihood(PAIRS[::-1])[::-1], lm.loglikelihood(PAIRS))


def test_some_continuation_is_the_greedy_one(paged, stock):
    lm = stock()
    text = lm.generate_until(asked((CONTEXTS[0], {"until": [], "max_gen_toks": 3})))[0]
    pairs = asked((CONTEXTS[0], text), (CONTEXTS[0], text[:-1] + "q"))
    assert [greedy for _, greedy in paged().loglikelihood(pairs)] == [True, False]


def test_a_request_longer_than_the_model_loses_its_beginning(paged, stock, caplog):
    pairs = asked(("abcdefgh" * 3, " end"), ("short", " end"))
    lm = paged(max_length=16)
    agree(lm.loglikelihood(pairs), stock(max_length=16).loglikelihood(pairs))
    assert "1 of 2 requests are longer than max_length = 16" in caplog.text


def test_a_continuation_longer_than_the_model_is_named(paged):
    from pagedkv.errors import RequestError

    with pytest.raises(RequestError, match=r"'a' \+ 'bbbbbbbbb': .* at most max_length = 8"):
        paged(max_length=8).loglikelihood(asked(("a", "b" * 9)))


def test_a_request_longer_than_the_pages_is_named(paged):
    from pagedkv.errors import RequestError

    with pytest.raises(RequestError, match="the request 'aaaa"):
        paged(max_tokens=16).loglikelihood(asked(("a" * 64, "b")))


@pytest.mark.parametrize("length", [None, 16])
def test_perplexity_of_long_texts_is_that_of_the_stock_model(paged, stock, length):
    texts = asked(("the quick brown fox jumps over the lazy dog. " * 2,), ("short.",))
    ours = paged(max_length=length).loglikelihood_rolling(texts, disable_tqdm=True)
    theirs = stock(max_length=length, batch_size=1).loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_context_is_computed_once_for_all_its_choices(paged):
    lm, fed = paged(), []
    lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    context = "which of these is it, the first or the last".replace(",", ".")
    lm.loglikelihood(asked(*((context, choice) for choice in CHOICES)))
    assert sum(fed) == len(context) + sum(len(choice) - 1 for choice in CHOICES)


def test_a_context_with_more_choices_than_rows_run_at_once(paged, stock):
    lm = paged()
    pairs = asked(*(("the quick", a + b + "c") for a in "abcdefghi" for b in "abcde"))
    assert len(pairs) > lm.generator.cache.config.max_sequences == 32
    agree(lm.loglikelihood(pairs), stock().loglikelihood(pairs))


def test_texts_are_those_of_the_stock_model(paged, stock):
    options = (
        {"until": ["e", "\n\n"], "max_gen_toks": 24},
        {"until": "qu", "max_gen_toks": 8},
        {"until": [], "max_new_tokens": 12, "do_sample": False, "temperature": 0.0},
    )
    requests = asked(*((c, o) for c in CONTEXTS[:3] for o in options))
    ours, theirs = paged().generate_until(requests), stock(batch_size=1).generate_until(requests)
    assert ours == theirs
    assert len(set(map(len, ours))) > 1


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(paged, stock):
    lm = stock()
    first = lm.generate_until(asked(("the quick", {"until": [], "max_gen_toks": 6})))[0]
    requests = asked(("the quick", {"until": ["k" + first[0]], "max_gen_toks": 6}))
    assert paged().generate_until(requests) == lm.generate_until(requests) == [first]


def test_an_empty_stop_string_ends_nothing(paged):
    lm = paged()
    texts = [
        lm.generate_until(asked(("the quick", {"until": until, "max_gen_toks": 6})))
        for until in ([""], [])
    ]
    assert texts[0] == texts[1] != [""]


def test_texts_can_be_drawn_again_with_the_seed_that_lm_eval_sets(paged):
    import torch

    requests = asked(("the quick", {"until": [], "max_gen_toks": 24, "temperature": 1.0}))
    lm, drawn = paged(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn += lm.generate_until(requests)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("end", ["e", 5])
def test_what_was_thought_is_no_part_of_the_answer(paged, stock, end):
    requests = asked(*((c, {"until": ["x"], "max_gen_toks": 24}) for c in CONTEXTS[:3]))
    ours = paged(think_end_token=end).generate_until(requests)
    assert ours == stock(think_end_token=end).generate_until(requests)


def test_a_chat_template_is_applied_as_by_the_stock_model(paged, stock):
    messages = [{"role": "user", "content": "the quick"}]
    text = paged().apply_chat_template(messages)
    assert text == stock().apply_chat_template(messages) == "the quick:\n"


def test_every_answer_goes_to_lm_evals_cache(paged):
    class Hook:
        def __init__(self) -> None:
            self.seen: list[tuple[str, Any]] = []

        def add_partial(self, kind: str, request: Any, answer: Any) -> None:
            self.seen.append((kind, tuple(request)))

    lm, hook = paged(), Hook()
    lm.set_cache_hook(hook)
    generated = asked(("a", {"until": ["e"], "max_gen_toks": 4}))
    lm.loglikelihood(PAIRS)
    lm.generate_until(generated)
    lm.loglikelihood_rolling(asked(("a text",)))
    wanted = [("loglikelihood", each.args) for each in PAIRS]
    wanted += [("generate_until", generated[0].args), ("loglikelihood_rolling", ("a text",))]
    assert sorted(map(repr, hook.seen)) == sorted(map(repr, wanted))


def test_a_row_that_fails_is_named(paged):
    from pagedkv.errors import RequestError

    requests = asked(("aaaaaaaaaaaaaaaa" * 4, {"until": [], "max_gen_toks": 4}))
    with pytest.raises(RequestError, match=r"context ends with 'aaaa.*': "):
        paged(max_tokens=16).generate_until(requests)
    requests = asked(("a", {"until": [], "max_gen_toks": 300}))
    with pytest.raises(RequestError, match="max_gen_toks: expected fewer than max_length = 256"):
        paged().generate_until(requests)


def test_adapters_are_loaded_as_by_the_stock_model(paged, stock, checkpoint, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    ours = paged(peft=str(tmp_path)).loglikelihood(PAIRS)
    agree(ours, stock(peft=str(tmp_path)).loglikelihood(PAIRS))
    assert ours[0] != pytest.approx(paged().loglikelihood(PAIRS)[0])


def test_a_model_that_is_there_already_is_taken(paged, stock, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    agree(paged(model).loglikelihood(PAIRS), stock().loglikelihood(PAIRS))


def test_arguments_of_the_generator_reach_it(paged):
    config = paged(kv_format="int8,int4", page_size=16, step_tokens=64, max_tokens=512).generator
    assert config.cache.config.kv_format == ("int8", "int4")
    assert (config.cache.config.page_size, config.step_tokens) == (16, 64)
    config = paged(retention="keydiff", budget=96, max_tokens=512).generator.cache.config
    assert config.budget == 96


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kv_fromat": "int4"}, "no argument is called kv_fromat; did you mean kv_format?"),
        ({"qwerty": 3}, "model_args: .* unexpected keyword argument 'qwerty'"),
        ({"kv_format": "int5"}, "model_args: kv_format"),
        ({"page_size": 0}, "model_args: page_size"),
        ({"parallelize": True}, "parallelize: without effect over pages, got True"),
        ({"tp_plan": "auto"}, "tp_plan: without effect"),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype: without effect"),
        ({"softmax_dtype": "bfloat16"}, "softmax_dtype: without effect"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_by_name(paged, arguments, said):
    from pagedkv.errors import ModelArgsError

    with pytest.raises(ModelArgsError, match=said):
        paged(**arguments)


def test_arguments_that_name_no_model_are_refused_by_name():
    from pagedkv.errors import ModelArgsError
    from pagedkv.integrations.lm_eval import PagedLM

    for arguments, said in (
        ({}, "pretrained: expected a folder"),
        ({"pretrianed": "abc"}, "no argument is called pretrianed; did you mean pretrained?"),
        ({"pretrained": "/nowhere"}, "model_args: cannot load what they name: .*/nowhere"),
    ):
        with pytest.raises(ModelArgsError, match=said):
            PagedLM(**arguments, device="cpu")


def test_an_argument_that_nobody_would_read_is_refused(paged, checkpoint):
    from transformers import AutoModelForCausalLM

    from pagedkv.errors import ModelArgsError

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ModelArgsError, match="no argument is called attn_implementation"):
        paged(model, attn_implementation="sdpa")


FROM_PRETRAINED = """
    attn_implementation cache_dir config device_map force_download load_in_4bit load_in_8bit
    local_files_only low_cpu_mem_usage max_memory offload_buffers offload_state_dict
    quantization_config rope_scaling sliding_window state_dict token use_safetensors variant
    num_hidden_layers num_key_value_heads patch_size n_group
"""


def test_no_argument_of_from_pretrained_is_taken_for_a_misspelt_one_of_ours():
    from pagedkv.integrations.lm_eval import _told_apart

    names = FROM_PRETRAINED.split()
    assert _told_apart(dict.fromkeys(names), is_loaded=False) == ({}, dict.fromkeys(names))


def test_a_model_with_an_encoder_is_refused_by_name(tmp_path):
    from transformers import T5Config

    from pagedkv.errors import UnsupportedModelError
    from pagedkv.integrations.lm_eval import PagedLM

    made(tmp_path)
    T5Config(vocab_size=40).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="backend: expected a decoder, got seq2seq"):
        PagedLM(str(tmp_path), device="cpu")


def test_that_a_batch_size_has_no_effect_is_said_once(paged, caplog):
    with caplog.at_level(logging.WARNING):
        paged(batch_size=1)
        assert "without effect" not in caplog.text
        lm = paged(batch_size="auto")
        lm.loglikelihood_rolling(asked(("a text",), ("another",)))
    assert caplog.text.count("batch_size: 'auto' is without effect") == 1


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a task of choices and one of texts, which ask nobody for their documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"ask": text, "all": ["a dog", "the end", "x"], "right": 1} for text in CONTEXTS[:3]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "test_split": "test"}
    data["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}}
    data |= {"doc_to_text": "{{ask}}", "doc_to_target": "{{right}}"}
    choices = {"task": "tiny_choices", "output_type": "multiple_choice", "doc_to_choice": "{{all}}"}
    texts = {"task": "tiny_texts", "output_type": "generate_until"}
    texts["generation_kwargs"] = {"until": ["e"], "max_gen_toks": 8}
    for each in (choices, texts):
        (folder / f"{each['task']}.yaml").write_text(json.dumps(data | each))
    return folder


def test_lm_eval_finds_the_model_by_its_name(checkpoint, task):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import pagedkv.integrations.lm_eval  # noqa: F401 - on 0.4.13 this makes the name known

    found = [
        lm_eval.simple_evaluate(
            model=name,
            model_args=f"pretrained={checkpoint}{more}",
            device="cpu",
            tasks=["tiny_choices", "tiny_texts"],
            task_manager=TaskManager(include_path=str(task), include_defaults=False),
            bootstrap_iters=0,
        )
        for name, more in (("pagedkv", ",page_size=8"), ("hf", ""))
    ]
    answers = [
        {row["doc_id"]: row["filtered_resps"] for row in run["samples"]["tiny_texts"]}
        for run in found
    ]
    assert answers[0] == answers[1]
    right = [[row["acc"] for row in run["samples"]["tiny_choices"]] for run in found]
    assert right[0] == right[1]
    assert len(right[0]) == len(answers[0]) == 3


def test_a_name_that_an_entry_point_has_given_is_left_alone(fresh_python):
    code = """
from lm_eval.api.registry import get_model, model_registry
import lm_eval.models
model_registry.register("pagedkv", target="pagedkv.integrations.lm_eval:PagedLM")
print(get_model("pagedkv").__module__)
"""
    assert fresh_python("-c", code).splitlines()[-1] == "pagedkv.integrations.lm_eval"


def test_the_command_evaluates(checkpoint, task, tmp_path):
    arguments = f"pretrained={checkpoint},kv_format=('int8','int4'),dtype=float32"
    tasks = ["--tasks", "tiny_choices", "tiny_texts", "--include_path", str(task)]
    command = [sys.executable, "-m", "pagedkv", "eval", "--model_args", arguments, *tasks]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny_choices" in done.stdout
    assert "acc_norm" in done.stdout
    assert "exact_match" in done.stdout
    arguments = f"pretrained={checkpoint},kv_format=int5"
    command[command.index("--model_args") + 1] = arguments
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pagedkv: model_args: kv_format: expected")
