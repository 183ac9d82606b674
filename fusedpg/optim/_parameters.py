"""Parameters lie in the group's arena, where peers write them in place, and are cut into slices."""

from __future__ import annotations

import collections
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from fusedpg._registration import load_extension
from fusedpg.functional import _backend, shard_range

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer
    from fusedpg.optim._bridge import Bridge
    from fusedpg.optim._modes import Mode

_log = logging.getLogger("fusedpg")

GONE = "the fused optimizer that has reduced this gradient is gone: call zero_grad()"


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


def add_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
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
        self.shared = share
        self._versions: dict[torch.Tensor, int] = {}

    # Memory that is made in inference mode would make inference tensors of the parameters.
    @torch.inference_mode(False)
    @torch.no_grad()
    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Moves the data of parameters. With sharing a collective: rank 0's values win."""
        params = list(params)
        if not self.shared:
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
        if not self.shared:
            return
        self.shared = False
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
        if self.shared:
            self._versions.update((param, param._version) for param in params)


def bytes_of(tensors: Iterable[object]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


class Numbers(dict[torch.Tensor, int]):
    """By parameter; says what is wrong with one that is missing."""

    def __missing__(self, param: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is in no group of the fused optimizer that "
            "has its gradient: it was taken out of param_groups, or put there by hand instead of "
            "with add_param_group()"
        )


class ParameterGroups:
    """The parameters of an optimizer, group by group, and how they are cut into slices.

    It does not keep its optimizer, which keeps this: a cycle would be freed by the garbage
    collector alone.
    """

    def __init__(self, optimizer: FusedOptimizer, group: dist.ProcessGroup, *, share: bool) -> None:
        self._reference = weakref.ref(optimizer)
        self.group = group
        self.backend = _backend(group)
        self.extension = load_extension()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.bridge: Bridge | None = None  # to the DDP whose gradients the optimizer takes
        self.memory = Parameters(group, share=share)
        self.layouts: dict[torch.Tensor, tuple[int, ...]] = {}  # strides that slices are cut by
        self.group_of = Numbers()  # number of the group of a parameter
        self._numbered: list[list[torch.Tensor]] = []  # parameters by group, numbered so

    def optimizer(self) -> FusedOptimizer:
        found = self._reference()
        if found is None:
            raise RuntimeError(GONE)
        return found

    @property
    def mode(self) -> Mode:
        """Mode-specific behaviour: with a DDP, or without."""
        return self.optimizer()._mode

    def parameters(self) -> list[torch.Tensor]:
        optimizer = self._reference() or self.optimizer()  # which raises
        return [param for group in optimizer.param_groups for param in group["params"]]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(self.optimizer().param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"{i} of group {number}", param

    def device(self) -> torch.device:
        """Where all parameters are."""
        for group in self.optimizer().param_groups:
            for param in group["params"]:
                return cast("torch.device", param.device)
        return torch.device("cpu")

    def number_groups(self, added: Iterable[torch.Tensor] = ()) -> Numbers:
        """Follows whoever edits ``param_groups``: groups and parameters may be taken out.

        Returns:
            The numbers, another object after every change.
        """
        groups = (self._reference() or self.optimizer()).param_groups
        now = [list(group["params"]) for group in groups]
        same = self.extension.same_objects
        if len(now) == len(self._numbered) and all(map(same, now, self._numbered)):
            return self.group_of
        self._check_listed_once(now)
        known = {*self.layouts, *added}
        self.group_of = Numbers(
            (param, number)
            for number, group in enumerate(groups)
            for param in group["params"]
            if param in known
        )
        self._numbered = now
        return self.group_of

    def _check_listed_once(self, groups: list[list[torch.Tensor]]) -> None:
        """torch.optim steps a parameter once for every place that it stands at, and warns."""
        params = [param for group in groups for param in group]
        if len(set(params)) != len(params):
            twice = next(p for p, count in collections.Counter(params).items() if count > 1)
            raise ValueError(
                f"a parameter of shape {tuple(twice.shape)} is listed more than once in "
                "param_groups: list it once (torch.optim would step it once for each)"
            )

    def shard(self, param: torch.Tensor) -> tuple[int, int]:
        return shard_range(param.numel(), self.world_size, self.rank)

    def owned(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a tensor laid out as the parameter ``like``: a view."""
        offset, length = self.shard(like)
        return tensor.detach().as_strided([length], [1], tensor.storage_offset() + offset)

    def owned_slices(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's slices of tensors laid out as their parameters."""
        return self.extension.owned_slices(tensors, self.world_size, self.rank)

    def check_layouts(self, params: list[torch.Tensor]) -> None:
        """Slices are ranges of memory: they do not survive ``model.to(memory_format=...)``."""
        usual = self.extension.have_layouts(params, self.layouts)
        for param in () if usual else params:
            if param.stride() != self.layouts.get(param):
                self._adapt_layout(param)

    def check_known(self, param: torch.Tensor) -> None:
        """Raises if something is wrong with a parameter whose gradient was not reduced."""
        if param not in self.layouts:
            self.group_of.__missing__(param)
        if self.bridge is not None:
            self.bridge.check_types()

    def _adapt_layout(self, param: torch.Tensor) -> None:
        if param not in self.layouts:
            self.group_of.__missing__(param)
        if same_order(param.shape, param.stride(), self.layouts[param]):
            self.layouts[param] = param.stride()
            return
        if self.optimizer().state.get(param) or self.memory.shared:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has changed its memory format (strides "
                f"{self.layouts[param]}, now {param.stride()}), and the slices of its state are "
                "cut by it. Convert the model before the first step, with share_parameters before "
                "the optimizer is made; or take full_state_dict() before and load it afterwards"
            )
        self.layouts[param] = param.stride()

    def check_same_layout(self, name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
        if param.stride() != grad.stride() and not same_order(
            param.shape, param.stride(), grad.stride()
        ):
            raise RuntimeError(
                f"parameter {name} has changed its memory format between backward and step()"
            )

    def check_shared(self, params: list[torch.Tensor] | None = None) -> None:
        """Before a step of some parameters, or of all."""
        if self.memory.shared:
            few = ((f"of shape {tuple(param.shape)}", param) for param in params or ())
            self.memory.check(self.named_parameters() if params is None else few)
