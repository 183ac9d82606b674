"""Checkpoints and memory of the fused optimizers."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
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
from checks.optim_script import Lamb
from checks.refused import refused
from harness import Context

BF16 = torch.bfloat16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.02, "betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "lamb": ("LAMB", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-4}),
}
STEPS = 5  # between checkpoints


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
        params = list(self.module.parameters())
        if name == "LAMB":
            self.optimizer: Any = Lamb(params, **arguments)
        else:
            self.optimizer = getattr(torch.optim, name)(params, foreach=False, **arguments)

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
        options = StateDictOptions(flatten_optimizer_state_dict=way == "dcp flat")
        state = {"optimizer": get_optimizer_state_dict(module, optimizer, options=options)}
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
        options = StateDictOptions(flatten_optimizer_state_dict=way == "dcp flat")
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


def before_first_step(context: Context, how: str) -> None:
    """A checkpoint of an SGD that has not stepped: the first step has no dampening."""
    module = Net()
    optimizer = fused(module, "momentum")
    reference = Reference("momentum")
    if how == "to torch":
        last = Reference("momentum")
        last.optimizer.load_state_dict(optimizer.full_state_dict(rank0_only=False))
        last.steps(0)
        module = last.module
    else:
        own = how == "own"
        state = optimizer.local_state_dict() if own else optimizer.full_state_dict(False)
        module = Net()
        optimizer = fused(module, "momentum")
        optimizer.load_state_dict(state)
        steps(context, module, optimizer, 0)
    reference.steps(0)
    reference.check(module)


def rank0_saves(context: Context, kind: str) -> None:
    """state_dict() is not a collective: only rank 0 calls it."""
    module = Net()
    optimizer = fused(module, kind)
    steps(context, module, optimizer, 0)
    if context.rank == 0:
        buffer = io.BytesIO()
        torch.save(optimizer.local_state_dict(), buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=True)
        assert equal(again, optimizer.local_state_dict())
        optimizer.load_state_dict(again)
    steps(context, module, optimizer, STEPS)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert bool((tensor == context.world_size).all())


def storages(value: Any) -> set[int]:
    """Where the tensors of a nested structure lie."""
    if isinstance(value, torch.Tensor):
        return {locals_of(value).untyped_storage().data_ptr()} - {0}
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return set()
    return set().union(*map(storages, items))


def input_untouched(context: Context, kind: str, form: str) -> None:
    """load_state_dict neither changes its argument nor keeps parts of it."""
    module = Net()
    optimizer = fused(module, kind)
    steps(context, module, optimizer, 0)
    if form == "own":
        state = copy.deepcopy(optimizer.local_state_dict())
    else:
        state = optimizer.full_state_dict(rank0_only=False)
    state["param_groups"][0]["lr"] = 0.01
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    assert equal(state, kept), "load_state_dict changed its input"
    steps(context, module, optimizer, STEPS)
    optimizer.param_groups[0]["lr"] = 0.5
    assert equal(state, kept), "steps changed what was loaded"
    held = storages([list(one.values()) for one in optimizer.state.values()])
    assert held.isdisjoint(storages(state))
    # And what was given out does not follow later steps, or says so by being local.
    full = optimizer.full_state_dict(rank0_only=False)
    assert held.isdisjoint(storages(full))


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


def masters(context: Context) -> None:
    """What the fp32 copies of half parameters are loaded from."""
    import fusedpg

    net = Net(BF16)
    optimizer = fused(net, "adamw", master_dtype=torch.float32)
    steps(context, net, optimizer, 0)
    for module_state in optimizer.local_state_dict()["state"].values():
        assert module_state["master_param"].dtype == torch.float32
        assert module_state["exp_avg"].dtype == torch.float32
    whole = optimizer.full_state_dict(rank0_only=False)
    assert any(
        not same(state["master_param"], state["master_param"].to(BF16).float())
        for state in whole["state"].values()
    ), "nothing is lost by rounding, so this shows nothing"
    # A checkpoint of torch has moments of the parameters' type and no masters.
    plain = Net(BF16)
    plain.load_state_dict(net.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.02)
    set_gradients(plain, 0, 0, 1)
    theirs.step()
    mine = fusedpg.optim.AdamW(plain.parameters(), lr=0.02, master_dtype=torch.float32)
    mine.load_state_dict(theirs.state_dict())
    for param in plain.parameters():
        offset, length = fusedpg.shard_range(param.numel(), context.world_size, context.rank)
        rounded = param.detach().flatten()[offset : offset + length].float()
        assert same(mine.state[param]["master_param"], rounded)
        assert mine.state[param]["exp_avg"].dtype == torch.float32
        assert float(mine.state[param]["step"]) == 1
    # model.load_state_dict after construction, to values that no master rounds to.
    late = Net(BF16)
    optimizer = fused(late, "sgd", master_dtype=torch.float32)
    steps(context, late, optimizer, 0)
    new = {name: torch.full_like(value, 7.0) for name, value in late.state_dict().items()}
    late.load_state_dict(new)
    for param in late.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in late.parameters():
        assert same(param.detach(), torch.full_like(param, 7.0 - 0.05))
        master = optimizer.state[param]["master_param"]
        assert bool(((master - (7.0 - 0.05)).abs() < 1e-6).all())


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


def writing(context: Context) -> None:
    """A write by rank 0 is seen by the others; a write outside is an error."""
    module = Net()
    optimizer = fused(module, "adamw", share_parameters=True)
    steps(context, module, optimizer, 0)
    with torch.no_grad(), optimizer.writing_parameters():
        if context.rank == 0:
            module.body.fill_(17)
    assert bool((module.body == 17).all())
    steps(context, module, optimizer, STEPS)
    assert not bool((module.body == 17).any())
    with torch.no_grad():
        module.body.mul_(1)
    try:
        steps(context, module, optimizer, 2 * STEPS)
    except RuntimeError as error:
        assert "writing_parameters" in str(error)
    else:
        raise AssertionError("a write outside step() went unnoticed")
    dist.barrier()


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


def other_kind(context: Context, saved: str, loads: str) -> None:
    """A state dict of another kind of optimizer is refused at once, and nothing has changed."""
    module = Net()
    theirs, ours = fused(module, saved), fused(module, loads)
    steps(context, module, theirs, 0)
    steps(context, module, ours, 0)
    state = theirs.full_state_dict(rank0_only=False)
    before = ours.full_state_dict(rank0_only=False)
    with refused(f"not {type(ours).__name__}'s", ValueError):
        ours.load_state_dict(state)
    after = ours.full_state_dict(rank0_only=False)
    assert before["param_groups"] == after["param_groups"]
    for number, values in before["state"].items():
        assert all(same(after["state"][number][key], value) for key, value in values.items())


def other_values(context: Context, kind: str, mode: str, how: str) -> None:
    """Ranks load state dicts whose values differ: the next step raises, and has moved nothing."""
    module = Net()
    net: Any = module if mode == "manual" else DistributedDataParallel(module, bucket_cap_mb=0.01)
    ddp = None if mode == "manual" else net
    optimizer = fused(module, kind, ddp=ddp, overlap=mode == "overlap")

    def step() -> None:
        loss = torch.zeros(())
        for i, param in enumerate(module.parameters()):
            loss = loss + (param * randn(3, i, numel=param.numel()).view_as(param)).sum()
        # DDP wants a forward of its own.
        module.forward = lambda: loss  # type: ignore[method-assign]
        net().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = optimizer.full_state_dict(rank0_only=False)
    other = copy.deepcopy(state)
    last = context.rank == context.world_size - 1
    key = "momentum_buffer" if kind == "momentum" else "exp_avg"
    if how == "value":
        # The last element belongs to the last rank alone.
        other["state"][1][key].view(-1)[0 if last else -1] += 1e-3
    optimizer.load_state_dict(other if last and how != "all" else state)
    if how == "one rank" and not last:
        optimizer.load_state_dict(optimizer.local_state_dict())
    before = [param.detach().clone() for param in module.parameters()]
    if how in ("all", "layout"):
        if how == "layout":
            for values in other["state"].values():
                if values[key].dim() == 4:
                    values[key] = values[key].contiguous(memory_format=torch.channels_last)
            optimizer.load_state_dict(other if last else state)
        step()
        step()
        return
    with refused("a state dict that was loaded", dist.DistBackendError):
        step()
    assert all(same(p.detach(), old) for p, old in zip(module.parameters(), before, strict=True))
    for param in module.parameters():
        param.grad = None
    if mode != "overlap":
        with refused("a state dict that was loaded", dist.DistBackendError):
            step()  # it does not go away by itself
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    step()
    step()
