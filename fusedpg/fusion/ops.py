"""What is computed element by element, and by which function of torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

POINTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "where": torch.where,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "clamp": torch.clamp,
    "cast": lambda x, dtype: x.to(dtype),
}


def exact(value: object) -> bool:
    """Whether a number is a float64, or an int that is one."""
    if not isinstance(value, int) or abs(value) <= 1 << 53:
        return True
    return abs(value) < 1 << 1000 and int(float(value)) == value


_BINARY = (
    "add sub mul div pow maximum minimum lt le gt ge eq ne logical_and logical_or where clamp cast"
)
UNARY = frozenset(POINTWISE) - set(_BINARY.split())

SCALAR_OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "abs": abs,
}

# How a user spells them. Methods of tensors go by the same names.
_SPELLINGS: dict[str, tuple[object, ...]] = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub, torch.subtract),
    "mul": (operator.mul, torch.mul, torch.multiply),
    "div": (operator.truediv, torch.div, torch.divide, torch.true_divide),
    "pow": (operator.pow, torch.pow),
    "neg": (operator.neg, torch.neg, torch.negative),
    "abs": (operator.abs, torch.abs, torch.absolute),
    "lt": (operator.lt, torch.lt, torch.less),
    "le": (operator.le, torch.le, torch.less_equal),
    "gt": (operator.gt, torch.gt, torch.greater),
    "ge": (operator.ge, torch.ge, torch.greater_equal),
    "eq": (operator.eq, torch.eq),
    "ne": (operator.ne, torch.ne, torch.not_equal),
    "logical_and": (operator.and_, torch.logical_and, torch.bitwise_and),
    "logical_or": (operator.or_, torch.logical_or, torch.bitwise_or),
    "logical_not": (operator.invert, operator.inv, torch.logical_not, torch.bitwise_not),
    "erf": (torch.erf, torch.special.erf),
    "exp": (torch.exp, math.exp),
    "log": (torch.log, math.log),
    "sqrt": (torch.sqrt, math.sqrt),
    "sigmoid": (torch.sigmoid, F.sigmoid),
    "tanh": (torch.tanh, F.tanh),
    "relu": (torch.relu, F.relu),
    "gelu": (F.gelu,),
    "silu": (F.silu,),
    "where": (torch.where,),
    "clamp": (torch.clamp, torch.clip),
}
FUNCTIONS: dict[object, str] = {f: name for name, spelt in _SPELLINGS.items() for f in spelt}
for _name in ("sign", "square", "reciprocal", "maximum", "minimum", "rsqrt"):
    FUNCTIONS[getattr(torch, _name)] = _name
METHODS: dict[str, str] = {
    name: name for name in POINTWISE if name not in ("cast", "gelu", "silu", "where")
}
METHODS |= {"absolute": "abs", "divide": "div", "multiply": "mul", "subtract": "sub"}
METHODS |= {"negative": "neg", "clip": "clamp"}


def reduce_locally(kind: str, x: torch.Tensor, dims: tuple[int, ...], keep: bool) -> torch.Tensor:
    """A reduction of a tensor that is here as a whole."""
    function: Any = {
        "sum": torch.sum,
        "max": torch.amax,
        "min": torch.amin,
    }[kind]
    return function(x, dim=dims, keepdim=keep) if dims else x.clone()
