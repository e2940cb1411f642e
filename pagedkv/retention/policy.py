"""The interface of a retention policy: it gets records of pages and returns a score for each.

A policy decides only the order. The cache (`pages/evict.py`) decides which pages may be evicted at
all (whole ones, not shared, not among the newest) and how many, and changes the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedkv.arrays import Floats, Ints

MEASURES = ("mass", "attended", "likeness")
HALF_LIFE = 4096  # tokens after which attention counts half; with 300 the sums were of no use


@dataclass(frozen=True)
class PageRecords:
    """Pages that sequences could lose, one row per page that a sequence holds in one layer group.

    One call has pages of many sequences and layers. Pages of one table have the same `owner`, and
    stand together in the order of their text. Scores are compared only within an owner.

    Attributes:
        owner: `[n]`, which table a page is in; from 0 up, ascending.
        position: `[n]`, position of a page's first token in its text.
        tokens: `[n]`, tokens that a page holds.
        length: `[n]`, tokens of the text that a page belongs to.
        mass: `[n]`, attention that a page's tokens got: the mean over heads, summed over watched
            queries; older queries count less (half after `HALF_LIFE` tokens).
        attended: `[n]`, the last step in which a page got more than an equal share; 0 if never.
        likeness: `[n]`, mean cosine of a page's keys to the mean direction of all keys stored.

    The last three are None unless the policy's `needs` names them. A policy that reads them names
    them, so their types leave None out.
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
    """Scores the pages of a sequence. Subclasses implement `keep_scores`.

    Attributes:
        needs: names from `MEASURES` that the policy reads; others are not collected.
        recent: how many newest tokens of a sequence are never offered to the policy.
        window: whether newer pages always score higher.
        merges: whether values of evicted tokens are averaged into values of tokens that stay.
    """

    needs: tuple[str, ...] = ()
    recent: int = 64
    window: bool = False
    merges: bool = False

    def keep_scores(self, pages: PageRecords) -> Any:
        """Returns `[n]` scores: each owner loses its lowest first, and the oldest of equal ones.

        A page with the score `inf` always stays; NaN is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keep_scores")

    def __str__(self) -> str:
        return type(self).__name__

    def pinned_pages(self, page_size: int) -> int:
        """Counts pages of a sequence that always stay: a budget must hold at least these."""
        return -(-self.recent // page_size)
