"""Jobs of fusedpg.aggregation."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import harness
from fusedpg import aggregation
from fusedpg.aggregation import Config, Context, ContextState, JobStatus
from harness import on_ranks

ROOT = Path(harness.__file__).parents[2]
FLOATS = "cpu_exponent_quantizer"


def dummy(**values: Any) -> Config:
    return Config(backend="dummy", dummy_bandwidth=1e6, **values)


# --- sums of process groups ---------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums(context: Any, backend: str, threads: int) -> None:
    """Those of all_reduce, of any number of jobs, whatever runs beside them; on "fused" its bits.
    Gloo's order of summation depends on where an element stands."""
    group = dist.new_group(backend=backend)
    rng = random.Random(7)
    torch.manual_seed(context.rank)
    tensors = [torch.randn(rng.choice([0, 1, 3, 1000, 4096, 50_001])) for _ in range(20)]
    tensors += [torch.randint(-9, 9, (7, 11), dtype=torch.int64), torch.randn(5).double()]
    want = [t.clone() for t in tensors]
    for t in want:
        dist.all_reduce(t, group=group)
    given = [t.clone() for t in tensors]
    outputs = [torch.empty_like(t) for t in tensors]
    with Context(Config(num_worker_threads=threads, packet_numel=7), group) as jobs:
        assert jobs.state is ContextState.RUNNING and jobs.num_workers == context.world_size
        apart = [jobs.all_reduce_async(a, b) for a, b in zip(given, outputs)]
        other = torch.ones(9)
        dist.all_reduce(other, group=group)
        assert torch.equal(other, torch.full((9,), float(context.world_size)))
        in_place = [jobs.all_reduce_async(t) for t in tensors]
        jobs.wait_for_all_jobs()
        assert all(job.status is JobStatus.FINISHED for job in apart + in_place)
        stats = jobs.stats()
    assert (stats.jobs_submitted, stats.jobs_finished, stats.jobs_failed) == (44, 44, 0)
    assert stats.numel_finished == stats.numel_submitted == 2 * sum(t.numel() for t in tensors)
    assert jobs.state is ContextState.STOPPED
    for k, sums in enumerate(want):
        for found in (outputs[k], tensors[k]):
            if backend == "fused" or not sums.is_floating_point():
                assert torch.equal(found, sums)
            else:
                torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-5)
    dist.destroy_process_group(group)


def quantized(rank: int, seed: int, numel: int) -> torch.Tensor:
    """Values of every magnitude, in runs of one, some of them special."""
    rng = random.Random(f"{seed} {rank}")
    values: list[float] = []
    while len(values) < numel:
        kind = rng.randrange(12)
        run = rng.randint(1, 40)
        if kind == 0:
            values += [rng.choice([0.0, -0.0])] * run
        elif kind == 1:
            values += [rng.choice([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45])]
        elif kind == 2:
            values += [math.ldexp(1.0, rng.randint(-149, 127))] * run
        else:
            scale = rng.randint(-160, 126)
            values += [math.ldexp(rng.uniform(-2, 2), scale) for _ in range(run)]
    return torch.tensor(values[:numel], dtype=torch.float32)


def expected(parts: list[torch.Tensor], packet: int) -> list[tuple[Fraction, Fraction] | None]:
    """Of each element: the exact sum and how far off a result may be; None: it is NaN."""
    found: list[tuple[Fraction, Fraction] | None] = []
    workers, numel = len(parts), parts[0].numel()
    for begin in range(0, numel, packet):
        rows = [part[begin : begin + packet].tolist() for part in parts]
        if not all(math.isfinite(x) for row in rows for x in row):
            found += [None] * len(rows[0])
            continue
        largest = max(abs(Fraction(x)) for row in rows for x in row)
        exponent = -148
        while Fraction(2) ** exponent <= largest:
            exponent += 1
        carry = math.ceil(math.log2(workers))
        unit = Fraction(2) ** (exponent - (31 if workers <= 128 else 30) + carry)
        bound = workers * unit / 2
        found += [(sum(map(Fraction, column)), bound) for column in zip(*rows)]
    return found


def check_quantized(got: torch.Tensor, parts: list[torch.Tensor], packet: int, what: str) -> None:
    for k, (x, exact) in enumerate(zip(got.tolist(), expected(parts, packet))):
        if exact is None:
            assert math.isnan(x), (what, k, x)
            continue
        total, bound = exact
        low, high = (float(torch.tensor(float(total + d)).float()) for d in (-bound, bound))
        assert low <= x <= high, (what, k, x, float(total), float(bound))


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 32, 1000])
@pytest.mark.parametrize("packet", [1, 16, 256])
def test_quantizer_keeps_its_bound(workers: int, packet: int) -> None:
    """One process plays all workers; Fractions are the oracle."""
    seed = random.randrange(10**6)
    print("seed", seed)
    numel = 600 if workers < 100 else 60
    parts = [quantized(rank, seed, numel) for rank in range(workers)]
    config = dummy(packet_numel=packet, max_outstanding_packets=4)
    outputs = [torch.empty(numel) for _ in parts]
    made = []
    for part, output in zip(parts, outputs):
        piece = aggregation.JobSlice(aggregation.Job(0, part, output), part, output)
        made.append(aggregation.ExponentQuantizer(piece, config, workers))
    for batch in range(made[0].batches):
        messages = [one.preprocess(batch) for one in made]
        entries = extra = None
        if messages[0].entries is not None:
            exact = sum(m.entries.to(torch.int64) for m in messages)  # type: ignore[union-attr]
            assert isinstance(exact, torch.Tensor) and exact.abs().max() < 2**31
            entries = exact.to(torch.int32)
        if messages[0].extra is not None:
            extra = torch.stack([m.extra for m in messages]).amax(0)  # type: ignore[misc]
        for one in made:
            one.postprocess(batch, aggregation.Message(entries, extra))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0]) or outputs[0].isnan().any()
    check_quantized(outputs[0], parts, packet, f"seed {seed}")


@on_ranks(2, 3)
@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_quantized_sums(context: Any, backend: str) -> None:
    group = dist.new_group(backend=backend)
    parts = [quantized(rank, 3, 3000) for rank in range(context.world_size)]
    mine = parts[context.rank]
    found = []
    for threads, outstanding in ((1, 3), (3, 256), (2, 2)):
        config = Config(
            num_worker_threads=threads, max_outstanding_packets=outstanding, packet_numel=64,
            prepostprocessor=FLOATS,
        )  # fmt: skip
        with Context(config, group) as jobs:
            found.append(jobs.all_reduce(mine, torch.empty_like(mine)))
            numbers = torch.arange(1000, dtype=torch.int32)
            assert torch.equal(jobs.all_reduce(numbers.clone()), numbers * context.world_size)
            with pytest.raises(RuntimeError, match="takes float32 and int32"):
                jobs.all_reduce(torch.ones(5, dtype=torch.float64))
    check_quantized(found[0], parts, 64, "")
    for other in found[1:]:
        assert torch.equal(found[0].view(torch.int32), other.view(torch.int32))
    bits = found[0].view(torch.int32).clone()
    dist.broadcast(bits, 0)
    assert torch.equal(bits, found[0].view(torch.int32))
    dist.destroy_process_group(group)


class FailsOnRankOne(aggregation.Bypass):
    """Once all jobs have been submitted: before, submitting would raise."""

    submitted = threading.Event()

    def preprocess(self, batch: int) -> aggregation.Message:
        if dist.get_rank() == 1:
            self.submitted.wait(20)
            raise ArithmeticError("on purpose")
        return super().preprocess(batch)


@on_ranks(2)
def test_failure_of_one_worker(context: Any) -> None:
    """The others hear of it long before their time limit, and a new context works."""
    aggregation.register_prepostprocessor("fails", FailsOnRankOne)
    FailsOnRankOne.submitted.clear()
    jobs = Context(Config(prepostprocessor="fails")).start()
    pending = [jobs.all_reduce_async(torch.ones(1000)) for _ in range(3)]
    dist.barrier()
    FailsOnRankOne.submitted.set()
    begun = time.monotonic()
    for job in pending:
        with pytest.raises(RuntimeError, match=f"job {job.id} failed"):
            job.wait(20)
        assert job.status is JobStatus.FAILED
    assert time.monotonic() - begun < 10
    with pytest.raises(RuntimeError, match="has failed: make another one"):
        jobs.all_reduce_async(torch.ones(3))
    jobs.stop()
    assert jobs.stats().jobs_failed == 3
    with Context() as again:
        assert torch.equal(again.all_reduce(torch.ones(3)), torch.full((3,), 2.0))


@on_ranks(2)
def test_arguments_of_one_worker(context: Any) -> None:
    """What all workers find wrong ends nothing; what one finds wrong the others hear at once."""
    wrong = torch.ones(40, 40).t()
    with Context(Config(num_worker_threads=2)) as jobs:
        for _ in range(2):
            with pytest.raises(ValueError, match="contiguous dense"):
                jobs.all_reduce_async(wrong)
            whole = jobs.all_reduce(torch.ones(1600))
            assert torch.equal(whole, torch.full((1600,), 2.0))
        jobs.wait_for_all_jobs()
        begun = time.monotonic()
        if context.rank == 1:
            with pytest.raises(ValueError, match="contiguous dense"):
                jobs.all_reduce_async(wrong)
            job = jobs.all_reduce_async(torch.ones(5000))
        else:
            job = jobs.all_reduce_async(torch.ones(1600))
        with pytest.raises(RuntimeError, match="failed"):
            job.wait(20)
        assert time.monotonic() - begun < 10
    dist.barrier()


@on_ranks(2)
def test_body_that_raises_on_one_worker(context: Any) -> None:
    begun = time.monotonic()
    if context.rank == 1:
        with pytest.raises(ArithmeticError), Context():
            raise ArithmeticError("on purpose")
    else:
        with Context() as jobs, pytest.raises(RuntimeError, match="failed"):
            jobs.all_reduce_async(torch.ones(1000)).wait(20)
    assert time.monotonic() - begun < 10
    dist.barrier()


# --- one process --------------------------------------------------------------------------------


def test_dummy() -> None:
    """Its link takes the time that its bandwidth says, and workers are all like this one."""
    for threads in (1, 4):
        config = Config(
            backend="dummy", dummy_bandwidth=100, num_workers=3, num_worker_threads=threads
        )
        t = torch.randn(250_000)  # 1 MB: 80 ms
        with Context(config) as jobs:
            begun = time.monotonic()
            job = jobs.all_reduce_async(t, torch.empty_like(t))
            asynchronous = time.monotonic() - begun
            assert torch.equal(job.wait(), t * 3)
            assert time.monotonic() - begun >= 0.08 > asynchronous
    with Context(Config(backend="dummy", instant_job_completion=True)) as jobs:
        assert jobs.all_reduce_async(t, out := torch.zeros_like(t)).done
        assert not out.any()
    with Context(dummy(dummy_process_packets=False, num_workers=3)) as jobs:
        assert torch.equal(jobs.all_reduce(t.clone()), t)


def test_tensors_of_any_state() -> None:
    """Parameters, inference tensors, several dimensions; what cannot be added up is refused."""
    with Context(dummy(num_workers=2)) as jobs:
        parameter = torch.nn.Parameter(torch.ones(3, 4))
        jobs.all_reduce(parameter)
        assert torch.equal(parameter.data, torch.full((3, 4), 2.0)) and parameter.requires_grad
        with torch.inference_mode():
            t = torch.ones(5)
            assert torch.equal(jobs.all_reduce(t), torch.full((5,), 2.0))
        for bad in (torch.ones(4, 4).t()[:, :2], torch.ones(4).to_sparse()):
            with pytest.raises(ValueError, match="contiguous dense"):
                jobs.all_reduce_async(bad)
        with pytest.raises(ValueError, match="output is"):
            jobs.all_reduce_async(torch.ones(3), torch.ones(4))
        whole = torch.ones(10)
        with pytest.raises(ValueError, match="overlap"):
            jobs.all_reduce_async(whole[:8], whole[2:])
        with pytest.raises(TimeoutError):
            slow = Context(Config(backend="dummy", dummy_bandwidth=0.1)).start()
            slow.all_reduce_async(torch.ones(1000)).wait(0.05)
        slow.stop()  # waits for it: 0.32 s


def test_life() -> None:
    jobs = Context(dummy())
    assert jobs.state is ContextState.CREATED
    with pytest.raises(RuntimeError, match="is created; jobs are for running ones"):
        jobs.all_reduce_async(torch.ones(1))
    before = threading.active_count()
    jobs.start()
    with pytest.raises(RuntimeError, match="is running already"):
        jobs.start()
    pending = [jobs.all_reduce_async(torch.ones(100)) for _ in range(50)]
    jobs.stop()
    assert all(job.status is JobStatus.FINISHED for job in pending)
    assert threading.active_count() == before and jobs.state is ContextState.STOPPED
    with pytest.raises(RuntimeError, match="is stopped; jobs are"):
        jobs.all_reduce_async(torch.ones(1))
    jobs.stop()
    unused = Context(dummy())
    unused.stop()
    assert unused.state is ContextState.STOPPED


class Newest(aggregation.Scheduler):
    """Whole jobs, the last one first."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.jobs: list[aggregation.Job] = []
        self.changed = threading.Condition()
        self.stopped = False
        self.done: list[int] = []

    def enqueue(self, job: aggregation.Job) -> None:
        with self.changed:
            job.queued(1)
            self.jobs.append(job)
            self.changed.notify()

    def get_slice(self, thread: int) -> aggregation.JobSlice | None:
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.stopped)
            if not self.jobs:
                return None
            job = self.jobs.pop()
            return aggregation.JobSlice(job, job.input.view(-1), job.output.view(-1))

    def slice_done(self, thread: int, part: aggregation.JobSlice) -> None:
        self.done.append(part.job.id)

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class Slow(aggregation.Backend):
    def exchange(self, thread: int, message: aggregation.Message) -> None:
        time.sleep(0.05)


def of_a_stack(order: list[int]) -> bool:
    """Whether numbers that were pushed one after the other may have been popped in this order."""
    stack: list[int] = []
    pushed = 0
    for number in order:
        while pushed <= number:
            stack.append(pushed)
            pushed += 1
        if stack.pop() != number:
            return False
    return True


def test_own_parts() -> None:
    made: list[Newest] = []

    def make(config: Config) -> Newest:
        made.append(Newest(config))
        return made[0]

    aggregation.register_scheduler("newest", make)
    aggregation.register_backend("slow", Slow)
    with Context(Config(backend="slow", scheduler="newest")) as jobs:
        for _ in range(4):
            jobs.all_reduce_async(torch.ones(10))
        jobs.wait_for_all_jobs(10)
    assert sorted(made[0].done) == [0, 1, 2, 3] != made[0].done
    assert of_a_stack(made[0].done)
    for field in ("backend", "scheduler", "prepostprocessor"):
        with pytest.raises(ValueError, match=rf"no {field} 'x'; there are"):
            Context(Config(**{"backend": "dummy", field: "x"})).start()


def test_start_that_fails_leaves_nothing() -> None:
    class Fails(Slow):
        left: ClassVar[list[int]] = []

        def setup_worker(self, thread: int) -> None:
            if thread == 2:
                raise ArithmeticError("on purpose")
            self.left.append(thread)

        def cleanup_worker(self, thread: int) -> None:
            self.left.remove(thread)

    aggregation.register_backend("fails", Fails)
    jobs = Context(Config(backend="fails", num_worker_threads=4))
    with pytest.raises(ArithmeticError):
        jobs.start()
    assert not Fails.left and jobs.state is ContextState.STOPPED


def test_scheduler_that_raises() -> None:
    class Raises(Newest):
        def slice_done(self, thread: int, part: aggregation.JobSlice) -> None:
            raise KeyError("on purpose")

    aggregation.register_scheduler("raises", Raises)
    jobs = Context(dummy(scheduler="raises")).start()
    job = jobs.all_reduce_async(torch.ones(10))
    with pytest.raises(RuntimeError, match="on purpose"):
        job.wait(10)
    jobs.stop()


# --- configuration ------------------------------------------------------------------------------

CFG = """\
[general]
rank = 3
num_workers = 2   # a comment
num_worker_threads = 8
backend = dummy
controller_ip = 10.0.0.1
timeout = 10

[backend.dummy]
bandwidth = 2500
process_packets = false

[backend.dpdk]
worker_port = 4000
"""


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, toml = tmp_path / "switchml.cfg", tmp_path / "jobs.toml"
    cfg.write_text(CFG)
    found = Config.load(cfg, environment={})
    assert found == Config(
        num_workers=2, num_worker_threads=8, backend="dummy", dummy_bandwidth=2500.0,
        dummy_process_packets=False, aggregators="10.0.0.1:50099",
    )  # fmt: skip
    environment = {
        "FUSEDPG_AGGREGATION_NUM_WORKERS": "5", "FUSEDPG_AGGREGATION_DUMMY_PROCESS_PACKETS": "1",
    }  # fmt: skip
    mixed = Config.load(cfg, environment=environment, num_workers=6)
    assert (mixed.num_workers, mixed.dummy_process_packets, mixed.dummy_bandwidth) == (
        6,
        True,
        2500,
    )
    if sys.version_info >= (3, 11):
        toml.write_text('num_worker_threads = 2\nscheduler = "fifo"\ninstant_job_completion = true')
        assert Config.load(toml, environment={}) == Config(
            num_worker_threads=2, instant_job_completion=True
        )
    monkeypatch.chdir(tmp_path)
    assert Config.load(environment={}) == found
    for text, message in (
        ("[general]\nworkers = 3", "switchml.cfg: unknown key general.workers"),
        ("[backend.dpdk]\nworker_prot = 1", "unknown key backend.dpdk.worker_prot"),
        ("[generel]\nnum_workers = 3", "unknown key generel.num_workers"),
        ("[general]\ndummy_bandwidth = 3", "unknown key general.dummy_bandwidth"),
        ("[general]\nnum_workers = many", "general.num_workers: expected int"),
        ("[general]\ninstant_job_completion = maybe", "expected bool"),
        ("num_workers = 3", "no section headers"),
        ("[general]\nnum_worker_threads = 0", "at least 1"),
        ("[general]\nnum_worker_threads = 9\nmax_outstanding_packets = 8", "at least one for each"),
        ("[backend.dummy]\nbandwidth = 0", "must be positive"),
    ):
        cfg.write_text(text)
        with pytest.raises(ValueError, match=message):
            Config.load(cfg, environment={})
    with pytest.raises(ValueError, match="FUSEDPG_AGGREGATION_WORKERS: no such parameter"):
        Config.load(environment={"FUSEDPG_AGGREGATION_WORKERS": "1"})
    with pytest.raises(FileNotFoundError):
        Config.load(tmp_path / "none.cfg")


def test_group_is_needed_and_fits() -> None:
    with pytest.raises(RuntimeError, match='Config\\(backend="dummy"\\)'):
        Context().start()


@on_ranks(2)
def test_number_of_workers_is_the_groups(context: Any) -> None:
    with pytest.raises(ValueError, match="num_workers is 3, but the process group has 2"):
        Context(Config(num_workers=3)).start()


# --- programs -----------------------------------------------------------------------------------


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["microbenchmark", "application", "own_processor"])
def test_examples(name: str) -> None:
    done = run(f"examples/aggregation/{name}.py")
    assert done.returncode == 0, done.stdout + done.stderr


BENCHMARK = ["benchmarks/allreduce_benchmark.py", "--tensor-numel", "5000", "--num-jobs", "3"]


@pytest.mark.parametrize("kind", ["float", "int32"])
@pytest.mark.parametrize("more", [[], ["--random", "true"], ["--inplace", "false"]])
def test_benchmark_verifies(kind: str, more: list[str]) -> None:
    command = [*BENCHMARK, "--tensor-type", kind, "--verify", "true", "--sync-every", "0", *more]
    done = run(*command, FUSEDPG_AGGREGATION_BACKEND="dummy", FUSEDPG_AGGREGATION_NUM_WORKERS="3")
    assert done.returncode == 0 and "Gbps" in done.stdout, done.stdout + done.stderr


# That of right bits passes: test_benchmark_verifies.
@pytest.mark.parametrize("program", ["allreduce", "dnn"])
def test_wrong_bit_ends_with_an_error(tmp_path: Path, program: str) -> None:
    command = BENCHMARK
    if program == "dnn":
        trace = tmp_path / "model.csv"
        trace.write_text("0, 3000, 1000, 2000\n1, 70, 1000, 2000\n")
        command = ["benchmarks/dnn_benchmark.py", "--model-path", str(trace), "--num-iters", "2"]
    values = {"FUSEDPG_AGGREGATION_BACKEND": "dummy", "FUSEDPG_AGGREGATION_NUM_WORKERS": "2"}
    if program == "dnn":
        right = run(*command, "--verify", "true", **values)
        assert right.returncode == 0, right.stdout + right.stderr
    wrong = run(*command, "--verify", "true", "--inject-wrong-bit", "true", **values)
    assert wrong.returncode == 1 and "wrong" in wrong.stderr, wrong.stdout + wrong.stderr
