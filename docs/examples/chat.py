"""A chat whose turns cost only their new tokens: the cache finds the conversation so far.

    python docs/examples/chat.py [--interactive] [--model FOLDER_OR_HUB_ID]

Nothing is carried from turn to turn but the messages. Each turn gives the whole conversation to
`add`, computes what was not found, answers and frees the sequence; its pages stay findable. So do
those of a turn that was taken back with /back.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from pagedkv import CacheConfig, PagedKVCache

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, chat_ids, end_tokens, load
from own_loop import forward

SYSTEM = (
    "You are a helpful assistant who knows the sea and its animals. Answer in one short sentence."
)
SCRIPT = (
    "Hello! What is the largest animal in the sea?",
    "What does it eat?",
    "How long can it stay under water?",
    "/back",
    "Where does it spend the winter?",
)


def answer(model: Any, cache: PagedKVCache, prompt: list[int], new_tokens: int) -> Any:
    """The most likely answer, and how many tokens of the prompt were found."""
    seq, ends, ids = cache.add(prompt), end_tokens(model), []
    found, feed = cache.length(seq), cache.uncached(seq)
    while len(ids) < new_tokens and not ends & set(ids):
        with cache.step([seq], tokens=[feed]) as step:
            ids += forward(model, step).argmax(-1).tolist()
        feed = ids[-1:]
    cache.free(seq)
    return ids, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--interactive", action="store_true", help="type yourself; /back, /quit")
    parser.add_argument("--turns", type=int, default=len(SCRIPT), help="turns of the script")
    parser.add_argument("--new-tokens", type=int, default=40, help="longest answer")
    args = parser.parse_args()
    model, tok = load(args.model)
    cache = PagedKVCache(CacheConfig.from_model(model.config, max_tokens=8192), device=model.device)

    messages = [{"role": "system", "content": SYSTEM}]
    script = iter(SCRIPT[: args.turns])
    while True:
        text = ask() if args.interactive else next(script, "/quit")
        if text == "/quit":
            break
        if not args.interactive:
            print(f"> {text}")
        if text == "/back":
            del messages[max(1, len(messages) - 2) :]
            print("  [the last question and its answer are taken back]\n")
            continue
        messages.append({"role": "user", "content": text})
        prompt = chat_ids(tok, messages)
        ids, found = answer(model, cache, prompt, args.new_tokens)
        messages.append(
            {"role": "assistant", "content": tok.decode(ids, skip_special_tokens=True).strip()}
        )
        print(
            textwrap.fill(messages[-1]["content"], 98, initial_indent="  ", subsequent_indent="  ")
        )
        print(f"  [{len(prompt)} tokens: {found} found, {len(prompt) - found} computed]\n")


def ask() -> str:
    try:
        return input("> ").strip() or "/quit"
    except EOFError:
        print()
        return "/quit"


if __name__ == "__main__":
    main()
