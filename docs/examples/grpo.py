"""GRPO in plain torch: completions fork from their prompt, weights change between the calls.

Of each prompt several completions are drawn, and those with a better reward than the others of
their prompt become likelier. The reward here is a toy: completions shall name many numbers.

    python docs/examples/grpo.py [--model FOLDER_OR_HUB_ID]
"""

import argparse
import sys
from pathlib import Path

import torch

from pagedkv import BatchGenerator

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, load

TASKS = ["Count from one to ten.", "How old are you?", "Name your favourite number."]


def reward(text: str) -> float:
    """How much of a text are digits."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    chats = [[{"role": "user", "content": task}] for task in TASKS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": args.new_tokens, "logprobs": True}
    for step in range(args.steps):
        # Closed while the model trains: it has its own attention, and the memory.
        with BatchGenerator(model, tokenizer) as generator:
            rollouts = generator.generate(
                prompts, num_return_sequences=args.samples, seed=step, **options
            )
        rewards = torch.tensor([reward(r.text) for r in rollouts]).view(-1, args.samples)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
        far = 0.0
        for rollout, advantage in zip(rollouts, advantages.tolist()):
            prompt = prompts[rollout.index]
            ids = torch.tensor([prompt + rollout.tokens], device=model.device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            now = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            drawn = torch.tensor(rollout.logprobs, device=model.device)
            far = max(far, float((now.detach() - drawn).abs().max()))
            loss = -((now - drawn).exp() * advantage).mean() / len(rollouts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fed = sum(len(r.tokens) - 1 for r in rollouts)
        print(
            f"step {step}: reward {rewards.mean():.3f}, {generator.stats.computed - fed} prompt "
            f"tokens computed for {len(rollouts)} rollouts, log-probabilities within {far:.0e}"
        )


if __name__ == "__main__":
    main()
