"""Memory of rows: it is of those in use alone, it moves, and what is in use stays what it is."""

import ctypes
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.stream.experts import memory as module
from pagedkv.stream.experts.memory import PAGE, RowMemory, mappings_of, most_mappings
from pagedkv.stream.weights import Place
from tests.stream.experts.residency import pages_of, resident
from tests.stream.models import decode, in_memory, make, save, stream

ROOT = Path(__file__).resolve().parents[3]
ROWS = 6
WIDTHS = [100, PAGE, 9 * PAGE, 9 * PAGE + 100, 12 * PAGE - 8]
MOVES = pytest.mark.skipif(not most_mappings(), reason="memory cannot be moved on this system")


def places_of(*widths):
    """Tensors of bytes with rows so wide, each of which begins on a page."""
    places, end = [], 0
    for number, width in enumerate(widths):
        places.append(Place(f"tensor {number}", end, (ROWS, width), torch.uint8))
        end += -(-ROWS * width // PAGE) * PAGE
    return places, end


def fill(memory, places, row, value):
    for place in places:
        memory.bytes[place.row(row) : place.row(row) + place.row_bytes] = (
            bytes([value]) * place.row_bytes
        )


def holds(memory, places, row, value):
    return all(
        bytes(memory.bytes[place.row(row) : place.row(row) + place.row_bytes])
        == bytes([value]) * place.row_bytes
        for place in places
    )


@settings(max_examples=60)
@given(
    widths=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3),
    calls=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)), max_size=20),
    moves=st.booleans(),
)
def test_rows_in_use_keep_their_bytes_and_no_other_has_memory(widths, calls, moves):
    places, end = places_of(*widths)
    memory, used = RowMemory(places, end, moves), {}
    for count, (row, other) in enumerate(calls, 1):
        if row not in used:
            fill(memory, places, row, count)
            used[row] = count
        elif other in used:
            del used[row]
            memory.give_back(row, used)
        else:
            del used[row]
            memory.move(row, other, used)
            fill(memory, places, other, count)
            used[other] = count
        assert all(holds(memory, places, *each) for each in used.items())
        assert resident(memory) == PAGE * len(pages_of(places, used))
    memory.close()
    memory.close()


@MOVES
def test_a_row_that_comes_has_the_memory_of_one_that_goes():
    """The bytes that the other left in it show it."""
    places, end = places_of(16 * PAGE, 10 * PAGE)
    memory = RowMemory(places, end, moves=True)
    fill(memory, places, 1, 7)
    memory.move(1, 4, {})
    assert holds(memory, places, 4, 7)
    assert holds(memory, places, 1, 0)  # reading makes no memory of its own


def test_mappings_are_counted_for_rows_whose_memory_moves():
    assert mappings_of(places_of(16 * PAGE)[0]) == ROWS
    assert mappings_of(places_of(16 * PAGE + 4, 100)[0]) == 2 * ROWS


@MOVES
@pytest.mark.parametrize("inner", [96, 92])  # whole pages, and such that neighbours share some
@pytest.mark.parametrize("moves", [True, False])
def test_experts_computed_from_memory_that_moves_have_the_bits_of_memory(
    moves, inner, tmp_path, monkeypatch
):
    moved = []
    move = RowMemory._move_pages
    monkeypatch.setattr(
        RowMemory, "_move_pages", lambda self, *args: moved.append(args) or move(self, *args)
    )
    if not moves:
        monkeypatch.setattr("pagedkv.stream.placement.most_mappings", lambda: 0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": inner, "num_experts": 16}
    folder = save(make("qwen3_moe", **sizes, num_experts_per_tok=2), tmp_path)
    tokens = [3, 9, 3, 4, 5, 17, 9, 3, 30, 31]
    with stream(folder, expert_slots=3) as streamer:
        found = decode(streamer.model, tokens)
        held = [experts for _, experts in streamer._passes._places.experts]
        for experts in held:
            pages = pages_of(experts._places, experts._held)
            assert resident(experts._memory) == PAGE * len(pages)
    assert bool(moved) is moves
    for mine, theirs in zip(found, decode(in_memory(folder), tokens), strict=True):
        assert torch.equal(mine, theirs)


def test_layers_beyond_the_mappings_of_a_process_do_not_move_memory(tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 16}
    folder = save(make("qwen3_moe", **sizes, num_experts_per_tok=2), tmp_path)
    monkeypatch.setattr("pagedkv.stream.placement.most_mappings", lambda: 2 * 2 * 16 + 3)
    with stream(folder, expert_slots=3) as streamer:
        moves = [each._memory._moves for _, each in streamer._passes._places.experts]
    assert moves == [True, True, False]


WITHOUT_MAPPINGS = """
import mmap
from tests.stream.experts.test_memory import PAGE, ROWS, RowMemory, fill, holds, places_of
places, end = places_of(16 * PAGE)
memory = RowMemory(places, end, moves=True)
for row in range(3):
    fill(memory, places, row, 1 + row)
others, flags = [], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
try:
    while True:  # of two kinds, as neighbours that are alike become one
        others.append(mmap.mmap(-1, PAGE, flags=flags))
        others.append(mmap.mmap(-1, PAGE, flags=flags, prot=mmap.PROT_READ))
except OSError:
    pass
assert len(others) > 1000
memory.move(1, 4, {0, 2})
assert not memory._moves
del others
fill(memory, places, 4, 9)
assert [holds(memory, places, row, value) for row, value in ((0, 1), (2, 3), (4, 9))] == [True] * 3
print("as it was")
"""


@MOVES
@pytest.mark.slow
def test_a_process_without_mappings_left_goes_on_without_moving():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MAPPINGS],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "as it was\n", done.stderr


def test_a_system_that_moves_no_memory_makes_it_anew(monkeypatch):
    monkeypatch.setattr(module, "_calls", lambda: None)
    assert module.most_mappings() == 0
    places, end = places_of(16 * PAGE)
    memory = RowMemory(places, end, moves=True)
    fill(memory, places, 0, 1)
    for old, new in pairwise(range(ROWS)):
        memory.move(old, new, {})
        assert resident(memory) == 0
        fill(memory, places, new, 2)


@MOVES
@pytest.mark.parametrize("again", [True, False])
def test_addresses_that_a_failed_move_lost_are_mapped_again_or_it_is_said(again, monkeypatch):
    calls, libc = module._calls(), ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def losing(source, nbytes, _, flags, target):
        libc.munmap(target, nbytes)
        return module.FAILED

    mapped = calls.mmap if again else lambda *args: module.FAILED
    lost = SimpleNamespace(mremap=losing, mmap=mapped, mincore=calls.mincore)
    monkeypatch.setattr(module, "_calls", lambda: lost)
    places, end = places_of(16 * PAGE)
    memory = RowMemory(places, end, moves=True)
    for row in range(3):
        fill(memory, places, row, 1 + row)
    with nullcontext() if again else pytest.raises(OSError, match="expert_slots: this process"):
        memory.move(1, 4, {0, 2})
    assert not memory._moves
    if again:
        fill(memory, places, 4, 9)
        assert holds(memory, places, 4, 9)
    assert holds(memory, places, 0, 1)
    assert holds(memory, places, 2, 3)
