"""The kernels of compression: the extension's where they serve, else torch's operations.

The extension's functions also take units of gradients, with the sizes of their parameters as
``numels``: csrc/c10d/compress.cpp has the rule, and their arguments by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fusedpg._registration import load_extension
from fusedpg.compress import _reference

_Result = TypeVar("_Result")


def _chosen(reference: Callable[..., _Result]) -> Callable[..., _Result]:
    """The extension's function for float32 on a CPU and for units, lists of tensors."""
    fast = None

    @functools.wraps(reference)
    def call(*arguments: Any, **options: object) -> _Result:
        nonlocal fast
        first = arguments[0] if arguments[0] is not None else arguments[1]
        if isinstance(first, list) or (first.dtype == torch.float32 and first.is_cpu):
            if fast is None:
                fast = getattr(extension(), reference.__name__)
            result: _Result = fast(*arguments, **options)
            return result
        return reference(*arguments, **options)

    return call


def extension() -> Any:
    """The extension's kernels, for those that torch's operations have none of."""
    return load_extension().compress


accumulate_ = _chosen(_reference.accumulate_)
block_dequantise_ = _chosen(_reference.block_dequantise_)
block_exponents = _chosen(_reference.block_exponents)
block_quantise = _chosen(_reference.block_quantise)
dgc_accumulate_ = _chosen(_reference.dgc_accumulate_)
natural = _chosen(_reference.natural)
onebit = _chosen(_reference.onebit)
pick = _chosen(_reference.pick)
qsgd = _chosen(_reference.qsgd)
scatter_ = _chosen(_reference.scatter_)
signs = _chosen(_reference.signs)
square_sums = _chosen(_reference.square_sums)
terngrad = _chosen(_reference.terngrad)
threshold = _chosen(_reference.threshold)
topk = _chosen(_reference.topk)
unnatural_ = _chosen(_reference.unnatural_)
unpack_signs_ = _chosen(_reference.unpack_signs_)
unqsgd_ = _chosen(_reference.unqsgd_)
unterngrad_ = _chosen(_reference.unterngrad_)
vote_signs_ = _chosen(_reference.vote_signs_)
zero_at_ = _chosen(_reference.zero_at_)
