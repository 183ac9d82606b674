"""What a group does while something goes wrong: collectives whose results are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fuzz.calls import Wrong


class Traffic:
    """Turns of calls on one group; every result that comes is checked."""

    def __init__(self, kind: str, numel: int, arena: bool, group: Any = None) -> None:
        self.kind, self.numel, self.group = kind, numel, group
        self.size, self.me = dist.get_world_size(group), dist.get_rank(group)
        self.arena = arena
        self.tensors = [self._empty(numel) for _ in range(3)]
        self.whole = self._empty(numel * self.size)
        self.other = self._empty(numel * self.size)
        self.turns: dict[str, Callable[[int], None]] = {
            "sums": self._sums,
            "async": self._async,
            "gather": self._gather,
            "exchange": self._exchange,
            "messages": self._messages,
            "steps": self._steps,
        }

    def _empty(self, numel: int) -> torch.Tensor:
        import fusedpg

        if self.arena:
            return fusedpg.empty(numel, dtype=torch.float32, group=self.group)
        return torch.empty(numel, dtype=torch.float32)

    def memory(self) -> list[torch.Tensor]:
        return [*self.tensors, self.whole, self.other]

    def turn(self, number: int) -> None:
        """One turn; raises Wrong for a wrong number, and whatever the group raises."""
        kinds = list(self.turns)
        self.turns[kinds[number % len(kinds)] if self.kind == "mixed" else self.kind](number)

    def _expect(self, tensor: torch.Tensor, value: float, what: str) -> None:
        if not bool((tensor == value).all()):
            bad = (tensor != value).nonzero().flatten()
            raise Wrong(
                f"{what}: {len(bad)} of {tensor.numel()} elements are wrong, first at "
                f"{int(bad[0])}: {float(tensor[bad[0]])} and not {value}"
            )

    def _sums(self, number: int) -> None:
        tensor = self.tensors[number % 3].fill_(self.me + number % 50)
        dist.all_reduce(tensor, group=self.group)
        total = sum(range(self.size)) + self.size * (number % 50)
        self._expect(tensor, total, f"sum {number}")

    def _async(self, number: int) -> None:
        works = []
        for index, tensor in enumerate(self.tensors):
            tensor.fill_(self.me + index)
            works.append(dist.all_reduce(tensor, group=self.group, async_op=True))
        for index, (work, tensor) in enumerate(zip(works, self.tensors)):
            work.wait()
            total = sum(range(self.size)) + self.size * index
            self._expect(tensor, total, f"asynchronous sum {number}")

    def _gather(self, number: int) -> None:
        own = self.tensors[0].fill_(self.me + number % 50)
        dist.all_gather_into_tensor(self.whole, own, group=self.group)
        for rank, part in enumerate(self.whole.view(self.size, self.numel)):
            self._expect(part, rank + number % 50, f"gathering {number}")

    def _exchange(self, number: int) -> None:
        for rank, part in enumerate(self.whole.view(self.size, self.numel)):
            part.fill_(10 * self.me + rank + number % 50)
        dist.all_to_all_single(self.other, self.whole, group=self.group)
        for rank, part in enumerate(self.other.view(self.size, self.numel)):
            self._expect(part, 10 * rank + self.me + number % 50, f"exchange {number}")

    def _messages(self, number: int) -> None:
        right, left = (self.me + 1) % self.size, (self.me - 1) % self.size
        self.tensors[0].fill_(self.me + number % 50)
        work = dist.isend(self.tensors[0], group_dst=right, group=self.group)
        dist.recv(self.tensors[1], group_src=left, group=self.group)
        work.wait()
        self._expect(self.tensors[1], left + number % 50, f"message {number}")

    def _steps(self, number: int) -> None:
        import fusedpg

        param, grad = self.tensors[0].fill_(0), self.tensors[1].fill_(self.me + number % 50)
        fusedpg.fused_sgd_(
            [param],
            [grad],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            is_first_step=True,
            reduce="sum",
            group=self.group,
        )
        total = sum(range(self.size)) + self.size * (number % 50)
        self._expect(param, -total, f"step {number}")
