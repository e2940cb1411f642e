"""Sixteen answers that share one set of instructions, which `generate` computes and keeps once.

    python docs/examples/drop_in.py [--model FOLDER_OR_HUB_ID]

The same job then runs on transformers' own cache, and every token is compared.
"""

import argparse
import runpy
import shutil
import time
from pathlib import Path

import torch
import transformers

from pagedkv import PagedCache

INSTRUCTIONS = """\
This is the evening at the science museum when everybody may ask. The guide answers each question \
in one short and friendly sentence, in words that a child of ten knows. She names the cause, and \
not only the name of a thing.

Question: On the way here we saw a rainbow over the river, but it was gone when we came closer. \
What makes a rainbow?
Answer: Sunlight is bent inside every drop of rain, and each color is bent a little differently.

Question: My grandfather keeps a compass in his coat, and however I turn it, the needle turns back. \
Why does it point north?
Answer: The Earth is a huge weak magnet, and the needle is a small one that lines up with it.

Question: In winter I see my own breath in front of my face, and in summer I never do. Where does \
the little cloud come from?
Answer: The water in your warm breath cools in the cold air and becomes tiny drops that you can see.

Question: Our cat sleeps on the washing machine while it runs. Why does she like it there?
Answer: It is warm, and the shaking may remind her of lying close to her mother.

Question:"""

QUESTIONS = """\
Today I lay on my back in the grass for a whole long afternoon, and there was not a single cloud.
Why is the sky blue?
We walked by the sea in the morning and again at night, and all the water had moved far, far away.
What makes the tides?
My brother fills his cup with cold milk up to the brim, and all the ice always stays on top of it.
Why does ice float?
My ears began to hurt a lot when the train went into the tunnel, and it helped me to yawn.
Why do my ears pop?
I sat up with my dad in the big storm last night, and we counted from each flash to the next rumble.
What is thunder?
In our own garden all the trees are green in June, and by the very end of October they are red.
Why do leaves change color?
I cut up one of them for our dinner yesterday, and after a minute my eyes were full of tears.
Why do onions make us cry?
There were so very many of them over the lake when all of the lights in the house had been put out.
Why do stars twinkle?
My aunt takes a big bag of it and puts it on all of the icy steps in front of her door.
Why does salt melt ice?
The moon was big and round when we came last week, and tonight only one thin slice of it is left.
Why does the moon change?
I shouted my own name down into the deep old well behind our house, and it came back to me twice.
What is an echo?
We leave the dough in a bowl under a towel in the kitchen, and an hour later it is twice as big.
Why does bread rise?
I rubbed a red balloon on my wool sweater for a while, and then it just hung on the wall.
Why does the balloon stick?
The soap in my bath was yellow or green this time, but all the foam on top of it was white.
Why is foam always white?
In the film that we saw there, the astronauts had to hang all of their sleeping bags on a wall.
Why does everything float up there?
My big sister says that the whales in the big hall downstairs are no kind of fish at all.
Why is a whale not a fish?
"""


def default_model() -> Path:
    """SmolLM2-135M, converted on first use by a file of this repository."""
    file = Path(__file__).parents[2] / "benchmarks" / "smollm2.py"
    return runpy.run_path(str(file))["smollm2"]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; default: SmolLM2-135M of benchmarks/")
    parser.add_argument("--rows", type=int, default=16, help="questions asked (1 to 16)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of every answer")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    name = args.model or default_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    tok = transformers.AutoTokenizer.from_pretrained(name)

    # 256 tokens for all rows, 32 of each row's own. Any tokenizer makes at least about as many.
    asked = QUESTIONS.splitlines()[1::2][: args.rows]
    told = QUESTIONS.splitlines()[::2]
    ends = [tok(f" {a} {b}\nAnswer:", add_special_tokens=False).input_ids for a, b in zip(told, asked)]
    ends = [end[-min(32, *map(len, ends)) :] for end in ends]
    prefix = tok(INSTRUCTIONS, return_tensors="pt").input_ids[:, :256].to(device)
    rows = torch.cat([prefix.expand(len(ends), -1), torch.tensor(ends, device=device)], dim=1)

    def generate(cache: PagedCache | None = None) -> torch.Tensor:
        new = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
        mask = torch.ones_like(rows)
        out = model.generate(
            rows, attention_mask=mask, past_key_values=cache, do_sample=False, **new
        )
        return out[:, rows.shape[1] :]

    start = time.perf_counter()
    room = rows.shape[1] + len(rows) * (rows.shape[1] - prefix.shape[1] + args.new_tokens + 16)
    with PagedCache.prefill(model, prefix, max_tokens=room) as shared:
        cache = shared.fork(len(rows))
        paged = generate(cache)
        paged_s = time.perf_counter() - start
        stats, config = cache.stats(), cache.kv.config
        cache.close()

    start = time.perf_counter()
    plain = generate()
    plain_s = time.perf_counter() - start

    columns = shutil.get_terminal_size((100, 24)).columns
    for question, answer in zip(asked, tok.batch_decode(paged)):
        print(f"{question} {answer.strip().splitlines()[0]}"[:columns])


if __name__ == "__main__":
    main()
