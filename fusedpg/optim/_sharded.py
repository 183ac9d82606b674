"""``overlap=False`` with a DDP: backward reduce-scatters its buckets, ``step()`` updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusedpg._registration import load_extension
from fusedpg.optim import _reduced
from fusedpg.optim._bridge import Bucket, Gradient
from fusedpg.optim._gradients import ShardedGrad
from fusedpg.optim._hooked import Combined
from fusedpg.optim._modes import Attached

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


class Sharded(Attached):
    # --- in backward: the bridge's calls ------------------------------------------------

    def bucket_ready(
        self,
        optimizer: FusedOptimizer,
        bucket: Bucket,
        grads: list[torch.Tensor],
        used: torch.Tensor | None,
    ) -> None:
        """A bucket in the usual case: plain gradients of this rank."""
        optimizer._stepped = False
        extension = load_extension()
        if bucket.slices is None:
            optimizer._check_layouts(bucket.params)
            bucket.slices = optimizer._owned_slices(bucket.views)
        slices = bucket.slices
        work = optimizer._backend.reduce_shards_(
            grads, bucket.views, used=used, async_op=True, **optimizer._reduction(shadow=False)
        )
        extension.set_gradients(bucket.params, None)

        def finish() -> None:
            work.wait()
            if used is None or bool(used.all()):
                extension.set_gradients(bucket.params, _placeholders(optimizer, bucket, slices))
                return
            flags = used.tolist()
            for param, local, flag in zip(bucket.params, slices, flags, strict=True):
                param.grad = ShardedGrad(param, optimizer._context, reduced=local) if flag else None

        optimizer._in_flight.append(finish)

    def gradients_ready(
        self,
        optimizer: FusedOptimizer,
        gradients: list[Gradient],
        used: torch.Tensor | None,
        shadow: bool,
    ) -> None:
        """A bucket in any other case."""
        optimizer._stepped = False
        _reduced.start(optimizer, gradients, used, shadow)

    def combined(
        self,
        optimizer: FusedOptimizer,
        gradients: list[Gradient],
        used: torch.Tensor | None,
        work: Combined,
    ) -> None:
        """A bucket that a hook of the user's combines."""
        optimizer._stepped = False
        optimizer._check_layouts([gradient.param for gradient in gradients])
        _reduced.follow(optimizer, gradients, used, work)

    def backward_done(self, optimizer: FusedOptimizer) -> None:
        optimizer._wait()

    # --- after it -----------------------------------------------------------------------

    def step(self, optimizer: FusedOptimizer, scale: Any, found_inf: Any) -> None:
        optimizer._check_shared()
        optimizer._wait()
        self.bridge.check_finished(optimizer._named_parameters())
        params, slices = _reduced.all_slices(optimizer)
        _reduced.step(optimizer, params, slices, scale, found_inf)


def _placeholders(
    optimizer: FusedOptimizer, bucket: Bucket, slices: list[torch.Tensor]
) -> list[ShardedGrad]:
    """What stands in ``p.grad`` when a bucket is reduced: the objects of the pass before, unless
    somebody has kept or changed one. Otherwise there would be Python for every parameter."""
    extension, known = load_extension(), bucket.grads
    found = extension.reduced_slices(known, ShardedGrad) if extension.only_here(known) else None
    if found is None or not extension.same_objects(found[0], slices):
        pairs = zip(bucket.params, slices, strict=True)
        context = optimizer._context
        bucket.grads = [ShardedGrad(param, context, reduced=local) for param, local in pairs]
    return bucket.grads
