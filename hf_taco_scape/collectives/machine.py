"""What a measurement depends on, as a signature, and a cache of measured tables by it.

The cache lies in Hugging Face's folder: $HF_HOME/hf_taco_scape (by default ~/.cache/huggingface/hf_taco_scape).
"""

import functools
import hashlib
import json
import logging
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from .routes import RouteTable

logger = logging.getLogger(__name__)

FORMAT = 1
# settings that change which link a message takes; the excluded ones differ from run to run
_LINK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_SYMM_MEM_", "TORCH_NCCL_")
_OTHER_VARIABLES = ("NCCL_DEBUG", "NCCL_COMM_ID", "TORCH_NCCL_TRACE", "TORCH_NCCL_DUMP")


def facts(device: torch.device) -> dict:
    """This process's part of a signature, JSON: its device, that device's links, and the software."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LINK_VARIABLES) and not name.startswith(_OTHER_VARIABLES)
    }
    return {
        "host": socket.gethostname(),
        "hardware": {**_device_facts(device), "variables": variables},
        "software": {
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
            "triton": _version("triton"),
            "hf_taco_scape": sys.modules[__package__.partition(".")[0]].__version__,
            "sources": _sources_digest(),
        },
    }


def signature(device: torch.device, job: dict, groups: Sequence[dist.ProcessGroup]) -> dict:
    """Facts of all ranks of `groups` and the `job`, the same on every rank; collective over `groups`.

    Hosts are numbered, not named: nodes of one kind share their measurements.
    """
    everyone = [facts(device)]
    for group in groups:
        lists = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, everyone, group=group)
        everyone = [one for some in lists for one in some]
    hosts = list(dict.fromkeys(one["host"] for one in everyone))
    return {
        "hardware": [{"host": hosts.index(one["host"]), **one["hardware"]} for one in everyone],
        "software": [one["software"] for one in everyone],
        "job": job,
    }


def differences(one: dict, other: dict) -> list[str]:
    """Names of the parts of two signatures that differ, e.g. `hardware.device`."""
    found = []
    for part in ("hardware", "software", "job"):
        a, b = one.get(part), other.get(part)
        if a == b:
            continue
        rows = list(zip(a, b, strict=False)) if isinstance(a, list) and isinstance(b, list) else [(a, b)]
        names = sorted({k for x, y in rows for k in {*(x or {}), *(y or {})} if (x or {}).get(k) != (y or {}).get(k)})
        found += [f"{part}.{name}" for name in names] or [f"{part} (number of ranks)"]
    return found


def first_says(value, groups: Sequence[dist.ProcessGroup]):
    """The first rank's `value` on every rank of `groups`; collective over them."""
    for group in groups:
        box = [value]
        dist.broadcast_object_list(box, group=group, group_src=0)
        value = box[0]
    return value


def cache_folder() -> Path:
    home = os.environ.get("HF_HOME")
    if home is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface"
    return Path(home).expanduser() / "hf_taco_scape"


def cache_file(signature: dict) -> Path:
    text = json.dumps(signature, sort_keys=True)
    return cache_folder() / f"routes-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_cache(signature: dict) -> RouteTable | None:
    """The table that was measured under this signature; None, with a line in the log, for a file that is not one."""
    file = cache_file(signature)
    try:
        saved = json.loads(file.read_text())
        if saved["format"] != FORMAT or saved["signature"] != signature:
            raise ValueError("it belongs to another machine or version")
        return RouteTable.from_json(saved["table"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is ignored and the links are measured again: %s: %s", file, type(error).__name__, error)
        return None


def write_cache(signature: dict, table: RouteTable) -> None:
    """Replace the file at once: another run never reads half of it. A folder that cannot be written is logged."""
    file = cache_file(signature)
    text = json.dumps({"format": FORMAT, "signature": signature, "table": table.to_json()}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(name, file)
    except OSError as error:
        logger.warning("the measured routes are not kept in %s: %s", file, error)


def _device_facts(device: torch.device) -> dict:
    if device.type != "cuda":
        return {"device": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    index, count = device.index, torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "memory": properties.total_memory,
        "peers": [peer == index or torch.cuda.can_device_access_peer(index, peer) for peer in range(count)],
        "nvlinks": nvlinks(index),
    }


def nvlinks(index: int) -> list[int] | None:
    """NVLink connections of CUDA device `index` to each visible device; None where torch does not tell."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        return list(detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix[index])
    except RuntimeError as error:  # no NVML in a container
        logger.info("NVLink connections are not known: %s", error)
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _sources_digest() -> str:
    """Of the code whose speed was measured: another checkout of the same version measures anew."""
    package = sys.modules[__package__.partition(".")[0]]
    rooms = [Path(root) / room for root in package.__path__ for room in ("codecs", "collectives", "kernels")]
    digest = hashlib.sha256()
    for file in sorted(file for room in rooms for file in room.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
