"""Accelerate: torchrun --standalone --nproc-per-node 2 examples/frameworks/with_accelerate.py"""

import collections

import torch
import torch.distributed as dist
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from accelerate import Accelerator

import fusedpg

args = arguments()
losses = Losses(args.losses)

dist.init_process_group("fused")  # before Accelerator, which would take Gloo
accelerator = Accelerator(cpu=True)

model = Model()
optimizer = fusedpg.optim.AdamW(groups(model), lr=LR, overlap=args.overlap)
data = torch.utils.data.DataLoader(Samples(), batch_size=BATCH // accelerator.num_processes)
model, wrapped, data = accelerator.prepare(model, optimizer, data)
optimizer.attach(model)

# Accelerate keeps its own counter with the random states of each rank: a new rank has none.
progress = collections.UserDict(step=0)
progress.state_dict = lambda: dict(progress)  # type: ignore[attr-defined]
progress.load_state_dict = progress.update  # type: ignore[attr-defined]
accelerator.register_for_checkpointing(progress)

if args.resume:
    accelerator.load_state(args.checkpoint)

for step, batch in zip(range(progress["step"], args.steps), data):
    loss = model(**batch)
    losses.note(step, loss)
    accelerator.backward(loss)
    if not args.overlap:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    wrapped.step()
    wrapped.zero_grad()
    if step + 1 == args.save_at:
        progress["step"] = step + 1
        accelerator.save_state(args.checkpoint)
