"""Train a ResNet-9 on colour images of 32x32 pixels: OneCycleLR, clipping, channels_last.

    torchrun --standalone --nproc-per-node 2 examples/resnet9.py --clip 1 --channels-last

The images are scikit-learn's handwritten digits, enlarged, in a random colour before another one,
and distorted differently in every step.
"""

from __future__ import annotations

import _common as common
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

LEARNING_RATES = {"adamw": 4e-3, "adam": 4e-3, "sgd": 0.1, "lamb": 0.02}


def colour_images(digits: TensorDataset, seed: int) -> TensorDataset:
    """3x32x32 pixels from 8x8: colours of ink and paper, and some noise."""
    grey, labels = digits.tensors
    generator = torch.Generator().manual_seed(seed)
    ink = F.interpolate(grey, size=(32, 32), mode="bicubic").clamp(0, 1)
    dark, light = torch.rand(2, len(ink), 3, 1, 1, generator=generator)
    noise = torch.randn(len(ink), 3, 32, 32, generator=generator)
    return TensorDataset(ink * 0.5 * dark + (1 - ink) * (0.5 + 0.5 * light) + 0.1 * noise, labels)


def distort(images: Tensor) -> Tensor:
    """Turns, resizes and shifts every image a little, by torch's random generator."""
    angle, size, right, down = torch.empty(4, len(images)).uniform_(-1, 1)
    cos, sin = torch.cos(0.2 * angle) * (1 + 0.1 * size), torch.sin(0.2 * angle)
    maps = torch.stack([cos, -sin, 0.15 * right, sin, cos, 0.15 * down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def convolution(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
    layers = [
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def build_model(width: int) -> nn.Module:
    """Eight convolutions, two pairs of them residual, and a linear layer."""
    return nn.Sequential(
        convolution(3, width),
        convolution(width, 2 * width, pool=True),
        Residual(2 * width),
        convolution(2 * width, 4 * width, pool=True),
        convolution(4 * width, 8 * width, pool=True),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def main() -> None:
    parser = common.argument_parser(__doc__, steps=88, batch_size=64)
    parser.add_argument("--width", type=int, default=32, help="64 is the usual ResNet-9")
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--channels-last", action="store_true")
    small = {"steps": 40, "width": 8, "batch_size": 32}
    args = common.parse_args(parser, LEARNING_RATES, quick=small)
    if not common.launched(args.nproc):
        return
    common.start(args)

    train, test = (colour_images(part, args.seed) for part in common.digits(args.seed))
    images, labels = train.tensors
    batches = common.Batches(args, len(train))
    model = build_model(args.width)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    ddp = DistributedDataParallel(model)
    optimizer = common.make_optimizer(args, model, ddp)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=batches.steps)

    training = common.Training(args, model, optimizer, batches.steps, scheduler)
    for step in training.steps():
        samples = batches[step]
        x = distort(images[samples]).contiguous(memory_format=memory_format)
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), labels[samples])
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        training.record(loss)

    accuracy = common.evaluate(model, test, common.correct)
    training.finish(accuracy=f"{accuracy:.2%}")


if __name__ == "__main__":
    main()
