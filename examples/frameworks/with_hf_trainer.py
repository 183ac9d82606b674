"""HF Trainer: torchrun --standalone --nproc-per-node 2 examples/frameworks/with_hf_trainer.py"""

from typing import Any

import torch
import torch.distributed as dist
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from transformers import Trainer, TrainerCallback, TrainingArguments

import fusedpg

args = arguments()
losses = Losses(args.losses)

dist.init_process_group("fused")  # before TrainingArguments, which would take Gloo


class FusedTrainer(Trainer):
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Asked also without clipping; overlap=True has no gradients any more.
        return None if args.overlap else super()._get_grad_norm(model, grad_norm)

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **_: Any) -> Any:
        loss = model(**inputs)
        losses.note(self.state.global_step, loss)
        return loss


class Callback(TrainerCallback):
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        optimizer.attach(trainer.model_wrapped)

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_save = state.global_step == args.save_at


model = Model()
optimizer = fusedpg.optim.AdamW(groups(model), lr=LR, overlap=args.overlap)
trainer = FusedTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(args.checkpoint),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_grad_norm=0.0 if args.overlap else 1.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    ),
    train_dataset=Samples(),
    optimizers=(optimizer, None),
    callbacks=[Callback()],
)
trainer.train(resume_from_checkpoint=args.resume)
