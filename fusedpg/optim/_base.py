"""What the fused optimizers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim._attach import check_ddp
from fusedpg.optim._bridge import Gradient, unsynchronised
from fusedpg.optim._gradients import GradContext, Lists, ShardedGrad, SpentGrad
from fusedpg.optim._join import StepOnJoin
from fusedpg.optim._overlap import UpdatesInBackward
from fusedpg.optim._parameters import Parameters, laid_out
from fusedpg.optim._state import Numbers, Started
from fusedpg.optim._whole import WholeState


class FusedOptimizer(UpdatesInBackward, WholeState, Joinable):
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
    ) -> None:
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
        if ddp is not None:
            check_ddp(ddp)
            process_group = process_group or ddp.process_group
        if process_group is None:
            process_group = dist.distributed_c10d._get_default_group()
        self._group = process_group
        self._backend = _backend(process_group)
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self.overlap = overlap
        self._max_grad_norm = max_grad_norm
        self._master_dtype = master_dtype
        self._reduce = reduce
        self._weight: float | None = None
        self._bridge = None
        self._watches = {}
        self._in_flight: list[Callable[[], None]] = []
        self._init_overlap()
        self._stepped = False  # since gradients were reduced for the last time
        self._lists = Lists()
        self._context = GradContext(
            process_group,
            self._sharded_grads,
            self._reduce_for_gradient,
            self._rebound,
            self._is_manual,
            self._lists,
        )
        self._shadow = False  # a joined rank, which has no data left
        self._parameters = Parameters(process_group, share=share_parameters)
        self._layouts, self._blank = {}, {}
        self._group_of, self._numbered = Numbers(), []
        self._check_options(defaults)
        Joinable.__init__(self)
        Optimizer.__init__(self, params, defaults)
        self._init_state_dict()
        if ddp is not None:
            self.attach(ddp)

    # --- DDP ------------------------------------------------------------------------

    def _rebound(
        self, param: torch.Tensor, grad: ShardedGrad | SpentGrad, memory: torch.Tensor
    ) -> None:
        if self._bridge is not None:
            self._bridge.rebound(param, grad, memory)

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
        if weight is None and self._bridge is not None and self._bridge.weighted_by_joining():
            weight = 1.0
        if weight is not None and shadow:
            weight = 0.0
        return {"mean": self._reduce == "mean", "weight": weight}

    def _gradients_ready(
        self, gradients: list[Gradient], used: torch.Tensor | None, shadow: bool
    ) -> None:
        """The bridge's call for one bucket."""
        self._stepped = False
        if self.overlap:
            self._update_in_backward(gradients, used, shadow)
        else:
            self._start_reduction(gradients, used, shadow)

    def _start_reduction(
        self, gradients: list[Gradient], used: torch.Tensor | None, shadow: bool = False
    ) -> None:
        self._check_layouts(gradient.param for gradient in gradients)
        work = self._backend.reduce_shards_(
            [gradient.local for gradient in gradients],
            [gradient.output for gradient in gradients],
            used=used,
            async_op=True,
            **self._reduction(shadow),
        )
        # DDP must find None to leave p.grad alone. What an earlier backward has reduced stays.
        reduced = []
        for param, _, output, earlier, _ in gradients:
            reduced.append((param, self._owned(output, param), earlier))
            param.grad = None
        del gradients  # the work holds them until it is done

        def finish() -> None:
            work.wait()
            flags = [True] * len(reduced) if used is None else used.tolist()
            for (param, local, before), flag in zip(reduced, flags, strict=True):
                if before is not None:
                    before.add_reduced(local if flag else None)
                    param.grad = before if flag or before.is_reduced() else None
                elif flag:
                    param.grad = ShardedGrad(param, self._context, reduced=local)
                else:
                    param.grad = None

        self._in_flight.append(finish)

    def _backward_done(self) -> None:
        """The bridge's call at the end of backward."""
        if self.overlap:
            self._updated_in_backward()
        else:
            self._wait()

    def _wait(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for finish in in_flight:
            finish()
        if self._bridge is not None:
            self._bridge.restore()
        if in_flight:
            self._context.changed()

    def _sharded_grads(self) -> list[ShardedGrad]:
        """All gradients, for questions about all of them."""
        everything = [param for group in self.param_groups for param in group["params"]]
        quickly = load_extension().gradients_of(everything, ShardedGrad)
        if quickly is not None:
            return quickly
        found = []
        for name, param in self._named_parameters():
            if isinstance(param.grad, ShardedGrad):
                found.append(param.grad)
            elif param.grad is not None and self._bridge is not None:
                raise RuntimeError(unsynchronised(name))
            elif param.grad is not None:
                raise RuntimeError(
                    f"the gradient of parameter {name} was put in by hand and is not reduced over "
                    "ranks, but others are: call optimizer.reduce_gradients() before clipping"
                )
        return found

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
            works.append(Started(self, work, mine, made, flags, options.get("found_inf")))
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
            async_op=True,
            **options,
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks before it looks at gradients."""
        if self.overlap and self._bridge is not None:
            raise RuntimeError("GradScaler needs overlap=False: see fusedpg's docs/optimizers.md")
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Optimizer's constructor would set it."""

    def _accumulated(self, param: torch.Tensor) -> None:
        grad = param.grad
        if self._bridge is not None or type(grad) is not torch.Tensor:
            return
        if grad.layout == torch.strided:
            param.grad = ShardedGrad(param, self._context, unreduced=laid_out(grad, param))
            self._context.changed()

    def reduce_gradients(self) -> None:
        """Manual mode: reduces ``p.grad`` over ranks now instead of in ``step()``.

        Clipping, norms and GradScaler do this by themselves. Collective.
        """
        self._check_attached()
        gradients, used = self._local_gradients()
        # What has been reduced and has not changed since need not go again.
        some = torch.tensor(float(any(used)))
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=self._group)
        if not some or not gradients:
            return
        self._stepped = False
        for dtype in dict.fromkeys(gradient.param.dtype for gradient in gradients):
            members = [i for i, g in enumerate(gradients) if g.param.dtype == dtype]
            flags = self._flags([used[i] for i in members])
            self._start_reduction([gradients[i] for i in members], flags, self._shadow)
        self._wait()

    def _reduce_for_gradient(self) -> None:
        """The reduction that somebody's question about one gradient needs."""
        if self._bridge is not None:
            raise RuntimeError(unsynchronised("asked for"))
        without = [(name, p) for name, p in self._named_parameters() if p.grad is None]
        self.reduce_gradients()
        for name, param in without:
            if param.grad is not None:
                # The caller has a list of gradients in which this one is missing.
                raise RuntimeError(
                    f"parameter {name} was used on other ranks only; call "
                    "optimizer.reduce_gradients() before clipping or unscaling"
                )

    def _flags(self, used: list[bool]) -> torch.Tensor | None:
        """Whether this rank used parameters, as operations take it."""
        device = self._device()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph does the same at every launch, so all ranks must have all gradients.
            if not all(used):
                raise RuntimeError("a parameter has no gradient: a CUDA graph needs all of them")
            return None
        return torch.tensor(used, dtype=torch.uint8, device=device)

    def _frozen_with_gradient(self) -> set[torch.Tensor]:
        """Who freezes a parameter does it on all ranks; a gradient that one has still counts."""
        frozen = [p for _, p in self._named_parameters() if not p.requires_grad]
        mine = [param.grad is not None for param in frozen]
        device = self._device()
        if frozen and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            anywhere = torch.tensor(mine, dtype=torch.uint8, device=device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
            mine = anywhere.tolist()
        return {param for param, has in zip(frozen, mine, strict=True) if has}

    def _local_gradients(self) -> tuple[list[Gradient], list[bool]]:
        """Manual mode: this rank's gradients, and which of them it has."""
        gradients, used = [], []
        left = self._frozen_with_gradient()
        for _, param in self._named_parameters():
            grad: Any = param.grad
            if not param.requires_grad and param not in left:
                continue
            earlier = grad if isinstance(grad, ShardedGrad) else None
            if earlier is not None:
                grad = earlier.unreduced()
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError("fused optimizers do not take sparse gradients")
            used.append(grad is not None)
            # A peer may have a gradient where this rank has none.
            grad = torch.zeros_like(param) if grad is None else laid_out(grad, param)
            gradients.append(Gradient(param, grad, grad, earlier))
        return gradients, used

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
        self._check_attached()
        loss = None
        if self._initialises():
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._bridge is None and not self._shadow:
            Join.notify_join_context(self)
        if self._parameters.shared:
            self._parameters.check(self._named_parameters())
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.overlap and self._bridge is not None:
            self._commit(scale, found_inf)
        elif self._bridge is None and self._max_grad_norm is None and self._all_local():
            self._step_on_local(scale, found_inf)
        else:
            if self._bridge is None:
                self.reduce_gradients()
            self._step_on_reduced(scale, found_inf)
        self._stepped = True
        return loss

    def _step_on_local(self, scale: Any, found_inf: Any) -> None:
        """Manual mode: everything is one operation."""
        params, grads = self._unreduced() or ([], [])
        used = [True] * len(params)
        if not params:
            gradients, used = self._local_gradients()
            params = [gradient.param for gradient in gradients]
            grads = [gradient.local for gradient in gradients]
        if params:
            for work in self._fused_step(
                params,
                grads,
                used=self._flags(used),
                grad_scale=_scalar(scale),
                found_inf=_scalar(found_inf),
                **self._reduction(self._shadow),
            ):
                work.wait()

    def _step_on_reduced(self, scale: Any, found_inf: Any) -> None:
        """Update and all-gather of what the hook has reduced."""
        self._wait()
        self._check_finished()
        params, slices = self._reduced_slices()
        if not params:
            return
        if self._bridge is None and scale is None and found_inf is not None:
            # unscale_() looked at this rank's gradients, before they were reduced.
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        # Tensors, so that a GPU need not be waited for.
        factor: Any = None if scale is None else scale.detach().double().reshape(())
        if self._max_grad_norm is not None:
            norm = self._context.total_norm(2.0)
            norm = norm if factor is None else norm / factor
            clip = ((norm + 1e-6) / self._max_grad_norm).clamp(min=1.0)
            factor = clip if factor is None else factor * clip
        double = [factor is not None and param.dtype == torch.float64 for param in params]
        for wide in sorted(set(double)):
            mine = [i for i, one in enumerate(double) if one == wide]
            for work in self._fused_step(
                [params[i] for i in mine],
                # The operation's scale is float32, which is too coarse for float64.
                [slices[i] / factor if wide else slices[i] for i in mine],
                reduced=True,
                grad_scale=None if wide else _scalar(factor),
                found_inf=_scalar(found_inf),
            ):
                work.wait()

    def _shadow_step(self) -> None:
        """A step for which this rank has no data."""
        self._shadow = True
        try:
            if self._bridge is None:
                self._drop_gradients()
            self.step()
        finally:
            self._shadow = False
        # Nobody calls zero_grad() on a joined rank.
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for _, param in self._named_parameters():
            param.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm``.

        Collective; between backward and ``step()``. ``torch.nn.utils.clip_grad_norm_`` on the
        parameters does the same.

        Returns:
            The norm before, a float32 scalar (float64 with float64 parameters), the same on all
            ranks.
        """
        self._check_attached()
        if self.overlap and self._bridge is not None:
            raise RuntimeError("clipping needs overlap=False")
        if self._bridge is None:
            self.reduce_gradients()
        self._wait()
        total = self._context.total_norm(float(norm_type))
        factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
        # Multiplying by one changes nothing; only a GPU's answer is not worth waiting for.
        if total.device.type != "cpu" or factor != 1:
            slices = [grad.local() for grad in self._sharded_grads()]
            if slices:
                torch._foreach_mul_(slices, factor)
            self._context.changed()
        wide = any(param.dtype == torch.float64 for _, param in self._named_parameters())
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


def _scalar(value: Any) -> torch.Tensor | None:
    return None if value is None else value.detach().float().reshape(())
