"""PyTorch Lightning: torchrun --standalone --nproc-per-node 2 with_lightning.py"""

import logging
import os
from typing import Any

import pytorch_lightning as lightning
import torch
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DistributedSampler

import fusedpg

args = arguments()
losses = Losses(args.losses)
logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
ranks = int(os.environ["LOCAL_WORLD_SIZE"])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch)
        losses.note(self.global_step, loss)
        return loss

    def configure_optimizers(self) -> Any:
        # Lightning has wrapped the model in DDP already.
        ddp = self.trainer.strategy.model
        return fusedpg.optim.AdamW(groups(self.model), lr=LR, ddp=ddp, overlap=args.overlap)


class Save(lightning.Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == args.save_at:
            # Calls consolidate_state_dict(), as ModelCheckpoint does.
            trainer.save_checkpoint(args.checkpoint)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=DDPStrategy(process_group_backend="fused"),
    use_distributed_sampler=False,
    max_steps=args.steps,
    gradient_clip_val=None if args.overlap else 1.0,
    callbacks=[Save()],
    enable_checkpointing=False,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
# Lightning's own sampler shuffles.
sampler = DistributedSampler(Samples(), ranks, int(os.environ["RANK"]), shuffle=False)
data = torch.utils.data.DataLoader(Samples(), batch_size=BATCH // ranks, sampler=sampler)
trainer.fit(Module(), data, ckpt_path=args.checkpoint if args.resume else None)
