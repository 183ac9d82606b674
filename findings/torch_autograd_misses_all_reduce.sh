#!/usr/bin/env bash
# torch 2.13.0, torch.distributed, shown on Gloo. all_reduce writes its tensor in place but does not raise the tensor's
# version, by which autograd notices that something it saved was overwritten. exp() saves its result: after mul_() on that
# result backward() raises, after all_reduce() it uses the sum and gives a gradient of 2e in place of e, without a word.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for name, write in (("mul_", lambda tensor: tensor.mul_(2)), ("all_reduce", dist.all_reduce)):
    weight = torch.ones(1, requires_grad=True)
    result = weight.exp()
    with torch.no_grad():
        write(result)
    try:
        result.sum().backward()
        end = f"the gradient is {weight.grad.item():.4f}"
    except RuntimeError:
        end = "backward raises"
    print(f"{name}, rank {rank}: version {result._version}, {end}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
all_reduce, rank 0: version 0, the gradient is 5.4366
all_reduce, rank 1: version 0, the gradient is 5.4366
mul_, rank 0: version 1, backward raises
mul_, rank 1: version 1, backward raises
SEEN
