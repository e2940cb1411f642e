"""Rollouts of TRL's trainers: trained for real, where TRL is installed."""

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from pagedkv.integrations.trl import PagedGRPOTrainer, PagedRLOOTrainer  # noqa: E402

TRAINERS = {"grpo": (PagedGRPOTrainer, trl.GRPOConfig), "rloo": (PagedRLOOTrainer, trl.RLOOConfig)}
# TRL 1.16 still uses words that transformers 5.24 will drop.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs from completion to completion."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


@pytest.fixture
def train(tiny_path, tmp_path):
    """Trains the tiny model of letters; returns the trainer and what each rollout was."""

    def train(kind: str, model: Any = None, prompts: Any = None, **options: Any) -> Any:
        trainer, config = TRAINERS[kind]
        seen: list[Any] = []

        class Watched(trainer):
            def _rolled_out(self, pages: Any, prompts: Any, logprobs: bool) -> Any:
                results = super()._rolled_out(pages, prompts, True)
                seen.append((prompts, results, self.rollout_stats, pages.cache.config.dtype))
                return results

            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                out = super()._generate(*args, **kwargs)
                own = self.accelerator.unwrap_model(self.model_wrapped)
                assert own.training
                assert own.config._attn_implementation == "sdpa"
                seen[-1] = (*seen[-1], forward(own, *seen[-1][:2]))
                return out

        rows = [{"prompt": text} for text in prompts or [f"Count to {i}:" for i in range(10, 18)]]
        extra = {
            name: options.pop(name) for name in ("peft_config", "generator") if name in options
        }
        given = {"max_steps": 3, "max_completion_length": 8, "learning_rate": 1e-3, **options}
        made = Watched(
            model=model or str(tiny_path),
            reward_funcs=reward,
            args=config(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **given),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(tiny_path, eos_token="\n"),
            **extra,
        )
        made.train()
        return made, seen

    return train


@torch.no_grad()
def forward(model: Any, prompts: Any, results: Any) -> list[Any]:
    """Returns the log-probabilities that a forward of each rollout's whole text gives now."""
    found = []
    for prompt, result in zip(prompts, results):
        model.eval()
        logits = model(torch.tensor([prompt + result.tokens])).logits[0, len(prompt) - 1 : -1]
        model.train()
        chosen = torch.tensor(result.tokens)[:, None]
        found.append(logits.float().log_softmax(-1).gather(1, chosen)[:, 0])
    return found


def far(seen: Any) -> float:
    """The largest error of a log-probability over all rollouts."""
    return max(
        float((torch.tensor(result.logprobs) - fresh).abs().max())
        for _, results, _, _, forwards in seen
        for result, fresh in zip(results, forwards)
    )


@pytest.mark.parametrize("kind", TRAINERS)
def test_three_steps_with_the_defaults_of_trl(train, kind, tmp_path):
    trainer, seen = train(kind, bf16=False, per_device_train_batch_size=16)
    assert "fused" in str(trainer.args.optim).lower()  # which moves no version of a parameter
    assert len(seen) == 3
    assert far(seen) < 1e-4
    for prompts, results, stats, _, _ in seen:
        distinct = sum(map(len, {tuple(prompt) for prompt in prompts}))
        fed = sum(len(result.tokens) - 1 for result in results)  # nobody feeds the last one
        assert stats.computed - fed == stats.prompt_tokens == distinct
        assert len(prompts) == 16
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()


def test_mixed_precision_rolls_out_in_its_own_dtype(train):
    _, seen = train("grpo", bf16=True)
    assert {dtype for _, _, _, dtype, _ in seen} == {"bfloat16"}
    assert 0 < far(seen) < 8 * 2**-5  # bfloat16 has steps of 2**-5 where logits are: 4 to 8


def test_adapters_are_trained_and_the_reference_is_the_model_below(train):
    import peft

    lora = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer, seen = train("grpo", bf16=False, beta=0.1, logging_steps=1, peft_config=lora)
    assert far(seen) < 1e-4
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert kl[-1] > 0


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching"])
def test_other_engines_are_refused_before_anything_is_loaded(train, name):
    with pytest.raises(ValueError, match=rf"{name}: expected False"):
        train("grpo", **{name: True})


def test_a_prompt_that_can_never_fit_ends_training_and_leaves_the_model_as_it_was(train, tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path).train()
    with pytest.raises(RuntimeError, match="rollout of prompt 0: "):
        train("grpo", model, ["word " * 40], generator={"max_tokens": 32}, bf16=False)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
