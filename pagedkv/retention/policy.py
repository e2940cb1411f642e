"""What a retention policy sees and says: records of pages in, a score for each out.

A policy decides nothing but an order. Which pages may go at all (whole, nobody else's, not among
the newest), how many, and what becomes of the tables belongs to the cache (`pages/evict.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedkv.arrays import Floats, Ints

MEASURES = ("mass", "attended", "likeness")
HALF_LIFE = 4096  # tokens after which attention counts half; 300 were measured to tell nothing


@dataclass(frozen=True)
class PageRecords:
    """Pages that sequences could lose, one row per page a sequence holds in one layer group.

    One call brings pages of many sequences and layers; those of one table have the same `owner`,
    lie together and in the order of their text. Scores are compared within an owner only.

    Attributes:
        owner: `[n]`, which table a page is in; from 0 up, ascending.
        position: `[n]`, of a page's first token in its text.
        tokens: `[n]`, tokens it holds.
        length: `[n]`, tokens of the text it belongs to.
        mass: `[n]`, attention that its tokens got, mean over heads, summed over the queries that
            were looked at, older ones counting less (half after `HALF_LIFE` tokens).
        attended: `[n]`, the last step in which it got more than an equal share; 0 if never.
        likeness: `[n]`, mean cosine of its keys to the mean direction of all keys stored.

    The last three are None unless the policy's `needs` names them.
    """

    owner: Ints
    position: Ints
    tokens: Ints
    length: Ints
    mass: Floats | None = None
    attended: Floats | None = None
    likeness: Floats | None = None

    @property
    def age(self) -> Ints:
        """`[n]`, tokens that came after a page's last one."""
        return self.length - self.position - self.tokens


class Policy:
    """Says which pages of a sequence to keep. Subclasses answer `keep_scores`.

    Attributes:
        needs: names out of `MEASURES` that it reads; the others are not collected.
        recent: newest tokens of a sequence that are never offered to it.
        merges: whether the values of tokens that go are averaged into those that stay.
    """

    needs: tuple[str, ...] = ()
    recent: int = 64
    merges: bool = False

    def keep_scores(self, pages: PageRecords) -> Any:
        """`[n]` numbers: of each owner the lowest go first, of equal ones the oldest.

        `inf` keeps a page whatever happens; NaN is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keep_scores")

    def __str__(self) -> str:
        return type(self).__name__

    def pinned_pages(self, page_size: int) -> int:
        """Whole pages of a sequence that can never go: the least that a budget must hold."""
        return -(-self.recent // page_size)
