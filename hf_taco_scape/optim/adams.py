"""AdamS: AdamW without a second-moment buffer (the previous momentum stands in for it).

    g    = gradient
    mt   = b1*m + (1-b1)*g
    v    = b2*m^2 + (1-b2)*g^2                      m is the momentum before this step
    p   -= lr*wd*p
    p   -= lr/(1-b1^t) * mt / (sqrt(v)/sqrt(1-b2^t) + eps)
    m    = mt

State is one tensor a parameter, fp32 whatever the parameter's dtype (fp64 for fp64 parameters).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer

# v is not stored, so a foreach call needs a temporary as large as its tensors: this many elements at a time
CHUNK_NUMEL = 1 << 24


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's optimizer state: fp64 for fp64 parameters, fp32 for all others."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def check_hyperparameters(lr, betas, eps, weight_decay) -> None:
    """Raise ValueError for values outside their range; warn where AdamS would take outsize steps."""
    b1, b2 = betas
    if not lr >= 0:
        raise ValueError(f"lr must be >= 0, got {lr}")
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
    # a gradient that arrives where m is 0 moves its parameter by lr*(1-b1)/sqrt(1-b2), whatever its size
    first_move = (1 - b1) / (1 - b2) ** 0.5
    if first_move > 1 + 1e-6:
        warnings.warn(
            f"betas={tuple(betas)}: a coordinate whose momentum was 0 moves by {first_move:.2f} lr at once "
            f"(0.45 at the default betas (0.9, 0.95)); lower b2, AdamW's 0.999 does not suit AdamS",
            stacklevel=3,
        )


_kernels: Callable[..., bool] | None = None


def use_kernels(update: Callable[..., bool]) -> None:
    """Let `adams_update_` try `update` first: same arguments, and whether it did the work.

    This room knows torch only, so the room that knows the kernels hands them in.
    """
    global _kernels
    _kernels = update


def adams_update_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momenta: list[torch.Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamS step, in place on `params` and `momenta`, for tensors of one device and one parameter dtype.

    `grads` (state dtype or the parameter's) are read only; `momenta` have the state dtype; `step` counts from 1.
    """
    hyperparameters = {"step": step, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if _kernels is not None and _kernels(params, grads, momenta, **hyperparameters):
        return
    for chunk in chunks(list(zip(params, grads, momenta, strict=True)), lambda tensors: tensors[0].numel()):
        _update_chunk(*map(list, zip(*chunk, strict=True)), **hyperparameters)


def _update_chunk(params, grads, momenta, *, step, lr, betas, eps, weight_decay) -> None:
    b1, b2 = betas
    v = torch._foreach_mul(momenta, momenta)
    torch._foreach_mul_(v, b2)
    state_grads = [g.to(m.dtype) for g, m in zip(grads, momenta, strict=True)]
    torch._foreach_addcmul_(v, state_grads, state_grads, value=1 - b2)
    torch._foreach_mul_(momenta, b1)
    torch._foreach_add_(momenta, state_grads, alpha=1 - b1)
    denominators = v
    torch._foreach_sqrt_(denominators)
    torch._foreach_div_(denominators, (1 - b2**step) ** 0.5)
    torch._foreach_add_(denominators, eps)
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    step_size = lr / (1 - b1**step)
    if params[0].dtype == momenta[0].dtype:
        torch._foreach_addcdiv_(params, momenta, denominators, value=-step_size)
    else:
        # the quotient is formed in the state's precision and rounded once, when it is added
        updates = torch._foreach_div(momenta, denominators)
        for param, update in zip(params, updates, strict=True):
            param.add_(update, alpha=-step_size)


def chunks(items: list, numel_of=torch.Tensor.numel) -> Iterator[list]:
    """Split a list into runs of about CHUNK_NUMEL elements, at least one item each."""
    chunk, numel = [], 0
    for item in items:
        if chunk and numel + numel_of(item) > CHUNK_NUMEL:
            yield chunk
            chunk, numel = [], 0
        chunk.append(item)
        numel += numel_of(item)
    if chunk:
        yield chunk


def load_state_uncast(optimizer: Optimizer, state_dict: dict, stay: tuple[str, ...] = ()) -> None:
    """`Optimizer.load_state_dict` without its cast of floating state to the parameter's dtype.

    Tensors are cloned to the parameter's device in the dtype they were saved in, so a resume is bit for bit; those
    named in `stay` are cloned where they are.
    """
    Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, param in zip(saved, params, strict=True):
        if i not in state_dict["state"]:
            continue
        optimizer.state[param] = {
            key: torch.empty_like(value, device=value.device if key in stay else param.device).copy_(value)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in state_dict["state"][i].items()
        }


class AdamS(Optimizer):
    """Dense AdamS (equations at the top of this file), with decoupled weight decay and foreach updates.

    Args:
        params: parameters or parameter groups; each group may set lr, betas, eps and weight_decay.
        lr: learning rate.
        betas: decay of the momentum, and weight of the squared previous momentum in v. b2 = 0.999 gets a warning.
        eps: added to sqrt(v).
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1):
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient; returns the closure's value, if one was given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple, list[torch.Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse or p.is_complex():
                    raise ValueError(
                        "AdamS takes real parameters with dense gradients; build the layer with sparse=False"
                    )
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p, dtype=state_dtype(p))
                state["step"] += 1
                alike[p.device, p.dtype, p.grad.dtype, state["step"]].append(p)
            for (_, _, _, step), params in alike.items():
                adams_update_(
                    params,
                    [p.grad for p in params],
                    [self.state[p]["momentum"] for p in params],
                    step=step,
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a `state_dict()`; the state keeps the dtype it was saved in, whatever the parameter's dtype."""
        load_state_uncast(self, state_dict)
