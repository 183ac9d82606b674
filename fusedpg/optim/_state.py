"""Groups, parameters and their sharded state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fusedpg._layout import is_dense
from fusedpg._refusal import telling
from fusedpg.optim import _torch
from fusedpg.optim._context import StepContext
from fusedpg.optim._modes import Mode
from fusedpg.optim._parameters import bytes_of, refuse_sharded

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)

ParamGroup = dict[str, Any]
"""A group of parameters as torch keeps it: its options, and the parameters as "params"."""


def _zeros(length: int, dtype: torch.dtype, number: int, device: torch.device) -> torch.Tensor:
    """A slice of state. Large blocks of memory all begin at the same place of a page; streams that
    advance together are faster (by 4%, measured) when they do not."""
    if device.type != "cpu" or length * dtype.itemsize < 1 << 20:
        return torch.zeros(length, dtype=dtype, device=device)
    begin = (number + 1) * 1024 // dtype.itemsize
    return torch.zeros(begin + length, dtype=dtype)[begin:]


def _capturing(param: torch.Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_zero(lr: float | torch.Tensor) -> bool:
    # Nobody waits for a GPU here.
    return not (isinstance(lr, torch.Tensor) and lr.device.type != "cpu") and bool(lr == 0)


def check_options(kind: type[Optimizer], options: ParamGroup, *names: str) -> None:
    """Raises what a class of torch does for some of its arguments, and for NaN."""
    arguments: dict[str, Any] = {name: options[name] for name in names}
    kind([torch.empty(0)], **arguments)
    # torch's SGD does not see it.
    for name, value in arguments.items():
        if isinstance(value, (float, torch.Tensor)) and bool(value != value):
            raise ValueError(f"Invalid {name} value: {value}")
    # ``foreach`` and ``fused`` are accepted and ignored; this would change what a step means.
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not supported by fused optimizers")


def _versions(state: dict[str, torch.Tensor]) -> int:
    return sum(value._version for value in state.values())


class ShardedState(Optimizer):
    """An optimizer that keeps this rank's slices of the state of its parameters."""

    _context: StepContext
    _mode: Mode
    _master_dtype: torch.dtype | None
    _blank: dict[torch.Tensor, int]  # state that was made before a step; versions of it
    _load_digest: int  # digest of the state dict that was loaded since the last step, or 0

    # --- what subclasses say ------------------------------------------------------

    _slices: tuple[str, ...]  # names of state slices, with all options
    _late = False  # whether a slice may be made when others are there
    # Values of options that state dicts of older versions lack.
    _group_defaults: ClassVar[ParamGroup]

    # Hyperparameters besides lr: numbers, and options by the names of ``_C.Hyper``.
    _numbers: tuple[str, ...]
    _flags: ClassVar[dict[str, str]]

    def _state_keys(self, group: ParamGroup) -> list[str]:
        """Names of the state slices, in the order in which the step takes them."""
        return list(self._slices)

    def _check_options(self, options: ParamGroup) -> None:
        """Raises what torch.optim does for hyperparameters out of range."""
        check_options(torch.optim.AdamW, options, "lr", *self._numbers)

    def _hyper(self, group: ParamGroup) -> dict[str, object]:
        """The keyword arguments of ``_C.Hyper``."""
        hyper: dict[str, object] = {"lr": group["lr"]}
        for name in self._numbers:
            if name == "betas":
                hyper["beta1"], hyper["beta2"] = map(float, group[name])
            else:
                hyper[name] = float(group[name])
        for name, option in self._flags.items():
            hyper[name] = bool(group[option])
        return hyper

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        """As torch: the parameter's, or that of the master weights."""
        return torch.float32 if self._has_master(param) else param.dtype

    _counts = True  # whether parameters have a counter of their steps

    def _first_differs(self, group: ParamGroup) -> bool:
        """Whether the step that finds no state is a special one."""
        return False

    def _loaded(self, values: dict[str, object]) -> dict[str, object]:
        """The state of a parameter from a state dict of torch, or of an older version of ours."""
        return values

    def _is_slice(self, key: str, group: ParamGroup) -> bool:
        """Whether a value of a parameter's state is a slice; the others are the same on all
        ranks."""
        return key == "master_param" or key in self._slices

    # --- parameters and state ------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        # In manual mode peers wait for this rank's parameters, where they are shared, too.
        waits = self._mode.manual or self._context.memory.shared
        context = self._context
        with telling(context.group, when=lambda: waits and context.device().type == "cpu"):
            if isinstance(param_group, dict):
                self._check_options({**self.defaults, **param_group})
            super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        try:
            with telling(self._context.group, *params, when=lambda: waits):
                for param in params:
                    self._check_param(param)
                self._context.number_groups(added=params)
                self._mode.add(params)
        except BaseException:
            self.param_groups.pop()
            raise
        self._context.memory.adopt(params)
        self._mode.watch(params)
        for param in params:
            self._context.layouts[param] = param.stride()
            if self.param_groups[-1].get("capturable"):
                # Every launch of a graph would make the state again.
                self._blank_state(param)

    def _check_param(self, param: torch.Tensor) -> None:
        name = f"a parameter of shape {tuple(param.shape)} and type {param.dtype}"
        refuse_sharded(param, name)
        if param.device.type not in ("cpu", "cuda") or param.device != self._context.device():
            raise ValueError(
                f"{name} is on {param.device}: fused optimizers take parameters on the CPU, or on "
                "one GPU"
            )
        if param.device.type == "cpu" and self.param_groups[-1].get("capturable"):
            raise ValueError("capturable=True is for CUDA graphs; this parameter is on the CPU")
        if param.dtype not in _DTYPES:
            raise TypeError(f"{name}: fused optimizers take float32, float64, bfloat16, float16")
        if param.layout != torch.strided or not is_dense(param):
            raise TypeError(f"{name} is not dense in memory")

    def _has_master(self, param: torch.Tensor) -> bool:
        return self._master_dtype is not None and param.dtype in _HALF

    # State is made by the first step of a parameter, as torch does.

    def _new_slice(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """Zeros, or of masters the parameter's values."""
        if key == "master_param":
            return self._context.owned(param, param).to(torch.float32, copy=True)
        _, length = self._context.shard(param)
        number = self._slices.index(key)
        return _zeros(length, self._state_dtype(param), number, param.device)

    def _make_state(self, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, list[str]]:
        """Makes what the next step of parameters needs.

        Returns:
            The new keys of the state of a parameter, where there are any.
        """
        self._check_blanks()
        made = {}
        needs = [self._state_keys(group) for group in self.param_groups]
        for param in params:
            keys = self._missing(param, needs[self._context.group_of[param]])
            if keys:
                self._make_keys(param, keys)
                made[param] = keys
            if self._blank.pop(param, None) is not None and not _capturing(param):
                made[param] = list(self.state[param])
        return made

    def _stepped_keys(self, slices: Iterable[str], master: bool) -> list[str]:
        """Names of all that a step reads of the state of a parameter."""
        return [*slices, *(["master_param"] if master else []), *(["step"] if self._counts else [])]

    def _known_state(
        self, params: list[torch.Tensor]
    ) -> tuple[list[int], dict[str, list[torch.Tensor]], bool] | None:
        """What a step reads of parameters: numbers of their groups, state by key, and whether they
        have masters. None if state is missing, or one operation cannot take all of them.

        One call asks for it as it is now, because anybody may edit ``optimizer.state``."""
        if self._blank or not params or not self.param_groups:
            return None
        first, *others = self.param_groups
        slices = self._state_keys(first)
        if others and any(self._state_keys(group) != slices for group in others):
            return None
        master = self._has_master(params[0])
        keys, context = self._stepped_keys(slices, master), self._context
        masters = self._master_dtype is not None
        found = context.extension.step_lists(
            params, context.group_of, context.layouts, self.state, keys, masters
        )
        return None if found is None else (found[0], dict(zip(keys, found[1], strict=True)), master)

    def _missing(self, param: torch.Tensor, slices: list[str]) -> list[str]:
        state = self.state.get(param, {})
        keys = [key for key in slices if key not in state]
        if self._has_master(param) and "master_param" not in state:
            keys.append("master_param")
        if self._counts and "step" not in state:
            keys.append("step")
        return keys

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make_keys(self, param: torch.Tensor, keys: list[str]) -> None:
        state = self.state[param]
        partial = [key for key in keys if key != "master_param"]
        if partial and not self._late and state.keys() - {"master_param"}:
            raise RuntimeError(
                f"the state of a parameter of shape {tuple(param.shape)} has no "
                f"{' and no '.join(partial)}: an option (amsgrad) was turned on after its first "
                "step, or the state was loaded from a run without it. torch.optim raises, too. Set "
                "options before the first step, load a state dict that has it, or begin anew with "
                "optimizer.state.clear() on all ranks"
            )
        if _capturing(param):
            raise RuntimeError(
                "a CUDA graph would make optimizer state anew at every launch: make a step before "
                "capturing, or the optimizer with capturable=True"
            )
        for key in keys:
            state[key] = (
                torch.zeros((), dtype=torch.float32, device=param.device)
                if key == "step"
                else self._new_slice(param, key)
            )

    def _end_step(
        self,
        work: dist.Work,
        params: list[torch.Tensor],
        made: dict[torch.Tensor, list[str]],
        used: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        load_digest: int,
    ) -> None:
        """Ends an operation. State made for parameters that nobody used goes again, as in torch."""
        stepped: list[int] | None = []  # whether any rank used a parameter; None: all were used
        try:
            work.wait()
            self._context.gradients.forget_factors()  # the ranks' were the same
            if self._load_digest == load_digest:
                self._load_digest = 0  # ranks have loaded the same
            if made and not (found_inf is not None and bool(found_inf)):
                stepped = None if used is None else used.tolist()
        finally:
            for i, param in enumerate(params) if made else ():
                if param in made and stepped is not None and not (stepped and stepped[i]):
                    state = self.state[param]
                    for key in made[param]:
                        state.pop(key, None)
                    if not state:
                        del self.state[param]

    def _blank_state(self, param: torch.Tensor) -> None:
        """State without a step."""
        group = self.param_groups[self._context.group_of[param]]
        keys = self._missing(param, self._state_keys(group)) if param.requires_grad else []
        if keys:
            self._make_keys(param, keys)
            self._blank[param] = _versions(self.state[param])

    def _check_blanks(self) -> None:
        if any(_versions(self.state.get(p, {})) != old for p, old in self._blank.items()):
            self._blank.clear()  # a checkpoint was loaded in place

    def _initialises(self) -> bool:
        """Makes state instead of a step, if that is what torch.distributed.checkpoint wants of it.

        Local. It asks optimizers without state for a step with a learning rate and gradients of
        zero, to have tensors to load into.
        """
        if not all(_is_zero(g["lr"]) for g in self.param_groups):
            return False
        if not _torch.initialises_state():
            return False
        self._context.number_groups()
        for _, param in self._context.named_parameters():
            self._blank_state(param)
        return True

    @contextlib.contextmanager
    def writing_parameters(self) -> Iterator[None]:
        """Allows writes to shared parameters outside ``step()``; a barrier at both ends.

        All ranks enter it; one rank of each machine, or all with the same values, write.
        """
        dist.barrier(group=self._context.group)
        with telling(self._context.group, when=lambda: self._context.device().type == "cpu"):
            yield
        dist.barrier(group=self._context.group)
        self._context.memory.accept(self._context.parameters())

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self._group_defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to a process group and "
            "holds slices of state. Copy its state_dict(); for copied parameters make an "
            "optimizer of its own and load that"
        )

    def memory_stats(self) -> dict[str, int]:
        """Bytes on this rank: ``parameters``, ``state``, and ``unsharded_state`` of torch."""
        params = self._context.parameters()
        held = whole = 0
        for param in params:
            for value in self.state.get(param, {}).values():
                held += bytes_of([value])
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    whole += param.numel() * value.element_size()
                else:
                    whole += bytes_of([value])
        return {"parameters": bytes_of(params), "state": held, "unsharded_state": whole}

    def memory_summary(self) -> str:
        """A readable form of :meth:`memory_stats`."""
        stats = self.memory_stats()
        lines = [f"{type(self).__name__}, rank {self._context.rank} of {self._context.world_size}"]
        lines += [f"  {key:16} {value / 2**20:12.2f} MiB" for key, value in stats.items()]
        return "\n".join(lines)
