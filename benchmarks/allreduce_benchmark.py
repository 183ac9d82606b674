"""SwitchML's allreduce_benchmark: how long jobs take, with its flags.

    FUSEDPG_AGGREGATION_BACKEND=dummy python benchmarks/allreduce_benchmark.py --tensor-numel 10000
    torchrun --nproc-per-node 2 benchmarks/allreduce_benchmark.py --verify true

Gbps is the tensor's bits by the time of a job. Ends with 1 if --verify finds a wrong result.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import _jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flag = parser.add_argument
    flag("--tensor-numel", type=int, default=2**24)
    flag("--num-jobs", type=int, default=10)
    flag("--num-warmup-jobs", type=int, default=5)
    flag("--inplace", type=_jobs.boolean, default=True)
    flag("--sync-every", type=int, default=1, help="jobs outstanding; 0: all (default: 1)")
    _jobs.add_flags(parser)
    arguments = parser.parse_args()
    context, values = _jobs.start(arguments)
    numel, number = arguments.tensor_numel, 0
    nanoseconds: list[float] = []
    wrong = None
    left = {"warm-up": arguments.num_warmup_jobs, "job": arguments.num_jobs}
    for kind, jobs in left.items():
        while jobs > 0:
            together = min(arguments.sync_every or jobs, jobs)
            inputs = [values.mine(numel, number + n) for n in range(together)]
            outputs = inputs if arguments.inplace else [torch.empty_like(t) for t in inputs]
            begun = time.perf_counter_ns()
            for t, output in zip(inputs, outputs):
                context.all_reduce_async(t, output)
            context.wait_for_all_jobs()
            each = (time.perf_counter_ns() - begun) / together
            if kind == "job":
                if values.rank == 0:
                    for n in range(together):
                        rate = outputs[0].nbytes * 8 / each
                        print(f"job {len(nanoseconds) + n}: {each:,.0f} ns, {rate:,.3f} Gbps")
                nanoseconds += [each] * together
                if arguments.inject_wrong_bit:
                    _jobs.flip(outputs[-1])
            if arguments.verify:
                for n, output in enumerate(outputs):
                    wrong = wrong or values.check(output, number + n)
            number, jobs = number + together, jobs - together
    if values.rank == 0:
        rates = [numel * 4 * 8 / each for each in nanoseconds]
        _jobs.summary("job", nanoseconds, rates)
    return _jobs.end(context, arguments, wrong)


if __name__ == "__main__":
    sys.exit(main())
