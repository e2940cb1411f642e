"""Processes that compute one model together, and what they have to agree on.

Every rank takes the same decisions from the same inputs. What one rank alone can know (its free
memory, its clock, its random numbers, a Ctrl-C) enters a decision only through here. This is the
only module that names torch.distributed; alone, none of it is called.
"""

from __future__ import annotations

import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import OtherRankError

T = TypeVar("T")


class Ranks:
    """This process and those that hold other parts of the same layers; alone, every call is free.

    Calls are collective: all ranks make them, in the same order.

    Args:
        mesh: the device mesh of tensor parallelism, of one dimension; None for a process alone.

    Attributes:
        size, rank: how many there are, and which one this is.
    """

    def __init__(self, mesh: Any = None) -> None:
        self.size, self.rank = 1, 0
        self._thread, self._entered = 0, 0
        if mesh is None or mesh.size() == 1:
            return
        import torch.distributed as dist

        self._dist, self._group = dist, mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self._first = dist.get_global_rank(self._group, 0)
        self._host = self._group
        if dist.get_backend(self._group) != "gloo":  # the host does not wait for a card
            ranks = dist.get_process_group_ranks(self._group)
            self._host = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size()
            )

    def enter(self, thread: int) -> None:
        """Notes that a thread works with the others now.

        Raises:
            RuntimeError: another thread does. What two threads ask would meet in any order.
        """
        if self._entered and thread != self._thread:
            raise RuntimeError(
                f"another thread works on this model, which {self.size} processes share; they take "
                "one call at a time, in the same order"
            )
        self._thread, self._entered = thread, self._entered + 1

    def leave(self) -> None:
        """Takes back one `enter`."""
        self._entered -= 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose tokens count."""
        return self.rank == 0

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Names the error of a group of which a process is gone, or late; it raises many kinds."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, OtherRankError) or not self._is_lost(error):
                raise
            said = " ".join(str(error).split())
            raise OtherRankError(f"another of {self.size} ranks is gone or late: {said}") from error

    def _is_lost(self, error: RuntimeError) -> bool:
        return self.size > 1 and (isinstance(error, self._dist.DistError) or "gloo" in str(error))

    def follow(self, tensor: Tensor) -> Tensor:
        """Overwrites a tensor on the model's device with that of the first rank."""
        if self.size == 1:
            return tensor
        with self.hearing():
            self._dist.broadcast(tensor, src=self._first, group=self._group)
        return tensor

    def share(self, value: Any) -> Any:
        """The value of the first rank, pickled."""
        if self.size == 1:
            return value
        values = [value]
        with self.hearing():
            self._dist.broadcast_object_list(values, src=self._first, group=self._host)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in their order, pickled."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        with self.hearing():
            self._dist.all_gather_object(values, value, group=self._host)
        return values

    def most(self, *values: int) -> list[int]:
        """The largest that any rank has, of each number."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self.hearing():
            self._dist.all_reduce(numbers, op=self._dist.ReduceOp.MAX, group=self._host)
        return numbers.tolist()

    def least(self, value: int) -> int:
        """The smallest that any rank has."""
        return -self.most(-value)[0]

    def agree(self, attempt: Callable[[], T]) -> T:
        """Runs `attempt` and returns its result; an error of one rank is raised on all.

        Args:
            attempt: what each rank does for itself, without a collective call.
        """
        if self.size == 1:
            return attempt()
        error: Exception | None = None
        try:
            result = attempt()
        except Exception as raised:
            error = raised
        errors = self.gather(None if error is None else _portable(error))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                other.add_note(f"raised on rank {rank} of {self.size}")
                raise other
        return result

    def refuse(self, **asked: Any) -> None:
        """Raises ValueError where something was asked for that one rank alone would decide."""
        for name, value in asked.items():
            if self.size > 1 and value is not None:
                raise ValueError(
                    f"{name}: not served where {self.size} processes share a model, because it "
                    "goes by what one of them alone knows"
                )

    def require_same(self, name: str, what: bytes) -> None:
        """Raises ValueError on every rank where they have not the same."""
        if self.size == 1:
            return
        number = int.from_bytes(sha256(what).digest()[:7], "little")
        low, high = self.most(-number, number)
        if -low != high:
            raise ValueError(f"{name}: expected the same on all {self.size} processes")


def spelled(value: Any) -> bytes:
    """A value as `require_same` compares it: objects by their type, whose address says nothing."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {one.name: getattr(value, one.name) for one in fields(value)}
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _portable(error: Exception) -> Exception:
    """An error, or where it cannot be pickled one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


ALONE = Ranks()
_RANKS: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


def dimensions_of(model: Any) -> tuple[str, ...]:
    """By what the processes that share a model differ, as far as it has a name."""
    mesh: Any = getattr(model, "_device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return tuple(name for i, name in enumerate(names) if mesh.size(i) > 1)


def ranks_of(model: Any) -> Ranks:
    """The ranks that share out the layers of a model; collective where there are several."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return ALONE
    if model not in _RANKS:
        if mesh.mesh_dim_names is not None:
            mesh = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
        _RANKS[model] = Ranks(mesh)
    return _RANKS[model]


class LaunchedRanks(Ranks):
    """All processes that a launcher such as torchrun started, before they have a model; collective.

    A model that transformers shares out among them later uses the same group.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        here = None
        if torch.accelerator.is_available():  # as transformers does it
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
            kind = torch.accelerator.current_accelerator()
            assert kind is not None
            here = torch.device(kind.type, torch.accelerator.current_device_index())
        long = timedelta(hours=2)  # that a model may take to load on one of them
        self._store, rank, size = next(rendezvous("env://", timeout=long))
        dist.init_process_group(
            store=PrefixStore("ranks", self._store),
            rank=rank,
            world_size=size,
            device_id=here,
            timeout=long,
        )
        super().__init__(init_device_mesh(here.type if here else "cpu", (size,)))

    def part(self, seconds: float) -> bool:
        """Ends this process's part, when all have read what it has sent; the first goes last.

        Args:
            seconds: how long it waits for others; they may be gone already.

        Returns:
            Whether all were there.
        """
        patience = timedelta(seconds=seconds)
        through, left = ([f"{what} {rank}" for rank in range(self.size)] for what in ("at", "left"))
        try:
            self._store.set(through[self.rank], "")
            self._store.wait(through, patience)
            self._dist.destroy_process_group()
            self._store.set(left[self.rank], "")
            if self.is_first:  # by which the others see where they are
                self._store.wait(left, patience)
        except RuntimeError:  # no other process comes any more
            return False
        return True
