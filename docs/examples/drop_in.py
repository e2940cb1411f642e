"""Sixteen questions behind one shared prefix, through `generate`, on pages and on a dense cache.

    python docs/examples/drop_in.py [--model FOLDER_OR_HUB_ID]

The prefix, 256 tokens, is computed once and kept once. Every token is then compared with what
transformers' own cache gives. The default model is tiny: its answers are fluent rather than true.
"""

import argparse
import shutil
import sys
import textwrap
import time
from itertools import cycle
from pathlib import Path

import torch

from pagedkv import PagedCache

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, load, same

GUIDE = (
    "You are a helpful guide in a science museum. Explain the cause in one or two short sentences."
)
EXAMPLES = """\
We saw a rainbow over the wide river this morning, but it was gone when we came closer. \
What makes a rainbow?
A rainbow appears when sunlight enters drops of rain. Every drop bends each color in a \
slightly different direction.
However often I turn my grandfather's compass, the needle turns back. Why does it point north?
The Earth is a large magnet. The needle of a compass is a small magnet, and it lines up with the \
very large one.
In winter I can see my own breath in front of my face. Where does the cloud come from?
Your breath contains water vapor. The cold air cools it, and it turns into tiny drops that \
you can see.
Our old cat sleeps on the washing machine while it is running. Why does she like it there?
The machine is warm, and a cat saves energy in warm places. Its shaking may also \
remind her of her purring mother.
"""
QUESTIONS = """\
I lay in the high grass for a whole warm afternoon, and there was not a single cloud.
Why is the sky blue?
We walked by the sea at noon and then again at night, and the water had moved very far.
What makes the tides?
My little brother fills up his tall cup with cold fresh milk, and the ice always stays on top.
Why does ice float?
When our train went into the long tunnel this morning, it helped me a lot to yawn.
Why do my ears pop?
My father and I sat at the open door until late last night and saw the big storm on the green hills.
What is thunder?
In June all of our old trees are green, and in October most of them are bright red.
Why do leaves change color?
I cut one of them for our dinner, and very soon my eyes were full of tears.
Why do onions make us cry?
There were so very many of them over the lake when all the lights in the house were out.
Why do stars twinkle?
My old aunt puts a lot of it on the icy stone steps in front of her front door.
Why does salt melt ice?
It was big and round when we all came last week, and tonight it is thin.
Why does the moon change its shape?
I shouted my own first name down into the deep old well, and it came back to me twice.
What is an echo?
We leave the soft dough in a warm dark bowl, and an hour later it is twice as big.
Why does bread rise?
I rubbed a big red balloon on my dry brown hair, and then it hung on the wall.
Why does the balloon stick?
The glass in the great hall shows my whole face, and the white wall behind it does not.
How does a mirror work?
In the old film that we saw, all of their blue sleeping bags hung on the wall.
Why do astronauts float in space?
My big sister always says that the ones in the big round hall are no fish at all.
Why is a whale a mammal?
"""


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
    shared_turns = [{"role": "system", "content": GUIDE}]
    for role, line in zip(cycle(["user", "assistant"]), EXAMPLES.splitlines()):
        shared_turns.append({"role": role, "content": line})
    lines = QUESTIONS.splitlines()[: 2 * args.rows]
    questions = lines[1::2]
    prompts = [
        chat_ids(tok, [*shared_turns, {"role": "user", "content": f"{story} {question}"}])
        for story, question in zip(lines[::2], questions)
    ]
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
