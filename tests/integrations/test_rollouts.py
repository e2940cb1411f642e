"""Rollouts over pages, with a trainer that calls them as TRL's do; TRL itself is not needed."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from pagedkv.errors import UnsupportedModelError
from pagedkv.integrations.trl import PagedRollouts
from tests.hf.tiny import tiny

A, B = [5, 6, 7, 8, 9], [5, 6, 30, 31]


class GRPO:
    """Stands for a trainer of TRL, as far as rollouts use it; rollouts have one turn, or two."""

    turns = 1

    def __init__(self, model, reward_funcs=None, args=None, rollout_func=None, **options):
        self.model = self.model_wrapped = model.train()
        self.processing_class = None
        self.temperature = options.get("temperature", 1.0)
        options = {"do_sample": True, "max_new_tokens": 4, "use_cache": False, **options}
        self.generation_config = GenerationConfig(**options, pad_token_id=0, eos_token_id=[1])
        self.accelerator = SimpleNamespace(unwrap_model=lambda m: m, autocast=nullcontext)

    def _generate(self, prompts):
        for turn in range(self.turns):
            out = self._generate_single_turn(prompts, None, {}, 2)
            if turn + 1 < self.turns:
                prompts = [p + tokens + [40, 41] for p, tokens in zip(prompts, out[0])]
        return prompts, out

    def _generate_single_turn(self, prompt_ids, images, fields, num_generations, has=False):
        raise AssertionError("the trainer's own way was taken")


class RLOO(GRPO):
    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        raise AssertionError("the trainer's own way was taken")


class Paged(PagedRollouts, GRPO):
    pass


class PagedRLOO(PagedRollouts, RLOO):
    pass


def trainer(kind: Any = Paged, **options: Any) -> Any:
    return kind(tiny(), generator={"max_tokens": 512, "page_size": 4}, **options)


def test_equal_prompts_are_computed_once_wherever_they_stand():
    made = trainer()
    # Copies that are no equal share of a batch do not fork: their last token is computed again.
    for prompts, copies in (([A, A, B, B], 0), ([A, B, B, A], 0), ([A, A, A, B], 2)):
        _, (tokens, logprobs) = made._generate(prompts)
        fed = sum(len(row) - 1 for row in tokens)
        assert len(tokens) == 4
        assert made.rollout_stats.computed - fed <= len(A) + len(B) + copies
        for prompt, row, said in zip(prompts, tokens, logprobs):
            with torch.no_grad():
                logits = made.model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
            fresh = logits.log_softmax(-1).gather(1, torch.tensor(row)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(said), fresh, atol=1e-4, rtol=0)


def test_weights_of_a_later_batch_are_never_answered_from_an_earlier_ones_pages():
    made = trainer(do_sample=False)
    first = made._generate([A, B])
    assert made._generate([A, B]) == first
    before = made.model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=0.1, fused=True)
    made.model(torch.tensor([A]), labels=torch.tensor([A])).loss.backward()
    optimizer.step()
    assert not torch.equal(before, made.model.lm_head.weight)
    _, (tokens, logprobs) = made._generate([A, B])
    _, (again, fresh) = trainer_of(made.model)._generate([A, B])
    assert tokens == again
    assert logprobs == fresh


def trainer_of(model: Any) -> Any:
    return Paged(model, generator={"max_tokens": 512, "page_size": 4}, do_sample=False)


def test_a_later_turn_finds_the_turn_before_it_and_pages_go_with_the_last():
    made = trainer(kind=type("Twice", (Paged,), {"turns": 2}))
    prompts, _ = made._generate([A * 4, B * 4])
    assert made.rollout_stats.reused >= len(A * 4) + len(B * 4)
    assert made._generator is None
    assert made.model.config._attn_implementation == "sdpa"
    assert [len(p) for p in prompts] >= [len(A * 4) + 3, len(B * 4) + 3]


def test_a_trainer_without_num_generations_gets_tokens_alone():
    _, tokens = trainer(PagedRLOO)._generate([A, A, B, B])
    assert [len(row) for row in tokens] == [4] * 4


def test_logprobs_are_told_only_at_the_temperature_they_are_of():
    _, (tokens, logprobs) = trainer(temperature=0.7)._generate([A, B])
    assert len(tokens) == 2
    assert logprobs is None


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, ValueError])
def test_a_model_is_as_it_was_behind_rollouts_and_behind_an_error(error):
    made = trainer()
    frozen = made.model.model.layers[0].eval()  # a part that its owner does not train

    def state():
        model = made.model
        return [m.training for m in model.modules()], model.config._attn_implementation

    before = state()
    made._generate([A, B])
    assert state() == before

    def fails(*_):
        assert not made.model.training
        raise error

    hook = frozen.register_forward_pre_hook(fails)
    with pytest.raises(error):
        made._generate([A, B])
    hook.remove()
    assert state() == before
    assert len(made._generate([A, B])[1][0]) == 2


def test_a_row_that_cannot_be_generated_raises_with_its_reason():
    made = trainer()
    with pytest.raises(RuntimeError, match=r"rollout of prompt 1: prompt: the model takes 256"):
        made._generate([A, A * 200])


def test_images_and_shards_are_refused_by_name():
    made = trainer()
    for images, fields in (([["a picture"]], {}), (None, {"pixel_values": torch.zeros(1)})):
        with pytest.raises(ValueError, match="images: expected prompts of text alone"):
            made._generate_single_turn([A], images, fields, 1)
    next(made.model.parameters()).ds_id = 3
    with pytest.raises(UnsupportedModelError, match=r"these are shards of DeepSpeed ZeRO-3"):
        made._generate([A])
    made = trainer()
    made.model.__class__ = type("FSDPModule", (type(made.model),), {})
    with pytest.raises(UnsupportedModelError, match=r"these are shards of FSDPModule"):
        made._generate([A])


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching"])
def test_engines_that_would_generate_instead_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}: expected False"):
        trainer(args=SimpleNamespace(**{name: True}))
    with pytest.raises(ValueError, match="rollout_func: expected None"):
        trainer(rollout_func=print)


def test_a_trainer_that_is_not_there_is_no_attribute():
    from pagedkv.integrations import trl

    with pytest.raises(AttributeError, match="PagedPPOTrainer"):
        _ = trl.PagedPPOTrainer
