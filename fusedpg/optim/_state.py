"""Groups, parameters and their sharded state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fusedpg.functional import shard_range
from fusedpg.optim import _checkpoint
from fusedpg.optim._bridge import Bridge
from fusedpg.optim._parameters import Parameters, bytes_of, is_dense, refuse_sharded, same_order

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)


def _zeros(length: int, dtype: torch.dtype, number: int, device: torch.device) -> torch.Tensor:
    """A slice of state. Large blocks of memory all begin at the same place of a page; streams that
    advance together are faster (by 4%, measured) when they do not."""
    if device.type != "cpu" or length * dtype.itemsize < 1 << 20:
        return torch.zeros(length, dtype=dtype, device=device)
    begin = (number + 1) * 1024 // dtype.itemsize
    return torch.zeros(begin + length, dtype=dtype)[begin:]


class ShardedState(Optimizer):
    """An optimizer that keeps this rank's slices of the state of its parameters."""

    _group: dist.ProcessGroup
    _rank: int
    _world_size: int
    _bridge: Bridge | None
    _parameters: Parameters
    _master_dtype: torch.dtype | None
    _group_of: dict[torch.Tensor, int]  # number of the group of a parameter
    _param_versions: dict[torch.Tensor, int]  # of half parameters, at their last step
    _layouts: dict[torch.Tensor, tuple[int, ...]]  # strides that the slices are cut by
    _fresh: set[torch.Tensor]  # no step was made, no state loaded

    def _wait(self) -> None:
        """For work under way that changes parameters or state."""
        raise NotImplementedError

    def _watch(self, param: torch.Tensor) -> None:
        """Called for every new parameter."""

    # --- what subclasses say ------------------------------------------------------

    def _state_keys(self, group: dict[str, Any]) -> list[str]:
        """Names of the state slices, in the order in which the step takes them."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of ``_C.Hyper``."""
        raise NotImplementedError

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        """As torch: the parameter's, or that of the master weights."""
        return torch.float32 if self._has_master(param) else param.dtype

    def _has_steps(self, group: dict[str, Any]) -> bool:
        """Whether parameters have a counter of their steps."""
        return True

    def _is_first(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether the next step of a parameter is a special one."""
        return False

    def _exported(self, values: dict[str, Any]) -> dict[str, Any]:
        """The whole state of a parameter as torch's optimizer has it."""
        return values

    def _is_slice(self, key: str, group: dict[str, Any]) -> bool:
        """Whether a value of a parameter's state is a slice; the others are the same on all
        ranks."""
        return key == "master_param" or key in self._state_keys(group)

    # --- parameters and state ------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for param in params:
            self._check_param(param)
            self._group_of[param] = len(self.param_groups) - 1
        if self._bridge is None:
            with torch.no_grad():
                for param in params:
                    dist.broadcast(param.data, group=self._group, group_src=0)
        self._parameters.adopt(params)
        for param in params:
            self._init_state(param, self.param_groups[-1])
            self._watch(param)
        if self._bridge is not None:
            self._bridge.add(self, params)

    def _check_param(self, param: torch.Tensor) -> None:
        name = f"a parameter of shape {tuple(param.shape)} and type {param.dtype}"
        refuse_sharded(param, name)
        if param.device.type not in ("cpu", "cuda") or param.device != self._device():
            raise ValueError(
                f"{name} is on {param.device}: fused optimizers take parameters on the CPU, or on "
                "one GPU"
            )
        if param.device.type == "cpu" and self.defaults.get("capturable"):
            raise ValueError("capturable=True is for CUDA graphs; this parameter is on the CPU")
        if param.dtype not in _DTYPES:
            raise TypeError(f"{name}: fused optimizers take float32, float64, bfloat16, float16")
        if param.layout != torch.strided or not is_dense(param):
            raise TypeError(f"{name} is not dense in memory")

    def _device(self) -> torch.device:
        """Where all parameters are."""
        for group in self.param_groups:
            for param in group["params"]:
                return cast("torch.device", param.device)
        return torch.device("cpu")

    def _shard(self, param: torch.Tensor) -> tuple[int, int]:
        return shard_range(param.numel(), self._world_size, self._rank)

    def _owned(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a tensor laid out as the parameter ``like``: a view."""
        offset, length = self._shard(like)
        return tensor.detach().as_strided([length], [1], tensor.storage_offset() + offset)

    def _has_master(self, param: torch.Tensor) -> bool:
        return self._master_dtype is not None and param.dtype in _HALF

    def _init_state(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        # At once rather than in the first step: untouched pages cost nothing, and a checkpoint
        # can be loaded in place without a step that would be a collective.
        state = self.state[param]
        _, length = self._shard(param)
        if self._has_steps(group):
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for number, key in enumerate(self._state_keys(group)):
            state[key] = _zeros(length, self._state_dtype(param), number, param.device)
        if self._has_master(param):
            state["master_param"] = self._owned(param, param).float()
        self._param_versions[param] = param._version
        self._layouts[param] = param.stride()
        self._fresh.add(param)

    def _check_layouts(self, params: Iterable[torch.Tensor]) -> None:
        """Slices are ranges of memory: they do not survive ``model.to(memory_format=...)``."""
        for param in params:
            if param.stride() != self._layouts[param]:
                self._adapt_layout(param)

    def _adapt_layout(self, param: torch.Tensor) -> None:
        if same_order(param.shape, param.stride(), self._layouts[param]):
            self._layouts[param] = param.stride()
            return
        if param not in self._fresh or self._parameters.shared:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has changed its memory format (strides "
                f"{self._layouts[param]}, now {param.stride()}), and the slices of its state are "
                "cut by it. Convert the model before the first step, with share_parameters before "
                "the optimizer is made; or take full_state_dict() before and load it afterwards"
            )
        self._init_state(param, self.param_groups[self._group_of[param]])

    def _check_same_layout(self, name: str, param: torch.Tensor, grad: torch.Tensor) -> None:
        if param.stride() != grad.stride() and not same_order(
            param.shape, param.stride(), grad.stride()
        ):
            raise RuntimeError(
                f"parameter {name} has changed its memory format between backward and step()"
            )

    def _refresh_masters(self, params: list[torch.Tensor]) -> None:
        """Takes over what was written into half parameters since the last step."""
        for param in params:
            if self._has_master(param) and self._param_versions[param] != param._version:
                master, now = self.state[param]["master_param"], self._owned(param, param)
                torch.where(master.to(param.dtype) == now, master, now.float(), out=master)

    @contextlib.contextmanager
    def writing_parameters(self) -> Iterator[None]:
        """Allows writes to shared parameters outside ``step()``; a barrier at both ends.

        All ranks enter it; one rank of each machine, or all with the same values, write.
        """
        dist.barrier(group=self._group)
        yield
        dist.barrier(group=self._group)
        self._parameters.accept(p for group in self.param_groups for p in group["params"])

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"{i} of group {number}", param

    # --- checkpoints ------------------------------------------------------------------

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full torch state dict, or one of this class, and never changes it.

        Local, not a collective. Values may be whole tensors of the parameter's shape
        (``torch.optim``, ``full_state_dict()``, ``merge_state_dicts()``) or this rank's own slices
        (``local_state_dict()`` of the same rank and world size).

        Raises:
            ValueError: for slices of another rank or world size, or groups that do not match.
        """
        self._wait()
        slices = _checkpoint.own_slices(self, state_dict)
        groups = self.param_groups
        super().load_state_dict(_checkpoint.without_state(state_dict))
        # The same dicts: fuse() shares them with an optimizer of torch and its schedulers.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups
        _checkpoint.install(self, slices)

    def memory_stats(self) -> dict[str, int]:
        """Bytes on this rank: ``parameters``, ``state``, and ``unsharded_state`` of torch."""
        params = [p for _, p in self._named_parameters()]
        held = whole = 0
        for param in params:
            for value in self.state[param].values():
                held += bytes_of([value])
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    whole += param.numel() * value.element_size()
                else:
                    whole += bytes_of([value])
        return {"parameters": bytes_of(params), "state": held, "unsharded_state": whole}

    def memory_summary(self) -> str:
        """A readable form of :meth:`memory_stats`."""
        stats = self.memory_stats()
        lines = [f"{type(self).__name__}, rank {self._rank} of {self._world_size}"]
        lines += [f"  {key:16} {value / 2**20:12.2f} MiB" for key, value in stats.items()]
        return "\n".join(lines)
