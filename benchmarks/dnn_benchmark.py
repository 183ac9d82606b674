"""SwitchML's dnn_benchmark: the iterations of a training that is only known by a trace.

    FUSEDPG_AGGREGATION_BACKEND=dummy python benchmarks/dnn_benchmark.py --model-path model.csv

A line of the trace is `layer_index, numel, forward_pass_ns, backward_pass_ns`. Layers compute by
waiting. Backward goes through them from the last one and submits each one's gradients; forward
waits for a layer's sum before it comes to that layer. Ends with 1 if --verify finds a wrong result.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
import time

import torch

import _jobs
from fusedpg.aggregation import Job


@dataclasses.dataclass
class Layer:
    index: int
    numel: int
    forward_ns: int
    backward_ns: int


def read(path: str) -> list[Layer]:
    layers = []
    with open(path, newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or row[0].strip() in ("", "layer_index") or row[0].startswith("#"):
                continue
            try:
                layer = Layer(*(int(float(field)) for field in row))
                if min(layer.numel, layer.forward_ns, layer.backward_ns) < 0:
                    raise ValueError
            except (TypeError, ValueError):
                sys.exit(
                    f"{path}:{number}: expected layer_index, numel, forward_pass_ns, "
                    f"backward_pass_ns, found {', '.join(row)}"
                )
            layers.append(layer)
    if not layers:
        sys.exit(f"{path}: no layers")
    return layers


def compute(nanoseconds: int) -> None:
    """Waits without taking the processor from the all-reduces; a short while it does."""
    ends = time.perf_counter_ns() + nanoseconds
    if nanoseconds > 500_000:
        time.sleep((nanoseconds - 200_000) / 1e9)
    while time.perf_counter_ns() < ends:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flag = parser.add_argument
    flag("--model-path", required=True, help="the trace")
    flag("--num-iters", type=int, default=10)
    flag("--num-warmup-iters", type=int, default=5)
    _jobs.add_flags(parser)
    arguments = parser.parse_args()
    layers = read(arguments.model_path)
    context, values = _jobs.start(arguments)
    outputs = [values.mine(layer.numel, n) for n, layer in enumerate(layers)]
    jobs: list[Job | None] = [None] * len(layers)
    nanoseconds: list[float] = []
    wrong = None

    def finish(n: int, inject: bool = False) -> None:
        nonlocal wrong
        job = jobs[n]
        if job is None:
            return
        job.wait()
        jobs[n] = None
        if inject and layers[n].numel:
            _jobs.flip(outputs[n])
        if arguments.verify:
            wrong = wrong or values.check(outputs[n], n)

    total = arguments.num_warmup_iters + arguments.num_iters
    for iteration in range(total):
        begun = time.perf_counter_ns()
        for n, layer in enumerate(layers):
            finish(n)
            compute(layer.forward_ns)
        for n in reversed(range(len(layers))):
            compute(layers[n].backward_ns)
            gradients = values.mine(layers[n].numel, n) if arguments.verify else outputs[n]
            if not arguments.verify:
                torch.clamp_(gradients, -1000, 1000)  # sums of sums would grow
            outputs[n] = gradients
            jobs[n] = context.all_reduce_async(gradients)
        last = iteration + 1 == total
        if last:
            for n in range(len(layers)):
                finish(n, inject=arguments.inject_wrong_bit and n == 0)
        took = time.perf_counter_ns() - begun
        if iteration >= arguments.num_warmup_iters:
            nanoseconds.append(took)
            if values.rank == 0:
                print(f"iteration {len(nanoseconds) - 1}: {took:,} ns")
    if values.rank == 0:
        bound = sum(layer.forward_ns + layer.backward_ns for layer in layers)
        _jobs.summary("iteration", nanoseconds, [])
        print(f"computation alone: {bound:,} ns an iteration")
    return _jobs.end(context, arguments, wrong)


if __name__ == "__main__":
    sys.exit(main())
