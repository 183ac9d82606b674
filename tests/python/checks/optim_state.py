"""Checkpoints and memory of the fused optimizers."""

from __future__ import annotations

import copy
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, distance, randn, same
from checks.faults import rejoin
from checks.optim_script import in_one_process
from harness import Context

BF16 = torch.bfloat16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.02, "betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "lamb": ("LAMB", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-4}),
    "sgd": ("SGD", {"lr": 0.05}),
}
STEPS = 5  # between checkpoints
# Of ways by torch.distributed.checkpoint in which ranks keep their slices.
OPTIONS = {
    "dcp": StateDictOptions(),
    "dcp flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "dcp to CPU": StateDictOptions(cpu_offload=True),
    "dcp flat to CPU": StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True),
}


class Net(torch.nn.Module):
    """Some elements belong to the last ranks alone, some ranks own nothing of a tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.linear = torch.nn.Linear(37, 53)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.body = torch.nn.Parameter(torch.zeros(1021))
        for i, param in enumerate(self.parameters()):
            param.data.copy_(randn(99, i, numel=param.numel()).view_as(param))
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)
            self.linear.weight.data = self.linear.weight.data.t().contiguous().t()
        self.to(dtype)


def set_gradients(module: torch.nn.Module, step: int, rank: int, world_size: int) -> None:
    """Gradients whose mean over ranks does not depend on the number of ranks."""
    factor = 1 + 0.5 * (rank - (world_size - 1) / 2)
    for i, param in enumerate(module.parameters()):
        grad = randn(7, i, step, numel=param.numel()).view_as(param) * factor
        param.grad = torch.empty_like(param).copy_(grad)


def fused(module: torch.nn.Module, kind: str, **options: Any) -> Any:
    import fusedpg

    name, arguments = KINDS[kind]
    return getattr(fusedpg.optim, name)(module.parameters(), **arguments, **options)


def steps(context: Context, module: torch.nn.Module, optimizer: Any, begin: int) -> None:
    for step in range(begin, begin + STEPS):
        set_gradients(module, step, context.rank, context.world_size)
        optimizer.step()
        optimizer.zero_grad()


class Reference:
    """Training in one process with torch.optim, never interrupted."""

    def __init__(self, kind: str) -> None:
        self.module = Net()
        name, arguments = KINDS[kind]
        self.optimizer = in_one_process(name, self.module.parameters(), **arguments)

    def steps(self, begin: int) -> None:
        for step in range(begin, begin + STEPS):
            set_gradients(self.module, step, 0, 1)
            self.optimizer.step()

    def check(self, module: torch.nn.Module) -> None:
        named = dict(self.module.named_parameters())
        for name, param in module.named_parameters():
            assert distance(param.detach().float(), named[name].detach()) <= 1e-6, name


def save(way: str, path: str, context: Context, module: torch.nn.Module, optimizer: Any) -> None:
    folder = Path(path)
    if context.rank == 0:
        torch.save(module.state_dict(), folder / "model.pt")
    if way == "full":
        state = optimizer.full_state_dict()
        if context.rank == 0:
            torch.save(state, folder / "full.pt")
        else:
            assert state == {}
    elif way == "consolidate":
        optimizer.consolidate_state_dict(to=context.world_size - 1)
        if context.rank == context.world_size - 1:
            torch.save(optimizer.state_dict(), folder / "full.pt")
    elif way in ("dcp whole", "dcp offload"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=way == "dcp offload")
        state = get_optimizer_state_dict(module, optimizer, options=options)
        assert bool(state) == (way == "dcp whole" or context.rank == 0)
        if context.rank == 0:
            torch.save(state, folder / "full.pt")
    elif way in ("merge", "own"):
        torch.save(optimizer.local_state_dict(), folder / f"rank{context.rank}.pt")
        (folder / "size").write_text(str(context.world_size))
    else:
        state = {"optimizer": get_optimizer_state_dict(module, optimizer, options=OPTIONS[way])}
        leaves = torch.utils._pytree.tree_leaves(state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        assert all(hasattr(tensor, "local") for tensor in tensors), "slices became wholes"
        dcp.save(state, checkpoint_id=folder / "dcp")
    dist.barrier()


def load(way: str, path: str, context: Context, module: torch.nn.Module, optimizer: Any) -> None:
    import fusedpg

    folder = Path(path)
    module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    if way in ("full", "consolidate"):
        optimizer.load_state_dict(torch.load(folder / "full.pt", weights_only=True))
    elif way in ("dcp whole", "dcp offload"):
        whole = torch.load(folder / "full.pt", weights_only=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "dcp offload")
        if way == "dcp offload" and context.rank != 0:
            whole = {}
        set_optimizer_state_dict(module, optimizer, whole, options=options)
    elif way == "merge":
        size = int((folder / "size").read_text())
        files = [folder / f"rank{rank}.pt" for rank in range(size)]
        parts = [torch.load(file, weights_only=True) for file in files]
        optimizer.load_state_dict(fusedpg.optim.merge_state_dicts(parts))
    elif way == "own":
        file = folder / f"rank{context.rank}.pt"
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    else:
        options = OPTIONS[way]
        state = {"optimizer": get_optimizer_state_dict(module, optimizer, options=options)}
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_optimizer_state_dict(
            module, optimizer, optim_state_dict=state["optimizer"], options=options
        )
    dist.barrier()


def leg(
    context: Context, way: str, kind: str, source: str, target: str, number: int, lay: str
) -> None:
    """One part of a run: from a checkpoint, if any, and to the next."""
    module = Net(channels_last=lay == "channels_last")
    optimizer = fused(module, kind)
    reference = Reference(kind)
    if source:
        load(way, source, context, module, optimizer)
    for part in range(number + 1):
        reference.steps(part * STEPS)
    steps(context, module, optimizer, number * STEPS)
    reference.check(module)
    if target:
        save(way, target, context, module, optimizer)


def same_world(context: Context, way: str, kind: str, path: str, dtype: torch.dtype) -> None:
    """Interrupted or not: the same bits."""
    options: dict[str, Any] = {"master_dtype": torch.float32} if dtype == BF16 else {}
    runs = [Net(dtype) for _ in range(2)]
    optimizers = [fused(module, kind, **options) for module in runs]
    for module, optimizer in zip(runs, optimizers, strict=True):
        steps(context, module, optimizer, 0)
    save(way, path, context, runs[0], optimizers[0])
    resumed = Net(dtype)
    for param in resumed.parameters():
        param.data.fill_(3)
    optimizer = fused(resumed, kind, **options)
    load(way, path, context, resumed, optimizer)
    steps(context, resumed, optimizer, STEPS)
    steps(context, runs[1], optimizers[1], STEPS)
    assert digest(list(resumed.parameters())) == digest(list(runs[1].parameters()))
    mine, want = optimizer.local_state_dict(), optimizers[1].local_state_dict()
    assert equal(mine, want), (mine, want)


def locals_of(value: Any) -> Any:
    return value.local() if hasattr(value, "local") else value


def equal(a: Any, b: Any) -> bool:
    """Deeply, bit by bit."""
    if isinstance(a, torch.Tensor):
        a, b = locals_of(a), locals_of(b)
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def from_torch(context: Context, kind: str, after: int, how: str) -> None:
    """torch.optim -> fused -> torch.optim, against torch without interruption."""
    import fusedpg

    reference, start = Reference(kind), Reference(kind)
    for part in range(after):
        reference.steps(part * STEPS)
        start.steps(part * STEPS)
    if how == "fuse":
        optimizer: Any = fusedpg.optim.from_torch(start.optimizer)
    else:
        optimizer = fused(start.module, kind)
        given = start.optimizer.state_dict()
        kept = copy.deepcopy(given)
        optimizer.load_state_dict(given)
        assert equal(given, kept)
    steps(context, start.module, optimizer, after * STEPS)
    reference.steps(after * STEPS)
    reference.check(start.module)
    whole = optimizer.full_state_dict(rank0_only=False)
    last = Reference(kind)
    last.module.load_state_dict(start.module.state_dict())
    last.optimizer.load_state_dict(whole)
    last.steps((after + 1) * STEPS)
    reference.steps((after + 1) * STEPS)
    reference.check(last.module)
    named = list(reference.module.parameters())
    for i, param in enumerate(last.module.parameters()):
        mine, want = last.optimizer.state[param], reference.optimizer.state[named[i]]
        assert mine.keys() == want.keys()
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                assert distance(mine[key], value) <= 5e-6, (key, i)


def storages(value: Any) -> set[int]:
    """Where the tensors of a nested structure lie."""
    if isinstance(value, torch.Tensor):
        return {locals_of(value).untyped_storage().data_ptr()} - {0}
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return set()
    return set().union(*map(storages, items))


def foreign_slices(context: Context, path: str) -> list[str]:
    """Slices of another rank, another world size or another shape are refused."""
    module = Net()
    optimizer = fused(module, "adamw")
    steps(context, module, optimizer, 0)
    save("own", path, context, module, optimizer)
    before = copy.deepcopy(optimizer.local_state_dict())
    other = (context.rank + 1) % context.world_size
    texts = []
    state = torch.load(Path(path) / f"rank{other}.pt", weights_only=True)
    smaller = optimizer.local_state_dict()
    smaller["state"] = dict(smaller["state"])
    smaller["state"][0] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}
    for wrong in (state, smaller):
        try:
            optimizer.load_state_dict(wrong)
        except ValueError as error:
            texts.append(str(error))
        else:
            raise AssertionError("foreign slices were accepted")
    assert equal(optimizer.local_state_dict(), before), "a refused load changed something"
    dist.barrier()
    return texts


# --- memory ---------------------------------------------------------------------


def pss() -> float:
    """Proportional set size of this process, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss in smaps_rollup")


def map_large_blocks() -> None:
    """Freed memory goes back to the system at once (M_MMAP_THRESHOLD)."""
    ctypes.CDLL(None).mallopt(-3, 64 << 10)


def stack(width: int, depth: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))


def state_bytes(context: Context, kind: str, width: int, depth: int) -> tuple[int, int, int]:
    """Bytes of state as reported and as held, and the number of parameters."""
    module = stack(width, depth)
    optimizer = fused(module, kind)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
    )
    stats = optimizer.memory_stats()
    count = sum(param.numel() for param in module.parameters())
    # torch's SGD has no counters.
    steps = 0 if kind == "momentum" else 4 * len(list(module.parameters()))
    factor = 4 if kind == "momentum" else 8
    assert stats["parameters"] == 4 * count
    assert stats["unsharded_state"] == factor * count + steps
    assert "MiB" in optimizer.memory_summary()
    return stats["state"], held, count


def ddp_memory(context: Context, which: str, width: int, depth: int) -> float:
    """MiB that an optimizer adds to a process that trains with DDP."""
    import fusedpg

    map_large_blocks()
    group = context.oracle if which != "fused" else None
    ddp = DistributedDataParallel(
        stack(width, depth), process_group=group, gradient_as_bucket_view=True
    )

    def step(optimizer: Any) -> None:
        ddp(torch.ones(2, width)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):  # DDP rebuilds its buckets in the second
        step(None)
        ddp.zero_grad()
    before = pss()
    if which == "fused":
        optimizer: Any = fusedpg.optim.AdamW(ddp.parameters(), lr=1e-3, ddp=ddp)
    elif which == "torch":
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, foreach=False)
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3, foreach=False
        )
    for _ in range(3):
        step(optimizer)
    dist.barrier()
    after = pss()
    dist.barrier()
    del optimizer
    return after - before


def shared_memory(context: Context, share: bool, numel: int) -> float:
    """MiB of large parameters in this process."""
    import fusedpg

    map_large_blocks()
    # What the first optimizer imports and allocates is not to be measured.
    warm = Net()
    steps(context, warm, fused(warm, "sgd", share_parameters=share), 0)
    dist.barrier()
    before = pss()
    dist.barrier()
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(numel // 4)) for _ in range(4)])
    optimizer = fusedpg.optim.SGD(module.parameters(), lr=0.5, share_parameters=share)
    for param in module:
        assert bool((param == 1).all())  # touches every page
    dist.barrier()
    after = pss()
    dist.barrier()
    # Staging buffers come with the first step; they are no parameters.
    for param in module:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in module:
        assert bool((param == 0.5).all())
    dist.barrier()
    return after - before


def sharing(context: Context, with_ddp: bool) -> list[str]:
    """One copy of the parameters or one a rank: the same bits."""
    return [sharing_one(context, kind, with_ddp) for kind in KINDS]


def sharing_one(context: Context, kind: str, with_ddp: bool) -> str:
    answers = []
    for share in (False, True):
        module: Any = Net() if not with_ddp else stack(33, 3)
        ddp = DistributedDataParallel(module) if with_ddp else None
        optimizer = fused(module, kind, share_parameters=share, ddp=ddp)
        for step in range(STEPS):
            if ddp is None:
                set_gradients(module, step, context.rank, context.world_size)
            else:
                ddp(randn(step, context.rank, numel=4 * 33).view(4, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        answers.append(digest([param.detach() for param in module.parameters()]))
    assert answers[0] == answers[1]
    return answers[0]


def outlives(context: Context, share: bool) -> None:
    """Parameters stay readable when their group is gone."""
    module = Net()
    optimizer = fused(module, "adamw", share_parameters=share)
    steps(context, module, optimizer, 0)
    kept = [param.detach().clone() for param in module.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    del optimizer
    gc.collect()
    for param, old in zip(module.parameters(), kept, strict=True):
        assert same(param.detach(), old)
    rejoin(context, f"outlives {share}", list(range(context.world_size)))
    again = fused(module, "adamw")
    steps(context, module, again, STEPS)
    assert len(set(gather(digest(list(module.parameters()))))) == 1


def gather(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


# --- what must not be loaded ------------------------------------------------------------------


OTHER_KINDS = {
    ("adamw", "lamb"),
    ("lamb", "adamw"),
    ("lamb", "adam"),
    ("adamw", "momentum"),
    ("momentum", "adamw"),
    ("lamb", "sgd"),
    ("sgd", "lamb"),
}
