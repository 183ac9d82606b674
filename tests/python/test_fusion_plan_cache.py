"""Which calls of a fused function are like an earlier one, and what they give."""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import fusedpg
import harness
from checks.compiled import compiles
from checks.shortcuts import taken
from fusedpg import fusion
from fusedpg._registration import load_extension
from fusedpg.fusion.signature import Signature
from fuzz import core
from fuzz.core import Choices, Pair, done
from harness import Context

scale = 2.0  # what `update` reads from outside


def update(g: fusion.Partial, w: fusion.Replicate, lr: float, seed: int, flag: Any = False) -> Any:
    s = scale * fusion.all_reduce(g, "mean" if flag == "mean" else "sum")
    if flag is None:
        s = s + 1
    if flag == "product":
        s = s @ (w.t() @ w)
    return w - lr * fusion.dropout(torch.relu(s) if flag is True else s, 0.25, seed)


class Given:
    """Tensors of a kind, which lie where they lay when a call comes back to them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[Any, tuple[Tensor, ...]] = {}

    def tensors(self, call: dict[str, Any], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Contribution, whole tensor, target."""
        key = call["dtype"], call["shape"], call["layout"]
        if key not in self._made:
            empty = [torch.empty(call["shape"], dtype=call["dtype"]) for _ in range(3)]
            self._made[key] = tuple(empty)
        made = self._made[key]
        for number, tensor in enumerate(made):
            own = self._rank if number == 0 and call["layout"] != "one" else 0
            drawn = torch.Generator().manual_seed(100 * seed + 10 * number + own)
            tensor.copy_(torch.randint(-9, 9, call["shape"], generator=drawn))
        g, w, target = made
        if call["layout"] == "transposed" and g.dim() == 2:
            g = g.view(g.shape[::-1]).t()
            w = w.view(w.shape[::-1]).t()
        elif call["layout"] == "negated" and g.is_floating_point():
            g = torch._neg_view(g)
        elif call["layout"] == "one":
            w = g
        if call["kind"] in ("parameter", "grad") and w.is_floating_point():
            w = torch.nn.Parameter(w, call["kind"] == "grad")
        return g, w, target


@contextlib.contextmanager
def state(call: dict[str, Any]) -> Iterator[None]:
    global scale
    dtype = call["autocast"]
    cast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(call["default"])
    scale = call["scale"]
    try:
        with torch.set_grad_enabled(call["kind"] != "no_grad"), cast:
            yield
    finally:
        torch.set_default_dtype(before)
        scale = 2.0


def outcome(run: Any, call: dict[str, Any], given: tuple[Tensor, ...]) -> list[Any]:
    """What a call gives and leaves behind, or what it raises."""
    g, w, target = given
    flag = call["flag"]
    if flag == "product" and call["shape"] not in ((4, 6), (6, 4)):
        flag = False
    numbers = {"lr": call["lr"], "seed": call["seed"], "flag": flag}
    args, kwargs = (g, w), numbers
    if call["named"]:
        args, kwargs = (), {"w": w, **numbers, "g": g}
    w.grad = None
    into = w if call["into"] == "argument" else target
    version = into._version
    try:
        with state(call):
            if call["into"]:
                got = run.into(into, *args, **kwargs)
                assert got._version > version, "autograd was not told"
            else:
                got = run(*args, **kwargs)
        if got.requires_grad:
            got.double().square().sum().backward()
    except (RuntimeError, TypeError, ValueError) as error:
        return [type(error), str(error)]
    kept = [x.detach().resolve_neg().clone() for x in (got, g, w, target)]
    new = [] if call["into"] else [got.detach()]
    return [got.requires_grad, got is w, got is target, w.grad, *kept, *new]


pytestmark = pytest.mark.fused_only

_C = load_extension()


@pytest.fixture(autouse=True, scope="module")
def compiled_code() -> Iterator[None]:
    """Calls are found where generated code is on."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FUSEDPG_FUSION", "compiled")
        yield


class Own(Tensor):
    """A class of a user's."""


class Text(str):
    """Text that is equal to any other."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Real(float):
    """As NumPy's numbers, which are Python's, too."""


class Seed(enum.IntEnum):
    five = 5


def _tensors() -> dict[str, Tensor]:
    x = torch.zeros(4, 4)
    return {
        "x": x,
        "y": torch.zeros(4, 4),
        "view": x.view(4, 4),
        "transposed": x.t(),
        "rows": x[:2],
        "behind": torch.zeros(5, 4)[1:],
        "flat": x.view(16),
        "int32": x.view(torch.int32),
        "float64": torch.zeros(4, 4, dtype=torch.float64),
        "grad": torch.zeros(4, 4, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(4, 4)),
        "constant": torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False),
        "negated": torch._neg_view(x),
        "sparse": torch.zeros(4, 4).to_sparse(),
        "meta": torch.zeros(4, 4, device="meta"),
        "own": torch.zeros(4, 4).as_subclass(Own),
    }


TENSORS = _tensors()
ORDINARY = [name for name in TENSORS if name not in ("negated", "sparse", "meta", "own")]


def step(g: Any, w: Any, lr: float, flag: Any = None, *, seed: int = 5) -> Any:
    return g, w, lr, flag, seed


@dataclass(frozen=True)
class Call:
    """What a call is given, by keywords behind the first `positional`, and where it is made."""

    g: str = "x"
    w: str = "y"
    lr: Any = 0.1
    flag: Any = None
    seed: Any = 5
    positional: int = 2
    targets: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    default: torch.dtype = torch.float32
    grad: bool = False

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = {"g": TENSORS[self.g], "w": TENSORS[self.w], "lr": self.lr, "flag": self.flag}
        args = tuple(values.values())[: self.positional]
        names = list(values)[self.positional :]
        return args, {name: values[name] for name in names} | {"seed": self.seed}

    @property
    def at(self) -> list[Tensor]:
        return [TENSORS[name] for name in self.targets]

    @contextlib.contextmanager
    def state(self) -> Iterator[None]:
        dtype = self.autocast or torch.bfloat16
        cast = torch.autocast("cpu", dtype=dtype, enabled=self.autocast is not None)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default)
        try:
            with torch.set_grad_enabled(self.grad), cast:
                yield
        finally:
            torch.set_default_dtype(before)

    def decides(self) -> Any:
        """All of it that decides what is computed, where, and by which steps."""
        values = SIGNATURE.bind(*self.arguments)
        flag = type(self.flag), self.flag
        tensors = [value for value in values.values() if isinstance(value, Tensor)] + self.at
        kinds = [
            (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors
        ]
        places: list[Any] = []
        if self.targets:
            first = [next(i for i, other in enumerate(tensors) if other is t) for t in tensors]
            places = [first, [t.data_ptr() for t in tensors]]
        return [type(v) for v in values.values()], flag, kinds, places, self.autocast, self.default


SIGNATURE = Signature(step)
CALLS = st.builds(
    Call,
    g=st.sampled_from(["x", *ORDINARY]),
    w=st.sampled_from(["y", *ORDINARY]),
    lr=st.sampled_from([0.1, 0.1, 0.5, 1, Real(0.1), float("nan"), -0.0]),
    flag=st.sampled_from([None, True, False, "sum", "mean", 1, 1.0]),
    seed=st.sampled_from([5, 6, Seed.five, 1 << 70]),
    positional=st.integers(0, 4),
    targets=st.sampled_from([(), (), ("x",), ("y",), ("view",), ("x", "y"), ("y", "x"), ("grad",)]),
    autocast=st.sampled_from([None, None, torch.bfloat16, torch.float16]),
    default=st.sampled_from([torch.float32, torch.float32, torch.float64]),
    grad=st.booleans(),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Call, Call]:
    """Two calls that differ in few ways, so that often only one of them decides."""
    first, other = draw(CALLS), draw(CALLS)
    names = draw(st.sets(st.sampled_from(list(vars(first))), max_size=2))
    return first, Call(**vars(first) | {name: getattr(other, name) for name in names})


def known(call: Call) -> Any:
    """Calls of which this one is the earlier one, with number 7."""
    calls = _C._EarlierCalls(SIGNATURE.parameters)
    values = list(SIGNATURE.bind(*call.arguments).values())
    with call.state():
        assert calls.add(values, call.at, 3) is None
        again = calls.add(values, call.at, 7)
    if call.grad and any(TENSORS[t].requires_grad for t in (call.g, call.w, *call.targets)):
        return None  # none is like it: it has a backward
    assert again == 3
    return calls


def same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


@hypothesis.settings(max_examples=200)
@hypothesis.given(pairs())
def test_against_a_model(pair: tuple[Call, Call]) -> None:
    first, other = pair
    calls = known(first)
    if calls is None:
        return
    with other.state():
        found = calls.find(*other.arguments, other.at)
    tensors = (other.g, other.w, *other.targets)
    backward = other.grad and any(TENSORS[name].requires_grad for name in tensors)
    expected = not backward and first.decides() == other.decides()
    assert (found is not None) == expected, (first, other, found)
    if found is not None:
        number, values = found
        assert number == 7
        bound = SIGNATURE.signature.bind(*other.arguments[0], **other.arguments[1])
        bound.apply_defaults()
        wanted = dict(bound.arguments) | {"lr": float(other.lr), "seed": int(other.seed)}
        assert list(wanted) == list(inspect.signature(step).parameters)
        assert all(map(same, values, wanted.values())), (values, wanted)


NOT_ALIKE: dict[str, tuple[Call, Call]] = {
    "another order": (Call("x", "flat"), Call("flat", "x")),
    "strides alone": (Call(), Call("transposed")),
    "a number's type": (Call(flag=1), Call(flag=1.0)),
    "a flag": (Call(flag="sum"), Call(flag="mean")),
    "a flag's type": (Call(flag=True), Call(flag=1)),
    "the memory of a target": (Call(targets=("x",)), Call(targets=("y",))),
    "the memory of an argument": (Call(w="y", targets=("x",)), Call(w="behind", targets=("x",))),
    "another object": (Call("x", "x", targets=("y",)), Call("x", "view", targets=("y",))),
    "more targets": (Call(targets=("x",)), Call(targets=("x", "y"))),
    "no target": (Call(targets=("x",)), Call()),
    "autocast": (Call(), Call(autocast=torch.bfloat16)),
    "autocast's type": (Call(autocast=torch.float16), Call(autocast=torch.bfloat16)),
    "the default type": (Call(), Call(default=torch.float64)),
    "a gradient": (Call("grad"), Call("grad", grad=True)),
    "a parameter": (Call("constant"), Call("x")),
}


@pytest.mark.parametrize("what", NOT_ALIKE)
def test_one_difference(what: str) -> None:
    for first, other in (NOT_ALIKE[what], NOT_ALIKE[what][::-1]):
        calls = known(first)
        if calls is not None:
            with first.state():
                assert calls.find(*first.arguments, first.at)[0] == 7
            with other.state():
                assert calls.find(*other.arguments, other.at) is None


@pytest.mark.parametrize(
    "given",
    [
        ((TENSORS["x"],), {"lr": 0.1}),
        ((TENSORS["x"], TENSORS["y"], 0.1, None, 5), {}),
        ((TENSORS["x"], TENSORS["y"], 0.1), {"g": TENSORS["x"]}),
        ((TENSORS["x"], TENSORS["y"]), {"lr": 0.1, "more": 1}),
        ((TENSORS["x"], TENSORS["y"], True), {}),
        ((TENSORS["x"], TENSORS["y"], "0.1"), {}),
        ((TENSORS["x"], TENSORS["y"], 10**400), {}),
        ((TENSORS["x"], TENSORS["y"], 0.1), {"seed": 0.5}),
        *(((TENSORS[name], TENSORS["y"], 0.1), {}) for name in TENSORS if name not in ORDINARY),
        ((TENSORS["x"], TENSORS["y"], 0.1, Text("sum")), {}),
    ],
)
def test_what_is_no_call(given: Any) -> None:
    """Of arguments that do not fit, or are of classes that may do anything, none is known."""
    for flag in (None, "sum"):
        assert known(Call(flag=flag)).find(*given, []) is None
    values = [*given[0], *given[1].values()]
    strange = [TENSORS[name] for name in TENSORS if name not in ORDINARY]
    if any(isinstance(x, Text) or any(x is y for y in strange) for x in values):
        with pytest.raises(ValueError, match="ordinary tensors"):
            _C._EarlierCalls(SIGNATURE.parameters).add(values, [], 1)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
@pytest.mark.parametrize("targets", [(), ("x",)])
def test_transformed(transform: Any, targets: tuple[str, ...]) -> None:
    calls = known(Call(targets=targets))
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(calls.find((x, TENSORS["y"]), {"lr": 0.1}, [TENSORS[t] for t in targets]))
        if targets:
            found.append(calls.find((TENSORS["x"], TENSORS["y"]), {"lr": 0.1}, [x]))
        return x.sum()

    transform(look)(torch.zeros(4, 4, 4) if transform is torch.vmap else torch.zeros(4, 4))
    assert found and not any(found)


def test_what_is_kept() -> None:
    calls = known(Call())
    assert len(calls) == 1
    calls.add(list(SIGNATURE.bind(*Call(w="flat").arguments).values()), [], 8)
    assert len(calls) == 2
    assert calls.find(*Call().arguments, [])[0] == 7
    assert calls.find(*Call(w="flat").arguments, [])[0] == 8
    calls.clear()
    assert len(calls) == 0 and calls.find(*Call().arguments, []) is None


def test_eager_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = known(Call())
    monkeypatch.setenv("FUSEDPG_FUSION", "eager")
    assert calls.find(*Call().arguments, []) is None
    monkeypatch.setenv("FUSEDPG_FUSION", "compiled")
    assert calls.find(*Call().arguments, []) is not None


# --- what calls give -----------------------------------------------------------------------------

WHERE = ("2",)
EXAMPLES = 3
# What of a call may be another one.
CHANGES: dict[str, list[Any]] = {
    "dtype": [torch.float32, torch.float32, torch.float64, torch.int32],
    "shape": [(4, 6), (4, 6), (24,), (6, 4), (40_000,)],
    "layout": ["contiguous", "contiguous", "transposed", "negated", "one"],
    "lr": [0.1, 0.5, 1, 2],
    "seed": [5, 6, 1 << 40],
    "flag": [False, False, True, None, "mean", "product"],
    "named": [False, True],
    "kind": ["plain", "plain", "parameter", "grad", "no_grad"],
    "autocast": [None, None, torch.bfloat16],
    "default": [torch.float32, torch.float32, torch.float64],
    "into": ["", "", "new", "argument"],
    "scale": [2.0, 2.0, 3.0],
}


def draw(choose: Choices, where: str) -> list[dict[str, Any]]:
    """Calls, each of which differs in few ways from the one before."""
    calls = [{name: choose.choice(values) for name, values in CHANGES.items()}] * 3
    for _ in range(choose.randint(4, 9)):
        names = choose.sample(CHANGES, choose.randint(0, 2))
        calls += [calls[-1] | {name: choose.choice(CHANGES[name]) for name in names}] * 2
    return calls


def run(calls: list[dict[str, Any]], context: Context) -> Iterator[Pair]:
    """Each gives what a new function gives. Seen are those that were like an earlier one."""
    made, kept = Given(context.rank), []
    with compiles(context), taken() as found:
        run = fusedpg.fuse(update)
        for number, call in enumerate(calls):
            count = len(found)
            got = outcome(run, call, made.tensors(call, number))
            if any(found[count:]):
                yield done(f"call {number}")
            count = len(found)
            want = outcome(fusedpg.fuse(update), call, made.tensors(call, number))
            assert not any(found[count:]), "a new function knows no call"
            kept.append((call, got, want))
            for call, got, want in kept[-5:]:  # results stay as they are
                assert len(got) == len(want), (number, call, got, want)
                for x, y in zip(got, want):
                    if isinstance(y, Tensor):
                        assert x.dtype is y.dtype and torch.equal(x, y), (number, call, x, y)
                    else:
                        assert x == y, (number, call, x, y)


@pytest.mark.parametrize("seed", [0, 1, *map(harness.slow, range(2, 10))])
def test_calls_give_what_a_new_function_gives(seed: int) -> None:
    assert core.search("shortcuts", "2", core.seed(seed)) > 5
