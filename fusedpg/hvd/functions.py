"""Objects and whole states from one rank to all."""

from __future__ import annotations

import importlib.util
import io
import itertools
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from fusedpg.hvd._basics import ProcessSet, global_process_set, rank, synchronize
from fusedpg.hvd._operations import allgather, broadcast_, broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int
) -> None:
    """Overwrites tensors by the root's.

    Args:
        params: a dict, such as ``model.state_dict()``, or tensors, or pairs of names and tensors.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"hvd: broadcast_parameters takes a dict or a list, got {type(params)}")
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


def _dump(obj: object) -> Tensor:
    pickler = pickle
    if importlib.util.find_spec("cloudpickle"):  # also takes functions and classes of a script
        pickler = importlib.import_module("cloudpickle")
    buffer = io.BytesIO()
    pickler.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _load(tensor: Tensor) -> Any:
    # Ranks of a job trust each other, as in torch.distributed's object collectives.
    return pickle.loads(tensor.numpy().tobytes())


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, on all ranks; pickled on the way.

    Args:
        name: for several at once; by default "object".
    """
    name = "object" if name is None else name
    here = rank() == root_rank
    data = _dump(obj) if here else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = broadcast_(
        torch.tensor([data.numel()], device="cpu"), root_rank, f"{name}.sz", process_set
    )
    if not here:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if here else _load(data)


def allgather_object(
    obj: object, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, on all ranks; pickled on the way."""
    name = "object" if name is None else name
    data = _dump(obj)
    lengths = allgather(torch.tensor([data.numel()], device="cpu"), f"{name}.sz", process_set)
    everything = allgather(data, f"{name}.t", process_set)
    return [_load(part) for part in everything.split(lengths.tolist())]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrites an optimizer's state and options by the root's.

    Other than Horovod's, it makes no step to create state that is not there: the root says which
    tensors there are.

    Args:
        model: not needed.

    Raises:
        ValueError: for ``torch.optim.LBFGS``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("hvd: the state of torch.optim.LBFGS cannot be broadcast")
    if hasattr(optimizer, "_hvd_broadcast_state"):  # fused=True, whose state is in slices
        optimizer._hvd_broadcast_state(root_rank)
        return
    own = _plain(optimizer.state_dict())
    if not own["state"]:
        # Horovod's step leaves gradients of zeros, which programs may read afterwards.
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
    tensors: list[tuple[str, Tensor]] = []
    is_root = rank() == root_rank
    # Every rank has tensors of the root's shapes and types: the root its own, the others new ones.
    outline = broadcast_object(
        tree_map_only(Tensor, _Hole, own, is_leaf=_is_leaf), root_rank, "optimizer"
    )
    own_leaves = tree_leaves(own, is_leaf=_is_leaf) if is_root else itertools.repeat(None)
    leaves, structure = tree_flatten_with_path(outline, is_leaf=_is_leaf)
    values = []
    for (path, leaf), own_leaf in zip(leaves, own_leaves):
        if isinstance(leaf, _Hole):
            leaf = own_leaf if is_root else torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            tensors.append((f"optimizer{keystr(path)}", leaf))
        values.append(leaf)
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        # Without the class's own: a wrapped optimizer's handles are not concerned.
        torch.optim.Optimizer.load_state_dict(optimizer, tree_unflatten(values, structure))


def _plain(value: object) -> Any:
    """A state whose dictionaries are plain: a class of somebody's own may not travel."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value  # type: ignore[call-arg, call-overload]


def _is_leaf(value: object) -> bool:
    return type(value) not in (dict, list, tuple)


class _Hole:
    """Stands for a tensor while the rest of a state is sent."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
