"""What fusedpg/optim/_torch.py assumes of torch's Python, read from torch's sources.

Of another version than the installed one, for which its files are enough:

    python -m checks.optim_assumptions path/to/site-packages
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.optim_torch import parameters
from checks.refused import refused
from harness import Context

CHECKPOINT = "torch/distributed/checkpoint"


class Module:
    def __init__(self, root: Path, path: str) -> None:
        self.tree = ast.parse((root / path).read_text())
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }

    def arguments(self, name: str) -> list[str]:
        function = self.functions.get(name)
        if function is None:
            return []
        return [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]

    def text(self, name: str) -> str:
        function = self.functions.get(name)
        return "" if function is None else ast.unparse(function)

    def who(self, text: str) -> set[str]:
        """Functions that have it in their code."""
        return {name for name in self.functions if text in self.text(name)}


def wrong(root: Path) -> Iterator[str]:
    """The assumptions that do not hold."""
    state_dict = Module(root, f"{CHECKPOINT}/state_dict.py")
    if "info" not in state_dict.arguments("_get_optim_state_dict"):
        yield "_get_optim_state_dict has no info"
    if state_dict.who("_state_dict_fn(optim, 'state_dict')") != {"_get_optim_state_dict"}:
        yield "another function than _get_optim_state_dict asks optimizers for their state"
    asks = state_dict.text("_get_optim_state_dict")
    if "_init_optim_state(optim)" not in asks:
        yield "state is not made before it is asked for"
    options = next(
        (ast.unparse(n) for n in ast.walk(state_dict.tree) if isinstance(n, ast.ClassDef)
         and n.name == "StateDictOptions"), "",
    )  # fmt: skip
    for name in ("full_state_dict", "cpu_offload"):
        if f"{name}: bool = False" not in options:
            yield f"StateDictOptions has no {name}"
    made = state_dict.text("_init_optim_state")
    order = [made.find(part) for part in ("torch.zeros_like(param)", "0.0", "optim.step(")]
    if -1 in order or order != sorted(order):
        yield "_init_optim_state makes no step with gradients and a learning rate of zero"
    if "optim.zero_grad(set_to_none=True)" not in made:
        yield "_init_optim_state leaves its gradients"

    clip = Module(root, "torch/nn/utils/clip_grad.py")
    for name in clip.who("torch._foreach_norm("):
        if "foreach" not in clip.arguments(name):
            yield f"{name} has no argument foreach"
        if "foreach = " in clip.text(name):
            yield f"{name} changes foreach"
    if "_get_total_norm" not in clip.who("torch._foreach_norm("):
        yield "_get_total_norm does not use _foreach_norm"
    supported = (root / "torch/utils/_foreach_utils.py").read_text()
    if "_foreach_supported_types" not in supported or "type(t) in" not in supported:
        yield "foreach operations have no list of types"

    graph = Module(root, "torch/autograd/graph.py")
    if graph.who("_execution_engine.run_backward(") != {"_engine_run_backward"}:
        yield "another function than _engine_run_backward enters the engine"
    for path in ("torch/_tensor.py", "torch/autograd/__init__.py"):
        if (root / path).is_file() and "_execution_engine.run_backward(" in (
            root / path
        ).read_text():
            yield f"{path} enters the engine"

    ddp = Module(root, "torch/nn/parallel/distributed.py")
    if "_pre_forward" not in ddp.who(".reducer._rebuild_buckets()"):
        yield "DDP does not rebuild its buckets in _pre_forward"
    if "_divide_by_initial_world_size" not in ast.unparse(ddp.tree):
        yield "DDP does not say what it divides by"
    for name in ("_build_params_for_reducer", "_build_debug_param_to_name_mapping"):
        if name not in ddp.functions:
            yield f"DDP has no {name}"
    helper = ["self", "parameters", "expect_sparse_gradient", "param_to_name_mapping"]
    if ddp.arguments("_ddp_init_helper")[:4] != helper:
        yield "_ddp_init_helper has other arguments"
    if "_use_python_reducer" not in ast.unparse(ddp.tree):
        yield "DDP does not say whether its reducer is Python"


# --- a torch that is not known -----------------------------------------------------------


def _in(module: str, source: str, name: str) -> Any:
    """A function as if it stood in that module of torch."""
    namespace = {**vars(sys.modules[module])}
    exec(compile(source, module, "exec"), namespace)
    return namespace[name]


def another_checkpoint(context: Context) -> None:
    """Who asks for state is not recognised: never slices where something whole is wanted."""
    import fusedpg

    params = parameters()
    optimizer = fusedpg.optim.AdamW(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    optimizer.step()
    ask = "def {0}(optim, info): return optim.state_dict()"
    for name, info in (
        ("_optim_state", types.SimpleNamespace()),
        ("_get_optim_state_dict", types.SimpleNamespace()),
        ("_get_optim_state_dict", types.SimpleNamespace(full_state_dict=True)),
        ("_get_optim_state_dict", None),
    ):
        asks = _in(dcp.__name__, ask.format(name), name)
        with refused("in a way that is not known"):
            asks(optimizer, info)
    # It has another name, and the same facts.
    asks = _in(dcp.__name__, ask.format("_optim_state"), "_optim_state")
    whole = asks(optimizer, types.SimpleNamespace(full_state_dict=True, cpu_offload=False))
    sizes = [state["exp_avg"].numel() for state in whole["state"].values()]
    assert sizes == [param.numel() for param in params], sizes


def another_init(context: Context) -> None:
    """What makes state by a step is not recognised: a step as torch's, or none at all."""
    import fusedpg

    source = Path(str(dcp.__file__)).read_text()
    function = next(
        ast.unparse(node) for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_init_optim_state"
    )  # fmt: skip
    renamed = function.replace("def _init_optim_state", "def _make_optim_state")
    make = _in(dcp.__name__, renamed, "_make_optim_state")
    mine, theirs = parameters(), parameters()
    ours, torchs = fusedpg.optim.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for one in (ours, torchs):
        make(one)
    assert ours.param_groups[0]["lr"] == 0.1
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert ours.state[a].keys() == torchs.state[b].keys()
        assert ours.state[a]["step"] == torchs.state[b]["step"]
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    for overlap in (False, True):
        bridged = fusedpg.optim.AdamW(ddp.parameters(), lr=0.1, ddp=ddp, overlap=overlap)
        with refused("never reduced"):
            make(bridged)
        ddp.zero_grad()
        bridged.detach()
        ddp(torch.ones(1, 3))  # gets a reducer of its own


def another_clip(context: Context) -> None:
    """Who asks for norms is not recognised: a mixture of gradients is refused."""
    import fusedpg

    params = parameters()
    optimizer = fusedpg.optim.AdamW(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    optimizer.reduce_gradients()
    grads = [params[0].grad, torch.ones(3), params[1].grad]
    ask = "def {0}(grads, {1}): return torch._foreach_norm(grads, 2.0)"
    asks = _in(
        "torch.nn.utils.clip_grad", ask.format("_get_total_norm", "foreach"), "_get_total_norm"
    )
    assert len(asks(grads, None)) == 3
    asks = _in("torch.nn.utils.clip_grad", ask.format("_norms", "way"), "_norms")
    with refused("cannot be mixed"):
        asks(grads, None)


def another_join(context: Context) -> None:
    """What DDP divides by under Join is not known."""
    from fusedpg.optim import _torch

    ddp = DistributedDataParallel(nn.Linear(3, 2))
    assert not _torch.divides_by_active(ddp)
    with mock.patch.object(ddp, "_join_config", types.SimpleNamespace(enable=True)):
        with refused("divides by under Join"):
            _torch.divides_by_active(ddp)
        for told in (True, False):
            ddp._divide_by_initial_world_size = told
            assert _torch.divides_by_active(ddp) != told
    dist.barrier()


if __name__ == "__main__":
    found = list(wrong(Path(sys.argv[1])))
    sys.exit("\n".join(found) or None)
