"""An elastic training whose committed steps are part of its state (test_hvd_elastic.py).

What happens when is said by a plan, a JSON object in the variable PLAN:
    epochs, samples, batch, every: the training; a commit after so many steps
    wait: {epoch: ranks}: an epoch begins with so many ranks
    kill: {worker: steps}: which worker kills itself in which committed step's successor
    kill_meeting: {worker: meeting}: which worker kills itself when it has got a place
    late: {worker: seconds}: which worker takes longer to start
    fused: whether the optimizer is a fused one, each rank of which has a slice of the state
The last line of each rank is a JSON object of what it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fusedpg.hvd as hvd
from fusedpg.hvd import _membership

PLAN = json.loads(os.environ.get("PLAN", "{}"))
FOLDER = Path(sys.argv[-1])
WAIT_SECONDS = 60


def make_data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs @ torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)


def make_model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss_of(model: torch.nn.Module, data: Any, indices: list[int]) -> torch.Tensor:
    inputs, targets = data
    return ((model(inputs[indices]).squeeze(1) - targets[indices]) ** 2).mean()


def worker() -> int:
    membership = _membership.current()
    return -1 if membership is None else membership.worker


def kill_in_meeting() -> None:
    """Ends this worker between its place and its group, at one of its meetings."""
    meet = _membership.Membership.meet

    def fatal(self: _membership.Membership) -> None:
        meet(self)
        if PLAN.get("kill_meeting", {}).get(str(self.worker)) == self.meetings:
            os.kill(os.getpid(), signal.SIGKILL)

    _membership.Membership.meet = fatal  # type: ignore[method-assign]


def main() -> None:
    kill_in_meeting()
    time.sleep(PLAN.get("late", {}).get(os.environ.get(_membership.WORKER), 0))
    hvd.init()
    data = make_data(PLAN["samples"])
    model, optimizer = make_model(worker())
    fused = PLAN.get("fused", False)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), fused=fused)
    sampler = hvd.elastic.ElasticSampler(data[0], seed=5)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, history=[]
    )
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def wait_for(ranks: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while hvd.size() != ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{hvd.size()} ranks, not {ranks}")
            time.sleep(0.02)
            state.commit()

    def step(indices: list[int]) -> None:
        optimizer.zero_grad()
        loss_of(model, data, indices).backward()
        if PLAN.get("kill", {}).get(str(worker())) == len(state.history):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.history.append((state.epoch, hvd.allgather_object(indices)))

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < PLAN["epochs"]:
            FOLDER.joinpath(f"epoch{state.epoch}").touch()
            wait_for(PLAN.get("wait", {}).get(str(state.epoch), hvd.size()))
            left = list(sampler)
            size = PLAN["batch"]
            for number, first in enumerate(range(0, len(left), size), 1):
                indices = left[first : first + size]
                step(indices)
                sampler.record_batch(number, len(indices))
                if number % PLAN["every"] == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    if fused:
        optimizer.consolidate_state_dict(to=None)
    momentum = optimizer.state_dict()["state"]
    result = {
        "worker": worker(),
        "rank": hvd.rank(),
        "size": hvd.size(),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "momentum": [momentum[n]["momentum_buffer"].flatten().tolist() for n in range(2)],
        "history": state.history,
        "resets": resets,
    }
    print(json.dumps(result), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
