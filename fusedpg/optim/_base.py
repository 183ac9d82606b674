"""The base of the fused optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, ParamsT

from fusedpg._refusal import tell, telling
from fusedpg.functional import _backend
from fusedpg.optim._bridge import CommHook, check_ddp, check_hook, check_hook_group
from fusedpg.optim._checkpoint import WholeState, consolidate_in_trainer
from fusedpg.optim._context import StepContext, StepOnJoin, StepOptions
from fusedpg.optim._gradients import Doing, ShardedGrad, SpentGrad
from fusedpg.optim._modes import (
    Attached,
    Detached,
    Manual,
    Mode,
    Overlap,
    Sharded,
    reduce_gradients,
)
from fusedpg.optim._parameters import laid_out, refuse_sharded
from fusedpg.optim._state import ParamGroup
from fusedpg.optim._torch import in_backward, uncompiled

if TYPE_CHECKING:
    from typing_extensions import Unpack

_F = TypeVar("_F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Arguments that all fused optimizers take, besides those of torch's."""

    ddp: DistributedDataParallel | None
    process_group: dist.ProcessGroup | None
    overlap: bool
    max_grad_norm: float | None
    master_dtype: torch.dtype | None
    reduce: str
    share_parameters: bool
    comm_hook: CommHook | None


def _complete(step: _F) -> _F:
    """A ``step`` with its hooks and profile, which torch's Optimizer adds to that of a class, and
    all of which torch.compile leaves alone. It would trace the hooks, and anew in every step."""
    hooked: Any = uncompiled(Optimizer.profile_hook_step(step))
    hooked.hooked = True  # torch looks whether this is done
    return hooked


class FusedOptimizer(WholeState, Joinable):
    """An optimizer whose step is one collective and whose state is sharded.

    Every rank keeps the state of ``fusedpg.shard_range(param.numel(), world_size, rank)`` of each
    parameter, so about 1/world_size of what torch's optimizer keeps.

    Subclasses say what their step is called, which state it has, and how a group's
    hyperparameters are passed to it.
    """

    _op: str
    # By the class of torch that does the same, for `from_torch`.
    _of_torch: ClassVar[dict[type[Optimizer], type[FusedOptimizer]]] = {}

    def __init_subclass__(
        cls, op: str = "", of: type[Optimizer] | None = None, **options: object
    ) -> None:
        """Declares an optimizer by its operation ``op``. A subclass of it, which may do anything
        else, takes nobody's place."""
        super().__init_subclass__(**options)
        if op:
            cls._op = op
        if of is not None:
            FusedOptimizer._of_torch[of] = cls

    def __init__(
        self,
        params: ParamsT,
        defaults: ParamGroup,
        *,
        ddp: DistributedDataParallel | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = False,
        max_grad_norm: float | None = None,
        master_dtype: torch.dtype | None = None,
        reduce: str = "mean",
        share_parameters: bool = False,
        comm_hook: CommHook | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            name = f"{type(self).__qualname__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {next(iter(unknown))!r}")
        if not isinstance(params, torch.Tensor):
            params = cast("ParamsT", list(params))
        # The others wait for this rank's parameters, also if its arguments are wrong.
        with telling(process_group or getattr(ddp, "process_group", None), params):
            if reduce not in ("mean", "sum"):
                raise ValueError(f'reduce must be "mean" or "sum", got {reduce!r}')
            if master_dtype not in (None, torch.float32):
                raise ValueError(f"master_dtype must be torch.float32 or None, got {master_dtype}")
            if max_grad_norm is not None and max_grad_norm <= 0:
                raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm}")
            if overlap and max_grad_norm is not None:
                raise ValueError(
                    "overlap=True updates parameters before the norm of all gradients is known: "
                    "max_grad_norm needs overlap=False"
                )
            if comm_hook is not None:
                check_hook(comm_hook, overlap, reduce)
            if ddp is not None:
                check_ddp(ddp)
                process_group = process_group or ddp.process_group
            self._check_options(defaults)
        if process_group is None:
            process_group = dist.distributed_c10d._get_default_group()
        self._overlap = overlap
        self._master_dtype = master_dtype
        self._reduce = reduce
        self._comm_hook = comm_hook
        self._context = StepContext(
            self,
            process_group,
            share=share_parameters,
            mean=reduce == "mean",
            max_grad_norm=max_grad_norm,
        )
        self._mode: Mode = Manual(self._context)
        self._looked = False  # at what became of the parameters until the first step
        self._blank = {}
        self._load_digest = 0
        Joinable.__init__(self)
        Optimizer.__init__(self, params, defaults)
        self._init_state_dict()
        if ddp is not None:
            self.attach(ddp)

    # --- DDP ------------------------------------------------------------------------

    @property
    def overlap(self) -> bool:
        """Whether parameters are updated during backward, with a DDP."""
        return self._overlap

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Takes the gradients of a DistributedDataParallel module from now on.

        For libraries that wrap the model after the optimizer was made. The module's parameters
        must be this optimizer's, and its process group the same. Several optimizers may be
        attached to one module, each with parameters of its own.

        Raises:
            RuntimeError: when DDP already has a communication hook, or the optimizer a module.
            ValueError: for another process group or foreign parameters.
            TypeError: for anything but a DistributedDataParallel.
        """
        check_ddp(ddp)
        context = self._context
        if context.bridge is not None:
            if context.bridge.serves(ddp):
                return
            raise RuntimeError(
                "the optimizer is attached to another DistributedDataParallel: make one optimizer "
                "for each, with its parameters, or detach() this one first"
            )
        if self._comm_hook is not None:
            check_hook_group(context.group, ddp.process_group, context.device())
        elif _backend(ddp.process_group) is not context.backend:
            raise ValueError(
                "the module's process group is not the optimizer's: make an optimizer with "
                "process_group=ddp.process_group, which can load this one's state_dict()"
            )
        mode: Attached = (Overlap if self._overlap else Sharded)(context)
        mode.attach(ddp, self._comm_hook)
        before, self._mode = self._mode, mode
        before.leave()
        # DDP's constructor has broadcast them.
        context.memory.accept(context.parameters())
        consolidate_in_trainer(WholeState)

    def detach(self) -> None:
        """Takes the optimizer off its module, and its hooks off all parameters.

        Call it on all ranks, after ``step()`` or ``zero_grad()``; gradients that were applied are
        dropped. A backward whose forward came before is DDP's own. Without an optimizer the module
        is a plain DistributedDataParallel again from its next synchronised forward on, and may be
        trained with an optimizer of torch. Parameters keep their values, and shared ones become
        each rank's own; the optimizer keeps its state, which can be saved, and can be attached
        again, also to another module with the same parameters.

        Raises:
            RuntimeError: inside backward, or with gradients that no ``step()`` has applied.
        """
        if in_backward():
            raise RuntimeError("detach() inside backward: call it after step()")
        self._context.wait()
        self._mode.check_detaching()
        attached = self._context.bridge is not None
        for name, param in self._context.named_parameters():
            if self._is_pending(param.grad, attached):
                raise RuntimeError(
                    f"detach(): the reduced gradient of parameter {name} was not applied: call "
                    "step() or zero_grad() first"
                )
        self._mode.leave()
        for param in self._context.parameters():
            grad = param.grad
            if isinstance(grad, (ShardedGrad, SpentGrad)):
                # In manual mode it is this rank's.
                own = grad.unreduced() if isinstance(grad, ShardedGrad) and not attached else None
                param.grad = None if own is None else laid_out(own, param)
        self._mode = Detached(self._context)
        # Those that were taken out of param_groups, too.
        self._context.memory.own(self._context.layouts)

    def _is_pending(self, grad: torch.Tensor | None, attached: bool) -> bool:
        if not isinstance(grad, ShardedGrad):
            return False
        return (attached or grad.holds_reduced()) and (
            not self._context.stepped or grad.unreduced() is not None
        )

    def set_local_batch_size(self, size: float | None) -> None:
        """Weights this rank's gradients: grad = sum(m_k * g_k) / sum(m_k) over ranks k.

        With losses that are means over the local batch of m_k samples, this is the gradient of the
        mean over all samples. Read when gradients are reduced; call it before backward, on all
        ranks or on none. None: every rank counts alike.
        """
        if size is not None and (self._reduce != "mean" or not 0 <= size < float("inf")):
            raise ValueError(
                f'a batch size must be finite, not negative, and needs reduce="mean"; got {size}'
            )
        self._context.weight = None if size is None else float(size)

    # --- the step -------------------------------------------------------------------

    def _fused_step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        *,
        used: torch.Tensor | None = None,
        **options: Unpack[StepOptions],
    ) -> list[Callable[[], None]]:
        """Starts the step of some parameters, in one operation if their groups allow."""
        self._context.number_groups()
        found_inf = options.get("found_inf")
        known = self._known_state(params)
        if known is not None:
            # The usual step: nothing to make, and one operation.
            self._state_changes()
            groups, states, master = known
            work = self._start(params, grads, groups, states, master, False, used, options)
            if self._context.memory.shared:
                self._context.memory.accept(params)
            return [partial(self._end_step, work, params, {}, used, found_inf, self._load_digest)]
        self._context.check_layouts(params)
        self._state_changes()
        made = self._make_state(params)
        # One operation cannot mix other state, and momentum buffers without a value.
        kinds: dict[tuple[tuple[str, ...], bool, bool], list[int]] = {}
        groups = [self._context.group_of[param] for param in params]
        for i, (param, number) in enumerate(zip(params, groups, strict=True)):
            group = self.param_groups[number]
            first = param in made and self._first_differs(group)
            kind = (tuple(self._state_keys(group)), self._has_master(param), first)
            kinds.setdefault(kind, []).append(i)
        works: list[Callable[[], None]] = []
        for (keys, master, first), members in kinds.items():
            mine = [params[i] for i in members]
            mine_of = [groups[i] for i in members]
            flags = used if used is None or len(members) == len(params) else used[members]
            values = [self.state.get(param, {}) for param in mine]
            states = {key: [v[key] for v in values] for key in self._stepped_keys(keys, master)}
            work = self._start(
                mine, [grads[i] for i in members], mine_of, states, master, first, flags, options
            )
            end = partial(self._end_step, work, mine, made, flags, found_inf, self._load_digest)
            if self._mode.tells:
                end()  # where a rank refuses the first it does not begin the others
            else:
                works.append(end)
        self._context.memory.accept(params)
        return works

    def _start(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        groups: list[int],
        states: dict[str, list[torch.Tensor]],
        master: bool,
        first: bool,
        used: torch.Tensor | None,
        options: StepOptions,
    ) -> dist.Work:
        """One operation. ``states`` by key; the moments in the operation's order, then others."""
        position = {number: i for i, number in enumerate(sorted(set(groups)))}
        special = {"first_step": True} if first else {}
        hyper = self._context.extension.Hyper
        hypers = [hyper(**self._hyper(self.param_groups[n]), **special) for n in position]
        work = self._context.backend.fused_step_(
            self._op,
            params,
            grads,
            [v for key, v in states.items() if key not in ("step", "master_param")],
            states.get("step", []),
            hypers,
            hyper_index=[position[number] for number in groups] if len(position) > 1 else [],
            master_params=states["master_param"] if master else [],
            masters_follow=True,
            used=used,
            shared_params=self._context.memory.shared,
            done_before=self._load_digest ^ self._context.gradients.multiplied(),
            async_op=True,
            **options,
        )
        assert work is not None
        return work

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks before it looks at gradients."""
        self._mode.check_scaling()
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Optimizer's constructor would set it."""

    @uncompiled
    def reduce_gradients(self) -> None:
        """Manual mode: reduces ``p.grad`` over ranks now instead of in ``step()``.

        Clipping, norms and GradScaler do this by themselves. Collective.
        """
        with self._context.telling():
            self._check_ready()
            reduce_gradients(self._context)

    def _check_ready(self) -> None:
        self._mode.check()
        if self._comm_hook is not None and self._mode.manual:
            raise RuntimeError(
                "a comm_hook combines the gradients of a DistributedDataParallel: pass ddp=, or "
                "attach(ddp)"
            )
        if not self._looked:
            for name, param in self._context.named_parameters():
                refuse_sharded(param, f"parameter {name}")
            self._looked = True

    @_complete
    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """One optimizer step; collective.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients
                enabled.

        Raises:
            RuntimeError: for gradients that were never reduced, and for what ``overlap=True``
                cannot do.
            torch.distributed.DistBackendError: when ranks disagree or a rank fails.
        """
        context, loss = self._context, None
        before = context.extension._shared_errors()
        try:
            self._check_ready()
            if not any(self.state.values()) and self._initialises():
                return loss
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            if self._join_config.enable and self._mode.tells:
                context.announce(Doing.STEP, scale=scale, found_inf=found_inf)
            context.in_step = True
            try:
                if context.memory.shared:
                    context.check_shared()
                self._mode.step(scale, found_inf)
            finally:
                context.in_step = context.notified = False
            context.stepped = True
        except Exception as error:
            # The other ranks wait for this one.
            if context.device().type == "cpu":
                tell(context.group, error, before, times=self._mode.operations_ahead())
            raise
        return loss

    def _shadow_step(self, scale: float | None = None, found_inf: bool = False) -> None:
        """A step for which this rank has no data. The others have GradScaler's scale, and whether
        it has found infinities anywhere, which the operation makes of all ranks' answers."""
        context = self._context
        device = context.device()
        given = {} if scale is None else {"grad_scale": torch.tensor(scale, device=device)}
        if found_inf:
            given["found_inf"] = torch.zeros((), device=device)
        if self._mode.manual and not context.follows:
            context.drop_gradients()  # of its own last step
        context.shadow = True
        vars(self).update(given)
        try:
            self.step()
        finally:
            context.shadow = False
            for name in given:
                delattr(self, name)
        # Nobody calls zero_grad() on a joined rank.
        context.drop_gradients()

    @uncompiled
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm``.

        Collective; between backward and ``step()``, which raises if ranks have clipped to different
        norms. ``torch.nn.utils.clip_grad_norm_`` on the parameters does the same; between hosts
        its norms are not compared.

        Returns:
            The norm before, a float32 scalar (float64 with float64 parameters), the same on all
            ranks.
        """
        with self._context.telling():
            self._check_ready()
            self._mode.prepare_clipping()
            self._context.wait()
            most, order = float(max_norm), float(norm_type)
            total = self._context.gradients.total_norm(order)
        self._context.gradients.note(f"clipped to {most} by norm {order}")
        factor = (most / (total + 1e-6)).clamp(max=1.0)
        # Multiplying by one changes nothing; only a GPU's answer is not worth waiting for.
        if total.device.type != "cpu" or factor != 1:
            self._context.gradients.scale(factor)
        wide = torch.float64 in self._context.extension.dtypes_of(self._context.parameters())
        return total if wide else total.float()

    # --- uneven inputs ------------------------------------------------------------------

    def join_hook(self, **kwargs: object) -> JoinHook:
        """For ``Join([ddp, optimizer])``: joined ranks take part in the others' steps."""
        return StepOnJoin(self._context, self._shadow_step)

    @property
    def join_device(self) -> torch.device:
        return self._context.device()

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._context.group


_COMMON = """
        Every rank passes the same parameters and ends every step with the same bits in them; the
        state of a parameter is split between the ranks. Arguments are torch's; ``foreach`` and
        ``fused`` are accepted and ignored.

        Args:
            params, lr, ...: as for ``torch.optim``. Parameters are dense tensors of float32,
                float64, bfloat16 or float16, on the CPU or all on one GPU. ``lr`` and all
                others are read at each step.{extra}
            ddp: take gradients from this DistributedDataParallel module, during backward. Without:
                manual mode, in which ``step()`` reduces ``p.grad`` and parameters are broadcast
                from rank 0 when they are added. ``attach(ddp)`` does the same later.
            process_group: of the fused backend; default: the module's, or the default group.
            overlap: update parameters during backward as soon as their gradients are there. Then
                there is no clipping, no GradScaler, and one backward for each step.
            max_grad_norm: clip the norm of all gradients in ``step()``.
            master_dtype: torch.float32 keeps float32 copies (this rank's slices) of bfloat16 and
                float16 parameters, which the updates go to.
            reduce: "mean" divides summed gradients by the number of ranks, "sum" does not.
            share_parameters: the ranks of the machine hold one copy of the parameters in shared
                memory. Nobody may write to them outside ``step()``; see ``writing_parameters()``.
            comm_hook: what ``register_comm_hook`` takes, (state, hook): combines gradients, into
                their mean, in place of the reduce-scatter; for example ``(state,
                fusedpg.compress.hook)``. Then ``process_group`` may be a part of the module's.

        Raises:
            ValueError, TypeError: for arguments and parameters that are not supported.
        """


def documented(text: str, extra: str = "") -> Callable[[_F], _F]:
    """Sets the docstring of a constructor, and the signature that is shown: with ``Options``."""

    def set_doc(function: Any) -> Any:
        function.__doc__ = text.rstrip() + "\n" + _COMMON.format(extra=extra)
        common = inspect.signature(FusedOptimizer.__init__).parameters
        own = inspect.signature(function)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown += [common[name] for name in Options.__annotations__]
        function.__signature__ = own.replace(parameters=shown)
        return function

    return set_doc


def defaults_of(arguments: dict[str, object], **fixed: object) -> dict[str, object]:
    """The defaults of groups: a constructor's ``locals()`` but for what is no option of groups."""
    other = ("self", "__class__", "params", "options")  # __class__: of super()
    return {name: value for name, value in arguments.items() if name not in other} | fixed
