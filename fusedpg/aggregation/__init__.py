"""All-reduces as jobs: a queue, worker threads, and parts that a program can replace.

::

    from fusedpg import aggregation

    with aggregation.Context(aggregation.Config(num_worker_threads=2)) as context:
        jobs = [context.all_reduce_async(tensor) for tensor in tensors]
        context.wait_for_all_jobs()

The interface is SwitchML's client library's: see docs/guides/aggregation.md.
"""

from fusedpg.aggregation._backends import Backend, Dummy, Group, Udp, register_backend
from fusedpg.aggregation._config import Config
from fusedpg.aggregation._context import Context, ContextState, Stats
from fusedpg.aggregation._jobs import Job, JobSlice, JobStatus
from fusedpg.aggregation._processors import (
    Bypass,
    ExponentQuantizer,
    Message,
    PrePostProcessor,
    register_prepostprocessor,
)
from fusedpg.aggregation._schedulers import Fifo, Scheduler, register_scheduler

__all__ = [
    "Backend",
    "Bypass",
    "Config",
    "Context",
    "ContextState",
    "Dummy",
    "ExponentQuantizer",
    "Fifo",
    "Group",
    "Job",
    "JobSlice",
    "JobStatus",
    "Message",
    "PrePostProcessor",
    "Scheduler",
    "Stats",
    "Udp",
    "register_backend",
    "register_prepostprocessor",
    "register_scheduler",
]
