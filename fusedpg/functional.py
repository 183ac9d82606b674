"""Functional operations on a group of the fused backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from fusedpg import _registration
from fusedpg._refusal import telling
from fusedpg._registration import BACKEND, load_extension
from fusedpg._types import GroupInfo, Stats

_F = TypeVar("_F", bound=Callable[..., Any])

_OPERATORS = torch.ops.fusedpg  # of csrc/c10d/ops.cpp, which a group has loaded


def _backend(group: dist.ProcessGroup | None) -> Any:
    """The ProcessGroupFused behind a group."""
    module = load_extension()
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    types = {device.type for device in group._device_types}
    device = torch.device("cpu" if "cpu" in types else "cuda")
    backend = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
    wrapped = getattr(backend, "wrapped_pg", None)
    backend = backend if wrapped is None else wrapped
    if not isinstance(backend, module.ProcessGroupFused):
        raise ValueError(
            f"this needs a group of backend {BACKEND!r}, found {type(backend).__name__}: create it "
            f'with init_process_group("{BACKEND}") or new_group(backend="{BACKEND}")'
        )
    return backend


def _is_ours(group: dist.ProcessGroup | None) -> bool:
    """True if this backend carries out all of a group's collectives, also if it serves "gloo"."""
    try:
        backend = _backend(group)
    except ValueError:
        return False
    # A served group's tensors on GPUs are Gloo's, if any rank has some.
    name = dist.get_backend(group)
    return name == BACKEND or (name == "gloo" and not backend.options._gloo_for_cuda)


def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The elements of a tensor that a rank reduces, updates and keeps optimizer state for.

    It depends on these three numbers alone, so checkpoints may rely on it: chunks of
    ``ceil(numel / world_size)`` rounded up to 32 elements, clipped to the end.

    Returns:
        ``(offset, length)`` in elements of the tensor flattened in memory order; the length may
        be 0.

    Raises:
        ValueError: unless ``numel >= 0`` and ``0 <= rank < world_size``.
    """
    return cast("tuple[int, int]", load_extension().shard_range(numel, world_size, rank))


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in the group's shared arena, which peers read and write in place.

    Collectives on it skip the staging copies. Local: never a collective. The tensor may outlive
    the group. A rank that is alone on its host has no arena: there it is ``torch.empty``.

    Args:
        size: as for ``torch.empty``.
        dtype: default ``torch.get_default_dtype()``.
        device: ``"cpu"``, or a GPU: there the arena is what the GPUs of all ranks see
            (``FUSEDPG_CUDA_ARENA_BYTES``), and ordinary memory where that is off or full.

    Raises:
        torch.OutOfMemoryError: when the arena (``FUSEDPG_ARENA_BYTES``) or the memory limit of the
            process is exhausted.
        ValueError: for another device or a group of another backend.
    """
    sizes = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return cast("torch.Tensor", _backend(group).empty(list(sizes), dtype, torch.device(device)))


def in_arena(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a tensor's storage lies in the group's arena (DDP's buckets do)."""
    return bool(_backend(group).in_arena(tensor))


def group_info(group: dist.ProcessGroup | None = None) -> GroupInfo:
    """Facts about a group on this rank.

    Keys: ``backend`` ("fused", or "gloo" where that is served), ``engine``
    ("shm", or between hosts "tcp"), ``world_size``, ``local_world_size``, ``local_ranks`` (of the
    group on this host), ``threads``, ``isa``, ``arena_reserved`` and ``arena_used`` (bytes),
    ``cuda_arena`` (bytes), ``sequence_number``, ``state`` ("ok" or "failed"); between hosts
    ``address``, where this rank listens, ``transport`` ("tcp") and, where there are some, once an
    operation has connected them, ``aggregators`` and ``aggregate`` (the latest choice between them
    and the ranks, and why); once a fused operation has run on a GPU also ``nccl_version`` and
    ``cuda_path`` ("stock", "ring" or "direct") of the latest one.
    """
    return cast("GroupInfo", _backend(group).info())


def stats(group: dist.ProcessGroup | None = None, *, reset: bool = False) -> Stats:
    """What this rank's calls have cost since the group began, or since the last reset.

    ``all_reduce``, ``sparse_all_reduce``, fused steps and fused functions are counted, and between
    hosts operations that only move data. ``reduce`` and ``reduce_scatter`` are not counted, nor
    inside a host operations that only move data.

    Returns:
        A dict by operation ("all_reduce", "sparse_all_reduce", ...) of dicts: ``calls``; ``paths``,
        calls by the way the data took ("one_shot", "staged", "direct", "block_sparse",
        "coordinates", "messages" between hosts); ``bytes_sent`` and
        ``bytes_received`` between this rank and its peers, through shared memory or a wire;
        ``messages_sent`` over a wire; and of calls that looked for blocks of zeros ``blocks``,
        ``blocks_present`` on this rank and ``blocks_union`` on any rank, with ``density`` and
        ``union_density`` as shares of ``blocks`` (None without). And under "waited" a dict by rank:
        the seconds for which this rank's collectives of CPU tensors have waited for that one,
        inside a host or for a message. ``send``, ``recv`` and ``monitored_barrier`` are not in it.
    """
    backend = _backend(group)
    result = cast("Stats", backend.stats())
    if reset:
        backend.reset_stats()
    return result


def all_reduce_(
    tensor: torch.Tensor,
    op: str | dist.ReduceOp.RedOpType = "sum",
    group: dist.ProcessGroup | None = None,
) -> None:
    """``dist.all_reduce`` as an operator of its own, which small tensors reach sooner.

    In place and synchronous, with the bits and the errors of ``dist.all_reduce``, and in one order
    with it. It is ``torch.ops.fusedpg.all_reduce_(tensor, op, group.group_name)``, which
    ``torch.compile`` keeps in its graph; nothing of ``torch.distributed``'s Python is in front of
    it.

    Args:
        tensor: dense, as for ``dist.all_reduce``, of any strides.
        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor", as in functional
            collectives, or a member of ``dist.ReduceOp`` of these.
        group: a group of the fused backend; default: the default group.

    Raises:
        ValueError: for arguments this rank can check alone.
        RuntimeError: for a tensor that requires grad, outside ``torch.no_grad()``: it has no
            derivative.
        torch.distributed.DistBackendError: when ranks disagree or a rank fails.

    Example::

        fusedpg.all_reduce_(logits, "max")
    """
    if not isinstance(op, str):
        op = str(getattr(op, "name", op)).lower()
    if group is None:
        group = dist.group.WORLD
        if group is None:
            group = dist.distributed_c10d._get_default_group()  # which says what to do
    elif cast("object", group) == dist.GroupMember.NON_GROUP_MEMBER:
        dist.distributed_c10d._warn_not_in_group("all_reduce_")
        return
    # torch.ops takes as long as the rest of a small call. Dynamo knows torch.ops alone.
    if not torch.compiler.is_dynamo_compiling():
        module = _registration._extension
        if module is not None and module.all_reduce_(tensor, op, group):
            return
    try:
        operator = _OPERATORS.all_reduce_.default
    except AttributeError:  # no group of ours has loaded it
        _backend(group)
        operator = _OPERATORS.all_reduce_.default
    operator(tensor, op, group.group_name)


def sparse_all_reduce(
    tensor: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    block_size: int | None = None,
    threshold: float = 0.0,
    residual: torch.Tensor | None = None,
    bitmap: torch.Tensor | None = None,
) -> dist.Work | None:
    """``dist.all_reduce`` that moves only the blocks in which some element is not zero.

    In place. Inside a machine the result is that of ``dist.all_reduce``, bit for bit (but for which
    NaN); between machines the order of additions may be another. A block counts as zero
    only if all its bits are 0, so -0.0 and NaN travel. What travels is the share d of blocks that a
    rank has, and back the share u that any rank has (OmniReduce, SIGCOMM 2021). Where u is so large
    that this does not pay, the whole tensor travels.

    Args:
        tensor: dense, on the CPU; float64, float32, bfloat16, float16, int64 or int32.
        op: SUM or AVG.
        group: a group of the fused backend; default: the default group.
        async_op: return a Work to wait for; arguments must stay untouched until then.
        block_size: elements of a block, 32 to 65536; None: the group's option. The same on all
            ranks.
        threshold: blocks without an element of a larger magnitude are not sent, but kept in
            ``residual``; 0 sends all that is not zero.
        residual: with ``threshold``, a contiguous tensor of as many elements and the same dtype,
            zeros at first, which belongs to this rank and this call site. It is added to
            ``tensor`` before, and receives what was not sent (error feedback), so that nothing is
            lost: sent + residual == tensor + old residual, bit for bit (but for -0.0).
        bitmap: this rank's choice of blocks, without a look at ``tensor``: contiguous bools, one
            for each block of ``tensor.reshape(-1)``. A block whose bool is False counts as +0.0,
            whatever it holds. Other ranks may have another bitmap, or none. Not with
            ``threshold``.

    Raises:
        ValueError: for arguments this rank can check alone.
        torch.distributed.DistBackendError: when ranks disagree or a rank fails.
    """
    with telling(group, tensor):
        work = _backend(group).sparse_all_reduce(
            tensor, op, block_size, threshold, residual, bitmap, async_op
        )
    return cast("dist.Work | None", work)


def quantized_all_reduce(
    tensor: torch.Tensor,
    block: int = 256,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """``dist.all_reduce`` by sums of integers, which are the same bits in any order.

    In place, on a group of any backend. ``block`` elements (of the tensor flattened row by row)
    share an exponent, the largest of all ranks; an element becomes an int32, and these are added
    (block floating point, after SwitchML, NSDI 2021). So the result has the same bits on all
    ranks, whatever the order in which ranks are added, and its error does not depend on it: see
    docs/reference/numerics.md for the bound. A block in which any rank has an infinity or NaN is
    NaN, all of it.

    Args:
        tensor: float32, bfloat16 or float16, of any shape and strides.
        block: elements of a block, at least 1. The same on all ranks.
        op: SUM or AVG.
        group: default: the default group.

    Raises:
        ValueError: for arguments this rank can check alone.
        TypeError: on all ranks, where they have other blocks, elements or types and as many blocks.
        torch.distributed.DistBackendError: when ranks disagree otherwise or a rank fails.

    Example::

        fusedpg.quantized_all_reduce(gradient, op=dist.ReduceOp.AVG)
    """
    from fusedpg.compress import _block_float, _numbers

    with telling(group, tensor):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError("quantized_all_reduce: tensor is a dense tensor")
        if tensor.dtype not in _block_float.DTYPES:
            names = ", ".join(str(dtype) for dtype in _block_float.DTYPES)
            raise ValueError(f"quantized_all_reduce: tensor is of {names}, found {tensor.dtype}")
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"quantized_all_reduce: op is SUM or AVG, got {op}")
        block = _numbers.whole("block", block, at_least=1, at_most=2**31 - 1)
        _block_float.sum_(tensor, block, group, average=op == dist.ReduceOp.AVG)


def _group_name(group: dist.ProcessGroup | None) -> str:
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    return group.group_name


_STATES = """
        params: full replicas, dense in memory, equal on all ranks: float32, float64, bfloat16 or
            float16 tensors; updated in place on every rank, to the same bits.
        grads: this rank's gradients, shaped as ``params``; read and never written. float64 goes
            with float64, the other types with each other; arithmetic is in float32 or float64."""

_OPTIONS = """
        lr: a number or a scalar tensor, read when the operation runs.
        maximize: ascend instead of descend.
        grad_scale: float32 scalar; gradients are divided by it (as ``torch.amp.GradScaler`` gives
            it).
        found_inf: float32 scalar; when it is non-zero on any rank, nothing is updated on all
            ranks, and it is 1 on all of them.
        master_params: this rank's float32 slices of bfloat16 or float16 ``params``; the update
            happens there and is rounded into ``params``. Empty: none.
        reduce: "mean" divides the summed gradients by the world size, "sum" does not.
        weight: with "mean", gradients are summed as ``weight * grad`` and divided by the sum of all
            ranks' weights: pass the local batch size for uneven data. On all ranks or on none.
        block_skip: (not LAMB) look for blocks of zeros in the gradients and skip them on the way
            to their owners; the numbers are the same. Blocks are of the group's ``block_size``. On
            all ranks or on none. Takes no effect on CPU tensors inside a machine with ``weight``,
            and on GPUs.
        group: a group of the fused backend; default: the default group.
        async_op: return a Work to wait for; arguments must stay untouched until then.

    Raises:
        ValueError: for arguments this rank can check alone.
        torch.distributed.DistBackendError: when ranks disagree or a rank fails.
    """

_SLICES = """
            1-D slices of each parameter flattened in memory (stride) order, of
            ``shard_range(param.numel(), world_size, rank)[1]`` elements"""


def _documented(text: str) -> Callable[[_F], _F]:
    """Sets the docstring, whose common parts stand once."""

    def set_doc(function: _F) -> _F:
        function.__doc__ = text.format(states=_STATES, slices=_SLICES, options=_OPTIONS)
        return function

    return set_doc


_COMMON = ("grad_scale", "found_inf", "reduce", "weight", "block_skip")


def _step(op: str, lists: int, arguments: dict[str, Any]) -> dist.Work | None:
    if torch.compiler.is_compiling():  # which knows the operator alone
        return _begin_step(op, lists, arguments)
    with telling(arguments["group"], *arguments.values()):
        return _begin_step(op, lists, arguments)


def _begin_step(op: str, lists: int, arguments: dict[str, Any]) -> dist.Work | None:
    """The operator ``op``, or where there is a Work, for which operators have no type, the method
    behind it.

    Args:
        lists: how many arguments, the first ones, are lists: params, grads, the states, and but
            for SGD the counters.
        arguments: the caller's, by name and in order. What has no other meaning is a
            hyperparameter, by the name that the operator has for it.
    """
    hyper = dict(arguments)
    tensors = [list(hyper.pop(name)) for name in list(hyper)[:lists]]
    if not tensors[0]:
        raise ValueError(f"{op}: params is empty")
    common = {name: hyper.pop(name) for name in _COMMON if name in hyper}
    common["master_params"] = list(hyper.pop("master_params"))
    if common["reduce"] not in ("mean", "sum"):
        raise ValueError(f'{op}: reduce must be "mean" or "sum", got {common["reduce"]!r}')
    group, async_op = hyper.pop("group"), hyper.pop("async_op")
    module = load_extension()
    if not async_op:
        packet = getattr(torch.ops.fusedpg, op)
        operator = packet.tensor_lr if isinstance(hyper["lr"], torch.Tensor) else packet.default
        operator(*tensors, group_name=_group_name(group), **hyper, **common)
        return None
    params, grads, *states = tensors
    steps = [] if op == "fused_sgd_" else states.pop()
    if op == "fused_sgd_":
        hyper["first_step"] = hyper.pop("is_first_step")
    elif op == "fused_adam_":
        hyper["decoupled"] = False
    common["mean"] = common.pop("reduce") == "mean"
    work = _backend(group).fused_step_(
        op, params, grads, states, steps, [module.Hyper(**hyper)], async_op=True, **common
    )
    return cast("dist.Work | None", work)


@_documented(
    """One SGD step as one collective: reduce-scatter, update of the owned slice, all-gather.

    Formula: ``torch.optim.SGD``'s (momentum as Sutskever et al. 2013). Arguments are those of
    ``torch._fused_sgd_``, but that every rank passes its own gradients.

    Args:{states}
        momentum_buffer_list: with ``momentum``, this rank's{slices}, in float32 (float64 for
            float64) or the type of the parameter; else empty.
        is_first_step: the momentum buffers hold nothing yet and become the gradient.{options}"""
)
def fused_sgd_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffer_list: Sequence[torch.Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float | torch.Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool = False,
    is_first_step: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    master_params: Sequence[torch.Tensor] = (),
    reduce: str = "mean",
    weight: float | None = None,
    block_skip: bool = False,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    return _step("fused_sgd_", 3, locals())


_ADAM = """
    Args:{states}
        exp_avgs, exp_avg_sqs: this rank's moments,{slices}, in float32 (float64 for float64) or
            the type of the parameter.
        max_exp_avg_sqs: likewise with ``amsgrad``, else empty.
        state_steps: one float32 scalar tensor each; incremented by the operation, unless an
            infinity was found.{options}"""


@_documented(
    """One Adam step as one collective: reduce-scatter, update of the owned slice, all-gather.

    Formula: Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1, weight decay as an L2 term, in the
    order of operations of ``torch._fused_adam_``, whose arguments these are.
"""
    + _ADAM
)
def fused_adam_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    state_steps: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    master_params: Sequence[torch.Tensor] = (),
    reduce: str = "mean",
    weight: float | None = None,
    block_skip: bool = False,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    return _step("fused_adam_", 6, locals())


@_documented(
    """One AdamW step as one collective: reduce-scatter, update of the owned slice, all-gather.

    Formula: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, in the order of
    operations of ``torch._fused_adamw_``, whose arguments these are.
"""
    + _ADAM
)
def fused_adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    state_steps: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    master_params: Sequence[torch.Tensor] = (),
    reduce: str = "mean",
    weight: float | None = None,
    block_skip: bool = False,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    return _step("fused_adamw_", 6, locals())


@_documented(
    """One LAMB step as one collective: reduce-scatter, update of the owned slice, all-gather.

    Formula: You et al. 2020 (arXiv:1904.00962), algorithm 2, with the identity for phi::

        u = m^ / (sqrt(v^) + eps) + weight_decay * x
        x -= lr * (|x| / |u|) * u

    Norms are of whole tensors: sums of squares in float64, over ranks in rank order. Where a norm
    is zero the ratio is 1.

    Args:{states}
        exp_avgs, exp_avg_sqs: this rank's moments,{slices}, in float32 (float64 for float64).
        state_steps: one float32 scalar tensor each; incremented by the operation, unless an
            infinity was found.
        trust_clip: limit the ratio to 1.
        always_adapt: use the ratio even where ``weight_decay`` is 0; without, it is 1 there.
        {options}"""
)
def fused_lamb_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    state_steps: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    trust_clip: bool = False,
    always_adapt: bool = False,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    master_params: Sequence[torch.Tensor] = (),
    reduce: str = "mean",
    weight: float | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    return _step("fused_lamb_", 5, locals())
