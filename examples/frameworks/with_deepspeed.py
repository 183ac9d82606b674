"""DeepSpeed: torchrun --standalone --nproc-per-node 2 examples/frameworks/with_deepspeed.py"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
losses = Losses(args.losses)

# DeepSpeed would compile its own all-reduce over shared memory, and use it for inference only.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="fused")
ranks = dist.get_world_size()

# DeepSpeed reduces gradients and shards state by itself: its optimizers, or torch's, not fusedpg's.
model = Model()
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups(model), lr=LR),
    config={
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    },
)
data = Samples()
data = DataLoader(data, BATCH // ranks, sampler=DistributedSampler(data, shuffle=False))

if args.resume:
    engine.load_checkpoint(args.checkpoint)

for step, batch in zip(range(engine.global_steps, args.steps), data):
    loss = engine(**batch)
    losses.note(step, loss)
    engine.backward(loss)
    engine.step()
    if step + 1 == args.save_at:
        engine.save_checkpoint(args.checkpoint)
