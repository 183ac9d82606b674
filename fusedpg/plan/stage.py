"""A pipeline stage of any width: its operators, what it receives and what it sends.

A value goes from the stage that computes it straight to every stage that uses it, however far that
is, and is divided anew on the way. Its gradient takes the way back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedpg import _collectives
from fusedpg.plan.config import Plan, PlanError
from fusedpg.plan.layout import Box, Layout, Piece, reshard, within
from fusedpg.plan.operators import Model, OperatorModule, Part
from fusedpg.plan.split_backward import backward_inputs
from fusedpg.tensor_parallel._epilogue import Place

# --- what the plan says about values, which all ranks compute alike -----------------------


@dataclass(frozen=True)
class Route:
    """A value's way from the stage that computes it to one that uses it."""

    number: int
    value: str
    source_stage: int
    target_stage: int
    source: Layout
    target: Layout
    shape: tuple[int, ...]  # whole
    differentiable: bool


class Placement:
    """The stage and devices of every operator, and the routes by which values travel."""

    def __init__(self, model: Model, plan: Plan) -> None:
        plan.check(model.names)
        self.model, self.plan = model, plan
        self.stage_of = [
            stage for stage, count in enumerate(plan.num_ops_in_each_stage) for _ in range(count)
        ]
        self.producer = {
            name: number for number, op in enumerate(model.operators) for name in op.outputs
        }
        for number, op in enumerate(model.operators):
            tp, _, algo, _ = self.degrees(number)
            inputs = [model.values[name] for name in op.inputs]
            if problem := op.problem(tp, algo, inputs):
                raise PlanError(problem)
        self.users: dict[str, list[int]] = {}
        for number, op in enumerate(model.operators):
            for name in op.inputs:
                self.users.setdefault(name, []).append(number)
        self.routes = self._routes()

    def degrees(self, number: int) -> tuple[int, int, int, bool]:
        """tp, dp, algo and recomputation of an operator."""
        plan, stage = self.plan, self.stage_of[number]
        index = number - plan.first_op(stage)
        return (
            plan.model_parallel_size_of_each_op[stage][index],
            plan.data_parallel_size_of_each_op[stage][index],
            min(plan.algo_of_each_op[stage][index], self.model.operators[number].ways - 1),
            bool(plan.recompute_ops[stage][index]),
        )

    def layout(self, number: int, split: int | None) -> Layout:
        tp, dp, _, _ = self.degrees(number)
        return Layout(tuple(self.plan.devices(self.stage_of[number])), tp, dp, split)

    def wanted(self, number: int, position: int) -> Layout:
        """The layout in which an operator takes its input at `position`."""
        algo = self.degrees(number)[2]
        return self.layout(number, self.model.operators[number].splits(algo)[0][position])

    def given(self, name: str) -> Layout:
        """The layout in which a value's operator leaves it."""
        number = self.producer[name]
        op, algo = self.model.operators[number], self.degrees(number)[2]
        return self.layout(number, op.splits(algo)[1][op.outputs.index(name)])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the value of a whole micro-batch."""
        return (self.plan.micro_batch_size, *self.model.values[name].shape)

    def _routes(self) -> list[Route]:
        found: list[Route] = []
        for name, producer in self.producer.items():
            source = self.stage_of[producer]
            seen = {source}
            for user in self.users.get(name, []):
                target = self.stage_of[user]
                if target in seen:
                    continue
                seen.add(target)
                # Divided as its first user there takes it.
                layout = self.wanted(user, self.model.operators[user].inputs.index(name))
                route = (len(found), name, source, target, self.given(name), layout)
                differentiable = self.model.values[name].differentiable
                found.append(Route(*route, self.shape(name), differentiable))
        return found

    def rank_sets(self) -> list[tuple[int, ...]]:
        """The ranks of every group that the plan needs, in an order that all ranks share."""
        found = set()
        for stage in range(self.plan.num_stages):
            found.add(tuple(self.plan.devices(stage)))
        for number in range(len(self.model.operators)):
            devices = tuple(self.plan.devices(self.stage_of[number]))
            tp, dp, _, _ = self.degrees(number)
            found.update(devices[d * tp : (d + 1) * tp] for d in range(dp))
            found.update(devices[t::tp] for t in range(tp))
        return sorted(found)


# --- groups and messages ------------------------------------------------------------------

Sent = tuple[dist.Work, Tensor]
"""A message's Work, and the tensor that has to stay until it is done."""

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_groups_world: dist.ProcessGroup | None = None


def groups(rank_sets: list[tuple[int, ...]]) -> Mapping[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of ranks; a collective. Groups are kept for the next plan."""
    global _groups_world
    world = dist.distributed_c10d._get_default_group()
    if _groups_world is not world:
        _groups.clear()
        _groups_world = world
        _groups[tuple(range(dist.get_world_size()))] = world
    # torch's default would be half an hour, whatever the default group has.
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    for ranks in rank_sets:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
    return _groups


@dataclass
class Move:
    """This rank's share of a change of layout."""

    shape: tuple[int, ...]  # of the block that it is to have; empty without one
    sends: list[tuple[int, tuple[slice, ...]]]
    receives: list[tuple[int, tuple[slice, ...], tuple[int, ...]]]
    own: tuple[tuple[slice, ...], tuple[slice, ...]] | None
    quiet: bool  # no rank sends anything

    @classmethod
    def of(cls, shape: tuple[int, ...], source: Layout, target: Layout, rank: int) -> Move:
        pieces = reshard(shape, source, target)
        had: Box = ()
        block: Box = ()
        if rank in source.devices:
            had = source.box(source.devices.index(rank), shape)
        if rank in target.devices:
            block = target.box(target.devices.index(rank), shape)

        def size(piece: Piece) -> tuple[int, ...]:
            return tuple(end - begin for begin, end in piece.box)

        away = [piece for piece in pieces if piece.source != piece.target]
        kept = [piece for piece in pieces if piece.source == piece.target == rank]
        return cls(
            tuple(end - begin for begin, end in block),
            [(p.target, within(p.box, had)) for p in away if p.source == rank],
            [(p.source, within(p.box, block), size(p)) for p in away if p.target == rank],
            (within(kept[0].box, had), within(kept[0].box, block)) if kept else None,
            not away,
        )


class Link:
    """One direction of a route: messages between ranks, in the order of micro-batches."""

    def __init__(self, route: Route, rank: int, dtype: torch.dtype, backward: bool) -> None:
        ends = (route.source, route.target)
        source, target = reversed(ends) if backward else ends
        self.move = Move.of(route.shape, source, target, rank)
        self.tag = 2 * route.number + backward
        self.dtype = dtype
        # Values by micro-batch that a rank with both stages leaves here for itself.
        self.own: dict[int, Tensor] = {}

    def send(self, x: Tensor, micro_batch: int) -> list[Sent]:
        sent = []
        for target, index in self.move.sends:
            part = x[index].contiguous()
            work = dist.isend(part, target, tag=self.tag)
            assert work is not None  # both ranks are in the group
            sent.append((work, part))
        if self.move.own is not None:
            self.own[micro_batch] = x[self.move.own[0]].clone()
        return sent

    def begin(self) -> Pending:
        """Posts the receives of the next micro-batch."""
        result = torch.empty(self.move.shape, dtype=self.dtype)
        parts = []
        for source, index, shape in self.move.receives:
            view = result[index]
            direct = view.is_contiguous()
            buffer = view if direct else torch.empty(shape, dtype=self.dtype)
            work = dist.irecv(buffer, source, tag=self.tag)
            assert work is not None
            parts.append((work, None if direct else index, buffer))
        return Pending(result, parts)

    def end(self, pending: Pending, micro_batch: int) -> Tensor:
        for work, index, buffer in pending.parts:
            work.wait()
            if index is not None:
                pending.result[index] = buffer
        if self.move.own is not None:
            pending.result[self.move.own[1]] = self.own.pop(micro_batch)
        return pending.result


@dataclass
class Pending:
    """A block that is on its way."""

    result: Tensor
    parts: list[tuple[dist.Work, tuple[slice, ...] | None, Tensor]]


def exchanged(x: Tensor, move: Move, group: dist.ProcessGroup | None) -> Tensor:
    """The block that this rank has after a change of layout among the ranks of a group."""
    result = x.new_empty(move.shape)
    if move.own is not None:
        result[move.own[1]] = x[move.own[0]]
    if move.quiet:
        return result
    ranks = dist.get_process_group_ranks(group)
    sends, receives = dict(move.sends), {rank: (i, size) for rank, i, size in move.receives}
    parts = [x[sends[rank]].reshape(-1) if rank in sends else x.new_empty(0) for rank in ranks]
    counts = [math.prod(receives[rank][1]) if rank in receives else 0 for rank in ranks]
    flat = x.new_empty(sum(counts))
    dist.all_to_all_single(
        flat, torch.cat(parts), counts, [part.numel() for part in parts], group=group
    )
    for rank, part in zip(ranks, flat.split(counts)):
        if rank in receives:
            index, shape = receives[rank]
            result[index] = part.view(shape)
    return result


# --- a stage ------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds of one iteration."""

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0  # for other stages
    optimizer: float = 0.0  # with the sum of gradients over data-parallel ranks

    @contextlib.contextmanager
    def add(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begin)


Held = dict[str, dict[Layout, Tensor]]
"""Values by name, in every layout that they have been brought to."""


@dataclass
class _Saved:
    """The state of a micro-batch between forward and backward."""

    received: list[tuple[Link, Tensor]]  # with the links that take the gradients back
    sent: list[tuple[Tensor, list[Link]]]  # with the links that bring the gradients
    loss: Tensor | None


class Stage:
    """A rank's part of one stage.

    Args:
        placement: of the whole plan.
        index: the stage's number.
        rank: in the default group.
        process_groups: of all sets of ranks that the plan needs.
        links: this rank's, by route and direction.
        dtype: of weights and of values that are floating-point numbers.
        seed: of the weights and of dropout.
    """

    def __init__(
        self,
        placement: Placement,
        index: int,
        rank: int,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        links: Mapping[tuple[int, bool], Link],
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        plan, model = placement.plan, placement.model
        self.placement, self.index, self.seed = placement, index, seed
        self.devices = tuple(plan.devices(index))
        self.position = self.devices.index(rank)
        self.rank = rank
        self.group = process_groups.get(self.devices)
        self.first = plan.first_op(index)
        self.operators = model.operators[
            self.first : self.first + plan.num_ops_in_each_stage[index]
        ]
        self.modules = [
            op.module(
                self._part(self.first + i, process_groups), dtype, mixed(seed, self.first + i)
            )
            for i, op in enumerate(self.operators)
        ]
        ways = [
            (route, links[route.number, False], links[route.number, True])
            for route in placement.routes
        ]
        self.incoming = [way for way in ways if way[0].target_stage == index]
        self.outgoing = [way for way in ways if way[0].source_stage == index]
        self.runs = self._runs()
        self.times = Times()
        self.step = 0
        self._saved: dict[int, _Saved] = {}
        self._later: dict[int, list[Callable[[], None]]] = {}
        self._ahead: dict[tuple[str, int], list[Pending]] = {}
        self._moves: dict[object, tuple[Move, Move]] = {}

    def _part(
        self, number: int, process_groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    ) -> Part:
        tp, dp, algo, _ = self.placement.degrees(number)
        d, t = divmod(self.position, tp)
        beside = self.devices[d * tp : (d + 1) * tp]
        across = self.devices[t::tp]
        place = Place(process_groups[beside]) if tp > 1 else None
        return Part(tp, dp, t, d, place, process_groups[across] if dp > 1 else None, algo)

    def _runs(self) -> list[tuple[bool, range]]:
        """Runs of operators that are recomputed together, or not at all."""
        flags = (self.placement.degrees(self.first + i)[3] for i in range(len(self.operators)))
        runs: list[tuple[bool, range]] = []
        for again, run in itertools.groupby(flags):
            first = runs[-1][1].stop if runs else 0
            runs.append((again, range(first, first + len(list(run)))))
        return runs

    def expect(self, kind: str, micro_batch: int) -> None:
        """Posts the receives of a pass, so that messages travel before it begins."""
        kind = "B" if kind == "I" else kind
        if kind == "W" or (kind, micro_batch) in self._ahead:
            return
        links = [there for _, there, _ in self.incoming]
        if kind != "F":
            links = [back for route, _, back in self.outgoing if route.differentiable]
        self._ahead[kind, micro_batch] = [link.begin() for link in links]

    # --- forward ---

    def forward(self, micro_batch: int, data: Mapping[str, Tensor]) -> list[Sent]:
        """The forward pass of a micro-batch, and the messages that it sends.

        Args:
            data: the whole micro-batch, which all ranks have.
        """
        self.expect("F", micro_batch)
        held: Held = {}
        received = []
        with self.times.add("waiting"):
            for (route, there, back), pending in zip(
                self.incoming, self._ahead.pop(("F", micro_batch))
            ):
                value = there.end(pending, micro_batch)
                if route.differentiable:
                    value.requires_grad_(torch.is_grad_enabled())
                    received.append((back, value))
                held[route.value] = {route.target: value}
        with self.times.add("forward"):
            for again, run in self.runs:
                if again and torch.is_grad_enabled():
                    self._recomputed(run, held, data, micro_batch)
                else:
                    self._compute(run, held, data, micro_batch)
        sent: list[Sent] = []
        ways: dict[str, list[Link]] = {}
        for route, there, back in self.outgoing:
            sent += there.send(held[route.value][route.source].detach(), micro_batch)
            if route.differentiable:
                ways.setdefault(route.value, []).append(back)
        outputs = [(held[name][self.placement.given(name)], back) for name, back in ways.items()]
        if torch.is_grad_enabled():
            self._saved[micro_batch] = _Saved(received, outputs, self._loss(held))
        self.loss = self._loss(held)
        return sent

    def _loss(self, held: Held) -> Tensor | None:
        """Each sample's, on the last stage."""
        last = self.first + len(self.operators) == len(self.placement.model.operators)
        return next(iter(held[self.operators[-1].outputs[0]].values())) if last else None

    def _compute(
        self, run: range, held: Held, data: Mapping[str, Tensor], micro_batch: int
    ) -> None:
        for i in run:
            op, module, number = self.operators[i], self.modules[i], self.first + i
            module.part.seed = mixed(self.seed, self.step, micro_batch, number)
            inputs = [
                self._input(number, at, name, held, data) for at, name in enumerate(op.inputs)
            ]
            outputs = module(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for name, output in zip(op.outputs, outputs, strict=True):
                held[name] = {self.placement.given(name): output}
            self._drop(held, number + 1)

    def _input(
        self, number: int, at: int, name: str, held: Held, data: Mapping[str, Tensor]
    ) -> Tensor:
        """A value as an operator takes it."""
        wanted = self.placement.wanted(number, at)
        if name in data:
            size = data[name].shape[0] // wanted.dp
            return data[name].narrow(0, self.position // wanted.tp * size, size)
        forms = held[name]
        if wanted not in forms:
            source, value = next(iter(forms.items()))
            key = (name, source, wanted)
            if key not in self._moves:
                shape = self.placement.shape(name)
                self._moves[key] = (
                    Move.of(shape, source, wanted, self.rank),
                    Move.of(shape, wanted, source, self.rank),
                )
            there, back = (
                functools.partial(exchanged, move=move, group=self.group)
                for move in self._moves[key]
            )
            forms[wanted] = _collectives.paired(value, there, back)
        return forms[wanted]

    def _recomputed(
        self, run: range, held: Held, data: Mapping[str, Tensor], micro_batch: int
    ) -> None:
        """Operators of which nothing is kept but the inputs of the first one."""
        made = {name for i in run for name in self.operators[i].outputs}
        used = {name for i in run for name in self.operators[i].inputs}
        names = [name for name in held if name in used - made]
        layouts = [next(iter(held[name])) for name in names]
        kept = [name for name in made if self._last_user(name) >= self.first + run.stop]
        kept.sort(key=self.placement.producer.__getitem__)
        step, modules = self.step, [self.modules[i] for i in run]

        def segment(*values: Tensor) -> tuple[Tensor, ...]:
            inside: Held = {
                name: {layout: value} for name, layout, value in zip(names, layouts, values)
            }
            # The second time is in the middle of another micro-batch.
            now, self.step = self.step, step
            try:
                self._compute(run, inside, data, micro_batch)
            finally:
                self.step = now
            return tuple(next(iter(inside[name].values())) for name in kept)

        results = checkpoint(
            segment,
            *(held[name][layout] for name, layout in zip(names, layouts)),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), _second_time(modules)),
        )
        for name, result in zip(kept, results, strict=True):
            held[name] = {self.placement.given(name): result}
        self._drop(held, self.first + run.stop)

    def _last_user(self, name: str) -> int:
        """The last operator that uses a value; the loss is used after all of them."""
        users = self.placement.users.get(name)
        return users[-1] if users else len(self.placement.model.operators)

    def _drop(self, held: Held, number: int) -> None:
        """Forgets what neither this operator of the model uses nor a later one."""
        for name in [name for name in held if self._last_user(name) < number]:
            del held[name]

    # --- backward ---

    def backward(self, micro_batch: int, scale: float, kind: str = "B") -> list[Sent]:
        """The backward pass of a micro-batch, and the messages that it sends.

        Args:
            scale: the gradient of what is trained with respect to a sample's loss.
            kind: "B"; "I" leaves the gradients of weights, as far as it can, to `weights`.
        """
        self.expect(kind, micro_batch)
        saved = self._saved.pop(micro_batch)
        brought: dict[Link, Tensor] = {}
        with self.times.add("waiting"):
            links = [back for route, _, back in self.outgoing if route.differentiable]
            for link, pending in zip(links, self._ahead.pop(("B", micro_batch))):
                brought[link] = link.end(pending, micro_batch)
        with self.times.add("backward"):
            tensors, gradients = [], []
            for tensor, back in saved.sent:
                gradient = brought[back[0]]
                for link in back[1:]:
                    gradient += brought[link]
                tensors.append(tensor)
                gradients.append(gradient)
            if saved.loss is not None:
                tensors.append(saved.loss)
                gradients.append(torch.full_like(saved.loss, scale))
            trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
            inputs = [value for _, value in saved.received]
            self._differentiate(
                micro_batch,
                [tensors[i] for i in trained],
                [gradients[i] for i in trained],
                inputs if kind == "I" else None,
            )
        sent: list[Sent] = []
        for link, value in saved.received:
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            sent += link.send(gradient, micro_batch)
        return sent

    def _differentiate(
        self,
        micro_batch: int,
        outputs: list[Tensor],
        gradients: list[Tensor],
        inputs: list[Tensor] | None,
    ) -> None:
        """All of a backward pass; or with `inputs`, what these need."""
        if not outputs:
            return
        whole = functools.partial(torch.autograd.backward, outputs, gradients)
        if inputs is None or any(again for again, _ in self.runs):
            # Each part would compute again what was not kept.
            whole()
        elif not inputs:
            self._later[micro_batch] = [whole]
        else:
            parameters = [p for module in self.modules for p in module.parameters()]
            later = backward_inputs(outputs, gradients, inputs, parameters)
            self._later[micro_batch] = [one.compute for one in later]

    def weights(self, micro_batch: int) -> None:
        """The gradients of weights that a backward pass of kind "I" has left."""
        with self.times.add("backward"):
            later = self._later.pop(micro_batch, [])
            while later:
                later.pop(0)()


@contextlib.contextmanager
def _second_time(modules: list[OperatorModule]) -> Iterator[None]:
    for module in modules:
        module.part.recomputing = True
    try:
        yield
    finally:
        for module in modules:
            module.part.recomputing = False


def mixed(*numbers: int) -> int:
    """One seed of several numbers; the same in every process."""
    return hash(numbers) & (2**62 - 1)
