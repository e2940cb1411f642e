"""Sixteen questions behind one shared prefix, through `generate`, on pages and on a dense cache.

    python docs/examples/drop_in.py [--model FOLDER_OR_HUB_ID]

The prefix, 256 tokens, is computed once and kept once. Every token is then compared with what
transformers' own cache gives. The default model is tiny: its answers are fluent rather than true.
"""

import argparse
import json
import shutil
import sys
import textwrap
import time
from pathlib import Path

import torch

from pagedkv import PagedCache

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, load, same

FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--rows", type=int, default=16, help="questions, at most 16")
    parser.add_argument("--new-tokens", type=int, default=32, help="of every answer")
    args = parser.parse_args()
    model, tok = load(args.model)

    model.generation_config.eos_token_id = None  # no row ends early: the same work for both

    # With the default model 256 tokens for all and 32 more for each; other tokenizers may make
    # fewer of the same texts, and then every question loses its first words to be as short.
    shared_turns = json.loads((FOLDER / "museum.json").read_text())
    lines = (FOLDER / "questions.txt").read_text().splitlines()[: args.rows]
    prompts = [chat_ids(tok, [*shared_turns, {"role": "user", "content": line}]) for line in lines]
    questions = [line.rpartition(". ")[2] for line in lines]  # without the story before it
    columns = enumerate(zip(*prompts))
    front = next((i for i, ids in columns if len(set(ids)) > 1), len(prompts[0]) - 32)
    own = min(len(prompt) - front for prompt in prompts)
    ids = torch.tensor([prompt[:front] + prompt[-own:] for prompt in prompts], device=model.device)
    ones, rows, new_tokens = torch.ones_like(ids), len(ids), args.new_tokens

    def generate(cache: PagedCache | None = None) -> torch.Tensor:
        out = model.generate(
            ids,
            attention_mask=ones,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new_tokens,
        )
        return out[:, front + own :]

    start = time.perf_counter()
    room = front + rows * (own + new_tokens + 16)  # tokens; 16 for what a last page leaves empty
    shared = PagedCache.prefill(model, ids[0, :front], max_tokens=room)
    with shared, shared.fork(rows) as cache:
        paged = generate(cache)
        paged_s = time.perf_counter() - start
        held, config = cache.stats().live, cache.kv.config

    start = time.perf_counter()
    dense = generate()
    dense_s = time.perf_counter() - start

    left = max(map(len, questions))
    right = shutil.get_terminal_size((100, 24)).columns - left - 2
    for question, answer in zip(questions, tok.batch_decode(paged)):
        answer = textwrap.shorten(answer.split(tok.eos_token)[0], right, placeholder=" ...")
        print(f"{question:<{left}}  {answer}")

    # The last new token is never fed, so it has no keys and values.
    apart = rows * -(-(front + own + new_tokens - 1) // config.page_size)
    page = config.bytes_per_page()
    print(f"\n{'':<22}{'tokens/s':>9}{'seconds':>10}{'prompt tokens computed':>25}{'pages':>8}")
    for name, seconds, computed, pages in (
        ("paged, shared prefix", paged_s, front + rows * own, held),
        ("transformers' cache", dense_s, rows * (front + own), apart),
    ):
        speed = rows * new_tokens / seconds
        print(f"{name:<22}{speed:>9.1f}{seconds:>10.1f}{computed:>25,}{pages:>8,}")
    print(
        f"A page is {config.page_size} tokens, {page / 2**10:.0f} KiB; without sharing the tokens "
        f"fill {apart}.\nBy this arithmetic, {held * page / 2**20:.0f} MiB instead of "
        f"{apart * page / 2**20:.0f} MiB.\n"
    )
    sys.exit(not same(model, ids.tolist(), paged.tolist(), dense.tolist()))


if __name__ == "__main__":
    main()
