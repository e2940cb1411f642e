"""Many answers to one prompt: samples and beams are forks, so what they share is kept once.

    python docs/examples/best_of_n.py [--model FOLDER_OR_HUB_ID]

First the best of n samples, then a beam search, both in a loop of their own; then the same beam
search by `generate`, with pages and with transformers' own cache.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from pagedkv import CacheConfig, PagedCache, PagedKVCache

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, end_tokens, load, same
from own_loop import forward

SYSTEM = "You are a helpful assistant who writes for children. Write one short sentence."
TASKS = ("How does the story of the old lighthouse keeper begin?", "Why do we have to sleep?")


def best_of(model: Any, cache: PagedKVCache, prompt: list[int], n: int, new_tokens: int) -> Any:
    """Samples n answers: (mean log-probability, ids) of each, and the most pages held."""
    root, ends = cache.add(prompt), end_tokens(model)
    answers, sums = [[] for _ in range(n)], [0.0] * n
    with cache.step([root]) as step:  # the prompt, once
        logits = forward(model, step).expand(n, -1)
    seqs = cache.fork(root, n)
    cache.free(root)
    row_of, pages = dict(zip(seqs, range(n))), 0
    while True:
        picked = torch.multinomial((logits / 0.8).softmax(-1), 1)  # temperature 0.8
        chances = logits.log_softmax(-1).gather(1, picked)
        for seq, token, chance in zip(list(seqs), picked[:, 0].tolist(), chances[:, 0].tolist()):
            row = row_of[seq]
            answers[row].append(token)
            sums[row] += chance
            if token in ends or len(answers[row]) == new_tokens:
                pages = max(pages, cache.stats().live)
                cache.free(seq)
                seqs.remove(seq)
        if not seqs:
            return [(s / len(a), a) for s, a in zip(sums, answers)], pages
        with cache.step(seqs, tokens=[answers[row_of[seq]][-1:] for seq in seqs]) as step:
            logits = forward(model, step)


def beam_search(model: Any, cache: PagedKVCache, prompt: list[int], beams: int, n: int) -> Any:
    """The likeliest n tokens that the beams find, their log-probability, pages held at the end."""
    seqs, texts, sums = [cache.add(prompt)], [[]], torch.zeros(1, device=model.device)
    feed = [cache.uncached(seqs[0])]
    for _ in range(n):
        with cache.step(seqs, tokens=feed) as step:
            chances = forward(model, step).log_softmax(-1)
        chances[:, list(end_tokens(model))] = -torch.inf  # every beam gets its n tokens
        sums, best = (sums[:, None] + chances).flatten().topk(beams)
        parents, tokens = (best // chances.shape[1]).tolist(), (best % chances.shape[1]).tolist()
        texts = [texts[parent] + [token] for parent, token in zip(parents, tokens)]
        children = [cache.fork(seqs[parent])[0] for parent in parents]
        cache.free(seqs)
        seqs, feed = children, [[token] for token in tokens]
    pages = cache.stats().live
    cache.free(seqs)
    return texts[0], float(sums[0]), pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32, help="longest answer")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tok = load(args.model)
    cache = PagedKVCache(CacheConfig.from_model(model.config, max_tokens=8192), device=model.device)
    system = {"role": "system", "content": SYSTEM}
    sampled, searched = (chat_ids(tok, [system, {"role": "user", "content": t}]) for t in TASKS)
    n = args.new_tokens

    def pages(held: int, rows: int, tokens: int) -> str:
        apart = rows * -(-tokens // cache.config.page_size)
        return f"{held} pages, {apart} without sharing"

    def show(mark: str, score: float, ids: list[int]) -> None:
        text = tok.decode(ids, skip_special_tokens=True)
        print(f"{mark}{score:7.2f}  {textwrap.shorten(text, 90, placeholder=' ...')}")

    print(TASKS[0])
    scored, held = best_of(model, cache, sampled, args.samples, n)
    for score, ids in scored:
        show("*" if score == max(scored)[0] else " ", score, ids)
    longest = max(len(ids) for _, ids in scored)
    print(f"{args.samples} samples:", pages(held, args.samples, len(sampled) + longest - 1))

    print(f"\n{TASKS[1]}")
    ours, score, held = beam_search(model, cache, searched, args.beams, n)
    show("*", score / n, ours)
    print(f"{args.beams} beams, own loop:", pages(held, args.beams, len(searched) + n - 1))

    prompt = torch.tensor([searched], device=model.device)
    sizes = {"num_beams": args.beams, "min_new_tokens": n, "max_new_tokens": n}

    def generate(forks: PagedCache | None = None) -> list[int]:
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, cache=forks, do_sample=False, **sizes)
        return out[0, len(searched) :].tolist()

    shared = PagedCache.prefill(model, prompt[:, :-1], cache=cache)
    with shared, shared.fork(args.beams) as forks:
        paged = generate(forks)
        held = cache.stats().live
    print(f"{args.beams} beams, generate:", pages(held, args.beams, len(searched) + n - 1))
    dense = generate()
    sys.exit(not same(model, [searched, searched], [ours, paged], [dense, dense]))


if __name__ == "__main__":
    main()
