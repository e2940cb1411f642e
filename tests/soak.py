"""One process, jobs of all kinds at random, faults injected: `python -m tests.soak --minutes 30`.

After every job answers are compared with those of the model alone, nobody holds a page, and the
cache is checked. Once a second resident memory, open files and threads are looked at. What this
alone finds: what is lost a little at a time, and what one kind of job leaves for another.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pagedkv import BatchGenerator, PagedCache, PagedKVCache
from pagedkv.hf.model import cache_config
from pagedkv.saving import pieces
from pagedkv.saving.store import PrefixStore
from tests.batch.generating import failing
from tests.cache.stored_world import clean, damage
from tests.cases import CASES, random_op
from tests.hf.tiny import named, tiny
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATEFUL
from tests.world import World

VOCABULARY, LONGEST = 90, 40
SIZES = {"max_tokens": 640, "page_size": 4, "host_tokens": 200, "growth_step": 160}
STORE_BYTES = 300_000
MOST_KNOWN = 5000  # ids and hashes that a world remembers; then it begins anew
WARM_UP = 0.25  # of the time, in which memory may grow
SLACK = 24 << 20  # bytes that it may grow by afterwards


class Boom(Exception):
    """The error that is injected."""


class Soak:
    """The jobs, and what they count."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.source, self.folder = random.Random(seed), folder
        self.threads = {*threading.enumerate()}
        self.model = tiny("llama")
        config = cache_config(self.model, **SIZES)
        self.cache = PagedKVCache(config, device="cpu", debug=True)
        self.batched = BatchGenerator(self.model, cache=self.cache, step_tokens=48)
        self.stored = self.with_store()
        self.known: dict[Any, list[int]] = {}
        self.worlds: dict[str, World] = {}
        self.done: Counter[str] = Counter()
        self.latest: deque[str] = deque(maxlen=5)
        self.bases = [self._ids(30) for _ in range(6)]

    def with_store(self) -> BatchGenerator:
        """A generator as of another process; after `clear_prefixes` one leaves its store alone."""
        store = PrefixStore(self.folder / "store", max_bytes=STORE_BYTES)
        return BatchGenerator(self.model, prefix_store=store, step_tokens=48, **SIZES)

    def _ids(self, count: int) -> list[int]:
        return [self.source.randrange(3, VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        base = self.source.choice(self.bases)
        return base[: self.source.randrange(1, 30)] + self._ids(self.source.randrange(6))

    def alone(self, prompt: list[int], new: int) -> list[int]:
        """Returns the model's own answer, computed once."""
        known = self.known.get(tuple(prompt), [])
        if len(known) < new:
            ids = torch.tensor([prompt])
            made = self.model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
            known = self.known[tuple(prompt)] = made[0, len(prompt) :].tolist()
            if len(self.known) > 3000:
                self.known.pop(next(iter(self.known)))
        return known[:new]

    def asked(self) -> tuple[list[list[int]], dict[str, Any]]:
        rows = [self.prompt() for _ in range(self.source.choice((1, 2, 5, 12)))]
        rules: dict[str, Any] = {"max_new_tokens": self.source.randrange(1, 12), "do_sample": False}
        return rows, rules

    def compare(self, results: Any, rows: list[list[int]], rules: dict[str, Any]) -> None:
        for result in results:
            if result.error is None:
                expected = self.alone(rows[result.index], rules["max_new_tokens"])
                assert result.tokens == expected, (rows[result.index], result.tokens, expected)
            else:
                self.done[f"error: {result.error[:30]}"] += 1

    def either(self) -> BatchGenerator:
        return self.source.choice((self.batched, self.stored))

    # ------------------------------------------------------------------ jobs

    def generate(self) -> None:
        rows, rules = self.asked()
        results = self.either().generate(rows, **rules)
        assert not any(result.error for result in results)
        self.compare(results, rows, rules)

    def sample(self) -> None:
        rows, rules = self.asked()
        rules |= {"do_sample": True, "seed": 5, "num_return_sequences": 3}
        first, second = (self.either().generate(rows, **rules) for _ in "ab")
        assert [x.tokens for x in first] == [x.tokens for x in second]

    def score(self) -> None:
        prompt, count = self.prompt(), 3
        continuation = self.alone(prompt, count)
        ((mine, other),) = self.either().score([prompt], [continuation, [5, 6]])
        assert len(mine.logprobs) == count
        assert sum(mine.logprobs[:1]) >= other.logprobs[0]

    def closed_stream(self) -> None:
        rows, rules = self.asked()
        stream = self.either().stream(rows, **rules)
        self.compare([next(stream)], rows, rules)
        stream.close()

    def threads(self) -> None:
        jobs = [(*self.asked(), self.either()) for _ in range(3)]
        raised: list[BaseException] = []

        def run(rows: Any, rules: Any, generator: BatchGenerator) -> None:
            try:
                found.append((generator.generate(rows, **rules), rows, rules))
            except BaseException as error:
                raised.append(error)

        found: list[Any] = []
        threads = [threading.Thread(target=run, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not raised, raised
        for each in found:
            self.compare(*each)

    def iterator(self) -> None:
        """Prompts that come of another thread's results, and an iterator that may raise."""
        rows, rules = self.asked()
        told: queue.Queue[Any] = queue.Queue()
        fails = self.source.random() < 0.3

        def given() -> Iterator[Any]:
            for _ in rows:
                yield told.get()
            if fails:
                raise Boom

        def tell() -> None:
            for row in rows:
                self.compare(self.batched.generate([row], **rules), [row], rules)
                told.put(row)

        other = threading.Thread(target=tell)
        other.start()
        try:
            self.compare(self.batched.generate(given(), **rules), rows, rules)
            assert not fails
        except Boom:
            assert fails
        finally:
            other.join()

    def failing_layer(self) -> None:
        rows, rules = self.asked()
        error = self.source.choice((Boom(), MemoryError(), RuntimeError("layer"), SystemExit()))
        layer, call = self.model.model.layers[1], self.source.randrange(8)
        try:
            with failing(layer, call, error):
                self.compare(self.either().generate(rows, **rules), rows, rules)
        except type(error):
            self.done[f"injected {type(error).__name__}"] += 1

    def failing_row(self) -> None:
        rows, rules = self.asked()

        def processors(place: int, _: int) -> list[Any]:
            return [self.break_off] if place % 2 else []

        results = self.either().generate(rows, processors=processors, **rules)
        assert all(bool(result.error) == bool(result.index % 2) for result in results)
        self.compare(results, rows, rules)

    def break_off(self, ids: Any, scores: Any) -> Any:
        raise Boom

    def interrupt(self) -> None:
        """Ctrl-C at any moment: `generate` returns what is finished, a stream raises it."""
        rows, rules = self.asked()
        way = self.source.choice((self.either().generate, self.either().stream))
        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.1 * self.source.random())
        results = []
        try:
            for result in way(rows, **rules):
                results.append(result)
        except KeyboardInterrupt:
            self.done["interrupts raised"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.done["rows interrupted"] += len(rows) - len(results)
        self.compare(results, rows, rules)

    def paged_cache(self) -> None:
        prompt, new = self.prompt(), self.source.randrange(1, 10)
        ids = torch.tensor([prompt])
        with (
            PagedCache.prefill(self.model, ids[:, :-1], cache=self.cache)
            if len(prompt) > 1
            else PagedCache(self.model, cache=self.cache) as cache,
            cache.fork() as forked,
        ):
            made = self.model.generate(
                ids, **named(forked), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        assert made[0, len(prompt) :].tolist() == self.alone(prompt, new)

    def save_and_load(self) -> None:
        prompt, path = self.prompt(), self.folder / "sequence"
        with PagedCache.prefill(self.model, torch.tensor([prompt]), cache=self.cache) as cache:
            (row,) = cache.rows
            self.cache.save(row, path)
            copy = self.cache.load(path)
            self.cache.offload(copy)
            self.cache.restore(copy)
            for layer in range(self.cache.config.num_layers):
                for x, y in zip(self.cache.gather(row, layer), self.cache.gather(copy, layer)):
                    assert torch.equal(x, y)
            self.cache.free(copy)

    def world(self) -> None:
        """Random operations of the walk, on caches that live as long as the process."""
        case = self.source.choice([*CASES, *STATEFUL, *EVICTING])
        world = self.worlds.get(case.name)
        if world is None or len(world.findable) + len(world.ever) > MOST_KNOWN:
            world = self.worlds[case.name] = World(case, everything=False)
        for _ in range(10):
            world.apply(random_op(self.source, case.config))

    def weights(self) -> None:
        """Weights change, and change back; what was found of others is not found."""
        weight = self.model.model.layers[0].self_attn.q_proj.weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(-1.0)
            rows, rules = self.asked()
            changed = self.either().generate(rows[:1], **rules)[0].tokens
            ids = torch.tensor(rows[:1])
            expected = self.model.generate(ids, pad_token_id=0, **rules)[0, len(rows[0]) :]
            weight.copy_(before)
        assert changed == expected.tolist()

    def housekeeping(self) -> None:
        for cache in (self.cache, self.stored.cache):
            self.source.choice((cache.shrink, cache.clear_prefixes))()
        self.done[f"store: {damage(self.folder / 'store', self.source)}"] += 1
        clean(self.folder / "store")
        self.done["tokens from store"] += self.stored.cache.stats().tokens_from_store
        self.stored.close()
        self.stored = self.with_store()

    # ------------------------------------------------------------------ around them

    JOBS = (
        (generate, 12), (sample, 3), (score, 4), (closed_stream, 4), (threads, 4), (iterator, 3),
        (failing_layer, 5), (failing_row, 4), (interrupt, 5), (paged_cache, 5), (save_and_load, 4),
        (world, 12), (weights, 1), (housekeeping, 4),
    )  # fmt: skip

    def one(self) -> None:
        """A job, and what must hold after each."""
        jobs, often = zip(*self.JOBS, strict=True)
        (job,) = self.source.choices(jobs, often)
        self.done[job.__name__] += 1
        self.latest.append(job.__name__)
        job(self)
        for cache in (self.cache, self.stored.cache):
            stats = cache.stats()
            assert cache.open_step is None, job.__name__
            assert stats.sequences == stats.live == stats.promised == stats.offloaded == 0, job
            cache.check()
        left = {*threading.enumerate()} - self.threads
        assert not left, left


def measured() -> tuple[int, int]:
    """Resident bytes, and open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


@contextmanager
def interruptible() -> Iterator[None]:
    """A timer presses Ctrl-C, also where a shell has it ignored, as it has for jobs behind it."""
    handlers = {
        signal.SIGALRM: lambda *_: signal.raise_signal(signal.SIGINT),
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def soak(seconds: float, seed: int, say: Callable[[str], None]) -> None:
    """Runs jobs for so long; raises where one is wrong, or what is watched grows."""
    pieces.TOKENS = 8  # prompts are short
    with tempfile.TemporaryDirectory() as folder, interruptible(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, begun, jobs = Soak(seed, Path(folder)), time.monotonic(), 0
        warm: list[int] = []
        later: list[int] = []
        files, told, looked = 0, begun, begun
        while (now := time.monotonic()) < begun + seconds:
            try:
                run.one()
            except BaseException:
                say(f"job {jobs}, after {', '.join(run.latest)}:")
                raise
            jobs += 1
            if now > looked + 1:
                resident, descriptors = measured()
                is_warm = now > begun + WARM_UP * seconds
                (later if is_warm else warm).append(resident)
                files = max(files, descriptors)
                looked = now
            if now > told + 60:
                told = now
                said = f"{resident >> 20} MB, {descriptors} files"
                say(f"{(now - begun) / 60:5.1f} min: {jobs} jobs, {said}")
        say(f"{jobs} jobs: " + ", ".join(f"{n} {what}" for what, n in run.done.most_common()))
        least, most = min(later or warm), max(later or warm)
        say(f"resident {least >> 20} to {most >> 20} MB after the warm-up, {files} files at most")
        third = len(later) // 3
        if third:
            grown = max(later[-third:]) - max(later[:third])
            assert grown <= SLACK, f"resident memory grew by {grown >> 20} MB"
        assert measured()[1] <= files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    soak(60 * given.minutes, given.seed, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
