"""The process that ranks are forked off, and the ranks; see pool.py. It runs as a script."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


def fork_ranks(address: str) -> None:
    """Forks ranks for as long as somebody asks for them."""
    forker = Client(address)
    groups: dict[int, list[int]] = {}
    try:
        while True:
            what, n, store = forker.recv()
            if what == "fork":
                groups[n] = [fork(address, forker, rank, n, store) for rank in range(n)]
            else:
                end(groups.pop(n))
                forker.send("ended")
    except (EOFError, OSError):
        pass  # who asked is gone
    finally:
        for group in groups.values():
            end(group)


def fork(address: str, forker: Connection, rank: int, n: int, store: str) -> int:
    process = os.fork()
    if process:
        return process
    try:
        forker.close()
        be_rank(address, rank, n, store)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # a rank that went on behind this would end the groups that were forked before


def end(group: list[int]) -> None:
    for process in group:
        os.kill(process, signal.SIGKILL)
    for process in group:
        os.waitpid(process, 0)


def be_rank(address: str, rank: int, n: int, store: str) -> NoReturn:
    """Calls functions as one rank of n until nobody asks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    os.environ |= {name: str(value) for name, value in place.items()}
    asked = Client(address)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, n),
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=300),  # pool.py ends ranks before that
    )
    # A shell that runs the tests in the background has them ignore Ctrl-C, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked.send(rank)  # a function that ends its rank must not find others that still look for it
    while True:
        try:
            name, args, kwargs = asked.recv()
        except BaseException:
            os._exit(0)
        try:
            module, function = name.split(":")
            torch.manual_seed(0)
            answer = getattr(importlib.import_module(module), function)(*args, **kwargs), None
        except BaseException:
            answer = None, traceback.format_exc()
        asked.send(answer)


if __name__ == "__main__":
    sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != Path(__file__).parent]
    sys.path.append(str(ROOT))  # behind all packages: a folder called kernels lies there
    import torch
    import torch.distributed
    import torch.distributed.tensor
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401

    import tests.ranks.jobs  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name of this machine
    gc.collect()
    gc.freeze()  # each job collects: ranks look at what they made, not at all that was imported
    fork_ranks(sys.argv[1])
