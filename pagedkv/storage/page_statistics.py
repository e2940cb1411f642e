"""Statistics on the device by which policies rank pages: attention mass, likeness of keys.

A row's attention is watched once in 16 of its tokens: in every 16th step if a step brings one
token, in every fourth if it verifies drafts of four tokens, in all steps that compute a prompt. The
sums stay on the device, by page; a decision reads them in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Floats, Ints
from pagedkv.config import CacheConfig
from pagedkv.kernels.sending import sent
from pagedkv.ranks import ALONE
from pagedkv.retention.policy import HALF_LIFE

from . import Storage

EVERY = 16  # tokens; decisions fall at page boundaries, so watching more often would add little
LAST_QUERIES = 64  # watched of a row's many new tokens: a prompt's end shows what matters in it
READ_BYTES = 8 << 20  # bytes of float32 keys compared at a time: bounds memory, was not tuned


class Marks(NamedTuple):
    """Statistics of pages, `[n]` each, in host memory."""

    mass: Tensor
    attended: Tensor


def _period(new: Ints) -> Ints:
    """Returns the period, in steps, at which rows with `new` tokens are watched."""
    return np.maximum(1, EVERY // np.maximum(1, new))


class PageStatistics:
    """Statistics of the pages of a cache, collected as far as its policy needs them.

    Attributes:
        ranks: all ranks whose heads count.
    """

    def __init__(self, config: CacheConfig, base: Ints, storage: Storage) -> None:
        self.config, self._storage, self._base, self.ranks = config, storage, base, ALONE
        self.watches = config.policy is not None and bool(
            {"mass", "attended"} & {*config.policy.needs}
        )
        self.compares = config.policy is not None and "likeness" in config.policy.needs
        self._steps = 0
        with torch.inference_mode(False):
            # The last element takes sums that belong to no page.
            total = int(base[-1]) + 1 if self.watches else 1
            self._mass = torch.zeros(total, dtype=torch.float32, device=storage.device)
            self._attended = torch.zeros(total, dtype=torch.int64, device=storage.device)
            self._unit = [torch.empty(0, device="cpu")] * len(config.groups)
            if self.compares:
                self._unit = [self._room_for_means(group) for group in range(len(config.groups))]
        self._known = np.zeros(int(base[-1]) + 1, dtype=bool)  # pages whose mean is up to date

    def _room_for_means(self, group: int) -> Tensor:
        layers, pages = len(self.config.groups[group].layers), self._base[group + 1]
        if self.config.groups[group].window is not None:
            layers = 0
        shape = layers, int(pages - self._base[group]), *self.config.shapes[group][:2]
        return torch.empty(*shape, dtype=torch.float16, device=self._storage.device)

    # ------------------------------------------------------------------ collect

    def queries(self, new: Ints) -> Ints | None:
        """Returns how many last queries of each row the coming step watches; None for none."""
        if not self.watches:
            return None
        self._steps += 1
        queries = np.minimum(new, LAST_QUERIES) * (self._steps % _period(new) == 0)
        return queries if queries.any() else None

    def weights(self, new: Ints, queries: Ints, layers: int) -> tuple[Floats, Floats]:
        """Returns, by row, the weight of watched queries, and the factor by which older sums fade.

        Watched queries stand for the queries of all steps since the last watched ones.
        """
        period = _period(new)
        return period / layers, 0.5 ** (period * new * (queries > 0) / HALF_LIFE)

    def places(self, group: int, table: Tensor, held: Tensor) -> Tensor:
        """Returns flat indices into the sums, for pages of a table `[B, columns]`.

        Pages that are not `held` get the index of the last element, which belongs to no page.
        """
        pages = table.long() + int(self._base[group])
        return pages.masked_fill_(~held, len(self._mass) - 1).flatten()

    def fade(self, places: Tensor, decays: Tensor) -> None:
        """Multiplies the attention that pages got so far by their decays."""
        self._mass[places] = self._mass[places] * decays

    def add(self, places: Tensor, mass: Tensor, attended: Tensor) -> None:
        """Adds a layer's attention by page, and notes pages that got more than an equal share."""
        self._mass.index_add_(0, places, mass)
        self._attended.scatter_reduce_(0, places, attended * self._steps, "amax")

    def invalidate(self, pages: Ints) -> None:
        """Notes that a step writes to pages, so that their keys have to be read again."""
        self._known[pages] = False

    def reset(self, pages: Ints) -> None:
        """Forgets the statistics of pages that get new owners."""
        self._known[pages] = False
        if self.watches and pages.size:
            self._set(sent(pages, self._mass.device), 0, 0)

    def copy(self, source: Ints, target: Ints) -> None:
        """Gives `target` pages, which are copies, the statistics of `source` pages."""
        self._known[target] = False  # slots may hold another owner's keys
        if self.watches and source.size:
            both = sent(np.stack([source, target]), self._mass.device)
            self._set(both[1], self._mass[both[0]], self._attended[both[0]])

    def export(self, pages: Ints) -> Marks | None:
        """Returns the statistics of pages, for `import_`; None if nothing is watched."""
        if not self.watches:
            return None
        ids = sent(pages, self._mass.device)
        return Marks(self._mass[ids].cpu(), self._attended[ids].cpu())

    def import_(self, pages: Ints, marks: Marks | None, chosen: Ints) -> None:
        """Gives new pages the statistics of the pages whose bytes they got.

        Args:
            marks: as `export` returned them.
            chosen: `[n]`, the index among `marks` for each of `pages`.
        """
        self.reset(pages)
        if marks is not None and pages.size:
            ids = sent(pages, self._mass.device)
            mass, attended = (mark[torch.from_numpy(chosen)].to(ids.device) for mark in marks)
            self._set(ids, mass, attended)

    def _set(self, pages: Tensor, mass: Any, attended: Any) -> None:
        self._mass[pages] = mass
        self._attended[pages] = attended

    # ------------------------------------------------------------------ read

    def measure(self, needs: tuple[str, ...], pages: Ints, owner: Ints) -> dict[str, Any]:
        """Returns a policy's statistics of pages, over the heads of all ranks, in one read.

        Args:
            pages: `[n]`, all whole pages of some tables, table after table and group after group.
            owner: `[n]`, the table that each page is in.
        """
        ids = sent(pages, self._storage.device)
        found = []
        for name in needs:
            if name == "likeness":
                found.append(self._likeness(pages, owner).double())
            else:
                found.append((self._mass if name == "mass" else self._attended)[ids].double())
        own = dict(zip(needs, torch.stack(found).cpu().numpy()))
        return own if self.ranks.size == 1 else _merged(self.ranks.gather(own))

    def _likeness(self, pages: Ints, owner: Ints) -> Tensor:
        """Returns, `[n]`, the mean cosine of each page's keys to the mean unit key of its table."""
        parts = []
        groups = np.searchsorted(self._base, pages, side="right") - 1
        for group in np.unique(groups).tolist():
            mine = groups == group
            self._learn(group, pages[mine])
            ids = sent(pages[mine] - self._base[group], self._storage.device)
            table = sent(np.unique(owner[mine], return_inverse=True)[1], ids.device)
            unit = self._unit[group].index_select(1, ids).float()  # [L, n, G, D]
            # A cosine is linear in the unit key, so a page's mean unit key gives its mean cosine.
            most = int(owner[mine].max() - owner[mine].min()) + 1
            mean = unit.new_zeros(unit.shape[0], most, *unit.shape[2:]).index_add_(1, table, unit)
            mean = torch.nn.functional.normalize(mean, dim=-1)
            parts.append((unit * mean.index_select(1, table)).sum(-1).mean((0, 2)))
        return torch.cat(parts)

    def _learn(self, group: int, pages: Ints) -> None:
        """Computes and keeps the mean unit keys of pages whose means are not up to date."""
        config, new = self.config, pages[~self._known[pages]]
        shape = config.page_size, *config.shapes[group][:2]
        step = max(1, READ_BYTES // (4 * int(np.prod(shape))))
        for start in range(0, new.size, step):
            part = new[start : start + step] - self._base[group]
            ids = sent(part, self._storage.device)
            for index, layer in enumerate(config.groups[group].layers):
                keys, _ = self._storage.read(layer, part, part.size * config.page_size)
                unit = torch.nn.functional.normalize(keys.float().view(-1, *shape), dim=-1)
                self._unit[group][index, ids] = unit.mean(1).half().to(ids.device)
        self._known[new] = True


def _merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges statistics of pages from several ranks with equally many heads.

    Mass and likeness are means over heads. `attended` is the latest of any rank.
    """
    every = {name: np.stack([one[name] for one in found]) for name in found[0]}
    return {n: x.max(0) if n == "attended" else x.mean(0) for n, x in every.items()}
