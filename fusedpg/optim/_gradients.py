"""The objects in ``p.grad`` between a backward that reduced gradients and ``step()``.

After the reduce-scatter a rank holds the combined gradient of its slice alone. A plain tensor of
the parameter's shape would hold garbage elsewhere, and clipping by it would go wrong silently. So
``p.grad`` is a tensor subclass that knows its slice: norms, scaling and GradScaler's check work on
all ranks' slices; anything else raises.
"""

from __future__ import annotations

import enum
import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.functional import group_info
from fusedpg.optim._parameters import GONE
from fusedpg.optim._torch import (
    called_by_engine,
    clips_by_default,
    in_backward,
    takes_foreach,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from typing_extensions import Self

    from fusedpg.optim._context import StepContext

aten = torch.ops.aten

Factor = float | torch.Tensor


class Doing(enum.IntEnum):
    """The next thing that a rank with data does with an optimizer's gradients."""

    STEP = enum.auto()
    REDUCE = enum.auto()
    NORMS = enum.auto()  # value: their order
    UNSCALE = enum.auto()  # value: the factor; of gradients of the type of one parameter's
    MULTIPLY = enum.auto()
    DIVIDE = enum.auto()
    ZERO = enum.auto()


EVERY = -1  # in place of a parameter's number
NO_SCALE = -1.0  # no scale


def end_all(finishers: Iterable[Callable[[], None]]) -> None:
    """Calls all of them, and raises the first error: an operation that failed does not end those
    behind it, which go on writing to parameters and gradients."""
    first: BaseException | None = None
    for finish in finishers:
        try:
            finish()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


class GradContext:
    """State that the gradients of one optimizer share: their norms, and their factors.

    ``torch.nn.utils.clip_grad_norm_`` asks for one norm after the other; the first question
    computes those of all gradients, in one collective. Every rank must ask.
    """

    def __init__(self, owner: StepContext) -> None:
        self.group, self.extension = owner.group, owner.extension
        # Gradients must not keep it alive: it has the parameters, they have the gradients, and
        # Python's garbage collector does not see ``p.grad``.
        self._reference = weakref.ref(owner)
        # By order: all norms, and by the id of a gradient, once somebody asks for one.
        self._known: dict[float, tuple[list[ShardedGrad], list[int], torch.Tensor]] = {}
        self._each: dict[float, dict[int, tuple[int, torch.Tensor]]] = {}
        # Whether any norms are known: hooks of single gradients look at it without Python.
        self.norms_known = self.extension.Flag()
        # A digest of what has multiplied the reduced gradients, and the first slice of these: the
        # gradient itself may be used again for the next backward.
        self._multiplied: tuple[weakref.ref[torch.Tensor], int] | None = None

    def owner(self) -> StepContext:
        found = self._reference()
        if found is None:
            raise RuntimeError(GONE)
        return found

    def joining(self) -> StepContext | None:
        """The owner, if a Join knows its optimizer."""
        found = self._reference()
        return found if found is not None and found.joining() else None

    def gradients(self) -> list[ShardedGrad]:
        """All gradients, for questions about all of them."""
        owner = self.owner()
        quickly = self.extension.gradients_of(owner.parameters(), ShardedGrad)
        if quickly is not None:
            return quickly
        found = []
        for name, param in owner.named_parameters():
            if isinstance(param.grad, ShardedGrad):
                found.append(param.grad)
            elif param.grad is not None:
                raise RuntimeError(owner.mode.not_reduced(name))
        return found

    @functools.cached_property
    def _one_host(self) -> bool:
        return bool(group_info(self.group)["engine"] == "shm")

    def multiplied(self) -> int:
        """A digest of what has multiplied the gradients that there are; 0: nothing has.

        The next step raises unless it is the same on all ranks: their slices would differ in scale.
        """
        if self._multiplied is None:
            return 0
        first, digest = self._multiplied
        now = self._first_slice()
        return digest if now is not None and now is first() else 0

    def _first_slice(self) -> torch.Tensor | None:
        return next((g.slice() for g in self.gradients() if g.holds_reduced()), None)

    def note(self, text: str) -> None:
        """Notes a factor of reduced gradients, in words that must be the same on all ranks."""
        # A rank that has joined multiplies by what the others tell it.
        if self.owner().world_size == 1 or self.joining() is not None:
            return
        digest = 1 + zlib.crc32(text.encode(), self.multiplied())
        first = self._first_slice()
        self._multiplied = None if first is None else (weakref.ref(first), digest)

    def note_factor(
        self, grads: list[ShardedGrad], factor: Factor, doing: Doing = Doing.MULTIPLY
    ) -> None:
        """As `note`, of a factor that somebody else has computed.

        Hosts with other processors may compute another last bit, so between hosts it is not
        compared; and a GPU's factor would have to be waited for.
        """
        if not all(grad.is_reduced() for grad in grads) or not self._one_host:
            return
        if isinstance(factor, torch.Tensor):
            if factor.device.type != "cpu" or factor.dim() != 0:
                return
            factor = factor.item()
        everything = len(grads) == len(self.gradients())
        which = "all" if everything else [self.owner().number_of(grad) for grad in grads]
        self.note(f"{doing.name} {factor!r} {which}")

    def forget_factors(self) -> None:
        """After a step, which has compared them, and where gradients begin anew."""
        self._multiplied = None

    def changed(self) -> None:
        """Gradients have other values now."""
        self.norms_known.set = False
        self._known.clear()
        self._each.clear()

    def norm(self, gradient: ShardedGrad, order: float) -> torch.Tensor | None:
        """The norm of one gradient, float64; those of all others are got with it."""
        known = self._each.get(order, {}).get(id(gradient))
        if known is None or known[0] != gradient.version():
            gradients, each = self._all_norms(order)
            self._each[order] = {
                id(g): (g.version(), norm) for g, norm in zip(gradients, each.unbind(), strict=True)
            }
            known = self._each[order].get(id(gradient))
        return None if known is None else known[1]

    def _all_norms(self, order: float) -> tuple[list[ShardedGrad], torch.Tensor]:
        with self.owner().telling():
            extension = self.extension
            gradients = self.gradients()
            slices = _slices(gradients)
            if order in self._known:
                known, versions, each = self._known[order]
                # Somebody may have dropped gradients, or written to their slices.
                same = slices is not None and extension.same_objects(known, gradients)
                if same and versions == extension.versions_of(slices):
                    return known, each
                self.changed()
            if slices is None:
                if any(gradient.unreduced() is not None for gradient in gradients):
                    self.owner().reduce()
                    gradients = self.gradients()
                slices = _slices(gradients) or [gradient.local() for gradient in gradients]
            self.owner().announce(Doing.NORMS, value=order)
            each = norms(slices, order, self.group)
            self._known[order] = gradients, extension.versions_of(slices), each
            self.norms_known.set = True
            return gradients, each

    def norms_of(self, gradients: Sequence[object], order: float) -> torch.Tensor | None:
        """The norms of a list of gradients if it is that of all of them, float64."""
        everything, each = self._all_norms(order)
        return each if self.extension.same_objects(everything, list(gradients)) else None

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients, which are reduced."""
        self.owner().announce(Doing.MULTIPLY, value=factor)
        self.multiply(factor)

    def multiply(self, factor: Factor) -> None:
        gradients = self.gradients()
        slices = _slices(gradients) or [gradient.local() for gradient in gradients]
        if slices:
            _scale(slices, factor)
        self.changed()

    def total_norm(self, order: float) -> torch.Tensor:
        """The norm of all gradients together, float64."""
        gradients, each = self._all_norms(order)
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.linalg.vector_norm(each, order)


def _slices(gradients: Sequence[object]) -> list[torch.Tensor] | None:
    """If all of them are reduced."""
    found = load_extension().reduced_slices(list(gradients), ShardedGrad)
    return None if found is None else found[0]


def _scale(parts: list[torch.Tensor], factor: Factor) -> None:
    """``torch._foreach_mul_`` by a number or a scalar tensor."""
    number: float | None
    if not isinstance(factor, torch.Tensor):
        number = factor
    else:
        plain = factor.device.type == "cpu" and factor.is_floating_point()
        plain = plain and not factor.requires_grad
        number = factor.item() if plain else None
    # Others' conversions (of integers, complex numbers) are torch's business.
    if type(number) is not float or not load_extension().scale_slices(parts, number):
        torch._foreach_mul_(parts, factor)


def norms(
    slices: list[torch.Tensor], order: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Norms of tensors of which every rank holds slices; collective.

    Returns:
        float64 tensor with one norm for each of ``slices``, the same on all ranks.
    """
    order = float(order)
    if not order > 0:
        raise ValueError(f"norms of sharded gradients need norm_type > 0, got {order}")
    device = slices[0].device if slices else torch.device("cpu")
    if order == 2 and device.type == "cpu":
        # Ours sums in an order that depends on neither threads nor instruction set.
        parts = load_extension().sums_of_squares(slices)
        dist.all_reduce(parts, group=group)
        return parts.sqrt_()
    # An empty slice contributes zero; torch has no inf-norm of nothing.
    parts = torch.zeros(len(slices), dtype=torch.float64, device=device)
    for i, one in enumerate(slices):
        if one.numel():
            parts[i] = torch.linalg.vector_norm(one, order, dtype=_wide(one.dtype))
    if order == float("inf"):
        dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=group)
        return parts
    dist.all_reduce(parts.pow_(order), group=group)
    return parts.pow_(1 / order)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Norms of half gradients overflow in their own type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Gradient(torch.Tensor):
    """Shape, strides and dtype of a parameter, no data of its own."""

    _context: GradContext
    _param: weakref.ref[torch.Tensor]

    @classmethod
    def _standing_for(cls, param: torch.Tensor, context: GradContext) -> Self:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            # Functions that reach for memory must find none.
            storage_size=0,
        )
        self._context = context
        self._param = weakref.ref(param)
        return self

    @property
    def context(self) -> GradContext:
        """State that the gradients of one optimizer share."""
        return self._context

    def param(self) -> torch.Tensor | None:
        """The parameter, if it is there still."""
        return self._param()

    def rebound(self, memory: torch.Tensor) -> None:
        """DDP copies the gradient, and may put the copy into its place."""
        param = self.param()
        if param is not None and param.grad is self:
            bridge = self.context.owner().bridge
            if bridge is not None:
                bridge.rebound(param, self, memory)  # type: ignore[arg-type]

    # These would go past __torch_dispatch__.

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter
    def data(self, value: object) -> None:
        # nn.Module.to() puts back what it has found to be right as it is.
        if value is not self:
            raise RuntimeError(
                "p.grad.data = ... would go unnoticed: this gradient of a fused optimizer has its "
                "values elsewhere. Without a DDP, p.grad = tensor gives this rank's gradient; with "
                "one, change gradients before backward has reduced them, by a hook of the tensor"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("copy and pickle")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("__dlpack__")

    def share_memory_(self) -> NoReturn:
        _refuse("share_memory_")

    def apply_(self, *args: object) -> NoReturn:  # torch reads memory that there is not
        _refuse("apply_ and map2_")

    map2_ = apply_  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardedGrad(_Gradient):
    """The gradient of a parameter over all ranks, of which this rank holds its slice.

    Norms (``torch.linalg.vector_norm``, ``Tensor.norm``, ``torch.nn.utils.clip_grad_norm_``) are
    those of the whole gradient and need a collective: all ranks must ask. ``mul_``, ``div_`` by a
    number, ``zero_`` and GradScaler's unscaling work on the slice. Backward may accumulate into it.

    In manual mode the reduction waits until somebody asks for it, or for ``step()``.
    """

    _slice: torch.Tensor | None  # reduced
    _unreduced: torch.Tensor | None  # this rank's, not in the slice yet
    _kept: bool  # the slice lies in memory of its own

    @staticmethod
    def __new__(
        cls,
        param: torch.Tensor,
        context: GradContext,
        *,
        reduced: torch.Tensor | None = None,
        unreduced: torch.Tensor | None = None,
    ) -> ShardedGrad:
        self: ShardedGrad = cls._standing_for(param, context)
        self._slice = reduced
        self._unreduced = unreduced
        self._kept = False
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def local(self) -> torch.Tensor:
        """This rank's slice: 1-D, in memory order; shared, not copied."""
        if self._slice is None:
            self.context.owner().reduce()
        assert self._slice is not None
        return self._slice

    def slice(self) -> torch.Tensor | None:
        """The same, if there is one without a reduction."""
        return self._slice

    def unreduced(self) -> torch.Tensor | None:
        """The sum of what backward has added since the last reduction, this rank's alone."""
        return self._unreduced

    def parts(self) -> list[torch.Tensor]:
        """All values that there are."""
        return [part for part in (self._slice, self._unreduced) if part is not None]

    def zero(self, unreduced: bool) -> None:
        """Forgets all values. ``unreduced``: as if autograd began anew, else where they are."""
        if unreduced:
            self._slice = None
            self._unreduced = torch.empty_strided(
                self.shape, self.stride(), dtype=self.dtype, device=self.device
            ).zero_()
        elif self._slice is None:
            assert self._unreduced is not None
            self._unreduced.zero_()
        else:
            self._slice.zero_()
            self._unreduced = None

    def version(self) -> int:
        """The version of the slice's values, as autograd counts writes."""
        return -1 if self._slice is None else self._slice._version

    def is_reduced(self) -> bool:
        return self._slice is not None and self._unreduced is None

    def holds_reduced(self) -> bool:
        return self._slice is not None

    def add_reduced(self, local: torch.Tensor | None) -> None:
        """Adds the slice that a further reduction has given, if any rank had a gradient."""
        if self._slice is None:
            self._slice = local
        elif local is not None:
            self._slice.add_(local)
        self._unreduced = None

    def keep(self) -> None:
        """The bucket that the slice lies in is about to be written again."""
        if self._slice is not None and not self._kept:
            self._slice = self._slice.clone()
            self._kept = True

    def set_unreduced(self, grad: torch.Tensor) -> None:
        self.keep()
        self._unreduced = grad
        self.context.changed()

    def accumulate(self, new: torch.Tensor) -> None:
        if self._unreduced is not None:
            self._unreduced += new
            return
        self.keep()
        self._unreduced = torch.empty_strided(
            self.shape, self.stride(), dtype=self.dtype, device=self.device
        ).copy_(new)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _BY_DDP and in_backward():
            source = next((arg for arg in args if isinstance(arg, ShardedGrad)), None)
            if source is not None and source.context.owner().mode.manual:
                _refuse_ddp()
        handler = _HANDLERS.get(func)
        if handler is None:
            _refuse(func)
        return handler(*args, **(kwargs or {}))


def _refuse(func: object) -> NoReturn:
    raise RuntimeError(
        f"{func}: each rank holds only its slice of this reduced gradient, so this would give a "
        "different result on every rank. Norms, clip_grad_norm_, scaling by a number and "
        "GradScaler work on it. To inspect gradients, use p.grad.local() (this rank's slice) or "
        "train with torch's optimizer and DDP's all-reduce."
    )


def _refuse_ddp() -> NoReturn:
    raise RuntimeError(
        "a DistributedDataParallel reduces the gradients of a fused optimizer that does not know "
        "it, and step() would reduce them once more: pass ddp=ddp to the optimizer, or call "
        "optimizer.attach(ddp), before the first backward; or train the bare module"
    )


def _vector_norm(
    grad: torch.Tensor,
    ord: float = 2,
    dim: object = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if dim is not None or keepdim:
        _refuse("norm along dimensions")
    if not isinstance(grad, ShardedGrad):
        raise RuntimeError(
            "norms of this rank's gradients and of reduced ones cannot be mixed: in manual mode "
            "call optimizer.reduce_gradients() first"
        )
    norm = grad.context.norm(grad, float(ord))
    if norm is None:
        raise RuntimeError(
            "this reduced gradient is no longer in the p.grad of a parameter of its optimizer, so "
            "its norm is not known; drop it, or give the parameter back to the optimizer"
        )
    return norm.to(dtype or grad.dtype)


def _norm(
    grad: torch.Tensor, p: float | None = 2, dim: object = None, keepdim: bool = False
) -> torch.Tensor:
    return _vector_norm(grad, 2 if p is None else p, dim or None, keepdim)


def _foreach_norm(
    grads: list[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    first = next(grad for grad in grads if isinstance(grad, ShardedGrad))
    extension = load_extension()
    alike = dtype is not None or len(extension.dtypes_of(grads)) == 1
    if alike and set(map(type, grads)) == {ShardedGrad}:
        each = first.context.norms_of(grads, float(ord))
        if each is not None:
            apart: list[torch.Tensor] = extension.scalars_of(
                each.to(dtype or first.dtype, copy=True)
            )
            return apart
    # torch's clipping asks for all gradients of a model together, of which some may be torch's own
    # optimizer's.
    norm = torch.linalg.vector_norm if clips_by_default() else _vector_norm
    return [
        _vector_norm(grad, ord, dtype=dtype)
        if isinstance(grad, ShardedGrad)
        else norm(grad, ord, dtype=dtype)
        for grad in grads
    ]


def _announce_change(gradient: ShardedGrad, doing: Doing, value: Factor = 0.0) -> None:
    """Announces a change of one gradient, if others have slices of it and no step has used it."""
    owner = gradient.context.joining()
    if owner is not None and gradient.holds_reduced() and not owner.stepped:
        owner.announce(doing, owner.number_of(gradient), value)


def _number(func: Callable[..., torch.Tensor], grad: torch.Tensor, other: Factor) -> torch.Tensor:
    if isinstance(other, torch.Tensor) and (other.dim() != 0 or isinstance(other, _Gradient)):
        _refuse(func)
    if not isinstance(grad, ShardedGrad):
        return func(grad, other)
    doing = Doing.MULTIPLY if func is torch.Tensor.mul_ else Doing.DIVIDE
    _announce_change(grad, doing, other)
    grad.context.note_factor([grad], other, doing)
    for part in grad.parts():
        func(part, other)
    grad.context.changed()
    return grad


_mul_ = functools.partial(_number, torch.Tensor.mul_)
_div_ = functools.partial(_number, torch.Tensor.div_)


def change(grad: torch.Tensor, doing: Doing, value: float) -> None:
    """Zeros, multiplies or divides a gradient."""
    if doing is Doing.ZERO:
        _zero_(grad)
    else:
        (_mul_ if doing is Doing.MULTIPLY else _div_)(grad, value)


def _zero_(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, ShardedGrad):
        return grad.zero_()
    _announce_change(grad, Doing.ZERO)
    # Ranks that have joined keep nothing that was reduced.
    context = grad.context
    owner = context.joining()
    grad.zero(unreduced=owner is not None and owner.mode.manual and owner.stepped)
    grad.context.forget_factors()
    grad.context.changed()
    return grad


def _foreach_mul_(grads: list[torch.Tensor], other: Factor) -> None:
    if isinstance(other, torch.Tensor) and (other.dim() != 0 or isinstance(other, _Gradient)):
        _refuse(torch.Tensor.mul_)
    found = load_extension().reduced_slices(grads, ShardedGrad)
    parts: list[torch.Tensor] = [] if found is None else found[0]
    contexts: list[GradContext] = [] if found is None else found[1]
    for grad in grads if found is None else ():
        if type(grad) is ShardedGrad:
            contexts += [grad.context] if grad.context not in contexts else []
            parts += grad.parts()
        else:
            parts.append(grad)
    for context in contexts:
        mine = [g for g in grads if type(g) is ShardedGrad and g.context is context]
        if context.joining() is not None:
            _announce_factor(context, mine, other)
        context.note_factor(mine, other)
    _scale(parts, other)
    for context in contexts:
        context.changed()


def _announce_factor(context: GradContext, grads: list[ShardedGrad], factor: Factor) -> None:
    if len(grads) == len(context.gradients()) and all(g.is_reduced() for g in grads):
        if not context.owner().stepped:
            context.owner().announce(Doing.MULTIPLY, value=factor)
        return
    for grad in grads:
        _announce_change(grad, Doing.MULTIPLY, factor)


def _foreach(one: Callable[..., object]) -> Callable[..., None]:
    def apply(grads: list[torch.Tensor], other: Factor | Sequence[float]) -> None:
        others = other if isinstance(other, (list, tuple)) else [other] * len(grads)
        for grad, factor in zip(grads, others, strict=True):
            one(grad, factor)

    return apply


def _foreach_zero_(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        _zero_(grad)


def _add_(grad: torch.Tensor, other: object, *, alpha: float = 1) -> torch.Tensor:
    # Autograd accumulates: a further backward before step(). Anybody may add to what is this
    # rank's gradient alone; nobody knows whether all ranks add the same to a reduced one.
    if (
        isinstance(grad, ShardedGrad)
        and (not grad.holds_reduced() or in_backward())
        and type(other) is torch.Tensor
        and alpha == 1
    ):
        grad.accumulate(other)
        grad.context.changed()
        return grad
    _refuse("add_")


def _copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(dst, _Gradient):
        raise RuntimeError(
            "the gradient that a fused optimizer has reduced would be overwritten. If two "
            "DistributedDataParallel modules share this parameter, put them into one"
        )
    # DDP copies gradients into its buckets.
    if isinstance(src, ShardedGrad) and called_by_engine(ShardedGrad.__torch_dispatch__.__code__):
        src.keep()
        src.rebound(dst)
        # Only what backward has added belongs there.
        added = src.unreduced()
        return dst.zero_() if added is None else dst.copy_(added)
    _refuse("copy_")


def _foreach_copy_(
    targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False
) -> None:
    for target, source in zip(targets, sources, strict=True):  # DDP with batched_grad_copy
        (_copy_ if isinstance(source, _Gradient) else torch.Tensor.copy_)(target, source)


def unscale_(
    grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    parts = [grad.local() if isinstance(grad, ShardedGrad) else grad for grad in grads]
    # An overflow in any rank's slice stops all of them.
    first = next(grad for grad in grads if isinstance(grad, ShardedGrad))
    context: GradContext = first.context
    owner = context.joining()
    if owner is not None:
        owner.announce(Doing.UNSCALE, owner.number_of(first), inv_scale)
    aten._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=context.group)
    context.changed()


_HANDLERS: dict[OpOverload, Callable[..., object]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _mul_,
    aten.mul_.Scalar: _mul_,
    aten.div_.Tensor: _div_,
    aten.div_.Scalar: _div_,
    aten.zero_.default: _zero_,
    aten._foreach_mul_.Scalar: _foreach_mul_,
    aten._foreach_mul_.Tensor: _foreach_mul_,
    aten._foreach_mul_.ScalarList: _foreach(_mul_),
    aten._foreach_div_.Scalar: _foreach(_div_),
    aten._foreach_zero_.default: _foreach_zero_,
    aten.add_.Tensor: _add_,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    aten.detach.default: lambda grad: grad,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale_,
}


# torch's clipping asks for all norms at once then, and multiplies all at once.
takes_foreach(ShardedGrad)


# How DDP fills its buckets.
_BY_DDP = frozenset({aten.copy_.default, aten.mul.out, aten.div.out, aten._foreach_copy_.default})


class SpentGrad(_Gradient):
    """The gradient of a parameter that was updated during backward (``overlap=True``).

    Whatever is asked of it raises, so that clipping or a check for infinities is not skipped
    silently, nor a forgotten ``zero_grad()``.
    """

    @staticmethod
    def __new__(cls, param: torch.Tensor, context: GradContext) -> SpentGrad:
        self: SpentGrad = cls._standing_for(param, context)
        return self

    def __init__(self, *args: object) -> None:
        super().__init__()

    @staticmethod
    def refuse_accumulation() -> NoReturn:
        raise RuntimeError(
            "overlap=True: a second backward without step() and zero_grad() between; the first one "
            "has already updated the parameters, and its gradients are gone. Accumulate under "
            "ddp.no_sync() before the synchronised backward, or use overlap=False"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is aten.detach.default:
            return args[0]
        if func is aten.add_.Tensor:
            cls.refuse_accumulation()
        if func is aten.zero_.default:
            raise RuntimeError("overlap=True: zero_grad() needs set_to_none=True, its default")
        if func is aten.copy_.default and not isinstance(args[0], _Gradient):
            # DDP rebuilds its buckets before zero_grad(), or fills one in a second backward.
            if in_backward():
                cls.refuse_accumulation()
            if called_by_engine(cls.__torch_dispatch__.__code__):
                args[1].rebound(args[0])
                return args[0].zero_()
        raise RuntimeError(
            f"{func}: with overlap=True the parameters were updated during backward and their "
            "gradients are gone, so clipping, checks and GradScaler cannot work; use overlap=False"
        )
