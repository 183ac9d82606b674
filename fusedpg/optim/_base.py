"""What the fused optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedpg._refusal import telling
from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim import _hooked
from fusedpg.optim._bridge import Bridge
from fusedpg.optim._ddp import check_ddp
from fusedpg.optim._frameworks import consolidate_in_trainer
from fusedpg.optim._gradients import GradContext, ShardedGrad, SpentGrad
from fusedpg.optim._hooked import CommHook
from fusedpg.optim._join import Doing, StepOnJoin, announce
from fusedpg.optim._manual import Detached, Manual, reduce_gradients
from fusedpg.optim._modes import Mode
from fusedpg.optim._overlap import Overlap
from fusedpg.optim._parameters import Parameters, laid_out, refuse_sharded
from fusedpg.optim._sharded import Sharded
from fusedpg.optim._state import Numbers, Started
from fusedpg.optim._torch import in_backward, uncompiled
from fusedpg.optim._whole import WholeState


def _complete(step: Any) -> Any:
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

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        ddp: DistributedDataParallel | None,
        process_group: dist.ProcessGroup | None,
        overlap: bool,
        max_grad_norm: float | None,
        master_dtype: torch.dtype | None,
        reduce: str,
        share_parameters: bool,
        comm_hook: CommHook | None,
    ) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params)
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
                _hooked.check(comm_hook, overlap, reduce)
            if ddp is not None:
                check_ddp(ddp)
                process_group = process_group or ddp.process_group
            self._check_options(defaults)
        if process_group is None:
            process_group = dist.distributed_c10d._get_default_group()
        self._group = process_group
        self._backend = _backend(process_group)
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._overlap = overlap
        self._max_grad_norm = max_grad_norm
        self._master_dtype = master_dtype
        self._reduce = reduce
        self._comm_hook = comm_hook
        self._weight: float | None = None
        self._mode: Mode = Manual()
        self._in_flight = []
        self._stepped = False  # since gradients were reduced for the last time
        self._context = GradContext(self)
        self._looked = False  # at what became of the parameters until the first step
        self._shadow = False  # a joined rank, which has no data left
        self._join_number = -1  # among the optimizers that Join was given
        # Of a joined rank: whether it has made the others' step, is on the way to it.
        self._followed = self._follows = False
        self._in_step = self._notified = False  # Join, of an iteration
        self._parameters = Parameters(process_group, share=share_parameters)
        self._layouts, self._blank = {}, {}
        self._load_digest = 0
        self._group_of, self._numbered = Numbers(), []
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
        if self._mode.bridge is not None:
            if self._mode.bridge.serves(ddp):
                return
            raise RuntimeError(
                "the optimizer is attached to another DistributedDataParallel: make one optimizer "
                "for each, with its parameters, or detach() this one first"
            )
        if self._comm_hook is not None:
            _hooked.check_group(self._group, ddp.process_group, self._device())
        elif _backend(ddp.process_group) is not self._backend:
            raise ValueError(
                "the module's process group is not the optimizer's: pass "
                "process_group=ddp.process_group"
            )
        params = self._all_parameters()
        bridge = Bridge.of(ddp, self, params)
        before, self._mode = self._mode, (Overlap if self._overlap else Sharded)(bridge)
        before.leave(self)
        # DDP's constructor has broadcast them.
        self._parameters.accept(params)
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
        self._wait()
        self._mode.check_detaching()
        attached = self._mode.bridge is not None
        for name, param in self._named_parameters():
            if self._is_pending(param.grad, attached):
                raise RuntimeError(
                    f"detach(): the reduced gradient of parameter {name} was not applied: call "
                    "step() or zero_grad() first"
                )
        self._mode.leave(self)
        for param in self._all_parameters():
            grad: Any = param.grad
            if isinstance(grad, (ShardedGrad, SpentGrad)):
                # In manual mode it is this rank's.
                own = grad.unreduced() if isinstance(grad, ShardedGrad) and not attached else None
                param.grad = None if own is None else laid_out(own, param)
        self._mode = Detached()
        # Those that were taken out of param_groups, too.
        self._parameters.own(self._layouts)

    def _is_pending(self, grad: Any, attached: bool) -> bool:
        if not isinstance(grad, ShardedGrad):
            return False
        return (attached or grad.holds_reduced()) and (
            not self._stepped or grad.unreduced() is not None
        )

    def _joined(self) -> None:
        """This rank has no data left, and nobody calls ``zero_grad()`` after its last step."""
        if self._stepped:
            self._drop_gradients()

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
        self._weight = None if size is None else float(size)

    def _reduction(self, shadow: bool) -> dict[str, Any]:
        weight = self._weight
        bridge = self._mode.bridge
        if weight is None and bridge is not None and bridge.weighted_by_joining():
            weight = 1.0
        if weight is not None and shadow:
            weight = 0.0
        return {"mean": self._reduce == "mean", "weight": weight}

    # --- the step -------------------------------------------------------------------

    def _fused_step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        *,
        used: torch.Tensor | None = None,
        **options: Any,
    ) -> list[Started]:
        """Starts the step of some parameters, in one operation if their groups allow."""
        self._number_groups()
        known = self._known_state(params)
        if known is not None:
            # The usual step: nothing to make, and one operation.
            self._state_changes()
            groups, states, master = known
            hypers = self._hypers(groups)
            work = self._start(params, grads, groups, hypers, states, master, used, options)
            self._parameters.accept(params)
            return [Started(self, work, params, {}, used, options.get("found_inf"))]
        self._check_layouts(params)
        self._state_changes()
        made = self._make_state(params)
        # What one operation cannot mix: other state, and momentum buffers without a value.
        kinds: dict[Any, list[int]] = {}
        groups = [self._group_of[param] for param in params]
        for i, (param, number) in enumerate(zip(params, groups, strict=True)):
            group = self.param_groups[number]
            first = param in made and self._first_differs(group)
            kind = (tuple(self._state_keys(group)), self._has_master(param), first)
            kinds.setdefault(kind, []).append(i)
        works = []
        for (keys, master, first), members in kinds.items():
            mine = [params[i] for i in members]
            mine_of = [groups[i] for i in members]
            flags = used if used is None or len(members) == len(params) else used[members]
            hypers = self._hypers(mine_of)
            if first:
                hypers = [{**h, "first_step": True} for h in hypers]
            values = [self.state.get(param, {}) for param in mine]
            states = {key: [v[key] for v in values] for key in self._stepped_keys(keys, master)}
            work = self._start(
                mine, [grads[i] for i in members], mine_of, hypers, states, master, flags, options
            )
            started = Started(self, work, mine, made, flags, options.get("found_inf"))
            if self._mode.tells:
                started.wait()  # where a rank refuses the first it does not begin the others
            else:
                works.append(started)
        self._parameters.accept(params)
        return works

    def _hypers(self, groups: list[int]) -> list[dict[str, Any]]:
        return [self._hyper(self.param_groups[number]) for number in sorted(set(groups))]

    def _start(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        groups: list[int],
        hypers: list[dict[str, Any]],
        states: dict[str, list[torch.Tensor]],
        master: bool,
        used: torch.Tensor | None,
        options: dict[str, Any],
    ) -> Any:
        """One operation. ``states`` by key; the moments in the operation's order, then others."""
        hyper = load_extension().Hyper
        position = {number: i for i, number in enumerate(sorted(set(groups)))}
        return self._backend.fused_step_(
            self._op,
            params,
            grads,
            [v for key, v in states.items() if key not in ("step", "master_param")],
            states.get("step", []),
            [hyper(**h) for h in hypers],
            hyper_index=[position[number] for number in groups] if len(position) > 1 else [],
            master_params=states["master_param"] if master else [],
            masters_follow=True,
            used=used,
            shared_params=self._parameters.shared,
            done_before=self._load_digest ^ self._context.multiplied(),
            async_op=True,
            **options,
        )

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
        with self._telling():
            self._check_ready()
            reduce_gradients(self)

    def _check_ready(self) -> None:
        self._mode.check()
        if self._comm_hook is not None and self._mode.manual:
            raise RuntimeError(
                "a comm_hook combines the gradients of a DistributedDataParallel: pass ddp=, or "
                "attach(ddp)"
            )
        if not self._looked:
            for name, param in self._named_parameters():
                refuse_sharded(param, f"parameter {name}")
            self._looked = True

    def _check_shared(self, params: list[torch.Tensor] | None = None) -> None:
        """Before a step of some parameters, or of all."""
        if self._parameters.shared:
            few = ((f"of shape {tuple(param.shape)}", param) for param in params or ())
            self._parameters.check(self._named_parameters() if params is None else few)

    @_complete
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; collective.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients
                enabled.

        Raises:
            RuntimeError: for gradients that were never reduced, and for what ``overlap=True``
                cannot do.
            torch.distributed.DistBackendError: when ranks disagree or a rank fails.
        """
        with self._telling():
            self._check_ready()
            loss = None
            if self._initialises():
                return loss
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            if self._mode.tells:
                announce(self, Doing.STEP, scale=scale, found_inf=found_inf)
            self._in_step = True
            try:
                self._mode.step(self, scale, found_inf)
            finally:
                self._in_step = self._notified = False
            self._stepped = True
        return loss

    def _shadow_step(self, scale: float | None = None, found_inf: bool = False) -> None:
        """A step for which this rank has no data. The others have GradScaler's scale, and whether
        it has found infinities anywhere, which the operation makes of all ranks' answers."""
        given = {} if scale is None else {"grad_scale": torch.tensor(scale, device=self._device())}
        if found_inf:
            given["found_inf"] = torch.zeros((), device=self._device())
        if self._mode.manual and not self._follows:
            self._drop_gradients()  # of its own last step
        self._shadow = True
        vars(self).update(given)
        try:
            self.step()
        finally:
            self._shadow = False
            for name in given:
                delattr(self, name)
        # Nobody calls zero_grad() on a joined rank.
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        load_extension().set_gradients(self._all_parameters(), None)

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
        with self._telling():
            self._check_ready()
            self._mode.prepare_clipping(self)
            self._wait()
            most, order = float(max_norm), float(norm_type)
            total = self._context.total_norm(order)
        self._context.note(f"clipped to {most} by norm {order}")
        factor = (most / (total + 1e-6)).clamp(max=1.0)
        # Multiplying by one changes nothing; only a GPU's answer is not worth waiting for.
        if total.device.type != "cpu" or factor != 1:
            self._context.scale(factor)
        wide = torch.float64 in load_extension().dtypes_of(self._all_parameters())
        return total if wide else total.float()

    # --- uneven inputs ------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``Join([ddp, optimizer])``: joined ranks take part in the others' steps."""
        return StepOnJoin(self)

    @property
    def join_device(self) -> torch.device:
        return self._device()

    @property
    def join_process_group(self) -> Any:
        return self._group
