"""Subject: functions of two pipeline stages, with several messages each, against one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.fusion import FUSED, REFERENCE, Contributions, compiled, shard
from checks.pipeline import Place, backends
from fuzz.core import Choices, Pair, Tape, done, draw_tape
from harness import Context

WHERE = ("4", "two of two", "crossed", "three and one")
EXAMPLES = 3
BOUND = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2, torch.bool: 0}
SHAPES = [(), (0,), (1,), (2,), (5,), (3, 0), (1, 1), (7, 33), (40,), (2, 3, 17), (70_001,)]
SENT = [
    "all_reduce(x{i}) * w{i}",
    "w{i} * 0.5 + 1",
    "reduce_scatter(x{i}, 'mean') + m{i}",
    "2 * all_gather(reduce_scatter(x{i}))",
    "torch.tanh(all_reduce(x{i}, 'mean')) - w{i}",
    "all_gather(m{i}) + w{i}",
    "all_reduce(x{i} * 3) + m{i}",
    "w{i}",
]
TAKEN = ["{r} * w{i}", "torch.tanh({r})", "{r} + all_reduce(x{i})", "{r} - m{i}", "{r}"]
WHOLE = [SENT[number] for number in (0, 1, 3, 4, 5, 7)]
PARTS = ["{r} - m{i}"]


@dataclasses.dataclass
class Message:
    number: int
    back: bool
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: str
    taken: str
    layout: str
    named: bool


class Stages:
    """The functions of two stages that send to each other."""

    def __init__(self, chosen: Choices, grad: bool, both: bool) -> None:
        count = chosen.randint(1, 4)
        tags: dict[bool, list[int]] = {
            back: chosen.sample([0, 1, 2, 3, 500, 16_383], count) for back in (False, True)
        }
        dtypes = [torch.float64] if grad else [torch.float64, torch.float32, torch.bfloat16]
        self.messages = []
        for number in range(count):
            shape = chosen.choice(SHAPES)
            flat = len(shape) > 0
            sent = chosen.choice(SENT if flat else [SENT[0], SENT[1], SENT[4]])
            taken = chosen.choice(TAKEN if flat else TAKEN[:3])
            back = both and chosen.random() < 0.5
            layout = chosen.choice(["None", "Replicate", "Shard"]) if flat else "None"
            self.messages.append(
                Message(
                    number,
                    back,
                    tags[back][number],
                    shape,
                    chosen.choice(dtypes),
                    sent,
                    taken,
                    layout,
                    chosen.random() < 0.5,
                )
            )
        recv_first = chosen.choice([None, 0, 1])
        self.texts = []
        self.functions = []
        for stage in (0, 1):
            mine = [m for m in self.messages if m.back == (stage == 1)]
            theirs = [m for m in self.messages if m.back != (stage == 1)]
            chosen.shuffle(theirs)
            arguments, sends, receives, results, layouts = [], [], [], [], []
            for m in self.messages:
                i = m.number
                arguments += [f"x{i}: Partial", f"w{i}: Replicate", f"m{i}: Shard"]
                arguments += [f"like{i}: Replicate"] if m in theirs else []
            dst, src = ("1", "1") if stage == 0 else ("0", "0")
            for m in mine:
                to = f"dst={dst}, " if m.named else ("dst=0, " if m.back else "")
                sends.append(f"t{m.number} = send({m.sent.format(i=m.number)}, {to}tag={m.tag})")
            for m in theirs:
                at = f"src={src}, " if m.named else ("src=1, " if m.back else "")
                r = f"recv(like{m.number}, {at}tag={m.tag})"
                receives.append(f"r{m.number} = {m.taken.format(r=r, i=m.number)}")
            lines = receives + sends if recv_first == stage else sends + receives
            for m in self.messages:
                results.append(f"t{m.number}" if m in mine else f"r{m.number}")
                layouts.append("None" if m in mine else m.layout)
            text = "\n    ".join(
                [
                    f"def program({', '.join(arguments)}) -> ({', '.join(layouts)},):",
                    *lines,
                    f"return {', '.join(results)},",
                ]
            )
            self.texts.append(text)
            self.functions.append(fusedpg.fuse(compiled(text, FUSED)))

    def drawn(self, draw: Any, size: int) -> dict[str, Any]:
        """Of both stages, as the full tensors."""
        made: dict[str, Any] = {}
        for m in self.messages:
            i = m.number
            for stage in (0, 1):
                made[f"x{i}", stage] = [draw(*m.shape).to(m.dtype) for _ in range(size)]
                made[f"w{i}", stage] = draw(*m.shape).to(m.dtype)
                made[f"m{i}", stage] = draw(*m.shape).to(m.dtype)
        return made

    def expected(self, drawn: dict[Any, Any]) -> list[torch.Tensor]:
        """What the receiving side of each message makes of it."""
        results = []
        for m in self.messages:
            sender, taker = (1, 0) if m.back else (0, 1)
            values = [
                {
                    name: Contributions(value) if isinstance(value, list) else value
                    for (name, stage), value in drawn.items()
                    if stage == s
                }
                for s in (sender, taker)
            ]
            scope = {**REFERENCE, "torch": torch}
            r = eval(m.sent.format(i=m.number), scope, values[0])
            scope["r"] = r.to(m.dtype)
            results.append(eval(m.taken.format(r="r", i=m.number), scope, values[1]))
        return results


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 100, 200)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    """Several calls of some pairs, in flight together."""
    for backend in backends(context):
        Play(context, backend, program).play()
        yield done(backend)


class Play:
    def __init__(self, context: Context, backend: str, program: Tape) -> None:
        self.context, self.backend = context, backend
        self.chosen = program.choices()
        self.place = Place(context, backend, 2, 40)
        generator = torch.Generator().manual_seed(self.chosen.getrandbits(24))
        self.draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        self.open: list[Any] = []

    def play(self) -> None:
        chosen = self.chosen
        plan = []
        for _ in range(2):
            grad = chosen.random() < 0.5
            plan.append((grad, Stages(chosen, grad, both=chosen.random() < 0.4)))
        for call in range(7):
            grad, pair = chosen.choice(plan)
            grad = grad and chosen.random() < 0.8
            two_way = {m.back for m in pair.messages} == {True, False}
            grad = grad and not two_way
            async_op, all_of_it = chosen.random() < 0.6, chosen.random() < 0.3
            self.call(call, pair, grad, async_op, chosen.choice(["default", "default", "whole"]))
            if chosen.random() < 0.4:
                self.sum(chosen.random() < 0.5)
            if all_of_it:
                self.end()
        self.end()
        self.place.close()

    def sum(self, everyone: bool) -> None:
        """A collective of the stage, or of all ranks, beside the messages."""
        place, size = self.place, self.context.world_size if everyone else self.place.size
        of_all = self.context.oracle if self.backend == "gloo" else None
        parts = [self.draw(7, 33) for _ in range(size)]
        total = parts[self.context.rank if everyone else place.rank].clone()
        dist.all_reduce(total, group=of_all if everyone else place.group)
        torch.testing.assert_close(total, sum(parts[1:], parts[0]))

    def end(self) -> None:
        # In any order, but alike on all ranks.
        self.chosen.shuffle(self.open)
        for finish in self.open:
            finish()
        self.open = []

    def call(self, number: int, pair: Stages, grad: bool, async_op: bool, how: str) -> None:
        place = self.place
        drawn = pair.drawn(self.draw, place.size)
        mine: dict[str, Any] = {}
        for m in pair.messages:
            i = m.number
            mine[f"x{i}"] = drawn[f"x{i}", place.stage][place.rank].clone()
            mine[f"w{i}"] = drawn[f"w{i}", place.stage].clone()
            mine[f"m{i}"] = shard(drawn[f"m{i}", place.stage], place.size, place.rank)
            if m.back != (place.stage == 1):
                mine[f"like{i}"] = torch.full(m.shape, float("nan"), dtype=m.dtype)
        what = (
            f"{self.backend}, call {number}, stage {place.stage}, grad {grad}, "
            f"async {async_op}, {how}\n{pair.texts[0]}\n{pair.texts[1]}\n"
            f"{[(m.shape, m.dtype) for m in pair.messages]}"
        )
        if grad:
            for value in mine.values():
                value.requires_grad_()
        function = pair.functions[place.stage]
        # As written, a slice is sent and taken as one, and both sides have to send alike.
        if how == "whole" and all(
            m.sent in WHOLE and m.taken not in PARTS and m.layout != "Shard" for m in pair.messages
        ):
            function = function.scheduled()
        try:
            got = function(**mine, **place.groups, async_op=async_op)
        except Exception as error:
            raise AssertionError(f"{what}\n{type(error).__name__}: {error}") from error
        leaves = drawn
        if grad:
            leaves = {
                key: [t.clone().requires_grad_() for t in v]
                if isinstance(v, list)
                else v.clone().requires_grad_()
                for key, v in drawn.items()
            }
        want = pair.expected(leaves)

        def finish() -> None:
            try:
                self.finish(pair, got.wait() if async_op else got, want, mine, leaves, grad)
            except Exception as error:
                raise AssertionError(f"{what}\n{type(error).__name__}: {error}") from error

        if async_op:
            self.open.append(finish)
        else:
            finish()

    def finish(self, pair: Stages, got: Any, want: Any, mine: Any, leaves: Any, grad: bool) -> None:
        place = self.place
        upstream = []
        for m, x, full in zip(pair.messages, got, want):
            if m.back == (place.stage == 1):
                assert x.shape == ()
                continue
            y = full.detach()
            # Where nothing else says so, a result with a Shard operand is one.
            sharded = (
                x.shape != full.shape
                or m.layout == "Shard"
                or (m.layout == "None" and m.taken == TAKEN[3])
            )
            y = shard(y, place.size, place.rank) if sharded else y
            assert x.dtype == m.dtype
            bound = BOUND[m.dtype]
            torch.testing.assert_close(x.detach(), y, rtol=bound, atol=bound)
            upstream.append((m, x, sharded))
        if not grad:
            return
        loss = sum((self.weights(full) * full).sum() for full in want)
        if loss.requires_grad:
            loss.backward()
        outputs, gradients = [], []
        for m, x in zip(pair.messages, got):
            if not x.requires_grad:
                continue
            outputs.append(x)
            if m.back == (place.stage == 1):
                gradients.append(torch.ones_like(x))
                continue
            sharded = next(s for n, _, s in upstream if n is m)
            w = self.weights(torch.empty(m.shape))
            gradients.append(shard(w, place.size, place.rank) if sharded else w)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        for name, value in mine.items():
            if name.startswith("like"):
                continue
            full = leaves[name, place.stage]
            full = full[place.rank] if isinstance(full, list) else full
            full = full.grad
            if full is None or value.grad is None:
                zero = full if value.grad is None else value.grad
                assert zero is None or not bool(zero.any()), name
                continue
            y = shard(full, place.size, place.rank) if name.startswith("m") else full
            torch.testing.assert_close(
                value.grad, y, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )

    @staticmethod
    def weights(like: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 2, like.numel(), dtype=torch.float64).reshape(like.shape)
