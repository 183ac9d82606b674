"""The fused steps as operators of torch: schema, fake tensors, torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from checks.cases import same
from checks.fused_ops import Model, Run, works
from harness import Context


def direct(model: Model, group_name: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of torch.ops.fusedpg.*."""
    options = model.options()
    missing = {"sgd": (), "lamb": ("trust_clip", "always_adapt")}.get(model.run.op, ("amsgrad",))
    for flag in ("maximize", *missing):
        options.setdefault(flag, False)
    del options["async_op"]
    return [list(one) for one in model.lists()], options | {"group_name": group_name}


def packet(op: str, tensor_lr: bool = False) -> Any:
    import fusedpg  # noqa: F401

    found = getattr(torch.ops.fusedpg, f"fused_{op}_")
    return found.tensor_lr if tensor_lr else found.default


def schema(context: Context, op: str, tensor_lr: bool) -> dict[str, bool]:
    """Which arguments the schema says are written."""
    written = {}
    for argument in packet(op, tensor_lr)._schema.arguments:
        written[argument.name] = argument.alias_info is not None and argument.alias_info.is_write
    return written


def fake(context: Context, run: Run) -> None:
    """Fake and meta tensors pass, and nothing happens to real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fusedpg

    model = Model(context, run)
    name = dist.distributed_c10d._get_default_group().group_name
    lists, options = direct(model, name)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(one) for one in many] for many in lists]
        kwargs = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }
        kwargs["master_params"] = [mode.from_tensor(one) for one in model.masters]
        assert packet(run.op, run.lr_tensor)(*fakes, **kwargs) is None
        wrapper = getattr(fusedpg, f"fused_{run.op}_")
        del kwargs["group_name"]
        assert wrapper(*fakes, **kwargs) is None
    metas = [[one.to("meta") for one in many] for many in lists]
    kwargs = {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
    kwargs["master_params"] = [one.to("meta") for one in model.masters]
    assert packet(run.op, run.lr_tensor)(*metas, **kwargs) is None
    works(context)


def opcheck(context: Context, run: Run) -> None:
    """torch's own test of the registration."""
    model = Model(context, run)
    model.set_gradients(0)
    name = dist.distributed_c10d._get_default_group().group_name
    lists, options = direct(model, name)
    torch.library.opcheck(
        packet(run.op, run.lr_tensor),
        tuple(lists),
        options,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def unknown_group(context: Context, op: str) -> tuple[str, str]:
    model = Model(context, Run(op))
    lists, options = direct(model, "nobody has this name")
    try:
        packet(op)(*lists, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("a group that does not exist was accepted")


def compiled(context: Context, run: Run, how: str, backend: str) -> None:
    """The same bits as in eager mode, in one graph."""
    import torch._dynamo
    import torch._inductor.config

    import fusedpg

    # Compiling in processes of its own is slow to start.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    eager, model = Model(context, run), Model(context, run)
    name = dist.distributed_c10d._get_default_group().group_name
    wrapper = getattr(fusedpg, f"fused_{run.op}_")
    operator = packet(run.op, run.lr_tensor)

    def function(lists: list[list[torch.Tensor]], options: dict[str, Any]) -> torch.Tensor:
        params, grads, *rest = lists
        doubled = [grad * 2 for grad in grads]
        if how == "wrapper":
            wrapper(params, doubled, *rest, **options)
        else:
            operator(params, doubled, *rest, **options)
        return params[0] + 1

    fast = torch.compile(function, fullgraph=True, backend=backend)
    for step in range(3):
        results = []
        for one, call in ((eager, function), (model, fast)):
            one.set_gradients(step)
            lists, options = direct(one, name)
            if how == "wrapper":
                del options["group_name"]
            results.append(call(lists, options))
            one.calls += 1
        assert same(results[0], results[1])
        for mine, want in zip(model.state(), eager.state(), strict=True):
            assert same(mine, want)
    assert all(float(step) == 3 for step in model.steps)
