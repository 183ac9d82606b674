#!/usr/bin/env bash
# deepspeed 0.19.8 with torch 2.13.0, two CPU ranks of one machine, on a processor with AVX-512. inference_all_reduce() takes
# DeepSpeed's shared-memory kernel, which adds float32, float16 and bfloat16. A float64 or int64 tensor comes back as it was,
# without an error, and an operation other than the sum is the sum: the maximum of 1 and 2 is 3.
# Needs a C++ compiler: DeepSpeed builds the kernel at first use. Elsewhere than on AVX-512 it takes the group's all_reduce.
. "$(dirname "$0")/environment.sh"
grep -q avx512bw /proc/cpuinfo || { echo "needs a processor with AVX-512" >&2; exit 1; }
environment torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8 ninja==1.13.0 setuptools==80.9.0
export LOCAL_SIZE=2 DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$folder/extensions PATH=$folder/environment/bin:$PATH
ranks 2 <<'PROGRAM'
import contextlib, os, torch
import deepspeed.comm as comm
with contextlib.redirect_stdout(open(os.devnull, "w")):
    comm.init_distributed(dist_backend="gloo", verbose=False)
rank = comm.get_rank()
for name, op in (("sum", comm.ReduceOp.SUM), ("maximum", comm.ReduceOp.MAX)):
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.full((4,), 1 + rank, dtype=dtype)
        comm.inference_all_reduce(tensor, op=op)
        print(f"{name} of 1 and 2, {dtype}, rank {rank}: {tensor[0].item()}", flush=True)
torch.distributed.destroy_process_group()
PROGRAM
grep -E '^(sum|maximum)' "$folder/output" >"$folder/lines" && mv "$folder/lines" "$folder/output"
expect <<'SEEN'
maximum of 1 and 2, torch.float32, rank 0: 3.0
maximum of 1 and 2, torch.float32, rank 1: 3.0
maximum of 1 and 2, torch.float64, rank 0: 1.0
maximum of 1 and 2, torch.float64, rank 1: 2.0
maximum of 1 and 2, torch.int64, rank 0: 1
maximum of 1 and 2, torch.int64, rank 1: 2
sum of 1 and 2, torch.float32, rank 0: 3.0
sum of 1 and 2, torch.float32, rank 1: 3.0
sum of 1 and 2, torch.float64, rank 0: 1.0
sum of 1 and 2, torch.float64, rank 1: 2.0
sum of 1 and 2, torch.int64, rank 0: 1
sum of 1 and 2, torch.int64, rank 1: 2
SEEN
