"""Where SCAPE's step runs as Triton kernels: the one place that chooses between the kernels and their torch twins.

The choice follows from the start (device, dtypes, layout, Triton there or not), so ranks with the same hardware agree.
They have to: the kernels order a cyclic or random mask's values by index, the twins from the mask's start.
The twins (step_ops, mask, mask_codec, optim.adams) stay the reference: `with torch_twins():` runs them on any device.
"""

import functools
import importlib.util

import torch

from hf_taco_scape.codecs.device import torch_twins, wants_kernels
from hf_taco_scape.optim import adams
from hf_taco_scape.sync.layout import row_shape
from hf_taco_scape.sync.mask import CyclicMask, EncodedMask, FullMask, RandomMask, mask_bytes
from hf_taco_scape.sync.mask_codec import choose_encoding
from hf_taco_scape.sync.slot import Slot

__all__ = ["FusedStep", "fused_step", "select_bool", "select_encoded", "square_sums", "torch_twins"]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _on_kernels(device: torch.device) -> bool:
    return wants_kernels(device) and _has_triton()


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fits(slot: Slot) -> bool:
    """Whether the kernels can take a sparse tensor as it is."""
    state = slot.state
    dims = sorted(slot.layout.row_dims)
    return (
        slot.param.dtype in FLOATS
        and state["momentum"].dtype == torch.float32
        and state["residual"].device == slot.param.device
        and slot.numel < 2**31
        and dims == list(range(dims[0], dims[0] + len(dims)))
    )


def fused_step(
    slots: list[Slot], before: "FusedStep | None", step: int, masks: dict, state_dtype: torch.dtype = torch.float32
) -> "FusedStep | None":
    """Return the kernels of step `step` over the sparse `slots`, or None where their twins run.

    before: what this returned in the step before; masks: this step's, by slot index; state_dtype: the message's.
    """
    if not slots or state_dtype != torch.float32 or not _on_kernels(slots[0].param.device):
        return None
    if not all(_fits(slot) for slot in slots):
        return None
    grads = [slot.grad for slot in slots]
    if any(grad is not None and grad.dtype not in FLOATS for grad in grads):
        return None
    return FusedStep(slots, grads, masks, step, before)


class FusedStep:
    """One step's kernels over the sparse slots; the values' order is that of indices, tensor by tensor."""

    def __init__(self, slots: list[Slot], grads, masks: dict, step: int, before: "FusedStep | None") -> None:
        self._slots, self._grads, self._masks, self._step = slots, grads, masks, step
        # the update leaves momenta zero off its mask; what happened since, if this is not the next step, is not known
        known = before is not None and before._updated and before._step == step - 1 and before._slots is slots
        self._previous = before._launch.mask if known else None
        self._updated = False

    def form(self, values: torch.Tensor, keep: set[int], scale: torch.Tensor | None) -> None:
        """c of every slot, packed into `values`; a slot with its index in `keep` holds c then, others residuals."""
        from hf_taco_scape.kernels.scape_launch import Entry, ScapeLaunch

        entries = [
            Entry(
                slot.param.view(-1),
                slot.momentum,
                slot.state["residual"].view(-1),
                grad,
                _kernel_mask(self._masks[slot.index], slot.param.device),
                slot.index in keep,
                _kernel_rows(slot) if "second_moment" in slot.state else None,
            )
            for slot, grad in zip(self._slots, self._grads, strict=True)
        ]
        self._launch = ScapeLaunch(entries, self._previous)
        self._values = values
        self._launch.form(self._numbers(), values, scale)
        del self._grads

    def _numbers(self) -> torch.Tensor:
        from hf_taco_scape.kernels.scape_launch import numbers_of

        groups = [slot.group for slot in self._slots]
        return numbers_of(groups, 0 if self._updated else 1, self._slots[0].param.device)

    def choose(self, chosen: list[tuple[Slot, int]]) -> list[torch.Tensor]:
        """Encoded masks of the k largest of each slot's c; then all slots hold residuals."""
        payloads = select_encoded([(slot.state["residual"].view(-1), k) for slot, k in chosen])
        self._launch.keep_unsent(self._values)
        return payloads

    def norms(self) -> list[torch.Tensor]:
        """The norm of each slot's ghat, once `values` holds the mean."""
        return list(self._launch.norms(self._numbers(), self._values))

    def update(self, clip: torch.Tensor | None, column_factors: dict[int, torch.Tensor]) -> None:
        """Parameters and momenta from the mean in `values`; the groups' step counts this one already.

        column_factors: by slot index, of all slots (second moment `factored`) or of none.
        """
        self._updated = True
        columns = [column_factors[slot.index] for slot in self._slots] if column_factors else None
        self._launch.update(self._numbers(), self._values, clip, columns)
        # autograd sees writes by its own operators only
        torch.autograd.graph.increment_version([slot.param for slot in self._slots])

    def owe(self, error: torch.Tensor, first: int, world: int) -> None:
        """Add world * error to the residuals, from place `first` of the values on."""
        self._launch.owe(error, first, world)

    def finish(self) -> None:
        """Forget all but the mask."""
        self._launch.entries.clear()
        self._launch.previous = self._previous = None
        del self._values, self._masks


def _kernel_mask(mask, device: torch.device) -> tuple[str, torch.Tensor | int, int]:
    if isinstance(mask, FullMask):
        return "full", 0, mask.k
    if isinstance(mask, CyclicMask):
        return "range", mask.start, mask.k
    if isinstance(mask, RandomMask):
        return "list", mask.indices(device), mask.k
    assert isinstance(mask, EncodedMask)
    kind = choose_encoding(mask.numel, mask.k)
    return "list" if kind == "int32" else kind, mask.payload.to(device), mask.k


def _kernel_rows(slot: Slot) -> tuple[torch.Tensor, int, int]:
    shape, dims = slot.param.shape, slot.layout.row_dims
    return slot.state["second_moment"], shape[max(dims) + 1 :].numel(), torch.Size(row_shape(shape, dims)).numel()


def square_sums(
    slots: list[Slot], dims: list[tuple[int, ...]], scale: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """`row_square_sums` of the sparse slots over their `dims` as one launch; None where its twin runs."""
    grads = [slot.grad for slot in slots]
    dtypes = {grad.dtype for grad in grads if grad is not None}
    plain = all(_fits(slot) and _rows_are_plain(slot, rows) for slot, rows in zip(slots, dims, strict=True))
    if not (plain and _on_kernels(slots[0].param.device) and len(dtypes) == 1 and dtypes <= set(FLOATS)):
        return None
    from hf_taco_scape.kernels.scape_rows_launch import Rows, square_sums

    counts = [torch.Size(row_shape(slot.param.shape, d)).numel() for slot, d in zip(slots, dims, strict=True)]
    rows = [
        Rows(grad, count, slot.numel // count, 0 not in d)
        for slot, grad, d, count in zip(slots, grads, dims, counts, strict=True)
    ]
    sums = square_sums(rows, scale, dtypes.pop(), slots[0].param.device)
    return list(sums.split(counts))


def _rows_are_plain(slot: Slot, dims: tuple[int, ...]) -> bool:
    """Whether a row is neighbours, or every `rows`-th entry: `dims` lead, or they end the shape."""
    ndim = slot.param.dim()
    return bool(dims) and tuple(sorted(dims)) in (tuple(range(len(dims))), tuple(range(ndim - len(dims), ndim)))


def select_encoded(tensors: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """EncodedMask payloads of the k largest |x| of each (x, k), as `select_topk`; flat fp32 on one CUDA device."""
    from hf_taco_scape.kernels.scape_select_launch import Choice, select

    assert all(k < x.numel() for x, k in tensors), "a full mask has no payload"
    sizes = [mask_bytes(x.numel(), k) for x, k in tensors]
    room = [-(-size // 16) * 16 for size in sizes]
    parts = torch.empty(sum(room), dtype=torch.uint8, device=tensors[0][0].device).split(room)
    forms = [choose_encoding(x.numel(), k) for x, k in tensors]
    select([Choice(x, k, form, part) for (x, k), form, part in zip(tensors, forms, parts, strict=True)])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def select_bool(x: torch.Tensor, k: int) -> torch.Tensor | None:
    """`select_topk` as kernels; None where its twin runs."""
    if not _on_kernels(x.device) or x.dtype != torch.float32 or not x.is_contiguous() or x.numel() >= 2**31:
        return None
    from hf_taco_scape.kernels.scape_select_launch import Choice, select

    out = torch.empty(x.numel(), dtype=torch.bool, device=x.device)
    select([Choice(x, k, "bool", out)])
    return out


def adams_update(params: list, grads: list, momenta: list, *, step: int, **hyperparameters) -> bool:
    """`adams_update_` as one kernel; False, and nothing done, where its twin runs."""
    dtypes = {params[0].dtype, *(g.dtype for g in grads)}
    fits = dtypes <= set(FLOATS) and len({g.dtype for g in grads}) == 1 and momenta[0].dtype == torch.float32
    if not (fits and _on_kernels(params[0].device) and all(t.is_contiguous() for t in (*params, *grads, *momenta))):
        return False
    from hf_taco_scape.kernels.scape_launch import adams as launch
    from hf_taco_scape.kernels.scape_launch import numbers_of

    groups = [hyperparameters | {"step": step}] * len(params)
    launch(params, grads, momenta, numbers_of(groups, 0, params[0].device))
    torch.autograd.graph.increment_version(params)
    return True


adams.use_kernels(adams_update)
