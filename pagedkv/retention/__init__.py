"""Retention inside a sequence: which pages stay if not all can. numpy only.

`POLICIES` has the names that `CacheConfig.retention` accepts. All policies but the plain window
keep the first tokens of a text.
"""

from __future__ import annotations

from typing import Any

from pagedkv.names import POLICIES as BORROWED
from pagedkv.names import meant

from .fifo import Fifo as Fifo
from .importance import Importance as Importance
from .kept import Kept as Kept
from .keydiff import KeyDiff as KeyDiff
from .lru import LeastRecentlyAttended as LeastRecentlyAttended
from .policy import MEASURES
from .policy import PageRecords as PageRecords
from .policy import Policy as Policy
from .semantic import Semantic as Semantic
from .sinks import Sinks as Sinks

POLICIES: dict[str, Policy] = {
    "fifo": Fifo(),
    "sinks": Sinks(Fifo()),
    "lru": Sinks(LeastRecentlyAttended()),
    "importance": Sinks(Importance()),
    "keydiff": Sinks(KeyDiff()),
    "semantic": Sinks(Semantic()),
}


def policy_of(retention: Any) -> Policy:
    """Returns the policy of a name, or the policy itself.

    Raises:
        ValueError: no policy has this name, or it needs a statistic that is not measured.
        TypeError: it is neither a name nor a policy.
    """
    if isinstance(retention, str):
        if retention not in POLICIES:
            raise ValueError(
                f"retention: expected one of {', '.join(POLICIES)}, or a Policy, got {retention!r}"
                + meant(retention, POLICIES, BORROWED)
            )
        return POLICIES[retention]
    if not isinstance(retention, Policy):
        raise TypeError(f"retention: expected a name or a Policy, got {type(retention).__name__}")
    recent: Any = retention.recent
    if isinstance(recent, bool) or not isinstance(recent, int) or recent < 0:
        raise ValueError(f"retention: recent: expected 0 or more tokens, got {retention.recent!r}")
    strange = sorted({*retention.needs} - {*MEASURES})
    if strange:
        raise ValueError(
            f"retention: {type(retention).__name__} needs {', '.join(strange)}; "
            f"what is measured is {', '.join(MEASURES)}"
        )
    return retention
