"""Exercises 1 and 2 of SwitchML's tutorial: the throughput of jobs by threads and sizes.

    python examples/aggregation/microbenchmark.py
    python benchmarks/allreduce_benchmark.py --help     # the benchmark itself, with all flags

Nothing is sent: the backend "dummy" sleeps as long as its link would take. Small tensors wait for
threads to be woken, large ones for the link.
"""

from __future__ import annotations

import time

import torch

from fusedpg import aggregation

JOBS = 10

print(f"{'threads':>8}{'elements':>12}{'ms a job':>12}{'Gbit/s':>10}")
for threads in (1, 4, 8):
    config = aggregation.Config(
        backend="dummy", dummy_bandwidth=10_000, num_worker_threads=threads, packet_numel=1024,
        prepostprocessor="cpu_exponent_quantizer",
    )  # fmt: skip
    with aggregation.Context(config) as context:
        for numel in (1_000, 100_000, 1_000_000):
            tensor = torch.randn(numel)
            context.all_reduce(tensor)  # warm-up
            begun = time.perf_counter()
            for _ in range(JOBS):
                context.all_reduce(tensor)
            each = (time.perf_counter() - begun) / JOBS
            print(f"{threads:>8}{numel:>12,}{each * 1e3:>12.3f}{numel * 32 / each / 1e9:>10.2f}")
