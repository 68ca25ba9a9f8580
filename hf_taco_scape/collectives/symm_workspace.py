"""Memory of a group that every rank writes: allocated and made known to the peers ahead, never in a captured graph.

torch.distributed._symmetric_memory is private; what is used of it is in `_symmetric_memory`. NVLink multicast is never
used.
"""

import importlib.util
import pathlib
import socket

import torch
import torch.distributed as dist

from ..kernels.symm_format import Inbox
from .transport import group_ranks

MEBIBYTE = 2**20
_MEMBERS: dict[str, tuple[int, ...]] = {}  # name of a group -> ranks that it had here first
PATIENCE_S = 600.0  # torch.distributed waits as long: a peer may write a checkpoint meanwhile


class SymmetricWorkspace:
    """The inboxes of one group; one for each group, its calls in the same order on all ranks.

    group: the process group, all of its ranks on one node. device: this rank's. max_bytes: room to reserve at once,
    see `symm_mem.inbox_bytes`. patience_s: how long a kernel waits for a peer before it ends with an error.

    Construction and growth are collective. A call on another stream than the last one waits for that one. Captured
    graphs are not seen here: capture on one stream, replay on the stream of the other calls. Replays and calls may
    take turns, as long as all ranks do the same.
    """

    def __init__(self, group, device: torch.device, max_bytes: int = 0, patience_s: float = PATIENCE_S) -> None:
        self.group = group
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.ranks = group_ranks(group)
        self.patience_s = patience_s
        self._room = 0
        self._inbox = None
        self._memory: list = []  # former inboxes too: a captured graph may use them
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._stream, self._stream_handle = None, None
        self._gave_up = torch.zeros(1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._gave_up_seen = self._gave_up.numpy()
        if max_bytes:
            self.reserve(max_bytes)

    def reserve(self, nbytes: int) -> None:
        """Grow so that no message of up to `nbytes` of an inbox grows the workspace again; collective.

        Call it, or the largest collective once, before a CUDA graph is captured: RuntimeError while one is.
        """
        if nbytes <= self._room:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a message needs {nbytes} bytes of the symmetric workspace, which has {self._room} and cannot grow "
                f"while a CUDA graph is captured: call workspace.reserve({nbytes}) on all ranks before the capture"
            )
        room = max(-(-nbytes // MEBIBYTE) * MEBIBYTE, 2 * self._room)
        addresses, memory = self._allocate(2 * room)
        table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        control = torch.zeros(128, dtype=torch.int32, device=self.device)  # counters, and from byte 256 on scratch
        self._memory.append((memory, table, control))
        self._inbox = Inbox(
            rank=self.rank,
            peers=tuple(addresses),
            peers_table=table.data_ptr(),
            room=room,
            counters=control.data_ptr(),
            scratch=control.data_ptr() + 256,
            gave_up=self._gave_up.data_ptr(),
            patience_ns=int(self.patience_s * 1e9),
        )
        self._ready()
        self._room = room

    def _allocate(self, nbytes: int) -> tuple[list[int], object]:
        """Memory of ff on every rank: its addresses here by rank, and what keeps it alive."""
        symmetric = _symmetric_memory()
        buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffer.fill_(0xFF)
        handle = symmetric.rendezvous(buffer, self.group or dist.group.WORLD)
        views = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.ranks)]
        addresses = [view.data_ptr() for view in views]
        if addresses[self.rank] != buffer.data_ptr():
            raise RuntimeError(
                "torch's symmetric memory gives another address for the own buffer than the buffer has: this release "
                "is not supported, set tp_backend to c10d"
            )
        return addresses, (buffer, handle, views)

    def _ready(self) -> None:
        """Return once every rank's memory is filled."""
        arrived = torch.ones(1, device=self.device)
        dist.all_reduce(arrived, group=self.group)
        arrived.item()  # the stream has filled this rank's memory before the collective ran

    def inbox(self, nbytes: int):
        """Addresses for a call whose messages take `nbytes` of an inbox; the call belongs on the current stream."""
        if nbytes > self._room:
            self.reserve(nbytes)
        if self.device.type == "cuda":
            self._follow_stream()
        return self._inbox

    def _follow_stream(self) -> None:
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle == self._stream_handle or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._stream, self._stream_handle = current, handle

    def table(self, starts: tuple[int, ...]) -> int:
        """Address of int64[ranks + 1] on the device; new ones are copied there, which a capture does not allow."""
        if starts not in self._tables:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "an all_gather of sizes that torch.tensor_split would not give needs a table on the device: call "
                    "it once with these sizes before the capture"
                )
            self._tables[starts] = torch.tensor(starts, dtype=torch.int64, device=self.device)
        return self._tables[starts].data_ptr()

    def check(self) -> None:
        """Raise RuntimeError if a kernel of this rank has given up waiting for a peer."""
        if self._gave_up_seen[0]:
            raise RuntimeError(
                f"rank {self.rank} of {self.ranks} waited {self.patience_s:g} s for a peer's message over symmetric "
                "memory and ended the kernel: a rank died, or the ranks called different collectives; start again"
            )


def _symmetric_memory():
    """torch.distributed._symmetric_memory, of which `empty(n, dtype, device)` and `rendezvous(tensor, group)` serve.

    RuntimeError that says what is missing where a torch release has moved them.
    """
    try:
        import torch.distributed._symmetric_memory as module
    except ImportError as error:
        raise RuntimeError(f"this torch has no symmetric memory ({error}): set tp_backend to c10d") from error
    missing = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    if missing:
        raise RuntimeError(f"torch.distributed._symmetric_memory has no {missing}: set tp_backend to c10d")
    return module


def why_not(group, device: torch.device) -> str | None:
    """Return None if every rank of `group` can use symmetric memory, else the first rank's reason; collective.

    All ranks return the same: any of them that cannot start sends all to torch.distributed.
    """
    device = torch.device(device)
    reason = _alone(device) or _remembered(group)
    facts = None if reason else _machine(device)
    everybody = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, (reason, facts), group=group)
    for rank, (reason, _) in enumerate(everybody):
        if reason:
            return f"rank {rank}: {reason}"
    facts = [facts for _, facts in everybody]
    rank = dist.get_rank(group)
    return _agreed(_together(facts, rank, device), group) or _trial(group, device)


def _alone(device: torch.device) -> str | None:
    """What this rank lacks by itself."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA devices, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from ..kernels.launch import supports

    if not supports(device):
        return f"{torch.cuda.get_device_name(device)} is older than sm89"
    try:
        _symmetric_memory()
    except RuntimeError as error:
        return str(error)
    return None


def _remembered(group) -> str | None:
    """torch keeps the ranks of a group's name for good; with others under that name a rendezvous would not end."""
    group = group or dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(group))
    first = _MEMBERS.setdefault(group.group_name, members)
    if first == members:
        return None
    return (
        f"this process had a group of the same name with ranks {list(first)}, not {list(members)}: start a new process"
    )


def _machine(device: torch.device) -> tuple[str, str]:
    """The machine's and the device's identity."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return host, uuid


def _together(facts: list[tuple[str, str]], rank: int, device: torch.device) -> str | None:
    """What stands between this rank and a peer."""
    host, uuid = facts[rank]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, (peer_host, peer_uuid) in enumerate(facts):
        if peer_host != host:
            return f"rank {peer} is on another node"
        index = visible.get(peer_uuid)
        if peer_uuid != uuid and index is not None and not torch.cuda.can_device_access_peer(device.index, index):
            return f"its GPU cannot write the memory of rank {peer}'s"
    return None


def _trial(group, device: torch.device) -> str | None:
    """Whether a rendezvous works; agreed before it too, because it waits for all ranks."""
    buffer, reason = None, None
    try:
        buffer = _symmetric_memory().empty(MEBIBYTE, dtype=torch.uint8, device=device)
    except Exception as error:
        reason = f"symmetric memory cannot be allocated: {_first_line(error)}"
    reason = _agreed(reason, group)
    if reason:
        return reason
    try:
        _symmetric_memory().rendezvous(buffer, group or dist.group.WORLD)
    except Exception as error:
        reason = f"symmetric memory cannot be shared: {_first_line(error)}"
    return _agreed(reason, group)


def _agreed(reason: str | None, group) -> str | None:
    """The first rank's reason, the same on all ranks."""
    reasons = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
