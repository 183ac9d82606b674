"""Subject: calls and tuning on groups that share ranks, with caches that differ."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.compiled import environment
from checks.fusion import (
    FUSED,
    REFERENCE,
    Case,
    Contributions,
    agree,
    compiled,
    shard,
    tensors,
)
from fusedpg.fusion import tune
from fuzz import functions
from fuzz.core import Choices, Pair, Tape, TapeChoices, done, draw_tape
from harness import Context, share_compiled

WHERE = ("3",)
EXAMPLES = 2
FOLDERS = ["all", "a", "b"]  # caches
SEED = 11  # of dropouts
SHAPES = [(1,), (7,), (64,), (1001,), (3, 5), (4, 33), (2, 3, 17), (0,), (0, 4), (300, 40)]


@dataclasses.dataclass
class Function:
    case: Case
    shapes: list[tuple[int, ...]]
    plain: Any
    fused: Any
    auto: Any
    graphs: dict[str, Any]


@dataclasses.dataclass
class Place:
    ranks: list[int]
    group: Any
    talk: Any  # Gloo, for the checks
    name: str


class Life:
    def __init__(self, context: Context, chosen: TapeChoices, groups: list[Place]) -> None:
        self.context, self.chosen, self.groups = context, chosen, groups
        self.open: list[Any] = []
        self.log: list[str] = []
        self.count = 0
        self.functions = [self._function() for _ in range(3)]
        place: list[Any] = [tempfile.mkdtemp(dir=context.scratch) if context.rank == 0 else None]
        for folder in FOLDERS if context.rank == 0 else ():
            (Path(place[0]) / folder).mkdir()
            share_compiled(Path(place[0]) / folder)
        dist.broadcast_object_list(place, group=context.oracle)
        self.root = Path(place[0])
        os.environ["FUSEDPG_CACHE_DIR"] = str(self.root / "all")

    def _function(self) -> Function:
        chosen = self.chosen
        case = functions.draw_case(chosen, smooth=True, flag=True)
        dtype = chosen.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
        text = case.text
        return Function(
            dataclasses.replace(case, dtype=dtype),
            chosen.sample([s for s in SHAPES if 0 not in s or 0 in case.shape], 3),
            compiled(text, REFERENCE),
            fusedpg.fuse(compiled(text, FUSED)),
            fusedpg.fuse(compiled(text, FUSED), schedule="auto"),
            {},
        )

    # --- one call ----------------------------------------------------------------------------

    def _drawn(self, f: Function, size: int) -> dict[str, Any]:
        shape, seed = self.chosen.choice(f.shapes), self.chosen.randrange(1 << 40)
        return tensors(dataclasses.replace(f.case, shape=shape, seed=seed), size)

    def _mine(self, drawn: dict[str, Any], size: int, rank: int) -> dict[str, Any]:
        mine = {key: v[rank] if isinstance(v, list) else v for key, v in drawn.items()}
        mine["m"] = shard(drawn["m"], size, rank)
        return {key: value.clone() for key, value in mine.items()}

    def _expected(
        self, f: Function, drawn: dict[str, Any], lr: float, flip: bool, grad: bool
    ) -> tuple[Any, dict[str, Any]]:
        """By torch, and the gradients of the weighted sum of the results."""
        leaves = {
            key: [t.clone().requires_grad_(grad) for t in (v if isinstance(v, list) else [v])]
            for key, v in drawn.items()
        }
        whole = {key: Contributions(v) if key in "gh" else v[0] for key, v in leaves.items()}
        results = f.plain(**whole, lr=lr, seed=SEED, flip=flip)
        grads: dict[str, Any] = {}
        if grad:
            loss = sum((self._weights(r) * r).sum() for r in results)
            if loss.requires_grad:
                loss.backward()
            grads = {key: [t.grad for t in v] for key, v in leaves.items()}
        return tuple(r.detach() for r in results), grads

    @staticmethod
    def _weights(result: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape)

    def check(self, got: Any, want: Any, place: Place, f: Function, what: str) -> None:
        size, rank = len(place.ranks), place.ranks.index(self.context.rank)
        assert len(got) == len(want), what
        for number, (x, full) in enumerate(zip(got, want)):
            note = f"result {number}, {what}"
            if x.shape == full.shape and (x.dim() != 1 or self._whole(f, number)):
                y = full
                found: list[Any] = [None] * size
                dist.all_gather_object(found, x.detach(), group=place.talk)
                for other in found:
                    assert torch.equal(other, x) or bool(x.isnan().any()), f"ranks differ: {note}"
            else:
                y = shard(full, size, rank)
            agree(x.detach(), y, f.case, False, note)

    def _whole(self, f: Function, number: int) -> bool:
        return self.layouts[number] == "Replicate"

    def call(self, place: Place) -> None:
        chosen = self.chosen
        f = chosen.choice(self.functions)
        size = len(place.ranks)
        drawn = self._drawn(f, size)
        lr, flip = chosen.choice([0.25, -1.5, 2, 0.0]), chosen.random() < 0.3
        auto = chosen.random() < 0.5
        mode = chosen.choice(["plain", "plain", "into", "async", "async into", "grad", "graph"])
        mode = "plain" if mode == "graph" and chosen.random() < 0.6 else mode
        tunes = chosen.random() < 0.4
        seconds, again = chosen.choice([0.0, 0.02, 0.2]), chosen.random() < 0.3
        keep = chosen.random() < 0.5
        if mode == "grad" and f.case.dtype != torch.float64:
            mode = "plain"
        if self.context.rank not in place.ranks:
            return
        rank = place.ranks.index(self.context.rank)
        mine = self._mine(drawn, size, rank)
        fused = f.auto if auto else f.fused
        what = (
            f"step {self.count}: {mode}, auto {auto}, tunes {tunes} {seconds} "
            f"{again}, {place.name}, {tuple(drawn['w'].shape)}, lr {lr} {flip}\n{f.case}"
        )
        want, grads = self._expected(f, drawn, lr, flip, mode == "grad")
        keys = {"lr": lr, "seed": SEED, "flip": flip}
        program = fused.program(**mine, **keys, group=place.group)
        self.layouts = [str(node.layout) for node in program.outputs]
        targets = None
        if "into" in mode:
            targets = []
            for node, full in zip(program.outputs, want):
                whole = str(node.layout) != "Shard"
                name = "w" if whole else "m"
                fits = mine[name].shape == (full.shape if whole else mine["m"].shape)
                if fits and not any(t is mine[name] for t in targets) and chosen_bit(self.count):
                    targets.append(mine[name])
                else:
                    shape = full.shape if whole else mine["m"].shape
                    targets.append(torch.full(shape, 7.0, dtype=f.case.dtype))
        if mode == "grad":
            mine = {key: value.requires_grad_() for key, value in mine.items()}
        if tunes:
            before = {key: value.detach().clone() for key, value in mine.items()}
            report = fused.tune(
                **mine, **keys, group=place.group, into=targets, seconds=seconds, again=again
            )
            for key, value in mine.items():
                assert torch.equal(value, before[key]), f"{key} changed by tuning: {what}"
            assert again <= (report.source == "timed"), what
        if mode == "graph":
            key = f"{auto} {place.name} {flip}"
            if key not in f.graphs:

                def traced(tensors: list[torch.Tensor], lr: float) -> Any:
                    return fused(*tensors, lr, SEED, flip, group=place.group)

                f.graphs[key] = torch.compile(traced, backend="eager")
            with torch.no_grad():
                got = f.graphs[key]([*mine.values()], lr)
        elif "into" in mode:
            got = fused.into(targets, **mine, **keys, group=place.group, async_op="async" in mode)
        else:
            got = fused(**mine, **keys, group=place.group, async_op="async" in mode)
        titles: list[Any] = [None] * size
        if tunes or auto:
            again_given = self._mine(drawn, size, rank)
            title = fused.schedule(**again_given, **keys, group=place.group).title
            dist.all_gather_object(titles, title, group=place.talk)
            assert len(set(titles)) == 1, f"{titles}: {what}"
        if "async" in mode:
            self.open.append((got, want, place, f, what, self.layouts))
            if not keep:  # those of other groups are waited for where all their ranks do
                self.wait(place)
            return
        if mode == "grad":
            self._gradients(got, grads, mine, place, what)
        self.check(got, want, place, f, what)

    def _gradients(self, got: Any, grads: Any, mine: Any, place: Place, what: str) -> None:
        size, rank = len(place.ranks), place.ranks.index(self.context.rank)
        given = []
        for layout in self.layouts:
            weights = self._weights(mine["w"])
            given.append(shard(weights, size, rank) if layout == "Shard" else weights)
        pairs = [(x, g) for x, g in zip(got, given) if x.requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g.reshape(x.shape) for x, g in pairs])
        for key, value in mine.items():
            full = grads[key][rank if key in "gh" else 0]
            if full is None or value.grad is None:
                zero = full if value.grad is None else value.grad
                assert zero is None or not bool(zero.any()), f"{key}: {what}"
                continue
            y = shard(full, size, rank) if key == "m" else full
            torch.testing.assert_close(
                value.grad, y, rtol=1e-8, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}\n{what}"
            )

    def wait(self, only: Place | None = None) -> None:
        for call in list(self.open):
            pending, want, place, f, what, self.layouts = call
            if only is None or place is only:
                self.open.remove(call)
                self.check(pending.wait(), want, place, f, what)

    # --- the caches --------------------------------------------------------------------------

    def caches(self) -> None:
        chosen = self.chosen
        kind = chosen.choice(["forget", "move", "damage", "swap"])
        who = [rank for rank in range(self.context.world_size) if chosen.random() < 0.5]
        how, folder = chosen.randrange(6), chosen.choice(FOLDERS)
        self.wait()
        dist.barrier(group=self.context.oracle)
        if self.context.rank in who:
            if kind == "forget":
                tune._memory.clear()
            elif kind == "move":
                os.environ["FUSEDPG_CACHE_DIR"] = str(self.root / folder)
            else:
                self._damage(kind, how)
        dist.barrier(group=self.context.oracle)

    def _damage(self, kind: str, how: int) -> None:
        place = Path(os.environ["FUSEDPG_CACHE_DIR"]) / "tuned"
        files = sorted(place.iterdir()) if place.is_dir() else []
        if kind == "swap" and files:
            texts = [file.read_bytes() for file in files if file.is_file()]
            for file, text in zip(files, texts[1:] + texts[:1]):
                if file.is_file():
                    file.write_bytes(text)
            return
        for file in files:
            if not file.is_file():
                continue
            if how == 0:
                file.write_bytes(b"")
            elif how == 1:
                file.write_bytes(bytes(range(256)))
            elif how == 2:
                file.write_text("\n\n")
            elif how == 3:
                file.write_text("as written\nof another program")
            elif how == 4:
                file.unlink()
                file.mkdir()
            else:
                file.write_text("x" * 100_000)
        tune._memory.clear()

    def run(self) -> Iterator[Pair]:
        while self.chosen.left > 0:
            self.count += 1
            yield done(f"step {self.count}")
            place = self.chosen.choice(self.groups)
            kind = self.chosen.random()
            if kind < 0.12:
                self.caches()
            elif kind < 0.2:
                self.wait()
            else:
                self.call(place)
        self.wait()


def chosen_bit(number: int) -> bool:
    return number % 3 != 0


def everyone(context: Context, value: Any) -> list[Any]:
    """What each rank passes."""
    found: list[Any] = [None] * context.world_size
    dist.all_gather_object(found, value, group=context.oracle)
    return found


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 200, 500)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    size, chosen = context.world_size, program.choices()
    parts = [list(range(size))] + [[a, b] for a in range(size) for b in range(a + 1, size)]
    parts += [[1]] if size > 1 else []
    groups = []
    for ranks in parts:
        group = dist.new_group(ranks, backend=context.backend)
        talk = dist.new_group(ranks, backend="gloo")
        groups.append(Place(ranks, group, talk, f"fused {ranks}"))
    groups.append(Place(parts[0], context.oracle, groups[0].talk, "gloo"))
    mode = chosen.choice(["eager", "eager", "compiled"])
    torch._dynamo.reset()
    tune._memory.clear()
    with environment(FUSEDPG_FUSION=mode, FUSEDPG_CACHE_DIR=context.scratch):
        yield from Life(context, chosen, groups).run()
    dist.barrier(group=context.oracle)
    for place in groups[:-1]:
        if context.rank in place.ranks:
            dist.destroy_process_group(place.group)
            dist.destroy_process_group(place.talk)
    assert everyone(context, chosen.left)
