"""What goes through torch.distributed.checkpoint: the table in docs/guides/optimizers.md.

It keeps one rank's of tensors with equal keys. The oracle is what each rank has saved in a file of
its own.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import fusedpg.hvd as hvd
from fusedpg import compress
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce
from fuzz.plans import tiny
from harness import Context, on_ranks
from test_hvd import session
from test_plan_train import random_plan

Parts = dict[str, Any]


class Run:
    """Something that trains, and whose state a checkpoint is to bring back."""

    def __init__(self, context: Context) -> None:
        self.context = context
        torch.manual_seed(0)
        # More parameters than ranks, of several sizes: DCP alternates ranks to balance bytes.
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(5, 8))
        self.net: nn.Module = self.model  # what is called
        self.optimizer: Any = None
        self.steps = 0

    def loss(self) -> torch.Tensor:
        self.steps += 1
        x = torch.linspace(-1, 1, 32).view(4, 8) * (self.context.rank + self.steps)
        return self.net(x).square().sum()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self) -> Parts:
        """What is given to DCP."""
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def loaded(self, parts: Parts) -> None:
        """After ``dcp.load(parts)``."""
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )

    def own(self) -> Any:
        """This rank's own, for files and comparisons."""
        raise NotImplementedError


class Fused(Run):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.net = self.ddp = DistributedDataParallel(self.model)
        self.optimizer = self.made()

    def made(self) -> Any:
        return fusedpg.optim.AdamW(self.model.parameters(), lr=0.01, ddp=self.ddp)

    def own(self) -> Any:
        state = self.optimizer.local_state_dict()["state"]
        slices = {
            number: {k: v.local() if k != "step" else v for k, v in values.items()}
            for number, values in state.items()
        }
        return slices, dict(self.model.state_dict())


class FusedAlone(Fused):
    """The optimizer itself, which DCP asks."""

    def saved(self) -> Parts:
        if not self.optimizer.state:
            get_state_dict(self.ddp, self.optimizer)  # makes state to load into, as for torch's
        return {"model": self.ddp.module, "optimizer": self.optimizer}

    def loaded(self, parts: Parts) -> None:
        pass


class Wholes(Fused):
    """Whole tensors, the same on all ranks."""

    def saved(self) -> Parts:
        if not self.optimizer.state:
            get_state_dict(self.ddp, self.optimizer)
            self.step()
        whole = self.optimizer.full_state_dict(rank0_only=False)
        return {"model": self.ddp.module.state_dict(), "optimizer": whole}

    def loaded(self, parts: Parts) -> None:
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])


class OfTorch(Fused):
    def made(self) -> Any:
        return fusedpg.optim.from_torch(
            torch.optim.AdamW(self.model.parameters(), lr=0.01), self.ddp
        )


class Compressed(Run):
    PARAMS: ClassVar[Parts] = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.net = ddp = DistributedDataParallel(self.model)
        self.state = compress.from_params(
            self.PARAMS, named_parameters=self.model.named_parameters()
        )
        ddp.register_comm_hook(self.state, compress.hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def saved(self) -> Parts:
        return {"model": self.model.state_dict(), "compress": self.state}

    def loaded(self, parts: Parts) -> None:
        self.model.load_state_dict(parts["model"])

    def own(self) -> Any:
        return self.state.state_dict()["memory"], self.state.state_dict()["step"]


class CompressedDict(Compressed):
    """The state dict, made by the script."""

    def saved(self) -> Parts:
        return {"model": self.model.state_dict(), "compress": self.state.state_dict()}

    def loaded(self, parts: Parts) -> None:
        super().loaded(parts)
        self.state.load_state_dict(parts["compress"])


class Momentum(CompressedDict):
    PARAMS: ClassVar[Parts] = {"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.1}


class LowRank(Compressed):
    PARAMS: ClassVar[Parts] = {"compressor": "powersgd", "memory": "powersgd"}


class Signs(Compressed):
    PARAMS: ClassVar[Parts] = {"compressor": "signum", "memory": "none"}


class Server(Compressed):
    PARAMS: ClassVar[Parts] = {**Compressed.PARAMS, "communicator": "ps"}


class Horovod(Run):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(
            inner, named_parameters=self.model.named_parameters()
        )
        self.sampler = hvd.elastic.ElasticSampler(range(40))

    def step(self) -> None:
        super().step()
        self.sampler.record_batch(0, 4)

    def saved(self) -> Parts:
        return {**super().saved(), "sampler": self.sampler.state_dict()}

    def loaded(self, parts: Parts) -> None:
        super().loaded(parts)
        self.sampler.load_state_dict(parts["sampler"])

    def own(self) -> Any:
        state = self.optimizer.state_dict()["state"]
        return state, dict(self.model.state_dict()), self.sampler.state_dict()


@fusedpg.fuse
def momentum_step(g: Partial, w: Replicate, m: Shard, lr: float):
    m = 0.9 * m + all_reduce(g, "mean")
    return w - lr * m, m


class OwnOptimizer(Run):
    """A fused function's moments: slices, which SliceTensor says of them."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        rank, world_size = context.rank, context.world_size
        self.params = list(self.model.parameters())
        self.ranges = [fusedpg.shard_range(p.numel(), world_size, rank) for p in self.params]
        self.moments = [torch.zeros(length) for _, length in self.ranges]

    def step(self) -> None:
        self.loss().backward()
        with torch.no_grad():
            for p, m in zip(self.params, self.moments, strict=True):
                momentum_step.into((p, m), p.grad, p, m, lr=0.01)
                p.grad = None

    def saved(self) -> Parts:
        slices = [
            fusedpg.optim.SliceTensor(m, p.shape, p.stride(), offset)
            for m, p, (offset, _) in zip(self.moments, self.params, self.ranges, strict=True)
        ]
        return {"model": self.model.state_dict(), "moments": slices}

    def loaded(self, parts: Parts) -> None:
        pass

    def own(self) -> Any:
        return [m.clone() for m in self.moments], dict(self.model.state_dict())


class TensorParallel(Run):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.net = self.model = nn.Sequential(
            fusedpg.ColumnParallelLinear(8, 8), fusedpg.RowParallelLinear(8, 6)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def loss(self) -> torch.Tensor:
        self.steps += 1
        x = torch.linspace(-1, 1, 32).view(4, 8) * self.steps  # the same on all ranks
        return self.net(x).square().sum()

    def own(self) -> Any:
        local = [p.to_local().clone() for p in self.model.parameters()]
        state = self.optimizer.state_dict()["state"].values()
        return local, [values["momentum_buffer"].to_local() for values in state]


def tensors(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def check_equal(found: Any, expected: Any) -> None:
    a, b = tensors(found), tensors(expected)
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, (one, other)


def file_of(run: Run) -> Any:
    """This rank's own through a file: the oracle."""
    memory = io.BytesIO()
    torch.save(run.own(), memory)
    memory.seek(0)
    return torch.load(memory)


RUNS: list[type[Run]] = [
    CompressedDict, Compressed, Momentum, LowRank, Signs, Server, Fused, FusedAlone, Wholes,
    OfTorch, Horovod, OwnOptimizer, TensorParallel,
]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", RUNS)
@on_ranks(2)
def test_each_rank_gets_its_own_back(
    context: Context, kind: type[Run], asynchronous: bool, tmp_path: Path
) -> None:
    with session():
        run = kind(context)
        for _ in range(3):
            run.step()
        expected = file_of(run)
        parts = run.saved()
        if asynchronous:
            gloo = dist.new_group(backend="gloo")
            saving = dcp.async_save(parts, checkpoint_id=tmp_path / "c", process_group=gloo)
            run.step()  # what is saved is of before
            saving.result()
        else:
            dcp.save(parts, checkpoint_id=tmp_path / "c")
        fresh = kind(context)
        parts = fresh.saved()
        dcp.load(parts, checkpoint_id=tmp_path / "c")
        fresh.loaded(parts)
        if isinstance(fresh, Compressed):
            first, second = map(tensors, gathered(expected[0]))
            differ = [not torch.equal(*both) for both in zip(first, second, strict=True)]
            assert any(differ), "all ranks have kept the same, which shows nothing"
        check_equal(fresh.own(), expected)


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


@on_ranks(2, 3)
def test_a_state_of_compression_belongs_to_a_rank_and_a_number_of_ranks(
    context: Context, tmp_path: Path
) -> None:
    run = Compressed(context)
    run.step()
    mine = run.state.state_dict()
    # A file that all ranks load: what rank 0 has kept would count once a rank.
    file = io.BytesIO()
    torch.save(gathered(mine)[0], file)
    file.seek(0)
    of_rank_0 = torch.load(file)
    other = Compressed(context)
    if context.rank:
        whose = rf"rank {context.rank} of .*got the state dict of rank 0 of"
        with pytest.raises(ValueError, match=whose):
            other.state.load_state_dict(of_rank_0)
    other.state.load_state_dict(of_rank_0, memory=False)
    assert other.state.state_dict()["step"] == 1
    assert other.state.state_dict()["memory"] == {}
    with pytest.raises(ValueError, match=r"has 'memory' and rank \d of"):
        other.state.load_state_dict({**mine, "memory": {}})
    # At another number of ranks DCP finds nothing, and says what it has looked for.
    dcp.save({"compress": run.state}, checkpoint_id=tmp_path)
    more = f"rank {context.rank} of {context.world_size + 1}"
    with pytest.raises(BaseException, match=f"Missing key in checkpoint state_dict: .*{more}"):
        dcp.load({"compress": {more: None}}, checkpoint_id=tmp_path)
    # The way out that the guide has.
    saved: Any = {"compress": {f"rank 0 of {context.world_size}": None}}
    dcp.load(saved, checkpoint_id=tmp_path)
    other.state.load_state_dict(saved["compress"], memory=False)
    assert other.state.state_dict()["step"] == 1


@on_ranks(4)
def test_states_of_two_groups_do_not_meet(context: Context, tmp_path: Path) -> None:
    """Each of them has a rank 0 of 2."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[context.rank // 2]
    run = Run(context)
    run.net = ddp = DistributedDataParallel(run.model, process_group=group)

    def made() -> compress.State:
        return compress.from_params(Compressed.PARAMS, group=group)

    state = made()
    ddp.register_comm_hook(state, compress.hook)
    run.loss().backward()
    dcp.save({"compress": state}, checkpoint_id=tmp_path)
    fresh = made()
    dcp.load({"compress": fresh}, checkpoint_id=tmp_path)
    check_equal(fresh.state_dict()["memory"], state.state_dict()["memory"])


@on_ranks(2)
def test_optimizers_of_a_plan_refuse(context: Context, tmp_path: Path) -> None:
    """They number the parameters of this rank's stages."""
    from fusedpg.plan.train import Trainer

    model = tiny("gpt")
    plan = random_plan(model, 2, 3, widths=[1, 1])
    trainer = Trainer(plan, model)
    trainer.step(model.random_batch(plan.global_batch_size, torch.float32, 0))
    with pytest.raises(BaseException, match="numbers the parameters of this rank's stages"):
        dcp.save({"optimizer": trainer.optimizers[0]}, checkpoint_id=tmp_path)
    own = [copy.deepcopy(one.local_state_dict()) for one in trainer.optimizers]
    for optimizer, saved in zip(trainer.optimizers, own, strict=True):
        optimizer.load_state_dict(saved)
