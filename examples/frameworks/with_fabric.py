"""Lightning Fabric: torchrun --standalone --nproc-per-node 2 examples/frameworks/with_fabric.py"""

import itertools
import os

import torch
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

import fusedpg

args = arguments()
losses = Losses(args.losses)

fabric = Fabric(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend="fused"),
)
fabric.launch()

model = Model()
optimizer = fusedpg.optim.AdamW(groups(model), lr=LR, overlap=args.overlap)
model, wrapped = fabric.setup(model, optimizer)
optimizer.attach(model._forward_module)  # what Fabric wrapped the model in: DDP

data = torch.utils.data.DataLoader(Samples(), batch_size=BATCH // fabric.world_size)
data = fabric.setup_dataloaders(data)

# Fabric calls consolidate_state_dict() by itself.
state = {"model": model, "optimizer": wrapped, "step": 0}
if args.resume:
    fabric.load(args.checkpoint, state)

for step, batch in zip(range(state["step"], args.steps), itertools.cycle(data)):
    loss = model(**batch)
    losses.note(step, loss)
    fabric.backward(loss)
    if not args.overlap:
        fabric.clip_gradients(model, wrapped, max_norm=1.0)
    wrapped.step()
    wrapped.zero_grad()
    if step + 1 == args.save_at:
        state["step"] = step + 1
        fabric.save(args.checkpoint, state)
