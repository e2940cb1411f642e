"""Sixteen questions behind one shared prefix, through `generate`, on pages and on a dense cache.

    python docs/examples/drop_in.py [--model FOLDER_OR_HUB_ID]

The prompts have different lengths and are padded on the left, as for any batch. Their prefix, 256
tokens, is computed once and kept once. Every token is then compared with what transformers' own
cache gives. The default model is tiny: its answers are fluent rather than true.
"""

import argparse
import json
import shutil
import sys
import textwrap
import time
from itertools import takewhile
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

    shared_turns = json.loads((FOLDER / "museum.json").read_text())
    lines = (FOLDER / "questions.txt").read_text().splitlines()[: args.rows]
    questions = [line.rpartition(". ")[2] for line in lines]  # without the story before it
    lines[1::2] = questions[1::2]
    prompts = [chat_ids(tok, [*shared_turns, {"role": "user", "content": line}]) for line in lines]
    columns = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts))
    prefix = [first for first, *_ in columns]
    tok.pad_token = tok.pad_token or tok.eos_token
    batch = tok.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    batch, rows, new_tokens = batch.to(model.device), len(prompts), args.new_tokens
    width = batch["input_ids"].shape[1]

    def generate(cache: PagedCache | None = None) -> torch.Tensor:
        out = model.generate(**batch, cache=cache, do_sample=False, max_new_tokens=new_tokens)
        return out[:, width:]

    start = time.perf_counter()
    own = sum(len(prompt) - len(prefix) for prompt in prompts)
    room = len(prefix) + own + rows * (new_tokens + 16)  # tokens; 16 for what a last page wastes
    shared = PagedCache.prefill(model, prefix, max_tokens=room)
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
    apart = sum(-(-(len(prompt) + new_tokens - 1) // config.page_size) for prompt in prompts)
    page = config.bytes_per_page()
    print(f"\n{'':<22}{'tokens/s':>9}{'seconds':>10}{'prompt tokens computed':>25}{'pages':>8}")
    for name, seconds, computed, pages in (
        ("paged, shared prefix", paged_s, len(prefix) + own, held),
        ("transformers' cache", dense_s, rows * width, apart),
    ):
        speed = rows * new_tokens / seconds
        print(f"{name:<22}{speed:>9.1f}{seconds:>10.1f}{computed:>25,}{pages:>8,}")
    print(
        f"A page is {config.page_size} tokens, {page / 2**10:.0f} KiB; without sharing the tokens "
        f"fill {apart}.\nBy this arithmetic, {held * page / 2**20:.0f} MiB instead of "
        f"{apart * page / 2**20:.0f} MiB.\n"
    )
    sys.exit(not same(model, prompts, paged.tolist(), dense.tolist()))


if __name__ == "__main__":
    main()
