"""A folder of prefixes that is damaged, full, gone, or used by several at once costs no answer."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from pagedkv import PrefixStore
from pagedkv.saving import store as stores
from tests.cache.stored import PIECE, TEXT, compute, files, make
from tests.effort import examples

WHOLE = len(TEXT) // PIECE * PIECE
PASSED_OVER = r"prefix_store: .*{} is passed over, what it held is computed again"


def file_of(folder, number):
    """The file of a piece of TEXT: the first is the last that was marked as used."""
    return sorted(files(folder), key=lambda file: -file.stat().st_mtime_ns)[number]


def silent(call, *args):
    """The result of a call that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args)


# ------------------------------------------------------------------ damage


def flip(data, at):
    data[at] ^= 0x10


DAMAGE = {
    "a flipped length": lambda data: flip(data, 0),
    "a flipped header": lambda data: flip(data, 30),
    "a flipped checksum": lambda data: flip(data, data.index(b"sha256") + 15),
    "a flipped shape": lambda data: flip(data, data.index(b"num_kv_heads") + 17),
    "a flipped key": lambda data: flip(data, data.index(b'model\\": \\"') + 12),
    "a flipped number": lambda data: flip(data, len(data) - 9),
    "a short end": lambda data: data.__delitem__(slice(len(data) - 1, None)),
    "half": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "nothing": lambda data: data.clear(),
    "more": lambda data: data.extend(b"x"),
    "something else": lambda data: data.__setitem__(slice(None), b"not ours at all" * 40),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_passed_over_computed_again_and_replaced(folder, damage, number):
    compute(make(folder), TEXT)
    path = file_of(folder, number)
    good = path.read_bytes()
    data = bytearray(good)
    damage(data)
    path.write_bytes(data)
    cache = make(folder)
    with pytest.warns(UserWarning, match=PASSED_OVER.format(path.name)) as told:
        assert compute(cache, TEXT) == number * PIECE
    assert len(told) == 1
    assert path.read_bytes() == good
    assert silent(compute, make(folder), TEXT) == WHOLE


@pytest.mark.sampled
def test_any_flipped_byte_is_noticed(folder):
    compute(make(folder), TEXT[:PIECE])
    (path,) = files(folder)
    good, source = path.read_bytes(), random.Random(1)
    for at in source.sample(range(len(good)), examples(200, taste=12)):
        data = bytearray(good)
        data[at] ^= 1 << source.randrange(8)
        path.write_bytes(data)
        with pytest.warns(UserWarning, match=PASSED_OVER.format("")):
            assert compute(make(folder), TEXT[:PIECE]) == 0
        assert path.read_bytes() == good


def test_a_piece_under_the_name_of_another_is_not_taken_for_it(folder):
    compute(make(folder), TEXT)
    first, second = file_of(folder, 0), file_of(folder, 1)
    first.write_bytes(second.read_bytes())
    with pytest.warns(UserWarning, match=PASSED_OVER.format(first.name)):
        assert compute(make(folder), TEXT) == 0


def test_what_is_no_file_or_a_link_is_left_alone(folder, tmp_path):
    compute(make(folder), TEXT)
    paths = [file_of(folder, 0), file_of(folder, 1), file_of(folder, 2)]
    (tmp_path / "elsewhere").write_bytes(paths[1].read_bytes())
    for path in paths:
        path.unlink()
    paths[0].mkdir()
    paths[1].symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    with pytest.warns(UserWarning, match="cannot be written, nothing new is kept"):
        assert compute(make(folder), TEXT) == 0
    assert paths[0].is_dir()
    assert (tmp_path / "elsewhere").read_bytes() == before


# ------------------------------------------------------------------ the folder


def test_a_folder_that_is_not_there_is_made_for_its_owner(tmp_path):
    PrefixStore(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    assert not list((tmp_path / "a" / "b").iterdir())


def test_files_have_the_mode_that_others_of_the_process_have(folder):
    before = os.umask(0o027)
    try:
        compute(make(folder), TEXT)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in files(folder)} == {0o640}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"folder": ""}, "prefix_store: expected a folder, got ''"),
        ({"folder": 3}, "prefix_store: expected a folder, got 3"),
        ({"max_bytes": 0}, "max_bytes: expected a positive int, got 0"),
        ({"max_bytes": True}, "max_bytes: expected a positive int, got True"),
        ({"max_bytes": "1GiB"}, "max_bytes: expected a positive int"),
        ({"max_age": 0}, "max_age: expected seconds above 0, or None, got 0"),
        ({"max_age": float("nan")}, "max_age: expected seconds"),
        ({"max_age": "1d"}, "max_age: expected seconds"),
    ],
    ids=str,
)
def test_what_makes_no_store_is_refused_by_name(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        PrefixStore(**{"folder": tmp_path, **given})


def test_a_file_in_place_of_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="prefix_store: expected a folder"):
            make(path)
    assert (tmp_path / "file").read_text() == "mine"


def refuse_writes(monkeypatch, number):
    """Makes every file that is begun end in an error of the system."""
    begin = os.open

    def refused(path, flags, *args, **options):
        if flags & os.O_CREAT and str(path).endswith(".tmp"):
            raise OSError(number, os.strerror(number), str(path))
        return begin(path, flags, *args, **options)

    monkeypatch.setattr(stores.os, "open", refused)


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    refuse_writes(monkeypatch, errno.EROFS)
    with pytest.raises(ValueError, match=r"expected a folder that can be written, .*Read-only"):
        make(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_becomes_unwritable_is_told_once_and_still_read(folder, monkeypatch, number):
    compute(make(folder), TEXT)
    cache = make(folder)
    refuse_writes(monkeypatch, number)
    with pytest.warns(UserWarning, match="cannot be written, nothing new is kept"):
        compute(cache, [*TEXT[:16], *range(100, 114)])
    silent(compute, cache, [*TEXT[:16], *range(200, 214)])
    assert silent(compute, cache, TEXT) == WHOLE


def test_a_disk_that_fills_up_leaves_nothing_half_written(folder, monkeypatch):
    cache, fill = make(folder), stores.files.fill

    def filled(file, *args):
        fill(file, *args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores.files, "fill", filled)
    with pytest.warns(UserWarning, match="No space left"):
        compute(cache, TEXT)
    assert not list(folder.iterdir())
    monkeypatch.undo()


def test_a_folder_that_was_full_is_tried_again_later(folder, monkeypatch):
    cache = make(folder)
    with monkeypatch.context() as patch:
        refuse_writes(patch, errno.ENOSPC)
        with pytest.warns(UserWarning, match="No space left"):
            compute(cache, TEXT)
    monkeypatch.setattr(stores, "RETRY_S", 0.0)
    cache.prefix_store._closed_until = 0.0
    compute(cache, TEXT)
    assert len(files(folder)) == WHOLE // PIECE


def test_a_folder_that_vanishes_is_told_and_not_made_again(folder):
    cache = make(folder)
    compute(cache, TEXT)
    for file in files(folder):
        file.unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="cannot be written"):
        compute(cache, TEXT[::-1])
    assert not folder.exists()
    assert compute(cache, TEXT) == len(TEXT) - 1


def test_files_that_vanish_are_computed_again(folder):
    compute(make(folder), TEXT)
    cache = make(folder)
    for path in files(folder):
        cache.prefix_store.use([bytes.fromhex(path.stem)])  # seen a moment ago
        path.unlink()
    assert silent(compute, cache, TEXT) == 0
    assert len(files(folder)) == WHOLE // PIECE


# ------------------------------------------------------------------ limits


def size_of_one(folder):
    compute(make(folder), TEXT)
    return max(file.stat().st_size for file in files(folder))


def test_the_least_recently_used_go_first_and_ends_before_beginnings(folder, tmp_path):
    one = size_of_one(tmp_path / "size")
    for text in (TEXT, TEXT[::-1]):
        compute(make(PrefixStore(folder, max_bytes=4 * one)), text[:16])
    assert compute(make(PrefixStore(folder)), [*TEXT[:16], 1]) == 16  # used again
    compute(make(PrefixStore(folder, max_bytes=4 * one)), list(range(200, 208)))
    assert sum(file.stat().st_size for file in files(folder)) <= 4 * one
    assert compute(make(PrefixStore(folder)), [*TEXT[:16], 1]) == 16
    assert compute(make(PrefixStore(folder)), [*TEXT[::-1][:16], 1]) == 8


def test_a_text_larger_than_the_folder_leaves_its_beginning(folder, tmp_path):
    one = size_of_one(tmp_path / "size")
    compute(make(PrefixStore(folder, max_bytes=2 * one)), TEXT)
    assert len(files(folder)) == 2
    assert compute(make(folder), TEXT) == 16
    compute(make(PrefixStore(tmp_path / "tiny", max_bytes=one // 2)), TEXT)
    assert not files(tmp_path / "tiny")


def test_files_that_nobody_used_for_too_long_go(folder):
    compute(make(folder), TEXT[:16])
    old = time.time() - 3600
    for file in files(folder):
        os.utime(file, (old, old))
    young = make(PrefixStore(folder, max_age=1800))
    assert compute(young, [*TEXT[:16], 5]) == 0
    for file in files(folder):
        assert file.stat().st_mtime > old + 1  # computed again
    assert compute(make(PrefixStore(folder, max_age=1800)), [*TEXT[:16], 5]) == 16


def test_a_hit_makes_files_young(folder):
    compute(make(folder), TEXT[:16])
    for file in files(folder):
        os.utime(file, (time.time() - 3600,) * 2)
    compute(make(folder), [*TEXT[:16], 5])
    assert all(file.stat().st_mtime > time.time() - 60 for file in files(folder))


def test_temporary_files_of_the_dead_are_removed_and_files_of_others_are_not(folder):
    """Others' are not counted either: what the store may keep stays whole beside them."""
    store = PrefixStore(folder, max_bytes=10_000)
    old = time.time() - 2 * stores.LEFT_OVER_S
    dead = store._beside("ab" * 32).name, store._beside("trial").name
    theirs = {
        "notes.txt", ".important.tmp", ".a.b.tmp", f".{'a' * 16}.tmp", "weights.safetensors",
        "w" * 64 + ".safetensors", "ab" * 32, "AB" * 32 + ".safetensors", ".trial.tmp",
    }  # fmt: skip
    for name in (*dead, *theirs):
        (folder / name).write_text("x" * 20_000)
        os.utime(folder / name, (old, old))
    folders = {"cd" * 32 + ".safetensors", f".{'b' * 16}.{'c' * 16}.tmp"}
    for name in folders:
        (folder / name).mkdir()
    busy = store._beside("ef" * 32).name
    (folder / busy).write_text("")
    compute(make(store), TEXT)
    assert compute(make(folder), TEXT) == WHOLE
    left = {path.name for path in folder.iterdir()}
    ours = {name for name in left - folders if stores.OURS.fullmatch(name)}
    assert left - ours == theirs | folders | {busy}
    assert len(ours) == WHOLE // PIECE


# ------------------------------------------------------------------ several at once

WORKER = """
import sys
import pytest
from pagedkv import PrefixStore
from pagedkv.saving import pieces
from tests.cache.stored import PIECE, compute, make
pieces.TOKENS = PIECE
folder, seed, rounds, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
import random, warnings
from pagedkv.saving import store as stores
warnings.simplefilter("error")
stores.TRUSTED_S = 0.0
source, found = random.Random(seed), 0
print("ready", flush=True)
for _ in range(rounds):
    text = [source.randrange(3)] * 8 + [source.randrange(3)] * 8 + [source.randrange(3)] * 9
    found += compute(make(PrefixStore(folder, max_bytes=limit)), text)
print(found, flush=True)
"""


def worker(folder, seed, rounds, limit):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), str(seed), str(rounds), str(limit)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip


@pytest.mark.slow
def test_processes_write_read_and_evict_at_once(folder):
    """Every prompt of each is found or computed, never wrong, and nobody is told of damage."""
    workers = [worker(folder, seed, 150, 20_000) for seed in range(3)]
    for each in workers:
        said, errors = each.communicate(timeout=600)
        assert each.returncode == 0, errors
        assert int(said.split()[1]) > 0
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_a_process_killed_in_the_middle_of_a_write_leaves_nothing_that_is_believed(folder):
    for seed in range(4):
        process = worker(folder, seed, 100_000, 10**9)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.1 * seed)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for text in ([a] * 8 + [b] * 8 + [c] * 9 for a in (0, 1) for b in (0, 2) for c in (1, 2)):
            silent(compute, make(folder), text)


def test_threads_share_a_store(folder):
    store, wrong = PrefixStore(folder, max_bytes=30_000), []

    def work(seed):
        source = random.Random(seed)
        try:
            for _ in range(30):
                compute(make(store), [source.randrange(3)] * 8 + [source.randrange(3)] * 9)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
