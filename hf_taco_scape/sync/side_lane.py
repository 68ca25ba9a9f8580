"""Work beside the main line: a side stream on CUDA, a thread on CPU."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class SideLane:
    """Runs one function at a time next to the caller; `join()` returns its result, ready for the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="scape-mask")
        self._pending: Future | list[torch.Tensor] | None = None

    def start(self, work: Callable[[], list[torch.Tensor]]) -> None:
        """Begin `work`, which may read what the caller has enqueued so far."""
        if self._stream is None:
            self._pending = self._threads.submit(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._pending = work()

    def join(self) -> list[torch.Tensor]:
        """The tensors `work` returned ([] if nothing was started); raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        if self._stream is None:
            return pending.result()
        caller = torch.cuda.current_stream(self._stream.device)
        caller.wait_stream(self._stream)
        for tensor in pending:
            # allocated on the side stream: keep its memory until the caller's stream is done with it too
            tensor.record_stream(caller)
        return pending
