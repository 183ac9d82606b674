#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.13.0, two CPU ranks. reduce(tensor, reduction="none"), by its documentation one of the four
# reductions, returns the sum over the ranks; a word that it does not know ("avg") does, too. Nothing is raised.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
ranks 2 <<'PROGRAM'
import torch
from accelerate import Accelerator
from accelerate.utils import reduce
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
for reduction in ("sum", "mean", "none", "avg"):
    print(f"{reduction}, rank {rank}: {reduce(torch.tensor([1.0 + rank]), reduction).tolist()}", flush=True)
accelerator.end_training()
PROGRAM
expect <<'SEEN'
avg, rank 0: [3.0]
avg, rank 1: [3.0]
mean, rank 0: [1.5]
mean, rank 1: [1.5]
none, rank 0: [3.0]
none, rank 1: [3.0]
sum, rank 0: [3.0]
sum, rank 1: [3.0]
SEEN
