"""The interface of a retention policy: it is given records of pages and returns a score for each.

A policy decides nothing but an order. The cache (`pages/evict.py`) decides which pages may be
evicted at all (whole ones, not shared, not among the newest) and how many, and changes the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedkv.arrays import Floats, Ints

MEASURES = ("mass", "attended", "likeness")
HALF_LIFE = 4096  # tokens after which attention counts half; after 300 sums were measured useless


@dataclass(frozen=True)
class PageRecords:
    """Pages that sequences could lose, one row per page a sequence holds in one layer group.

    One call brings pages of many sequences and layers; those of one table have the same `owner`,
    lie together and in the order of their text. Scores are compared within an owner only.

    Attributes:
        owner: `[n]`, which table a page is in; from 0 up, ascending.
        position: `[n]`, position of a page's first token in its text.
        tokens: `[n]`, tokens that a page holds.
        length: `[n]`, tokens of the text that a page belongs to.
        mass: `[n]`, attention that a page's tokens got, mean over heads, summed over the queries
            that were watched, older ones counting less (half after `HALF_LIFE` tokens).
        attended: `[n]`, the last step in which a page got more than an equal share; 0 if never.
        likeness: `[n]`, mean cosine of a page's keys to the mean direction of all keys stored.

    The last three are None unless the policy's `needs` names them, which only a policy that reads
    them does: so their types are those of what it reads.
    """

    owner: Ints
    position: Ints
    tokens: Ints
    length: Ints
    mass: Floats = None  # type: ignore[assignment]
    attended: Floats = None  # type: ignore[assignment]
    likeness: Floats = None  # type: ignore[assignment]

    @property
    def age(self) -> Ints:
        """`[n]`, tokens that came after a page's last one."""
        return self.length - self.position - self.tokens


class Policy:
    """Says which pages of a sequence to keep. Subclasses answer `keep_scores`.

    Attributes:
        needs: names out of `MEASURES` that the policy reads; the others are not collected.
        recent: newest tokens of a sequence that are never offered to the policy.
        merges: whether the values of tokens that go are averaged into those that stay.
    """

    needs: tuple[str, ...] = ()
    recent: int = 64
    merges: bool = False

    def keep_scores(self, pages: PageRecords) -> Any:
        """`[n]` numbers: of each owner the pages with the lowest go first, the oldest of equals.

        `inf` keeps a page whatever happens; NaN is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keep_scores")

    def __str__(self) -> str:
        return type(self).__name__

    def pinned_pages(self, page_size: int) -> int:
        """Whole pages of a sequence that can never go: the least that a budget must hold."""
        return -(-self.recent // page_size)
