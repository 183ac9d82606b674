"""Frameworks train, save, are killed and resume at another world size: the recipes of
docs/guides/frameworks.md, in processes of their own, against torch.optim on DDP with Gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import harness
from checks import frameworks
from harness import Context

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(240)]

ROOT = harness.ROOT
RECIPES = ROOT / "examples" / "frameworks"
# make test-frameworks sets it, after it has installed them.
REQUIRED = os.environ.get("FUSEDPG_TEST_FRAMEWORKS") == "1"
STEPS, SAVED, KILLED = 8, 4, 6


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        message = f"{module} is not installed: make test-frameworks (RAY=1 for ray)"
        pytest.fail(message) if REQUIRED else pytest.skip(message)


class Ranks:
    """The processes of a recipe, as torchrun starts them, but without its own start."""

    def __init__(
        self, recipe: str, size: int, folder: Path, *arguments: str, **environment: str
    ) -> None:
        self.losses = folder / f"losses{len(list(folder.iterdir()))}"
        self._store = harness.serve()
        common = {
            "OMP_NUM_THREADS": "1",
            **harness.environment_of(self._store),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch_extensions"),
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        paths = ["--checkpoint", str(folder / "checkpoint"), "--losses", str(self.losses)]
        command = [sys.executable, str(RECIPES / recipe), *paths, *arguments]
        self._logs = [folder / f"{self.losses.name}.log{rank}" for rank in range(size)]
        self._processes = []
        for rank, log in enumerate(self._logs):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                process = subprocess.Popen(command, env=own, stdout=file, stderr=file)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _fail(self, why: str) -> None:
        self.kill()
        logs = "\n".join(f"--- {log.name} ---\n{log.read_text()[-3000:]}" for log in self._logs)
        raise AssertionError(f"{why}\n{logs}")

    def lines(self) -> dict[int, float]:
        if not self.losses.exists():
            return {}
        whole = [line for line in self.losses.read_text().splitlines() if line.endswith("}")]
        return {line["step"]: line["loss"] for line in map(json.loads, whole)}

    def until(self, steps: int, seconds: float = 150.0) -> dict[int, float]:
        """The losses when there are so many."""
        end = time.monotonic() + seconds
        while len(self.lines()) < steps:
            if time.monotonic() > end or any(p.poll() is not None for p in self._processes):
                self._fail(f"{self.lines()} instead of {steps} steps")
            time.sleep(0.02)
        return self.lines()

    def wait(self, seconds: float = 150.0) -> dict[int, float]:
        end = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._fail("the recipe does not end")
            if process.returncode != 0:
                self._fail(f"exit status {process.returncode}")
        return self.lines()


def check(found: dict[int, float], first: int, clip: bool, rel: float = 2e-5) -> None:
    """Against torch.optim.AdamW on DDP with Gloo, two ranks, without interruption."""
    count = max(*found, STEPS) + 1
    want = harness.pool(2).run(frameworks.oracle, str(RECIPES), count, clip)[0]
    assert min(found) == first
    for step, loss in found.items():
        assert loss == pytest.approx(want[step], rel=rel), (step, found, want)


def killed_and_resumed(recipe: str, sizes: tuple[int, int], folder: Path, *arguments: str) -> None:
    clip = "--overlap" not in arguments
    endless = ["--steps", "1000000", "--save-at", str(SAVED)]
    with Ranks(recipe, sizes[0], folder, *endless, *arguments) as ranks:
        found = ranks.until(KILLED)
    check(found, 0, clip)
    again = ["--steps", str(STEPS), "--resume"]
    with Ranks(recipe, sizes[1], folder, *again, *arguments) as ranks:
        found = ranks.wait()
    assert set(found) == set(range(SAVED, STEPS))
    check(found, SAVED, clip)


CHAINS = [
    ("with_fabric.py", "lightning_fabric", (2, 3)),
    ("with_lightning.py", "pytorch_lightning", (2, 1)),
    ("with_accelerate.py", "accelerate", (2, 3)),
    ("with_hf_trainer.py", "transformers", (1, 2)),
]
OTHERS = [(2, 1), (2, 3), (1, 2)]


@pytest.mark.parametrize(("recipe", "module", "sizes"), CHAINS, ids=[c[1] for c in CHAINS])
def test_resumes_at_another_size(
    recipe: str, module: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    need(module)
    killed_and_resumed(recipe, sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "overlap"])
@pytest.mark.parametrize("sizes", OTHERS, ids=str)
@pytest.mark.parametrize(("recipe", "module"), [c[:2] for c in CHAINS], ids=[c[1] for c in CHAINS])
def test_resumes_at_every_size(
    recipe: str, module: str, sizes: tuple[int, int], mode: str, tmp_path: Path
) -> None:
    need(module)
    killed_and_resumed(recipe, sizes, tmp_path, *(["--overlap"] if mode == "overlap" else []))


def trained(context: Context) -> tuple[Any, Any, Any]:
    """The recipes' DDP module, and a fused optimizer after two steps."""
    sys.path.insert(0, str(RECIPES))
    import _task  # type: ignore[import-not-found]
    import torch

    import fusedpg

    data = _task.Samples()
    ddp = torch.nn.parallel.DistributedDataParallel(_task.Model())
    optimizer = fusedpg.optim.AdamW(_task.groups(ddp.module), lr=_task.LR)
    optimizer.attach(ddp)
    for step in range(2):
        sample = data[2 * step + context.rank]
        ddp(**{key: sample[key][None] for key in "xy"}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp, optimizer, _task


def check_saved(path: Path, optimizer: Any) -> None:
    import torch

    found, want = torch.load(path), optimizer.full_state_dict(rank0_only=False)
    assert found["param_groups"] == want["param_groups"]
    assert found["state"].keys() == want["state"].keys() and len(want["state"]) == 3
    for number, values in want["state"].items():
        for key, value in values.items():
            assert type(found["state"][number][key]) is torch.Tensor
            assert torch.equal(found["state"][number][key], value), (number, key)


def on_nodes(context: Context, apart: bool) -> None:
    """A launcher's variables: two nodes of one rank each, or one of two."""
    size = str(context.world_size)
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=size,
        LOCAL_RANK="0" if apart else str(context.rank),
        LOCAL_WORLD_SIZE="1" if apart else size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nobody asks there: the group exists
    )


def saves_by_accelerate(context: Context, folder: str, each_node: bool) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    on_nodes(context, each_node)
    config = ProjectConfiguration(save_on_each_node=each_node)
    accelerator = Accelerator(cpu=True, project_config=config)
    _, optimizer, _ = trained(context)
    wrapped = accelerator.prepare_optimizer(optimizer, device_placement=False)
    place = Path(folder) / str(context.rank)
    accelerator._optimizers = [wrapped]
    accelerator.save_state(str(place))
    torch.distributed.barrier()  # another rank's file is read, which may be being written
    writes = each_node or context.rank == 0
    assert (place / "optimizer.bin").exists() == writes
    check_saved((place if writes else Path(folder) / "0") / "optimizer.bin", optimizer)


@pytest.mark.parametrize("each_node", [False, True])
def test_accelerate_saves_where_it_writes(each_node: bool, tmp_path: Path) -> None:
    need("accelerate")
    with harness.Workers(2, oracle=False) as workers:
        workers.run(saves_by_accelerate, str(tmp_path), each_node)


def saves_by_trainer(context: Context, folder: str, each_node: bool) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    sys.path.insert(0, str(RECIPES))
    import _task

    import fusedpg

    on_nodes(context, each_node)
    model = _task.Model()
    optimizer = fusedpg.optim.AdamW(_task.groups(model), lr=_task.LR)
    place = Path(folder) / str(context.rank)

    class Attaching(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            optimizer.attach(self.model_wrapped)
            return super().training_step(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            return model(**inputs)

    trainer = Attaching(
        model=model,
        args=TrainingArguments(
            output_dir=str(place),
            use_cpu=True,
            max_steps=3,
            save_steps=2,  # and at the end
            per_device_train_batch_size=2,
            save_on_each_node=each_node,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=_task.Samples(),
        optimizers=(optimizer, None),
    )
    trainer.train()
    torch.distributed.barrier()
    writes = each_node or context.rank == 0
    for step in (2, 3):
        assert (place / f"checkpoint-{step}" / "optimizer.pt").exists() == writes
    file = (place if writes else Path(folder) / "0") / "checkpoint-3" / "optimizer.pt"
    check_saved(file, optimizer)


@pytest.mark.parametrize("each_node", [False, True])
def test_trainer_saves_where_it_writes(each_node: bool, tmp_path: Path) -> None:
    need("transformers")
    with harness.Workers(2, oracle=False) as workers:
        workers.run(saves_by_trainer, str(tmp_path), each_node)


@pytest.mark.parametrize("stage", [0, harness.slow(1)])
def test_deepspeed(stage: int, tmp_path: Path) -> None:
    """Its own ZeRO resumes at the same world size only."""
    need("deepspeed")
    sizes = (2, 2) if stage else (2, 3)
    killed_and_resumed("with_deepspeed.py", sizes, tmp_path, "--stage", str(stage))


@pytest.mark.slow
def test_ray(tmp_path: Path) -> None:
    need("ray")
    runs = [(2, 0, KILLED, ["--save-at", str(SAVED)]), (3, SAVED, STEPS, ["--resume"])]
    for size, first, steps, arguments in runs:
        # Ray starts the ranks itself; this is the driver.
        arguments = ["--ranks", str(size), "--steps", str(steps), *arguments]
        with Ranks("with_ray.py", 1, tmp_path, *arguments, RAY_USAGE_STATS_ENABLED="0") as driver:
            found = driver.wait()
        assert set(found) == set(range(first, steps))
        check(found, first, clip=True)


def test_torchft(tmp_path: Path) -> None:
    """A replica is killed, the other goes on, a new one takes over its slices."""
    need("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200)
    where = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()

    def start(number: int, folder: Path) -> Ranks:
        steps = ["--steps", "1000000", "--pause", "0.2", "--replica", str(number)]
        return Ranks("with_torchft.py", 2, folder, *steps, **where)

    try:
        with start(0, folders[0]) as first:
            with start(1, folders[1]) as second:
                second.until(4)
                first.until(4)
            count = len(first.lines())
            first.until(count + 4)
            with start(1, folders[2]) as third:
                third.until(4)
                begin = min(third.lines())
                first.until(begin + 4)
            assert begin > 0
            losses = [ranks.lines() for ranks in (first, second, third)]
    finally:
        lighthouse.shutdown()
    # One of the first two was there earlier.
    check(losses[0], min(losses[0]), clip=True, rel=1e-3)
    for step, loss in [*losses[1].items(), *losses[2].items()]:
        assert losses[0].get(step, loss) == loss, (step, losses)


def of_torchft(context: Context, address: str, kind: str) -> list[float]:
    """Three quorums of torchft's group between replicas; in the last one reduce_scatter, too."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from fusedpg import _serve_gloo

    _serve_gloo.serve_gloo(kind == "served")  # before torchft takes the class
    from torchft.process_group import ProcessGroupGloo

    from fusedpg.torchft import ProcessGroupFused

    found = []
    group: Any = (ProcessGroupFused if kind == "fused" else ProcessGroupGloo)(timedelta(seconds=30))
    try:
        for life in range(3):
            place = f"{address}/{kind}{life}", str(context.rank), context.rank, context.world_size
            group.configure(*place)
            t = torch.full((5,), context.rank + 1.0)
            group.allreduce([t], dist.AllreduceOptions()).wait()
            found.append(t.sum().item())
        kinds = {"fused": "ProcessGroupFused", "served": "ProcessGroupFused"}
        backend = group._pg._get_backend(torch.device("cpu"))
        assert type(backend).__name__ == kinds.get(kind, "ProcessGroupGloo")
        if kind == "fused":
            output, inputs = torch.empty(2), [torch.ones(2) * (i + 1) for i in range(2)]
            group.reduce_scatter([output], [inputs], dist.ReduceScatterOptions()).wait()
            found.append(output.sum().item())
        group.abort(errored=False)
    finally:
        _serve_gloo.serve_gloo(False)
    return found


@pytest.mark.parametrize("kind", ["gloo", "served", "fused"])
def test_torchft_group(kind: str) -> None:
    need("torchft")
    with harness.Workers(2, oracle=False) as workers:
        answers = workers.run(of_torchft, f"127.0.0.1:{workers.store.port}", kind)
    for rank, found in enumerate(answers):
        assert found == [15.0] * 3 + ([4.0 * (rank + 1)] if kind == "fused" else [])


RAY_COLLECTIVE = """
import sys
import numpy as np
import ray
from ray.util import collective
import fusedpg.ray

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=1)
class Actor:
    def go(self, rank):
        import fusedpg.ray
        import torch
        from ray.util import collective
        collective.init_collective_group(2, rank, "fused", "mine")
        data = np.full(1000, rank + 1.0, np.float32)
        collective.allreduce(data, "mine")
        part = np.zeros(2, np.float32)
        collective.reducescatter(part, [np.full(2, i + 1.0, np.float32) for i in range(2)], "mine")
        group = collective.collective.get_group_handle("mine")
        backend = group._pg._get_backend(torch.device("cpu"))
        return float(data[0]), float(part[0]), type(backend).__name__, group.backend()

actors = [Actor.remote() for _ in range(2)]
found = ray.get([actor.go.remote(rank) for rank, actor in enumerate(actors)])
assert found == [(3.0, 2.0 * (r + 1), "ProcessGroupFused", "FUSED") for r in range(2)], found
ray.shutdown()
"""


@pytest.mark.slow
def test_ray_collective() -> None:
    need("ray")
    done = subprocess.run(
        harness.python("-c", RAY_COLLECTIVE),
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_serves_a_llama() -> None:
    """The program of docs/guides/serve-llama.md: logits of the whole model, alike on all ranks."""
    need("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        str(RECIPES / "serve_llama.py"),
        "--check",
        "--tokens",
        "4",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},  # a rank's share
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks of 2 threads: the same 4 tokens on each" in done.stdout


def test_times_a_llama() -> None:
    """The benchmark of the documents: every arm gives the whole model's answer."""
    need("transformers")
    size = ["--width", "128", "--layers", "1", "--prompt", "8", "--rounds", "1", "--no-save"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/llm.py"), "--parts", "prefill", *size],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tp_plan on fused") == 2, done.stdout


def test_the_document_shows_the_recipes() -> None:
    text = (ROOT / "docs/guides/frameworks.md").read_text()
    shown = re.findall(r"```python\n# examples/frameworks/(\w+\.py)\n", text)
    assert set(shown) == {path.name for path in RECIPES.glob("with_*.py")}
