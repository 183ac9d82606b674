"""Where parameters lie: in the group's arena, where peers write them in place."""

from __future__ import annotations

import collections
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim._torch import uncompiled

_log = logging.getLogger("fusedpg")


def refuse_sharded(param: torch.Tensor, name: str) -> None:
    """Raises TypeError for parameters that FSDP or tensor parallelism has sharded."""
    # Whoever has a DTensor has imported it; it is slow to import.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(param, dtensor):
        what = "a DTensor (fully_shard or tensor parallelism)"
    elif hasattr(param, "_fsdp_orig_uid"):
        what = "no parameter of the model any more, since fully_shard has replaced it"
    elif getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        what = "a part of FullyShardedDataParallel"
    else:
        return
    raise TypeError(
        f"{name} is {what}: fused optimizers shard the state of whole parameters themselves. Make "
        "ddp = DistributedDataParallel(model) instead and pass ddp=ddp, or keep FSDP and torch's "
        "optimizer"
    )


def same_order(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether dense tensors of these strides have their elements in the same order in memory."""
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, others, strict=True))


def laid_out(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A gradient in the memory layout and type of its parameter."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    return torch.empty_like(param).copy_(grad)


def watch_gradient(
    param: torch.Tensor,
    owner: Any,
    accumulated: Callable[[Any, torch.Tensor], None],
    context: Any,
    kind: type,
) -> Any:
    """Calls ``accumulated(owner, param)`` when autograd has accumulated a gradient; or gives it to
    the gradient of this ``kind`` that stood there before, if nobody has kept that one, and tells
    the ``context`` that norms it knows are out of date.

    The owner is not kept alive. Frozen parameters are watched, too: they may be unfrozen.

    Returns:
        A handle whose ``remove()`` ends it.
    """
    this = weakref.ref(owner)

    @uncompiled
    def hook(param: torch.Tensor) -> None:
        owner = this()
        if owner is not None:
            accumulated(owner, param)

    watch = load_extension().LocalWatch(kind, this, hook, context.norms_known, context.changed)
    return add_hook(param, watch)


def add_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_post_accumulate_grad_hook``, of frozen parameters, too."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)  # torch registers no hook otherwise
    handle = param.register_post_accumulate_grad_hook(hook)
    if frozen:
        param.requires_grad_(False)
    return handle


def _like(memory: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return memory.as_strided(param.shape, param.stride())


class Parameters:
    """Moves parameters into the arena, and remembers which of them are shared."""

    def __init__(self, group: dist.ProcessGroup | None, *, share: bool) -> None:
        self._group = group
        self._share = share
        self._versions: dict[torch.Tensor, int] = {}

    @property
    def shared(self) -> bool:
        return self._share

    # Memory that is made in inference mode would make inference tensors of the parameters.
    @torch.inference_mode(False)
    @torch.no_grad()
    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Moves the data of parameters. With sharing a collective: rank 0's values win."""
        params = list(params)
        if not self._share:
            self._adopt_replicas(params)
            return
        if any(param.device.type != "cpu" for param in params):
            raise ValueError("share_parameters=True is for parameters on the CPU")
        backend = _backend(self._group)
        for param in params:
            memory = backend.empty_shared([param.numel()], param.dtype)
            if dist.get_rank(self._group) == 0:
                _like(memory, param).copy_(param)
            param.data = _like(memory, param)
            self._versions[param] = param._version
        # Nobody reads before rank 0 has written.
        dist.barrier(group=self._group)

    def _adopt_replicas(self, params: list[torch.Tensor]) -> None:
        backend = _backend(self._group)
        if not params or dist.get_world_size(self._group) == 1:
            return
        on_gpu = params[0].device.type != "cpu"
        info = backend.info()
        if info["cuda_arena" if on_gpu else "arena_reserved"] == 0:
            return
        users = collections.Counter(param.untyped_storage().data_ptr() for param in params)
        for param in params:
            storage = param.untyped_storage()
            # Memory that others may refer to stays where it is; it is staged.
            alone = (
                storage.nbytes() == param.numel() * param.element_size()
                and users[storage.data_ptr()] == 1
            )
            if not alone or param.numel() == 0 or backend.in_arena(param):
                continue
            try:
                memory = backend.empty([param.numel()], param.dtype, param.device, lives_long=True)
            except torch.OutOfMemoryError as error:
                _log.info("fused: parameters stay in ordinary memory and are staged: %s", error)
                return
            moved = _like(memory, param)
            moved.copy_(param)
            param.data = moved

    @torch.inference_mode(False)
    @torch.no_grad()
    def own(self, params: Iterable[torch.Tensor]) -> None:
        """Gives each rank a copy of its own of parameters that were shared."""
        if not self._share:
            return
        self._share = False
        self._versions.clear()
        params = list(params)
        for param in params:
            param.data = param.data.clone()
        self._adopt_replicas(params)

    def check(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises RuntimeError when a shared parameter was written outside ``step()``."""
        for name, param in params:
            if self._versions.get(param, param._version) != param._version:
                self._versions[param] = param._version
                raise RuntimeError(
                    f"shared parameter {name} was written in place outside step(): the ranks of "
                    "this machine hold one copy of it, so such writes race. Write on one rank "
                    "between barriers, inside `with optimizer.writing_parameters():`"
                )

    def accept(self, params: Iterable[torch.Tensor]) -> None:
        """Takes the present contents as they are."""
        if self._share:
            self._versions.update((param, param._version) for param in params)


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
