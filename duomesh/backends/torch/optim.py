"""AdamW over the stored tensors, with a wide master copy where weights are narrower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from duomesh.core.session import AdamW

__all__ = ["Optimizer"]

_WIDE = (torch.float32, torch.float64)


class Optimizer:
    """torch's AdamW on master weights.

    Where a parameter is fp32 or float64 it is its own master; a bf16 parameter has an fp32 master that it is rounded
    from after every update. Storage tensors that hold matrices decay, others do not.

    Args:
        params: storage name -> parameter.
        is_decayed: storage name -> whether weight decay acts on it.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], is_decayed: Mapping[str, bool], config: AdamW) -> None:
        self.config = config
        self.step_count = 0
        self._params = dict(params)
        self.masters: dict[str, Tensor] = {
            name: p if p.dtype in _WIDE else p.detach().float().requires_grad_() for name, p in params.items()
        }
        self.dtype = next(iter(self.masters.values())).dtype
        groups = [
            {"params": [self.masters[n] for n in params if is_decayed[n]], "weight_decay": config.weight_decay},
            {"params": [self.masters[n] for n in params if not is_decayed[n]], "weight_decay": 0.0},
        ]
        self._is_fused = next(iter(params.values())).is_cuda
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=self._is_fused,
            foreach=not self._is_fused,
        )

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: float, *, scale: float = 1.0) -> None:
        """One update from gradients by storage name, any float dtype, which it takes over and empties.

        scale: multiplies every gradient, after it was widened.
        """
        self.step_count += 1
        for name, master in self.masters.items():
            # popped, so that a narrow gradient is freed as soon as its wide copy exists
            master.grad = grads.pop(name).to(master.dtype)
        if self._is_fused:
            # the kernel divides gradients by this as it reads them: no pass of its own
            self._adamw.grad_scale = torch.full((), 1.0 / scale, device=next(iter(self.masters.values())).device)
        elif scale != 1.0:
            torch._foreach_mul_([master.grad for master in self.masters.values()], scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for master in self.masters.values():
            master.grad = None
        self.round_params()

    @torch.no_grad()
    def round_params(self) -> None:
        """Rounds compute weights from their masters, where the two are not one."""
        narrow = [name for name, p in self._params.items() if p is not self.masters[name]]
        if narrow:
            torch._foreach_copy_([self._params[n] for n in narrow], [self.masters[n] for n in narrow])

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(group, storage name, tensor). Moments that no update has made yet are zeros."""
        for name, master in self.masters.items():
            made = self._adamw.state.get(master, {})
            yield "master", name, master.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                yield key, name, made[key] if key in made else torch.zeros_like(master)

    def begin_load(self, step_count: int) -> dict[tuple[str, str], Tensor]:
        """Makes state for `step_count` updates and returns its tensors, to be filled in place; then `round_params`."""
        self.step_count = step_count
        for master in self.masters.values():
            self._adamw.state[master] = {
                "step": torch.tensor(float(step_count), device=master.device if master.is_cuda else "cpu"),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return {(group, name): tensor for group, name, tensor in self.state()}
