"""Your own loop and your own forward pass: prompts join as they come and leave as they end.

    python docs/examples/own_loop.py [--model FOLDER_OR_HUB_ID]

No `generate` and no transformers cache: `forward` below is a whole Llama over packed tokens, with
the weights of a loaded model. The cache finds by itself what a new prompt has in common with
earlier ones. Every token is then compared with `model.generate`, row by row.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pagedkv import CacheConfig, PagedKVCache, StepMetadata, paged_attention

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, end_tokens, load, same

SYSTEM = """\
You are a helpful cook who has worked in small kitchens by the sea for thirty years. Answer every \
question in one or two short sentences, and name amounts and times where they matter."""
QUESTIONS = """\
How long do I boil an egg?
How do I keep rice from sticking to the bottom of the pot?
What can I cook with three tomatoes, an onion and some old bread?
Why do you add salt to the water?
My soup is far too salty, and the guests will be here in ten minutes. What can I do?
How do I know that a fish is fresh?
""".splitlines()


@torch.no_grad()
def forward(model: Any, step: StepMetadata) -> torch.Tensor:
    """Logits `[B, vocabulary]` after the last new token of each sequence; for Llama's layers."""
    llama = model.model
    x = llama.embed_tokens(step.tokens)  # [T, hidden]: all sequences, one after another
    cos, sin = llama.rotary_emb(x, step.positions[None])
    for i, layer in enumerate(llama.layers):
        attention, y = layer.self_attn, layer.input_layernorm(x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (p(y).unflatten(-1, (-1, attention.head_dim)) for p in projections)  # [T, H, D]
        q, k = apply_rotary_pos_emb(q, k, cos[0], sin[0])
        y = paged_attention(q, k, v, step, i)  # writes k and v, then attends
        x = x + attention.o_proj(y.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(llama.norm(x[step.last_rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--rows", type=int, default=6, help="questions, at most 6")
    parser.add_argument("--new-tokens", type=int, default=40, help="longest answer")
    args = parser.parse_args()
    model, tok = load(args.model)
    questions, ends = QUESTIONS[: args.rows], end_tokens(model)
    system = {"role": "system", "content": SYSTEM}
    prompts = [chat_ids(tok, [system, {"role": "user", "content": q}]) for q in questions]

    cache = PagedKVCache(CacheConfig.from_model(model.config, max_tokens=4096), device=model.device)
    waiting = list(range(len(prompts)))
    found, answers = {}, [[] for _ in prompts]
    row_of, feed = {}, {}  # by sequence: its row, and the tokens it feeds next
    steps = tokens = 0
    while waiting or feed:
        if waiting:  # one prompt joins at each step, beside those that are being answered
            row = waiting.pop(0)
            seq = cache.add(prompts[row])
            row_of[seq], found[row], feed[seq] = row, cache.length(seq), cache.uncached(seq)
        with cache.step(list(feed), tokens=list(feed.values())) as step:
            logits = forward(model, step)
        steps, tokens = steps + 1, tokens + len(step.tokens)
        for seq, token in zip(list(feed), logits.argmax(-1).tolist()):
            answer = answers[row_of[seq]]
            answer.append(token)
            feed[seq] = [token]
            if token in ends or len(answer) == args.new_tokens:
                cache.free(seq)
                del feed[seq]

    print("prompt  found  answer (tokens)")
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        print(f"{len(prompt):>6}{found[row]:>7}{len(answer):>8}  {questions[row]}")
        text = tok.decode(answer, skip_special_tokens=True)
        print(textwrap.indent(textwrap.fill(text, 74), " " * 23))
    stats = cache.stats()
    print(
        f"\n{steps} steps over {tokens} tokens; {stats.tokens_reused} of "
        f"{sum(map(len, prompts))} prompt tokens were found in the cache"
    )

    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=args.new_tokens,
        )
        theirs.append(out[0, len(prompt) :].tolist())
    sys.exit(not same(model, prompts, answers, theirs))


if __name__ == "__main__":
    main()
