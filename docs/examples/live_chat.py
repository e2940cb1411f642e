"""Two users chat at the same time, and one of them leaves in the middle of an answer.

    python docs/examples/live_chat.py [--model FOLDER_OR_HUB_ID]

Ann's answer is short; Ben's task is cancelled when she has it, and his row ends with it.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from pagedkv import BatchGenerator

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, load

QUESTIONS = {"Ann": "Why is the sea salty?", "Ben": "Tell me a long story about a whale."}


async def chat(live: Any, name: str) -> None:
    """Prints the answer as it comes, a line at each end of a sentence."""
    messages = [{"role": "user", "content": QUESTIONS[name]}]
    text = ""
    async for event in live.add(messages, max_new_tokens=60, do_sample=False):
        text += event.text
        if event.finish_reason or text.endswith((".", "!")):
            print(fill(f"{name}: {text.strip()}", 100))
            text = ""


async def main(generator: BatchGenerator) -> None:
    async with generator.async_events() as live:
        ben = asyncio.create_task(chat(live, "Ben"))
        await chat(live, "Ann")
        print("Ben has left" if ben.cancel() else "Ben has his story")
    print(live.stats.computed, "tokens computed in", live.stats.steps, "steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_argument(parser)
    with BatchGenerator(*load(parser.parse_args().model)) as generator:
        asyncio.run(main(generator))
