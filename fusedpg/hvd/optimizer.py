"""``DistributedOptimizer``: gradients are reduced while autograd makes the others."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from fusedpg.hvd import _operations as ops
from fusedpg.hvd._basics import ProcessSet, global_process_set, is_elastic, size, synchronize
from fusedpg.hvd._grace import Grace, is_communicator
from fusedpg.hvd.compression import Compression, Compressor
from fusedpg.hvd.functions import broadcast_object

Wait = Callable[[], object]
_Seen = tuple[Tensor | None, int]


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Each parameter's name, which matches its gradient with those of other ranks."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        groups = enumerate(optimizer.param_groups)
        pairs = [(f"{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    else:
        pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) for pair in pairs):
            raise ValueError("hvd: named_parameters are pairs such as model.named_parameters()")
    counts = collections.Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"hvd: names of parameters must be unique, found twice: {twice}")
    found = {p: name for name, p in pairs}
    if any(p not in found for p in own):
        raise ValueError("hvd: named_parameters lacks parameters of the optimizer")
    return found


def _seen(grad: Tensor | None) -> _Seen:
    """A gradient and its version, which counts what was written into it."""
    return grad, 0 if grad is None or grad.is_inference() else grad._version


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's, whatever was wrapped around it here."""
    classes = (cls for cls in type(optimizer).__mro__ if cls.__module__ != __name__)
    step = next(vars(cls)["step"] for cls in classes if "step" in vars(cls))
    return bool(step.__module__.startswith("torch.optim."))


@dataclasses.dataclass(eq=False)
class _Record:
    """A parameter whose gradient is reduced."""

    param: Tensor
    name: str
    group: _Group
    left: int  # backward passes until its gradient is sent


@dataclasses.dataclass(eq=False)
class _Group:
    """Parameters whose gradients are sent together, when the last one is there."""

    records: list[_Record] = dataclasses.field(default_factory=list)
    missing: int = 0
    wait: Wait | None = None  # once they were sent
    sent: list[_Seen] = dataclasses.field(default_factory=list)  # what its gradients then were

    @property
    def name(self) -> str:
        names = [record.name for record in self.records]
        return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


class _Reducing(Optimizer):
    """The base of each class of optimizers that wait for reductions.

    Its attributes begin with ``_hvd``: they share an object with those of torch's class; programs
    read Horovod's ``_parameter_names``.
    """

    _parameter_names: dict[Tensor, str]
    _hvd_passes: int
    _hvd_records: list[_Record]
    _hvd_groups: list[_Group]
    _hvd_begun = False  # whether gradients were made since they were last waited for

    def _hvd_begin(self, names: dict[Tensor, str], passes: int, process_set: ProcessSet) -> None:
        self._parameter_names, self._hvd_passes, self._hvd_set = names, passes, process_set
        self._hvd_records, self._hvd_groups = [], []
        self._hvd_active = bool(process_set.included()) and (size() > 1 or is_elastic())
        if self._hvd_active:
            self._hvd_hook(p for group in self.param_groups for p in group["params"])
            self._hvd_group(self._hvd_divided(self._hvd_records))

    def _hvd_divided(self, records: list[_Record]) -> Iterable[list[_Record]]:
        return [[record] for record in records]

    def _hvd_group(self, parts: Iterable[list[_Record]]) -> None:
        for part in parts:
            group = _Group(part, len(part))
            self._hvd_groups.append(group)
            for record in part:
                record.group = group

    def _hvd_hook(self, params: Iterable[Tensor]) -> list[_Record]:
        me, found = weakref.ref(self), []
        for param in params:
            if not param.requires_grad:
                continue
            record = _Record(param, self._parameter_names[param], _Group(), self._hvd_passes)

            def accumulated(_: Tensor, record: _Record = record) -> None:
                optimizer = me()
                if optimizer is not None:
                    optimizer._hvd_accumulated(record)

            # An optimizer that had this parameter before does not reduce it any longer.
            earlier = getattr(param, "_hvd_hook", None)
            if earlier is not None:
                earlier.remove()
            handle = param.register_post_accumulate_grad_hook(accumulated)
            param._hvd_hook = handle  # type: ignore[attr-defined]
            found.append(record)
        self._hvd_records += found
        return found

    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_hvd_records"):
            number = len(self.param_groups) - 1
            for j, param in enumerate(self.param_groups[-1]["params"]):
                self._parameter_names.setdefault(param, f"{number}.{j}")
            if self._hvd_active:
                added = self._hvd_hook(self.param_groups[-1]["params"])
                self._hvd_group([record] for record in added)

    def _hvd_accumulated(self, record: _Record) -> None:
        if record.left <= 0:
            raise AssertionError(
                "gradients were computed more than backward_passes_per_step times before step(): "
                "increase backward_passes_per_step to accumulate gradients"
            )
        self._hvd_begun = True
        record.left -= 1
        if record.left == 0:
            group = record.group
            group.missing -= 1
            if group.missing == 0:
                self._hvd_begin_to_send(group)

    def _hvd_begin_to_send(self, group: _Group) -> None:
        group.wait = self._hvd_send(group)
        group.sent = [_seen(record.param.grad) for record in group.records]

    def _hvd_check(self, group: _Group) -> None:
        """Raises if gradients were changed since they were sent."""

    def _hvd_send(self, group: _Group) -> Wait:
        """Begins to combine what a group has."""
        raise NotImplementedError

    def _hvd_finish(self) -> None:
        """Sends what was not sent, and waits for everything."""
        failure: Exception | None = None
        for group in self._hvd_groups:
            try:
                if group.wait is None:
                    self._hvd_begin_to_send(group)
                self._hvd_check(group)
            except Exception as error:
                failure = failure or error
        # After an error training may go on: then nothing of this step is in flight.
        for group in self._hvd_groups:
            try:
                if group.wait is not None:
                    group.wait()
            except Exception as error:
                failure = failure or error
        self._hvd_reset()
        if failure is not None:
            raise failure

    def _hvd_reset(self) -> None:
        self._hvd_begun = False
        for record in self._hvd_records:
            record.left = self._hvd_passes
        for group in self._hvd_groups:
            group.wait, group.missing = None, len(group.records)
            group.sent = []

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many passes are accumulated before gradients are reduced, from now on.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if any(group.wait is not None for group in self._hvd_groups):
            raise AssertionError(
                "set_backward_passes_per_step() was called after backward() and before step() or "
                "synchronize(): gradients are being reduced"
            )
        self._hvd_passes = passes
        self._hvd_reset()

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._hvd_reset()
        super().load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._hvd_begun:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(): "
                "gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)


class _Gradients(_Reducing):
    """Reduces gradients."""

    def _hvd_set_up(
        self,
        compression: type[Compressor],
        op: int,
        predivide: float,
        groups: int | list[list[Tensor]] | None,
        sparse_as_dense: bool,
        grace: Grace | None,
    ) -> None:
        """Before ``_hvd_begin``."""
        self._hvd_compression, self._hvd_op = compression, op
        self._hvd_scale = (1.0 / predivide, predivide) if op == ops.Average else (1.0, 1.0)
        self._hvd_wanted = groups
        self._hvd_sparse_as_dense, self._hvd_grace = sparse_as_dense, grace
        self._hvd_sparse: set[Tensor] = set()  # whose gradients have been sparse
        self._hvd_synchronized, self._hvd_skip = False, False
        self._hvd_torchs = _is_torchs(self)

    def _hvd_divided(self, records: list[_Record]) -> Iterable[list[_Record]]:
        """Groups that were asked for; without, small parameters that come about the same time."""
        wanted = self._hvd_wanted
        if isinstance(wanted, int):
            # The order of the set's first rank.
            found = {record.name: record for record in records}
            order = broadcast_object(list(found), self._hvd_set.ranks[0], "names", self._hvd_set)
            each, more = divmod(len(order), wanted)
            edges = [i * each + min(i, more) for i in range(wanted + 1)]
            parts = [order[a:b] for a, b in itertools.pairwise(edges)]
            return [[found[name] for name in part] for part in parts if part]
        if wanted is not None:
            by_param = {record.param: record for record in records}
            chosen = [[by_param.pop(p) for p in group if p in by_param] for group in wanted]
            return [part for part in [*chosen, *([r] for r in by_param.values())] if part]
        if self._hvd_grace is not None:
            return super()._hvd_divided(records)
        return _small_together(records)

    def _hvd_send(self, group: _Group) -> Wait:
        if self._hvd_grace is not None:
            (record,) = group.records
            return self._hvd_grace.send(self._hvd_grad(record.param), record.param)
        waits, dense = [], []
        for record in group.records:
            param = record.param
            grad = param.grad
            if grad is None or grad.is_sparse:
                grad = self._hvd_grad(param)
                if grad.is_sparse and not self._hvd_sparse_as_dense:
                    waits.append(self._hvd_send_sparse(record, grad))
                    continue
                grad = grad.to_dense() if grad.is_sparse else grad
            dense.append((param, grad))
        if dense:
            waits.append(self._hvd_send_dense(group, dense))
        return waits[0] if len(waits) == 1 else lambda: [wait() for wait in waits]

    def _hvd_send_dense(self, group: _Group, dense: list[tuple[Tensor, Tensor]]) -> Wait:
        compression, contexts = self._hvd_compression, None
        # With versions of their own: the engine's writes are none of the program's.
        tensors = [grad.data for _, grad in dense]
        if compression is not Compression.none:
            sent = [compression.compress(grad) for grad in tensors]
            tensors, contexts = [tensor for tensor, _ in sent], [ctx for _, ctx in sent]
        handle = ops.grouped_allreduce_async_(
            tensors, None, group.name, self._hvd_op, *self._hvd_scale, self._hvd_set
        )
        if contexts is None and not self._hvd_sparse_as_dense:
            return lambda: synchronize(handle)

        def wait() -> None:
            results = synchronize(handle)
            if contexts is not None:
                results = [compression.decompress(r, ctx) for r, ctx in zip(results, contexts)]
            for (param, _), result in zip(dense, results):
                self._hvd_store(param, result)

        return wait

    def _hvd_send_sparse(self, record: _Record, grad: Tensor) -> Wait:
        finish = ops.sparse_allreduce_async(grad, record.name, self._hvd_op, self._hvd_set)
        return lambda: self._hvd_store(record.param, finish())

    def _hvd_grad(self, param: Tensor) -> Tensor:
        """The gradient; zeros where this rank has none, as others may."""
        if param.grad is None:
            param.grad = torch.zeros_like(param)
            if param in self._hvd_sparse:
                param.grad = param.grad.to_sparse(1)
        elif param.grad.is_sparse:
            self._hvd_sparse.add(param)
        return param.grad

    def _hvd_store(self, param: Tensor, result: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        with torch.no_grad():
            if result.is_sparse or grad.is_sparse:
                param.grad = result if result.is_sparse else result.to_sparse(grad.sparse_dim())
            elif result.data_ptr() != grad.data_ptr():
                grad.copy_(result)

    def _hvd_check(self, group: _Group) -> None:
        for record, sent in zip(group.records, group.sent):
            now = _seen(record.param.grad)
            if now[0] is not sent[0] or now[1] != sent[1]:
                raise RuntimeError(
                    f"hvd: the gradient of parameter {record.name} was changed or replaced while "
                    "it was being reduced: call optimizer.synchronize() after backward(), then "
                    "change gradients (clip, unscale), then step() in optimizer.skip_synchronize()"
                )

    def synchronize(self) -> None:
        """Waits for the reduced gradients, to clip them, for example.

        ::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        if self._hvd_active:
            self._hvd_finish()
        self._hvd_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In it ``step()`` takes gradients as they are."""
        self._hvd_skip = True
        try:
            yield
        finally:
            self._hvd_skip = False

    def step(self, closure: Any = None) -> Any:
        """Waits for the reduced gradients and applies them.

        Args:
            closure: makes the gradients and returns the loss, as for the optimizer's own step. The
                gradients of each evaluation are reduced before the optimizer sees them, unless
                the closure calls ``synchronize()`` itself, to clip them.

        Returns:
            This rank's loss. An optimizer that may evaluate the closure more than once
            (``torch.optim.LBFGS``, and those that are not torch's) decides by the loss, so it
            gets, and returns, the reduced one: ``op`` of all ranks' losses.

        Raises:
            RuntimeError: gradients were changed while they were being reduced; a closure makes
                gradients in ``skip_synchronize()``.
        """
        if closure is None:
            if not self._hvd_skip:
                if self._hvd_synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() after "
                        "optimizer.synchronize(): gradients are reduced again",
                        stacklevel=2,
                    )
                self.synchronize()
            self._hvd_synchronized = False
            return super().step()
        if not (self._hvd_torchs or self._hvd_skip or self._hvd_synchronized):
            self.synchronize()  # it may look at gradients before it asks for the closure's
        own_loss = self._hvd_torchs and not isinstance(self, torch.optim.LBFGS)

        def evaluate() -> Any:
            self._hvd_synchronized = False
            with torch.enable_grad():
                loss = closure()
            if self._hvd_skip:
                if self._hvd_begun:
                    self._hvd_finish()
                    raise RuntimeError(
                        "hvd: a closure makes gradients in skip_synchronize(), where they are not "
                        "reduced: call step(closure) outside of it, and synchronize() in the "
                        "closure to clip reduced gradients"
                    )
            elif self._hvd_begun or not self._hvd_synchronized:
                self.synchronize()
            return loss if own_loss or loss is None else self._hvd_reduced_loss(loss)

        try:
            return super().step(evaluate)
        finally:
            self._hvd_synchronized = False

    def _hvd_reduced_loss(self, loss: Tensor | float) -> Tensor | float:
        if not self._hvd_active or not self._hvd_groups:
            return loss
        if isinstance(loss, Tensor):
            own = loss.detach()
        else:
            own = torch.tensor(loss, dtype=torch.double, device="cpu")
        name = f"loss.{self._hvd_groups[0].name}"
        reduced = ops.allreduce(own, name=name, op=self._hvd_op, process_set=self._hvd_set)
        return reduced if isinstance(loss, Tensor) else reduced.item()


class _Deltas(_Reducing):
    """Combines by Adasum what one rank's own step makes of its parameters."""

    def _hvd_set_up(self, compression: type[Compressor]) -> None:
        self._hvd_compression = compression
        self._hvd_starts: dict[Tensor, Tensor] = {}

    def _hvd_send(self, group: _Group) -> Wait:
        (record,) = group.records
        param = record.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        start = self._hvd_starts.get(param)
        with torch.no_grad():
            if start is None:
                start = self._hvd_starts[param] = param.detach().clone()
            else:
                start.copy_(param)
            held = [options["params"] for options in self.param_groups]
            try:
                for options, params in zip(self.param_groups, held):
                    options["params"] = [param] if any(p is param for p in params) else []
                super().step()
            finally:
                for options, params in zip(self.param_groups, held):
                    options["params"] = params
            param.sub_(start)
        delta, ctx = self._hvd_compression.compress(param.detach())
        handle = ops.allreduce_async_(delta, name=record.name, op=ops.Adasum)

        def wait() -> None:
            result = self._hvd_compression.decompress(synchronize(handle), ctx)
            with torch.no_grad():
                param.copy_(start + result)

        return wait

    def synchronize(self) -> None:
        """Nothing: parameters are combined, not gradients."""

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("hvd: Adasum combines parameters in step(), which cannot be skipped")

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hvd_finish()
        return loss


# Bytes of parameters that are sent together: many small ones would cost more than they transfer.
_TOGETHER = 1 << 20


def _small_together(records: list[_Record]) -> Iterable[list[_Record]]:
    """Neighbours among parameters, the last ones first, as backward has their gradients."""
    part: list[_Record] = []
    total = 0
    for record in reversed(records):
        size_of = record.param.numel() * record.param.element_size()
        if part and total + size_of > _TOGETHER:
            yield part
            part, total = [], 0
        part.append(record)
        total += size_of
    if part:
        yield part


def _adopted(base: type[Optimizer], optimizer: Optimizer) -> Any:
    """An optimizer of a new class, with another one's groups, state and hooks."""
    bases: tuple[type, ...] = base, type(optimizer)
    cls: Any = type(type(optimizer).__name__, bases, {"__module__": base.__module__})
    made = cls.__new__(cls)
    made.__dict__.update(optimizer.__dict__)
    # A scheduler's wrapper around the old one's.
    made.__dict__.pop("step", None)
    return made


def _in_graces_order(function: Callable[..., object]) -> Callable[..., object]:
    """Takes ``(optimizer, grace, named_parameters, ...)``, too, as GRACE's own function does."""

    @functools.wraps(function)
    def either(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
        if args and (is_communicator(args[0]) or isinstance(args[0], Mapping)):
            kwargs["grace"], *rest = args
            return function(optimizer, *rest, **kwargs)
        return function(optimizer, *args, **kwargs)

    return either


@_in_graces_order
def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    grace: object = None,
    fused: bool = False,
) -> Any:
    """An optimizer that applies gradients of all ranks.

    It is of a class made from the given optimizer's, and takes over its groups, state and hooks.
    GRACE's order of arguments, ``(optimizer, grace, named_parameters, ...)``, is understood, too.

    Args:
        optimizer: any of torch's; not to be used afterwards.
        named_parameters: names that match gradients between ranks; by default positions.
        compression: ``Compression.none`` or ``.fp16``, or a class like them.
        backward_passes_per_step: passes whose gradients are added up before they are reduced.
        op: Average, Sum, or Adasum, which combines what the ranks' steps make of the parameters.
        gradient_predivide_factor: averages are divided by it before, and by the rest after.
        num_groups: deprecated; use ``groups``.
        groups: how many groups gradients are reduced in, or lists of parameters that are.
        sparse_as_dense: reduces sparse gradients as dense ones.
        process_set: the ranks whose gradients are reduced.
        grace: compresses gradients: a ``fusedpg.compress.State``, what makes one
            (``fusedpg.compress.from_params``), or a communicator of GRACE's.
        fused: runs the step of ``fusedpg.optim`` in place of the optimizer's: reduce-scatter,
            update and all-gather are one operation, and each rank has a part of the state.

    Raises:
        ValueError: for what does not go together.
        TypeError: ``fused`` with an optimizer that has no fused one.
    """
    if gradient_predivide_factor != 1.0 and op != ops.Average:
        raise ValueError("hvd: gradient_predivide_factor is for op=Average")
    if num_groups:
        warnings.warn("hvd: num_groups= is deprecated; use groups=", DeprecationWarning, 2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("hvd: backward_passes_per_step must be positive")
    if isinstance(groups, list):
        _check_groups(groups)
    elif groups is not None and groups <= 0:
        raise ValueError("hvd: groups must be a positive number, or lists of parameters")
    others = {
        "compression": compression is not Compression.none,
        "gradient_predivide_factor": gradient_predivide_factor != 1.0,
        "groups": groups is not None,
        "sparse_as_dense": sparse_as_dense,
    }
    if fused:
        others["process_set"], others["grace"] = process_set.process_set_id != 0, grace is not None
    if fused or grace is not None:
        given = [name for name, is_given in others.items() if is_given]
        if given or (grace is not None and op != ops.Average):
            what = "fused" if fused else "grace"
            raise ValueError(f"hvd: {what}= does not go with {', '.join(given) or 'this op'}")
    if fused:
        from fusedpg.hvd._fused import fused_optimizer

        return fused_optimizer(optimizer, op)
    names = _named(optimizer, named_parameters)
    if op == ops.Adasum and size() > 1:
        if process_set.process_set_id != 0:
            raise NotImplementedError("hvd: Adasum works in the global process set only")
        if groups is not None or sparse_as_dense:
            raise ValueError("hvd: Adasum does not go with groups or sparse_as_dense")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("hvd: Adasum steps parameter by parameter, which LBFGS cannot")
        made = _adopted(_Deltas, optimizer)
        made._hvd_set_up(compression)
        made._hvd_begin(names, backward_passes_per_step, process_set)
        return made
    sender = None
    if grace is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        sender = Grace(grace, names, [p for p in params if p.requires_grad], process_set)
    made = _adopted(_Gradients, optimizer)
    made._hvd_set_up(compression, op, gradient_predivide_factor, groups, sparse_as_dense, sender)
    made._hvd_begin(names, backward_passes_per_step, process_set)
    return made


def _check_groups(groups: list[list[Tensor]]) -> None:
    params = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) for p in params):
        raise ValueError("hvd: groups are lists of parameters")
    if len({id(p) for p in params}) < len(params):
        raise ValueError("hvd: a parameter may be in one group only")
