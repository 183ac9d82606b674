"""Facts of operators that no measurement has: order, layouts, recomputation.

The models of Aceso are described here by the names of their operators. A database of another
model describes it in a file of its own (see `fusedpg.plan.database`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fusedpg.plan.config import Facts

__all__ = ["Layout", "Operators", "known_operators", "layout"]

_LAYER = 13  # operators of a layer of an encoder, in GPT and T5
_T5_DECODER_LAYER = 21


class Layout(NamedTuple):
    """The division of a tensor over the devices of an operator.

    Args:
        replicas: devices that hold the same part.
        dims: the parts that each dimension is split into.
    """

    replicas: int
    dims: tuple[int, int, int]


def layout(kind: str | None, tp: int, dp: int) -> Layout | None:
    """The layout of a tensor of one of these kinds; None if it fits every neighbour.

    Args:
        kind: "replicated" over `tp`, or split over it along "hidden" or "heads";
            "samples_first" is replicated, with the batch as the first dimension.
        tp: the operator's tensor-parallel degree.
        dp: its data-parallel degree.
    """
    if kind is None:
        return None
    return {
        "replicated": Layout(tp, (1, dp, 1)),
        "hidden": Layout(1, (1, dp, tp)),
        "heads": Layout(1, (dp, tp, 1)),
        "samples_first": Layout(tp, (dp, 1, 1)),
    }[kind]


@dataclass(frozen=True)
class Operators:
    """The operators of a model.

    Args:
        sequence: the name of each operator, in the order of the forward pass.
        layouts: for each name the kinds of the input's and the output's layout, for each `algo`;
            without one, neighbours need no resharding.
        layer_starts: names where a segment of recomputed operators ends.
        never_recomputed: names that are not recomputed.
        shared_activations: by what factor the activations of a name count, because it shares
            them with a neighbour.
        memory_main_params: copies of the weights in higher precision, in sizes of the weights.
        memory_optimizer: the optimizer's state, likewise.
        optimizer_divides: whether data-parallel devices share that state.
        model: the keys that describe the model in a plan's file.
    """

    sequence: tuple[str, ...]
    layouts: Mapping[str, Sequence[tuple[str | None, str | None]]] = field(default_factory=dict)
    layer_starts: frozenset[str] = frozenset()
    never_recomputed: frozenset[str] = frozenset()
    shared_activations: Mapping[str, float] = field(default_factory=dict)
    memory_main_params: float = 0.0
    memory_optimizer: float = 2.0
    optimizer_divides: bool = False
    model: Facts = field(default_factory=dict)


_COLUMN = ("replicated", "hidden")
_ROW = ("hidden", "replicated")
_GPT_LAYOUTS: dict[str, Sequence[tuple[str | None, str | None]]] = {
    "encoder-embedding": [(None, "replicated")] * 2,
    "enc-1st-layernorm": [("replicated", "replicated")] * 2,
    "enc-attention-qkv": [_COLUMN, _ROW],
    "enc-attention-score": [("hidden", "heads")] * 2,
    "enc-attention-softmax": [("heads", "heads")] * 2,
    "enc-attention-dropout": [("heads", "heads")] * 2,
    "enc-attention-context": [("heads", "hidden")] * 2,
    "enc-attention-dense": [_ROW, _COLUMN],
    "enc-post-attention-dropout": [("replicated", "replicated")] * 2,
    "enc-2nd-layernorm": [("replicated", "replicated")] * 2,
    "enc-MLP-GEMM-1": [_COLUMN, _ROW],
    "enc-MLP-gelu": [("hidden", "hidden")] * 2,
    "enc-MLP-GEMM-2": [_ROW, _COLUMN],
    "enc-post-MLP-dropout": [("replicated", "replicated")] * 2,
    "final-layernorm": [("replicated", "samples_first")] * 2,
    "gpt-post-process": [("samples_first", None)] * 2,
}
# Softmax's output is dropout's input, and dropout's mask has one byte for two of a half's.
_ATTENTION_SHARES = {"enc-attention-softmax": 0.0, "enc-attention-dropout": 1.5}


def gpt_facts(layers: int, length: int, heads: int, hidden: int) -> Facts:
    return {
        "num_layers": layers,
        "seq_length": length,
        "max_position_embeddings": length,
        "num_attention_heads": heads,
        "hidden_size": hidden,
    }


def _t5(layers: int, heads: int, channels: int, feed_forward: int) -> Facts:
    return {
        "num_layers": layers,
        "encoder_seq_length": 2048,
        "decoder_seq_length": 512,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "kv_channels": channels,
        "hidden_size": 1024,
        "ffn_hidden_size": feed_forward,
    }


def _resnet(blocks: Sequence[int], channels: int, width: int) -> Facts:
    return {"num_layers": list(blocks), "in_channels": channels, "width_factor": width}


# The sizes of Aceso's experiments, as its files of plans describe them.
MODELS: dict[tuple[str, str], Facts] = {
    ("gpt", "350M"): gpt_facts(24, 2048, 16, 1024),
    ("gpt", "1_3B"): gpt_facts(24, 2048, 32, 2048),
    ("gpt", "2_6B"): gpt_facts(32, 2048, 32, 2560),
    ("gpt", "6_7B"): gpt_facts(32, 2048, 32, 4096),
    ("gpt", "13B"): gpt_facts(40, 2048, 40, 5120),
    ("gpt", "scale-layer"): gpt_facts(1, 2048, 8, 512),
    ("t5", "770M"): _t5(24, 16, 64, 4096),
    ("t5", "3B"): _t5(24, 32, 128, 16384),
    ("t5", "6B"): _t5(24, 64, 128, 32768),
    ("t5", "11B"): _t5(24, 128, 128, 65536),
    ("t5", "22B"): _t5(48, 128, 128, 65536),
    ("resnet", "250M"): _resnet((3, 4, 6, 3), 160, 2),
    ("resnet", "500M"): _resnet((3, 4, 6, 3), 224, 2),
    ("resnet", "1B"): _resnet((3, 4, 6, 3), 320, 2),
    ("resnet", "2B"): _resnet((3, 4, 6, 3), 448, 2),
    ("resnet", "4B"): _resnet((3, 4, 6, 3), 640, 2),
    ("resnet", "6_8B"): _resnet((3, 4, 6, 3), 320, 16),
    ("resnet", "13B"): _resnet((3, 4, 23, 3), 320, 16),
}


def known_operators(model_name: str, names: Sequence[str], model: Facts) -> Operators | None:
    """The operators of one of Aceso's models; None for other names.

    Args:
        model_name: "gpt", "t5" or "resnet".
        names: the names in a database, each once, in order.
        model: what describes the model; of these "num_layers" is used.
    """
    names = tuple(names)
    transformer = functools.partial(
        Operators,
        layer_starts=frozenset(["enc-1st-layernorm"]),
        shared_activations=_ATTENTION_SHARES,
        memory_main_params=2.0,
        memory_optimizer=4.0,
        model=model,
    )
    if model_name == "gpt":
        layers = int(model["num_layers"])
        head, layer, tail = names[:1], names[1 : 1 + _LAYER], names[1 + _LAYER :]
        return transformer(
            sequence=(*head, *layer * layers, *tail),
            layouts=_GPT_LAYOUTS,
            never_recomputed=frozenset(["encoder-embedding", "gpt-post-process"]),
        )
    if model_name == "t5":
        layers = int(model["num_layers"])
        decoder = 1 + _LAYER + 2
        return transformer(
            sequence=(
                *names[:1],
                *names[1 : 1 + _LAYER] * layers,
                *names[1 + _LAYER : decoder],
                *names[decoder : decoder + _T5_DECODER_LAYER] * layers,
                *names[decoder + _T5_DECODER_LAYER :],
            ),
            never_recomputed=frozenset(
                ["encoder-embedding", "decoder-embedding", "t5-post-process"]
            ),
        )
    if model_name == "resnet":
        return Operators(
            sequence=names,
            layouts={name: [("samples_first", "samples_first")] * 2 for name in names},
            layer_starts=frozenset(name for name in names if "-conv1" in name),
            never_recomputed=frozenset(["conv1"]),
            shared_activations={
                name: 0.0
                for name in names
                if name == "bn1" or "-bn3" in name or ("-downsample" in name and "0-0" not in name)
            },
            model=model,
        )
    return None
