"""What the arms and cases of the benchmarks are called in tables and plots, and whose they are.

Short names stay the keys of command lines and results.
"""

from __future__ import annotations

OURS, PEER, LIMIT = "ours", "peer", "limit"

ARMS = {
    "copy": "copy of the same bytes by all ranks",
    "gloo": "Gloo",
    "served": "fused, asked for as Gloo",
    "deepspeed": "DeepSpeed SHM",
    "open mpi": "Open MPI",
    "link": "what the link needs for the bytes",
    "link with headers": "what it needs for them in packets of TCP",
    # collectives
    "fused": "fused",
    "fused arena": "fused, tensors in the arena",
    "fused ordinary": "fused, ordinary tensors",
    # ddp
    "no_comm": "DDP that communicates nothing",
    "no_sync": "no DDP work at all (no_sync)",
    "forward alone": "its forward alone",
    "optimizer alone": "its optimizer alone",
    "step's bound": "forward, the link's time or backward, optimizer",
    # steps
    "gloo all_reduce + AdamW": "Gloo all_reduce + AdamW(fused=True)",
    "deepspeed all_reduce + AdamW": "DeepSpeed SHM all_reduce + AdamW(fused=True)",
    "fused all_reduce + AdamW": "fused all_reduce + AdamW(fused=True)",
    "fused_adamw_ block_skip": "fused_adamw_(block_skip=True)",
    "fused_adamw_, shared parameters": "fused_adamw_, parameters shared",
    "reduce_shards, fused step (f)": "the same in two halves (overlap=False)",
    "reduce_scatter, AdamW, all_gather (e)": "fused reduce_scatter, AdamW, all_gather",
    "gloo all_reduce + LAMB": "Gloo all_reduce + LAMB of torch operations",
    # data_parallel
    "as written": "fused function, operation by operation",
    "on slices": "the same on slices",
    "one operation": "the same as one operation",
    "gloo all_reduce + SGD": "Gloo all_reduce + SGD of torch operations",
    "gloo all_reduce + SGD(fused=True)": "Gloo all_reduce + SGD(fused=True)",
    "gloo all_reduce + eager AdamW": "Gloo all_reduce + AdamW of torch operations",
    # training
    "a": "Gloo: DDP + AdamW(fused=True)",
    "b": "Gloo: DDP + ZeroRedundancyOptimizer",
    "c": "Gloo: FSDP2 + AdamW(fused=True)",
    "d": "fused: unchanged DDP + AdamW(fused=True)",
    "e": "fused: the same, state sharded, unfused",
    "f": "fusedpg.optim.AdamW",
    "g": "fusedpg.optim.AdamW(overlap=True)",
    "h": "fusedpg.optim.AdamW(share_parameters=True)",
    "m": "fusedpg.optim.AdamW without DDP",
    "f, ours": "fusedpg.optim.AdamW, its own clipping",
    "m, ours": "fusedpg.optim.AdamW without DDP, its own clipping",
    "f, max_grad_norm": "fusedpg.optim.AdamW(max_grad_norm=)",
    "best of f, g": "fusedpg.optim.AdamW in its faster mode",
    "no_sync + step": "no synchronisation, then the fused step",
    # hvd
    "hvd": "fusedpg.hvd",
    "hvd fused=True": "fusedpg.hvd, fused=True",
    # async_op
    "sync": "fused, synchronous",
    "async": "fused, async_op=True and wait()",
    "functional": "fused, functional collective",
    "compiled": "fused, functional under torch.compile",
    "gloo sync": "Gloo, synchronous",
    "gloo async": "Gloo, async_op=True and wait()",
    "gloo functional": "Gloo, functional collective",
    "gloo compiled": "Gloo, functional under torch.compile",
    "fake functional": "a functional collective that communicates nothing",
    "matmul alone": "the matmul alone",
    "fused arena sync + matmul": "fused, arena: one after the other",
    "fused arena overlap": "fused, arena: submit, matmul, wait",
    "fused ordinary sync + matmul": "fused, ordinary: one after the other",
    "fused ordinary overlap": "fused, ordinary: submit, matmul, wait",
    "gloo sync + matmul": "Gloo: one after the other",
    "gloo overlap": "Gloo: submit, matmul, wait",
    # sparse
    "dense": "fused, dense",
    "auto": 'fused, block_skip="auto"',
    "on": 'fused, block_skip="on"',
    "scan": "looking for zeros alone",
    # model_parallel
    "gloo, eager": "Gloo's all_reduce, torch's operations",
    "fused, eager": "fused all_reduce, torch's operations",
    "fused, compile": "fused all_reduce, the same under torch.compile",
    "fused, one operation": "one fused operation",
    "fused, apart": "product, then sum",
    "fused, overlap": "rows summed while others are multiplied",
    "fused, auto": "what overlap=None chooses",
    "fused styles": "fusedpg.tensor_parallel",
    "gloo DTensor, sequence": "torch's styles with SequenceParallel, Gloo",
    "fused styles, sequence": "fusedpg.tensor_parallel with SequenceParallel",
    "all_reduce alone": "the all_reduce alone",
    # pipeline_parallel
    "gloo all_reduce + send": "Gloo: all_reduce, operations, send",
    "all_reduce + send": "fused: all_reduce, operations, send",
    "slices sent": "slices sent, and gathered",
    "in chunks": "one operation, in chunks beside the send",
    "stage 0 alone": "what stage 0 computes, without the send",
    "one by one": "each waited for",
    "two on their way": "the next begun before each wait",
    # llm
    "layers": "fusedpg.tensor_parallel",
    "no communication": "DTensor that communicates nothing",
    "shards alone": "the arithmetic alone",
}
CASES = {
    "mlp": "MLP, 25 M parameters, batch 4",
    "transformer": "transformer, 10 M parameters",
    "cnn": "CNN, bound by its arithmetic",
    "small": "1,000 parameters of 64 elements",
    "small, clip": "the same, `clip_grad_norm_` alone",
    "small, step with clipping": "the same, a step with clipping",
    "vectors": "1,000 parameters of 256 elements",
    "ddp": "DDP step, MLP, 25 M parameters",
    "fsdp2": "FSDP2 step, MLP, 25 M parameters",
    "adamw step": "AdamW step",
    "lamb step": "LAMB step",
    "sgd step": "SGD step with momentum",
    "arena": "all_reduce in the arena",
    "ordinary": "all_reduce in ordinary memory",
    "overlap": "16 MB all_reduce beside a matmul",
    "decode": "decoding one token",
    "prefill": "prefill of 256 tokens",
    "sequence": "the same in parts of the sequence",
    "rows": "512 rows times a weight, summed",
    "epilogue": "all_reduce + bias, dropout, + residual",
    "segment": "to the next stage",
    "product": "a product, to the next stage",
    "step": "DDP step, MLP, 25 M parameters",
    "micro-batches": "16 micro-batches",
}
LIMITS = (
    *("copy", "link", "no_sync", "no_comm", "no_sync + step", "matmul alone", "scan"),
    *("plain sockets", "plain sockets, and the sum", "link with headers", "forward alone"),
    *("optimizer alone", "step's bound", "all_reduce alone", "no communication"),
    *("shards alone", "fake functional"),
)
PEERS = (
    "a",
    "b",
    "c",
    "open mpi",
    "plain torch",
    "one process, 1 thread",
    "one process, all threads",
)
BEGIN_OF_PEERS = ("gloo", "deepspeed", "nccl", "torch.", "reduce_scatter, ")

BEST = "best of f, g"
KEPT = ", kept"  # after the name of an arm: after fusedpg.keep_freed_memory()


def arm(name: str) -> str:
    if name.endswith(KEPT):
        return f"{arm(name.removesuffix(KEPT))}, freed memory kept"
    return ARMS.get(name, name)


def case(name: str) -> str:
    """Also of "adamw step, 10%": with what follows the case; and of densities, as "1% random"."""
    head, comma, rest = name.partition(", ")
    if head.endswith("% random"):
        return f"all_reduce, {head.removesuffix(' random')} of the blocks{comma}{rest}"
    return CASES.get(name) or CASES.get(head, head) + comma + rest


def whose(name: str) -> str:
    """OURS, PEER or LIMIT."""
    name = name.removesuffix(KEPT)
    if name in LIMITS:
        return LIMIT
    if name in PEERS or name.startswith(BEGIN_OF_PEERS) or name.endswith(" on gloo"):
        return PEER
    return OURS
