"""A call of `score`: each context becomes rows, one for each of its continuations."""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.batch.job import Job
from pagedkv.batch.prompt_queue import Coming
from pagedkv.batch.rows import Row

from .continuations import Continuation
from .pairs import Context


class ScoreJob(Job):
    """A job whose prompts are contexts. Its loop is that of any job."""

    def _rows(self, coming: Coming) -> list[Row]:
        """Makes the rows of a context, one for each continuation; a row may have an error."""
        given: Context = coming.prompt
        wrong = self._what_is_wrong(given.ids)
        ids = given.ids[:0] if wrong else given.ids
        rows: list[Row] = []
        for one in given.continuations:
            why = wrong or self._what_is_wrong_behind(len(ids), one.ids)
            behind = one.ids[:0] if why else one.ids
            row = Continuation(
                ids.astype(np.int32), behind.astype(np.int32), one.index, one.choice, given.salt
            )
            row.error = why
            rows.append(row)
        return rows

    def _what_is_wrong_behind(self, before: int, ids: Ints) -> str | None:
        if wrong := self._what_is_wrong(ids, "continuation"):
            return wrong
        fed = before + ids.size - 1  # the last token is not fed
        cache = self._packed.kv.config.max_sequence_length
        for who, most in (("model", self._longest), ("cache", cache)):
            if fed > most:
                return (
                    f"continuation: the {who} takes {most} tokens, got {before} before it and "
                    f"{ids.size} of its own, of which the last is not fed"
                )
        return None
