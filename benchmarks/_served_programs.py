"""Programs that ask for "gloo", or for nothing, each as its framework's users write it.

benchmarks/serve_gloo.py runs them, with FUSEDPG_SERVE_GLOO=1 and without. None of them names
fusedpg. Each notes numbers that a rank must find on both.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

RANK = int(os.environ.get("RANK", "0"))
WIDTH = 512


@dataclass(frozen=True)
class Program:
    title: str
    run: Callable[..., None]
    needs: str  # a module


PROGRAMS: dict[str, Program] = {}  # in the order of tables


def program(title: str, needs: str = "torch", name: str = "", **given: Any) -> Callable[..., Any]:
    """Registers a function as a program, by its own name unless there is another."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        PROGRAMS[name or run.__name__] = Program(title, functools.partial(run, **given), needs)
        return run

    return register


class Run:
    """What a program notes: seconds of its steps after the first two, and numbers."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.seconds = 0.0
        self.numbers: list[float] = []

    def steps(self, count: int, step: Callable[[int], Any]) -> None:
        for i in range(2):
            self._note(step(i))
        begin = time.perf_counter()
        for i in range(2, 2 + count):
            self._note(step(i))
        self.seconds += time.perf_counter() - begin

    def _note(self, value: Any) -> None:
        if value is not None:
            self.numbers.append(float(value))


class Imports:
    """Seconds that the main thread takes to load modules from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False
        # `import`, in Python and in C, and import_module() come here with a module that is new.
        self._load = importlib._bootstrap._find_and_load  # type: ignore[attr-defined]
        importlib._bootstrap._find_and_load = self._timed  # type: ignore[attr-defined]

    def _timed(self, *arguments: Any) -> Any:
        if self._inside or threading.current_thread() is not threading.main_thread():
            return self._load(*arguments)
        self._inside = True
        begin = time.perf_counter()
        try:
            return self._load(*arguments)
        finally:
            self._inside = False
            self.seconds += time.perf_counter() - begin


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(step: int, rank: int = RANK) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step * 64 + rank))


# --- torch: steps on a group, and the programs of the default group ---

Step = Callable[[int], Any]  # of a number; what a rank must find, too
Group = dist.ProcessGroup | None


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def training(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, rank: int | None = None
) -> Step:
    chosen = optimizer or adamw(module)
    mine = dist.get_rank() if rank is None else rank

    def step(i: int) -> float:
        loss = module(batch(i, mine)).square().mean()
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        return loss.item()

    return step


def ddp_steps(group: Group = None) -> Step:
    return training(nn.parallel.DistributedDataParallel(model(), process_group=group))


def zero1_steps(group: Group = None) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
    )
    return training(module, optimizer)


def fsdp2_steps(group: Group = None) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = None if group is None else dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    module = model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return training(fully_shard(module, mesh=mesh))


def tensor_parallel_steps(mesh: Any) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {str(2 * i): (RowwiseParallel if i % 2 else ColwiseParallel)() for i in range(4)}
    return training(parallelize_module(model(), mesh, styles), rank=0)


def pipeline_steps(group: Group = None, *, noted: bool = False) -> Step:
    """With the loss of all ranks' part at its end, or a barrier."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model()
    share = len(whole) // ranks
    part = whole[rank * share : (rank + 1) * share]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    optimizer, target = adamw(part), torch.zeros(16, WIDTH)

    def step(i: int) -> float | None:
        losses: list[torch.Tensor] | None = [] if noted else None
        if rank == 0:
            schedule.step(batch(i, 0))
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if not noted:
            dist.barrier(group=group)
            return None
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        dist.broadcast(total, ranks - 1)
        return total.item()

    return step


@program("DDP")
def ddp(run: Run) -> None:
    dist.init_process_group()
    run.steps(30, ddp_steps())


@program("FSDP1")
def fsdp1(run: Run) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    run.steps(30, training(FullyShardedDataParallel(model(), device_id=torch.device("cpu"))))


@program("FSDP2")
def fsdp2(run: Run) -> None:
    dist.init_process_group("gloo")
    dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    run.steps(30, fsdp2_steps())


@program("DTensor tensor parallel")
def tensor_parallel(run: Run) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    run.steps(30, tensor_parallel_steps(mesh))


@program("pipeline, 1F1B")
def pipeline(run: Run) -> None:
    dist.init_process_group("gloo")
    run.steps(20, pipeline_steps(noted=True))


@program("ZeroRedundancyOptimizer")
def zero1(run: Run) -> None:
    dist.init_process_group("gloo")
    run.steps(20, zero1_steps())


@program("DCP async_save, process", name="dcp_process", kind="PROCESS")
@program("DCP async_save, thread", name="dcp_thread", kind="THREAD")
def checkpoints(run: Run, kind: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("cpu:gloo")
    module = fully_shard(model())

    def step(i: int) -> float:
        future = dcp.async_save(
            {"model": module.state_dict()},
            checkpoint_id=run.scratch / f"step{i}",
            async_checkpointer_type=AsyncCheckpointerType[kind],
        )
        future.result()
        return float(i)

    run.steps(6, step)
    state = {"model": module.state_dict()}
    for value in state["model"].values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=run.scratch / "step3")
    run.numbers += [value.full_tensor().sum().item() for value in state["model"].values()]


# With TORCH_DISTRIBUTED_DEBUG=DETAIL.
program("DDP, TORCH_DISTRIBUTED_DEBUG=DETAIL", name="detail")(ddp)


@program("DDP, a rank dies, torchrun restarts")
def elastic(run: Run) -> None:
    """The first life of rank 1 ends in the middle; torchrun starts all ranks again."""
    dist.init_process_group()
    module = nn.parallel.DistributedDataParallel(model())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 1:
        module(batch(0))
        os._exit(1)
    run.steps(30, training(module))


# --- frameworks ---


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": self.model(x).square().mean()}


@program("accelerate launch --cpu", "accelerate")
def accelerate(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module = Loss()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(Samples(), batch_size=16)
    module, optimizer, data = accelerator.prepare(module, optimizer, data)
    batches = iter(data)

    def step(_: int) -> float:
        loss = module(**next(batches))["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    run.steps(30, step)
    accelerator.save_state(str(run.scratch / "accelerate"))


@program("HF Trainer", "transformers")
def trainer(run: Run) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step == 2:
                self.begin = time.perf_counter()
            elif state.global_step == 42:
                run.seconds += time.perf_counter() - self.begin

    hf = Trainer(
        model=Loss(),
        args=TrainingArguments(
            output_dir=str(run.scratch / "trainer"),
            use_cpu=True,
            max_steps=42,
            per_device_train_batch_size=16,
            save_steps=42,
            report_to=[],
            disable_tqdm=True,
            logging_steps=10,
            seed=0,
        ),
        train_dataset=Samples(),
        callbacks=[Clock()],
    )
    hf.train()
    run.numbers += [entry["loss"] for entry in hf.state.log_history if "loss" in entry]


@program('HF tp_plan="auto"', "transformers")
def tp_plan(run: Run) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = run.scratch / "llama"
    if RANK == 0:
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        LlamaForCausalLM(config).save_pretrained(path / "tmp")
        (path / "tmp").rename(path / "saved")
    while not (path / "saved").exists():
        time.sleep(0.05)
    llm = AutoModelForCausalLM.from_pretrained(path / "saved", tp_plan="auto")
    llm.eval()
    tokens = torch.arange(8)[None]

    def step(_: int) -> float:
        with torch.no_grad():
            return llm(tokens).logits.float().square().mean().item()

    run.steps(30, step)


@program("Lightning, ddp", "pytorch_lightning")
def lightning(run: Run) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loss()

        def training_step(self, data: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if index == 2:
                self.begin = time.perf_counter()
            loss = self.inner(**data)["loss"]
            run.numbers.append(loss.item())
            return loss

        def on_train_end(self) -> None:
            run.seconds += time.perf_counter() - self.begin

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    ranks = int(os.environ["WORLD_SIZE"])
    sampler = torch.utils.data.DistributedSampler(Samples(), ranks, RANK, shuffle=False)
    pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        use_distributed_sampler=False,
        max_steps=32,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=16, sampler=sampler))


def _deepspeed(run: Run, stage: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed(dist_backend="gloo")
    module = Loss()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(i: int) -> float:
        loss = engine(batch(i))["loss"]
        engine.backward(loss)
        engine.step()
        return loss.item()

    run.steps(20, step)


for number in range(4):
    register = program(f"DeepSpeed, ZeRO {number}", "deepspeed", f"deepspeed{number}", stage=number)
    register(_deepspeed)


@program("torchft ProcessGroupGloo, 3 quorums", "torchft")
def torchft(run: Run) -> None:
    from datetime import timedelta

    from torchft.process_group import ProcessGroupGloo

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    ranks = int(os.environ["WORLD_SIZE"])
    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for life in range(3):  # what a quorum of other replicas causes
        group.configure(f"{address}/life{life}", f"replica{RANK}", RANK, ranks)
        store.add(f"life{life}", 1)

        def step(i: int) -> float:
            t = batch(i).repeat(16, 1)
            options = dist.AllreduceOptions()
            group.allreduce([t], options).wait()
            return t.sum().item()

        run.steps(20, step)
    group.shutdown()


@program("ray.util.collective, 4 MiB", "ray")
def ray_collective(run: Run) -> None:
    """Its ranks are Ray's actors; this process only asks them."""
    import numpy as np
    import ray
    from ray.util import collective

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=1)
    class Actor:
        def setup(self, ranks: int, rank: int) -> None:
            self.rank = rank
            collective.init_collective_group(ranks, rank, "gloo", "mine")

        def go(self, count: int) -> tuple[float, float]:
            total = 0.0
            begin = time.perf_counter()
            for _ in range(count):
                data = np.full(1 << 20, self.rank + 1.0, np.float32)
                collective.allreduce(data, "mine")
                total += float(data[0])
            return time.perf_counter() - begin, total

    actors = [Actor.remote() for _ in range(2)]
    ray.get([actor.setup.remote(2, rank) for rank, actor in enumerate(actors)])
    for count in (2, 20):
        answers = ray.get([actor.go.remote(count) for actor in actors])
    run.seconds = max(seconds for seconds, _ in answers)
    run.numbers += [total for _, total in answers]
    ray.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    name, scratch = sys.argv[1], Path(sys.argv[2])
    run = Run(scratch)
    with tempfile.TemporaryDirectory() as unused:
        os.chdir(unused)
        imports = Imports()
        begin = time.perf_counter()
        PROGRAMS[name].run(run)
        whole = time.perf_counter() - begin
    if RANK == 0:
        kind = "none"
        if dist.is_initialized():
            kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        note = {"seconds": run.seconds, "whole": whole, "imports": imports.seconds}
        note |= {"numbers": run.numbers, "kind": kind}
        (scratch / "note.json").write_text(json.dumps(note))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
