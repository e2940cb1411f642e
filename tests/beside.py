"""Threads that are joined with a limit: what would wait for ever fails instead."""

import time
from threading import Thread

LIMIT = 600  # seconds: far more than any of these takes


def run_all(*jobs) -> None:
    """Runs functions in threads of their own; what one raises is raised here."""
    raised = []

    def guarded(job):
        try:
            job()
        except BaseException as error:
            raised.append(error)

    threads = [Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if raised:
        raise raised[0]


def wait_until(ready) -> None:
    for _ in range(100 * LIMIT):
        if ready():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")
