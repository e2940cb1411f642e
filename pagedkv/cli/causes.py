"""Bad prompts: why a row has no prompt that can be used, and what the command says then.

A bad prompt is a mistake in the file, not in the job. Its row gets an error in place of an answer,
other rows are answered. Another try would not help, so the command makes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

EMPTY, KIND, ENCODING, TEMPLATE, LONG = "empty", "kind", "encoding", "template", "too_long"
UNCUT = "uncut"  # too long, and it has no text that can be cut
SAID = {
    EMPTY: "empty",
    KIND: "neither a text nor chat messages",
    ENCODING: "not in the encoding of the file",
    TEMPLATE: "refused by the chat template",
    LONG: "longer than the model takes",
    UNCUT: "longer than the model takes, and cannot be cut",
}


def told(bad: Iterable[tuple[str, str]], every: int, skipped: Collection[str]) -> list[str]:
    """Returns a line for each cause: how many prompts are bad for it, and where the first is.

    Args:
        bad: the cause and the place of each bad prompt.
        skipped: causes of prompts that are left out.
    """
    places: dict[str, list[str]] = {}
    for cause, place in bad:
        places.setdefault(cause, []).append(place)
    return [
        f"{len(each):,} of {every:,} prompts {'is' if len(each) == 1 else 'are'} {SAID[cause]}"
        + (f": {each[0]}" if len(each) == 1 else f", the first in {each[0]}")
        + (" (skipped)" if cause in skipped else "")
        for cause, each in places.items()
    ]


def told_at_the_end(causes: Mapping[int, str], every: int) -> str:
    """Says how many prompts have no answer, and why.

    Args:
        causes: why prompts have no answer, by the prompt's index.
    """
    counts = Counter(causes.values())
    parts = ", ".join(f"{count:,} {SAID[cause]}" for cause, count in counts.most_common())
    verb, those = ("has", "it is") if len(causes) == 1 else ("have", "they are")
    return (
        f"{len(causes):,} of {every:,} prompts {verb} an error in place of an answer ({parts}); "
        f"{those} not tried again"
    )
