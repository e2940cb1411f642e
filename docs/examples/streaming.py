"""A model under a budget smaller than its weights: eight questions behind one shared prefix.

    python docs/examples/streaming.py [--model FOLDER] [--device-memory 400MiB]

Layers come from the checkpoint in every pass, pages stay. The same questions are then asked of the
model in memory, and the answers compared token by token.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

from pagedkv import BatchGenerator, LayerStreamer, plan_memory

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, load, same

HERE = Path(__file__).parent
ROWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--device-memory", default="450MiB", help="all that may be used")
    parser.add_argument("--new-tokens", type=int, default=24, help="longest answer")
    args = parser.parse_args()
    model, tok = load(args.model)
    folder = Path(model.name_or_path)

    messages = json.loads((HERE / "museum.json").read_text())
    questions = (HERE / "questions.txt").read_text().splitlines()[:ROWS]
    asked = [[*messages, {"role": "user", "content": question}] for question in questions]
    prompts = [chat_ids(tok, conversation) for conversation in asked]
    options = {"max_new_tokens": args.new_tokens, "do_sample": False}
    with BatchGenerator(model, tok) as generator:
        expected = generator.generate(prompts, **options)

    plan = plan_memory(
        folder,
        device_memory=args.device_memory,
        batch=ROWS,
        length=max(map(len, prompts)) + args.new_tokens,
        weight_dtype="float32",
        device=model.device.type,
    )
    print(plan)
    with (
        LayerStreamer.from_pretrained(
            folder, plan=plan, dtype=model.dtype, device=model.device
        ) as streamer,
        BatchGenerator(streamer.model, tok, plan=plan) as generator,
    ):
        answers = generator.generate(prompts, **options)
        print(f"\n{streamer.stats()}\n")
        reused = generator.stats.reused
    for question, answer in zip(questions, answers):
        for line in (f"> {question}", answer.text or ""):
            print(textwrap.shorten(line, 96, placeholder=" ..."))
    print(f"{reused:,} prompt tokens were shared, not computed")
    tokens = [[result.tokens for result in results] for results in (answers, expected)]
    sys.exit(not same(model, prompts, *tokens))


if __name__ == "__main__":
    main()
