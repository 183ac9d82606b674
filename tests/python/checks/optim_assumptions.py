"""What fusedpg/optim/_torch.py assumes of torch's Python, read from torch's sources.

Of another version than the installed one, for which its files are enough:

    python -m checks.optim_assumptions path/to/site-packages
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

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


if __name__ == "__main__":
    found = list(wrong(Path(sys.argv[1])))
    sys.exit("\n".join(found) or None)
