"""`Ring`: brings units of weights in cyclic order, through a few slots of memory.

The n-th needed unit lies in slot n % depth, so the number of units need not be a multiple of the
depth. The order is that of a pass and wraps into the next pass: the first layers are on their way
while the head computes. If a pass asks for another unit than the next one (because the last pass
raised, or the model is called without its head), the ring restarts there.

On a CPU files are read into the slots: by the thread that asks, as long as the file cache has
everything, else by a reader thread that runs ahead. On a CUDA device the reader always runs ahead:
it fills a staging slot, and a copy stream copies that to the device. Events order copies and
computation; only the reader waits on the host, for the copy out of the staging slot that it fills
next.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pagedkv.errors import StreamError

from .arena import HostArena
from .stats import StreamStats
from .weights import Unit, WeightStore

PAGE = 4096  # slots begin on pages


class DeviceRing:
    """The slots from which layers compute, and the events that order their use.

    On a CPU they are the staging slots.

    Attributes:
        nbytes: bytes of a slot.
        staging: host memory of all slots; None if nothing is read from files.
    """

    @torch.inference_mode(False)  # the reader thread, which is not in that mode, fills the slots
    def __init__(self, depth: int, nbytes: int, device: torch.device, staged: bool) -> None:
        cuda = device.type == "cuda"
        self.device, self.nbytes = device, nbytes
        self.staging = HostArena(depth * nbytes, pin=cuda) if staged or not cuda else None
        self.copies: Any = torch.cuda.Stream(device) if cuda else None
        self.slots: list[Tensor] = []
        self.events: list[dict[str, Any]] = []
        for number in range(depth):
            if cuda:
                self.slots.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
                names = ("begun", "filled", "free")
                self.events.append({n: torch.cuda.Event(enable_timing=n != "free") for n in names})
            elif self.staging is not None:
                self.slots.append(self.staging.tensor[number * nbytes : (number + 1) * nbytes])

    def carry(self, number: int, source: Tensor) -> float:
        """Copies a unit into its slot when no layer computes from the slot any more.

        Returns:
            Seconds that the previous copy into this slot took; 0 if not known.
        """
        events = self.events[number]
        seconds = 0.0
        if events["filled"].query() and events["begun"].query():
            seconds = _elapsed(events)
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(events["free"])
            events["begun"].record(self.copies)
            self.slots[number][: source.nbytes].copy_(source, non_blocking=True)
            events["filled"].record(self.copies)
        return seconds

    def wait_filled(self, number: int) -> None:
        """Makes later computation wait until a slot is filled."""
        if self.copies is not None:
            torch.cuda.current_stream(self.device).wait_event(self.events[number]["filled"])

    def set_free(self, number: int) -> None:
        """Makes the next copy into a slot wait for the computation launched so far."""
        if self.copies is not None:
            self.events[number]["free"].record(torch.cuda.current_stream(self.device))


class Ring:
    """Brings units in cyclic order.

    Args:
        units: the units in the order of a pass.
        held: host memory of units that stay there, by index of the unit.
        depth: number of slots.
        cyclic: whether units are read ahead for the next pass.

    Attributes:
        closed: whether `close` was called; if an interrupt ended it, call it again.
    """

    def __init__(
        self,
        store: WeightStore,
        units: Sequence[Unit],
        held: Mapping[int, Tensor],
        depth: int,
        device: torch.device,
        stats: StreamStats,
        cyclic: bool = True,
    ) -> None:
        self.units, self.depth, self.cyclic = units, depth, cyclic
        self._store, self._held, self._stats = store, held, stats
        nbytes = -(-max(unit.nbytes for unit in units) // PAGE) * PAGE
        self.ring = DeviceRing(depth, nbytes, device, staged=len(held) < len(units))
        self._always = device.type == "cuda"
        self.ahead = self._always
        # C code takes and releases it, and no signal comes in between: an interrupt leaves it free.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # How many units were filled, taken by a layer, and given back by a layer so far.
        self._filled = self._taken = self._freed = 0
        self._asked = 0  # units below this number were asked for
        self._shift = 0  # number n is unit (n + shift) % units
        self._warm = len(units)  # units since the last one that was not in the file cache
        self._failure: BaseException | None = None
        self._busy = self.closed = False
        self._reader: threading.Thread | None = None

    def acquire(self, index: int) -> int:
        """Waits for a unit and returns the slot that holds it until `release`.

        Raises:
            CheckpointError: the unit could not be read. The ring can be asked again.
            StreamError: the ring was closed.
        """
        started = perf_counter()
        if (self._taken + self._shift) % len(self.units) != index or self._freed < self._taken:
            self._restart(index)
        if self.closed:
            raise StreamError("the streamer of this model was closed")
        number = self._taken
        if self.ahead or self._reader is not None:
            self._await(number)
        if self._filled <= number:
            self._fill(number)
            self._count(number)
        self._taken += 1
        slot = number % self.depth
        self.ring.wait_filled(slot)
        self._stats.stall_seconds += perf_counter() - started
        return slot

    def release(self) -> None:
        """Gives back the slot that was acquired last."""
        self.ring.set_free((self._taken - 1) % self.depth)
        with self._lock:
            if self._filled > self._taken or self.ahead or self._busy:
                self._freed = self._taken
            else:
                # Nothing was read ahead: the next unit takes the same slot, whose lines the CPU's
                # cache still has. So it gets the same number as this one, and the shift grows.
                self._filled = self._taken = self._freed
                self._shift = (self._shift + 1) % len(self.units)
            self._changed.notify_all()
        if self.ahead:
            self._start()

    def _start(self) -> None:
        """Starts the reader thread if it does not run, as after an interrupt."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_ahead, name="pagedkv", daemon=True)
        if self._reader.ident is None:
            self._reader.start()

    def _await(self, number: int) -> None:
        """Waits until the reader has filled a slot, or has stopped: then the caller fills it."""
        self._start()
        with self._lock:
            self._asked = number + 1
            self._changed.notify_all()  # a reader that failed tries again
            self._changed.wait_for(
                lambda: (
                    self._filled > number
                    or self._failure is not None
                    or not (self.ahead or self._busy)
                )
            )
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _restart(self, index: int) -> None:
        """Forgets units that were read ahead, and goes on with this one."""
        with self._lock:
            ahead, self.ahead = self.ahead, False
            self._changed.wait_for(lambda: not self._busy)
            for number in range(self._freed, self._taken):
                self.ring.set_free(number % self.depth)
            self._failure = None
            self._filled = self._freed = self._taken
            self._shift = (index - self._taken) % len(self.units)
            self.ahead = ahead
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.closed or self._may_read())
                if self.closed:
                    return
                self._busy = True
                number = self._filled
            try:
                self._fill(number)
            except BaseException as error:
                with self._lock:
                    self._failure = error
            else:
                self._count(number)

    def _may_read(self) -> bool:
        room = self._filled - self._freed < self.depth
        first = (self._filled + self._shift) % len(self.units) == 0
        due = self.cyclic or not first or self._filled < self._asked
        return self.ahead and room and due and self._failure is None

    def _count(self, number: int) -> None:
        """Notes that a slot is filled, and decides whether reading ahead pays."""
        with self._lock:
            self._filled = number + 1
            self.ahead = self._always or self._warm < len(self.units)

    def _fill(self, number: int) -> None:
        """Reads the n-th unit into its slot, or starts the copy that brings it there."""
        index, slot = (number + self._shift) % len(self.units), number % self.depth
        unit, ring = self.units[index], self.ring
        source = self._held.get(index)
        if source is None:
            assert ring.staging is not None
            if ring.copies is not None:
                ring.events[slot]["filled"].synchronize()  # the copy that last left this slot
            begin = slot * ring.nbytes
            self._read(unit, ring.staging, begin)
            source = ring.staging.tensor[begin : begin + unit.nbytes]
        if ring.copies is not None:
            self._stats.copy_seconds += ring.carry(slot, source)
            self._stats.bytes_copied += unit.nbytes
        elif index in self._held:
            ring.slots[slot][: unit.nbytes].copy_(source)

    def _read(self, unit: Unit, arena: HostArena, at: int) -> None:
        store, stats, started = self._store, self._stats, perf_counter()
        cold = store.reader.cold_bytes
        store.fill(unit, arena, at)
        stats.read_seconds += perf_counter() - started
        stats.bytes_read += unit.file_bytes
        stats.cold_bytes += store.reader.cold_bytes - cold
        self._warm = 0 if store.reader.cold_bytes > cold else self._warm + 1

    def close(self) -> None:
        """Stops the reader and frees the slots; held memory is its owner's. Idempotent."""
        others = self._reader is not None and self._reader is not threading.current_thread()
        with self._lock:
            self.closed = True
            self._changed.notify_all()
            if others:  # `join` alone is not enough, because an interrupt ends it for good
                self._changed.wait_for(lambda: not self._busy)
        if others and self._reader is not None and self._reader.ident is not None:
            self._reader.join()
        if self.ring.copies is not None:
            self.ring.copies.synchronize()
        if self.ring.staging is not None:
            self.ring.staging.close()
            self.ring.staging = None
        self.ring.slots.clear()
        self._held = {}


def _elapsed(events: dict[str, Any]) -> float:
    try:
        return events["begun"].elapsed_time(events["filled"]) / 1e3
    except (RuntimeError, ValueError):  # not recorded yet
        return 0.0
