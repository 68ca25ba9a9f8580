"""A dead or stuck rank ends the others with an error that names it, instead of a hang.

Each rank writes a counter to the group's store from a thread of its own; each also reads the others'. gloo reports a
lost connection without saying whose it was, and not at all when the peer is merely stuck.
"""

import logging
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger(__name__)

_EXIT_CODE = 70
_START_FACTOR = 5  # a rank may reach its first beat much later than another: data preparation, compilation
_KEY = "hf_taco_scape/heartbeat"


class Heartbeat:
    """Watches the ranks of the default group; `timeout_s` without a beat makes a rank dead.

    While the main thread waits for a dead rank it cannot be interrupted, so the watcher then prints the error and ends
    the process, as NCCL's watchdog does. Errors raised by a collective are translated by `explain`.
    """

    def __init__(self, timeout_s: float, on_dead=None) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self._interval_s = timeout_s, min(timeout_s / 6, 5.0)
        # a connection of its own: a blocked call of the main thread must not hold the beats up
        self._store = dist.distributed_c10d._get_default_store().clone()
        # ranks start their heartbeats in one order, so this number is the same everywhere
        self._run = self._store.add(f"{_KEY}/starts/{self.rank}", 1)
        self._on_dead = on_dead or self._end_process
        self._last_seen = {r: (None, time.monotonic()) for r in range(self.world) if r != self.rank}
        self._dead: str | None = None
        self._stop = threading.Event()
        self._store.set(self._name_key(self.rank), f"{socket.gethostname()}, process {os.getpid()}")
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, finished: bool = True) -> None:
        """Stop beating. A finished rank says goodbye, so that nobody takes it for dead; a failed one does not."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=self._interval_s + 1)
        if not finished:
            return
        try:
            self._store.set(self._beat_key(self.rank), "done")
        except RuntimeError:
            logger.debug("the store is gone already")

    @contextmanager
    def explain(self):
        """Around training: an error of a collective that a dead rank caused is raised again with its name."""
        try:
            yield
        except RuntimeError as error:
            name = self._who_died(error)
            if name is None:
                raise
            raise RuntimeError(name) from error

    def explain_uncaught(self) -> None:
        """The same for errors that end the program: the name is printed below the traceback."""
        print_traceback = sys.excepthook

        def hook(kind, error, traceback):
            print_traceback(kind, error, traceback)
            name = None if self._stop.is_set() else self._who_died(error)
            if name is not None:
                print(f"hf_taco_scape: {name}", file=sys.stderr, flush=True)
            self.stop(finished=False)

        sys.excepthook = hook

    def _who_died(self, error: BaseException) -> str | None:
        """The dead rank, if `error` looks like a lost connection: seen at once by gloo, by the beats only later."""
        deadline = time.monotonic() + self.timeout_s + 2 * self._interval_s
        while self._lost_connection(error) and self._dead is None and time.monotonic() < deadline:
            time.sleep(self._interval_s / 4)
        return self._dead

    @staticmethod
    def _lost_connection(error: BaseException) -> bool:
        text = str(error).lower()
        return any(word in text for word in ("connection closed", "connection reset", "gloo", "timed out", "nccl"))

    def _watch(self) -> None:
        count = 0
        while not self._stop.wait(self._interval_s):
            count += 1
            try:
                self._beat(count)
                overdue = self._overdue()
            except RuntimeError:
                return  # the store went away: the launcher is taking the run down
            if overdue is not None and self._dead is None:
                key = self._name_key(overdue)
                name = self._store.get(key).decode() if self._store.check([key]) else "never started"
                self._dead = (
                    f"rank {overdue} ({name}) has given no sign of life for {self.timeout_s:.0f} s: it died or is "
                    "stuck; see its own output. (heartbeat_timeout sets the limit)"
                )
                # leave a main thread that already has an error the time to raise it
                if not self._stop.wait(4 * self._interval_s):
                    self._on_dead(self._dead)
                return

    def _overdue(self) -> int | None:
        now = time.monotonic()
        for rank, (beat, since) in self._last_seen.items():
            key = self._beat_key(rank)
            new = self._store.get(key).decode() if self._store.check([key]) else None
            if new != beat or new == "done":
                self._last_seen[rank] = (new, now)
            elif now - since > self.timeout_s * (1 if beat is not None else _START_FACTOR):
                return rank
        return None

    def _beat(self, count: int) -> None:
        self._store.set(self._beat_key(self.rank), str(count))

    def _beat_key(self, rank: int) -> str:
        return f"{_KEY}/{self._run}/beat/{rank}"

    def _name_key(self, rank: int) -> str:
        return f"{_KEY}/{self._run}/name/{rank}"

    @staticmethod
    def _end_process(message: str) -> None:
        print(f"hf_taco_scape: {message}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)


def wait_for_all(what: str, timeout_s: float) -> None:
    """Wait until every rank of the world has come here; RuntimeError with the fix where some do not call `what`."""
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    turn = store.add(f"hf_taco_scape/{what}/{dist.get_rank()}", 1)  # the same number on all ranks
    key, deadline = f"hf_taco_scape/{what}/turn{turn}", time.monotonic() + timeout_s
    store.add(key, 1)
    while (here := store.add(key, 0)) < world:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{what} gathers slices from all {world} processes, but only {here} called it: call it on every "
                "process, not under `if is_main_process`"
            )
        time.sleep(0.01)
