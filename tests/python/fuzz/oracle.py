"""What must come out, computed by one process alone from everybody's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checks.cases import FLOATS, reference
from checks.optim_script import Lamb

Tensors = Sequence[torch.Tensor]


def reduced(redop: str, inputs: Tensors) -> torch.Tensor:
    """A left fold in rank order, of whatever shape the members' tensors have."""
    first = inputs[0]
    flat = reference(redop, [one.reshape(first.shape) for one in inputs])
    return flat.clone()


def reduced_parts(redop: str, parts: Sequence[Tensors], me: int) -> torch.Tensor:
    """Of a reduce_scatter, in which member p gave `parts[p]`."""
    return reduced(redop, [own[me] for own in parts])


def exchanged(inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[int]], me: int) -> Any:
    """Of an all_to_all along the first dimension: what comes from everybody."""
    received = []
    for sender, one in enumerate(inputs):
        begin = sum(splits[sender][:me])
        received.append(one[begin : begin + splits[sender][me]])
    return received


def above(tensor: torch.Tensor, block: int, threshold: float) -> torch.Tensor:
    """A tensor without its blocks in which no element is above the threshold."""
    kept = tensor.clone().flatten()
    for begin in range(0, kept.numel(), block):
        piece = kept[begin : begin + block]
        if not bool((~(piece.abs() <= threshold)).any()):
            piece.zero_()
    return kept.view(tensor.shape)


EPS = 1e-3  # of Adam, AdamW and LAMB


class Optimizer:
    """torch.optim on the reduced gradients, in float64; LAMB by the paper's formula."""

    def __init__(self, args: dict[str, Any], params: Tensors) -> None:
        self.args = args
        self.params = [param.double().clone().requires_grad_() for param in params]
        # What roundings are measured by: what ends near 0 was larger, and rounded, before.
        self.scales = [param.detach().abs() for param in self.params]
        common = {"lr": args["lr"], "weight_decay": args["weight_decay"]}
        maximize = args["maximize"]
        if args["rule"] == "sgd":
            self.optimizer: Any = torch.optim.SGD(
                self.params,
                momentum=args["momentum"],
                nesterov=args["nesterov"],
                maximize=maximize,
                **common,
            )
        else:
            common |= {"betas": (0.9, 0.99), "eps": EPS, "maximize": maximize}
            if args["rule"] != "lamb":
                common["amsgrad"] = args["amsgrad"]
            rule = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lamb": Lamb}
            self.optimizer = rule[args["rule"]](self.params, **common)

    def step(self, gradients: Sequence[Tensors], weights: Sequence[float] | None) -> None:
        """One step from all members' gradients, `gradients[member][parameter]`."""
        size = len(gradients)
        for index, param in enumerate(self.params):
            own = [member[index].double() for member in gradients]
            if weights is not None and self.args["reduce"] == "mean":
                total = sum((w * g for w, g in zip(weights, own)), torch.zeros_like(own[0]))
                total = total / sum(weights)
                if self.args["rule"] != "sgd":
                    # A mean that should be 0 is a rounding, which those rules divide by eps.
                    most = torch.stack(own).abs().amax(0)
                    self.scales[index] += self.args["lr"] * most * 2**-22 / EPS / 2e-5
            else:
                total = sum(own[1:], own[0])
                total = total / size if self.args["reduce"] == "mean" else total
            param.grad = total / (self.args["scale"] or 1)
            self.scales[index] += self.args["lr"] * param.grad.abs()
        self.optimizer.step()

    def wrong(self, index: int, found: torch.Tensor) -> str | None:
        """Whether a parameter is further away than a few roundings."""
        want = self.params[index].detach()
        eps = torch.finfo(found.dtype).eps
        limit = {torch.float64: 1e-11, torch.float32: 2e-5}.get(found.dtype, 3 * eps)
        # Rounded at every step, with moments that carry gradients of about 1.
        scale = torch.maximum(want.abs(), self.scales[index]) + self.args["lr"]
        error = ((found.double() - want).abs() / scale).max() if found.numel() else torch.tensor(0)
        if float(error) <= limit * self.args["steps"]:
            return None
        return f"parameter {index} of {self.args['rule']} is {float(error):.3g} off, not {limit}"


def is_exact(dtype: torch.dtype, data: str) -> bool:
    """Whether any order of additions has the same bits."""
    return dtype not in FLOATS or "exact" in data or data == "zeros"
