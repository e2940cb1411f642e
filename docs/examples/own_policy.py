"""A retention policy of your own: which pages of a text stay when only some can.

    python docs/examples/own_policy.py [--model FOLDER_OR_HUB_ID]

The policy below has one method. Everything else, from sharing to positions, is the cache's. A text
is read under a budget by this policy and by others, and what they kept is compared.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from pagedkv import PagedCache
from pagedkv.retention import PageRecords, Policy, Sinks

sys.path.insert(0, str(Path(__file__).parent))
from common import add_model_argument, load


@dataclass(frozen=True)
class Fading(Policy):
    """Pages that got least attention for each token that came after them go."""

    recent: int = 64  # newest tokens that are never up for discussion
    needs = ("mass",)  # what is measured for this policy: attention, while steps are computed

    def keep_scores(self, pages: PageRecords) -> Any:
        return pages.mass / pages.age


POLICIES = {
    "everything": None,
    "the newest": "fifo",
    "sinks, the newest": "sinks",
    "keydiff": "keydiff",
    "sinks, Fading": Sinks(Fading()),
}


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, retention: Any, budget: int) -> tuple[float, list[int]]:
    """Perplexity of the second half of a text read in pieces, and the positions that stay."""
    fields = {} if retention is None else {"retention": retention, "budget": budget}
    losses = []
    with PagedCache(model, max_tokens=2 * len(ids) + 512, **fields) as cache:
        for start in range(0, len(ids) - 1, 32):
            piece = ids[start : start + 33]
            out = model(input_ids=piece[None, :32], cache=cache, use_cache=True)
            logits = out.logits[0, : len(piece) - 1]
            losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
        stored = cache.kv.positions(cache.rows[0], layer=model.config.num_hidden_layers // 2)
    return math.exp(torch.cat(losses)[len(ids) // 2 :].mean()), stored.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_argument(parser)
    parser.add_argument("--tokens", type=int, default=512, help="length of the text")
    parser.add_argument("--budget", type=int, default=128, help="tokens that stay")
    args = parser.parse_args()
    model, tok = load(args.model)
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = torch.tensor(tok(text[: 16 * args.tokens])["input_ids"][: args.tokens])
    ids = ids.to(model.device)

    print(f"{len(ids)} tokens, of which {args.budget} stay; a mark is a page of 16 in a layer\n")
    for name, retention in POLICIES.items():
        perplexity, stored = read(model, ids, retention, args.budget)
        pages = {position // 16 for position in stored}
        marks = "".join("#" if i in pages else "." for i in range(-(-len(ids) // 16)))
        print(f"{name:<18} perplexity {perplexity:7.2f}  {len(stored):>4} stored  {marks[:40]}")


if __name__ == "__main__":
    main()
