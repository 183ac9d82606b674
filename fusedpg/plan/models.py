"""Built-in models as sequences of operators, with Aceso's names and sizes, and small ones.

A model's facts are the keys that describe it in a plan's file: a plan is enough to build it. Word
embeddings and the last operator's weights are not tied.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedpg.plan.catalogue import MODELS as MODELS_OF_ACESO
from fusedpg.plan.catalogue import gpt_facts
from fusedpg.plan.config import Facts, Plan, PlanError
from fusedpg.plan.operators import (
    QKV,
    AttentionContext,
    AttentionDropout,
    AveragePool,
    BatchNorm,
    ClassLoss,
    Convolution,
    DropoutAdd,
    Embedding,
    Gelu,
    LanguageLoss,
    LayerNorm,
    Linear,
    MaxPool,
    Model,
    Operator,
    Relu,
    Score,
    Shortcut,
    Softmax,
    Value,
)

# --- transformers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """The sizes of a layer of a transformer."""

    length: int
    memory_length: int  # of keys and values
    hidden: int
    heads: int
    channels: int  # of each head
    features: int  # of the MLP
    p: float  # of dropout
    causal: bool

    @classmethod
    def of(cls, facts: Facts, length: int, causal: bool) -> _Block:
        return cls(
            length,
            length,
            facts["hidden_size"],
            facts["num_attention_heads"],
            facts["kv_channels"],
            facts["ffn_hidden_size"],
            facts["dropout"],
            causal,
        )


class _Layers:
    """Appends operators; the next one's input is the last one's output."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []

    def add(self, kind: Callable[..., Operator], name: str, *inputs: str, **fields: object) -> str:
        """The name of the output: the operator's number and name."""
        return self.add_several(kind, name, inputs, (name,), **fields)[0]

    def add_several(
        self,
        kind: Callable[..., Operator],
        name: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        **fields: object,
    ) -> tuple[str, ...]:
        """The names of the outputs: the operator's number, and the output's name."""
        given = tuple(f"{len(self.operators)}.{output}" for output in outputs)
        self.operators.append(kind(name=name, inputs=inputs, outputs=given, **fields))
        return given

    def attention(self, prefix: str, suffix: str, inputs: tuple[str, ...], block: _Block) -> str:
        """From the normalised values, and the memory if there is one, to the product behind."""
        heads, channels = block.heads, block.channels
        size = {"length": block.length, "memory_length": block.memory_length, "heads": heads}
        name, several = f"{prefix}-attention", ("query", "key", "value")
        of_qkv = {**size, "hidden": block.hidden, "channels": channels}
        q, k, v = self.add_several(QKV, f"{name}-qkv{suffix}", inputs, several, **of_qkv)
        y = self.add(Score, f"{name}-score{suffix}", q, k, **size, channels=channels)
        y = self.add(Softmax, f"{name}-softmax{suffix}", y, **size, causal=block.causal)
        y = self.add(AttentionDropout, f"{name}-dropout{suffix}", y, **size, p=block.p)
        y = self.add(AttentionContext, f"{name}-context{suffix}", y, v, **size, channels=channels)
        return self.product(f"{name}-dense{suffix}", y, block, heads * channels, block.hidden)

    def product(
        self, name: str, x: str, block: _Block, ins: int, outs: int, column_first: bool = False
    ) -> str:
        sizes = {"length": block.length, "in_features": ins, "out_features": outs}
        return self.add(Linear, name, x, **sizes, column_first=column_first)

    def mlp(self, prefix: str, x: str, block: _Block) -> str:
        name, hidden, features = f"{prefix}-MLP", block.hidden, block.features
        y = self.product(f"{name}-GEMM-1", x, block, hidden, features, column_first=True)
        y = self.add(Gelu, f"{name}-gelu", y, length=block.length, features=features)
        return self.product(f"{name}-GEMM-2", y, block, features, hidden)

    def encoder_layer(self, x: str, block: _Block) -> str:
        """13 operators: a block of self-attention and an MLP."""
        size = {"length": block.length, "hidden": block.hidden}
        y = self.add(LayerNorm, "enc-1st-layernorm", x, **size)
        y = self.attention("enc", "", (y,), block)
        x = self.add(DropoutAdd, "enc-post-attention-dropout", y, x, **size, p=block.p)
        y = self.add(LayerNorm, "enc-2nd-layernorm", x, **size)
        y = self.mlp("enc", y, block)
        return self.add(DropoutAdd, "enc-post-MLP-dropout", y, x, **size, p=block.p)

    def decoder_layer(self, x: str, memory: str, own: _Block, crossed: _Block) -> str:
        """21 operators: causal self-attention, attention to `memory`, and an MLP."""
        size = {"length": own.length, "hidden": own.hidden}
        y = self.add(LayerNorm, "dec-1st-layernorm", x, **size)
        y = self.attention("dec", "-1", (y,), own)
        x = self.add(DropoutAdd, "dec-post-attention-dropout-1", y, x, **size, p=own.p)
        y = self.add(LayerNorm, "dec-2nd-layernorm", x, **size)
        y = self.attention("dec", "-2", (y, memory), crossed)
        x = self.add(DropoutAdd, "dec-post-attention-dropout-2", y, x, **size, p=own.p)
        y = self.add(LayerNorm, "dec-3rd-layernorm", x, **size)
        y = self.mlp("dec", y, own)
        return self.add(DropoutAdd, "dec-post-MLP-dropout", y, x, **size, p=own.p)


def _sizes(name: str, facts: Callable[..., Facts]) -> dict[str, Facts]:
    """The sizes of Aceso's experiments, with what its files of plans do not say."""
    return {
        size: facts(**known) for (model, size), known in MODELS_OF_ACESO.items() if model == name
    }


def _gpt_facts(**known: Any) -> Facts:
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    more = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads}
    return {**known, **more, "vocab_size": known.get("vocab_size", 51200), "dropout": 0.1}


def _gpt_size(layers: int, length: int, hidden: int, heads: int, vocabulary: int) -> Facts:
    return _gpt_facts(**gpt_facts(layers, length, heads, hidden), vocab_size=vocabulary)


# Aceso's databases hold one layer of each size; a plan's file says how many it is for.
GPT_SIZES = {
    "tiny": _gpt_size(2, 8, 16, 4, 32),
    "25M": _gpt_size(6, 128, 384, 6, 16384),
    **_sizes("gpt", _gpt_facts),
    "scale-layer": _gpt_size(8, 2048, 512, 8, 51200),
}


def gpt(size: str, facts: Facts) -> Model:
    length, hidden = facts["seq_length"], facts["hidden_size"]
    vocabulary = facts["vocab_size"]
    block = _Block.of(facts, length, causal=True)
    tokens = Value((length,), torch.int64, high=vocabulary, differentiable=False)
    layers = _Layers()
    x = layers.add(
        Embedding,
        "encoder-embedding",
        "tokens",
        vocabulary=vocabulary,
        hidden=hidden,
        length=length,
        dropout=facts["dropout"],
    )
    for _ in range(facts["num_layers"]):
        x = layers.encoder_layer(x, block)
    x = layers.add(LayerNorm, "final-layernorm", x, length=length, hidden=hidden)
    last = {"length": length, "hidden": hidden, "vocabulary": vocabulary}
    layers.add(LanguageLoss, "gpt-post-process", x, "labels", **last)
    data = {"tokens": tokens, "labels": tokens}
    return Model("gpt", size, tuple(layers.operators), data, dict(facts)).check()


def _t5_facts(vocab_size: int = 30592, **known: object) -> Facts:
    return {**known, "vocab_size": vocab_size, "dropout": 0.1}


_T5_TINY = {"encoder_seq_length": 8, "decoder_seq_length": 4, "max_position_embeddings": 8}
_T5_TINY |= {"num_layers": 2, "num_attention_heads": 4, "kv_channels": 4}
_T5_TINY |= {"hidden_size": 16, "ffn_hidden_size": 32}
T5_SIZES = {"tiny": _t5_facts(32, **_T5_TINY), **_sizes("t5", _t5_facts)}


def t5(size: str, facts: Facts) -> Model:
    hidden, vocabulary, p = facts["hidden_size"], facts["vocab_size"], facts["dropout"]
    encoder, decoder = facts["encoder_seq_length"], facts["decoder_seq_length"]
    block = _Block.of(facts, encoder, causal=False)
    own = _Block.of(facts, decoder, causal=True)
    crossed = replace(block, length=decoder)
    words = {"vocabulary": vocabulary, "hidden": hidden, "dropout": p}
    layers = _Layers()
    x = layers.add(Embedding, "encoder-embedding", "tokens", length=encoder, **words)
    for _ in range(facts["num_layers"]):
        x = layers.encoder_layer(x, block)
    memory = layers.add(LayerNorm, "enc-final-layernorm", x, length=encoder, hidden=hidden)
    x = layers.add(Embedding, "decoder-embedding", "decoder_tokens", length=decoder, **words)
    for _ in range(facts["num_layers"]):
        x = layers.decoder_layer(x, memory, own, crossed)
    x = layers.add(LayerNorm, "dec-final-layernorm", x, length=decoder, hidden=hidden)
    last = {"length": decoder, "hidden": hidden, "vocabulary": vocabulary}
    layers.add(LanguageLoss, "t5-post-process", x, "labels", **last)
    tokens = {
        name: Value((length,), torch.int64, high=vocabulary, differentiable=False)
        for name, length in (("tokens", encoder), ("decoder_tokens", decoder), ("labels", decoder))
    }
    return Model("t5", size, tuple(layers.operators), tokens, dict(facts)).check()


# --- Wide-ResNet --------------------------------------------------------------------------


def _resnet_facts(image_size: int = 224, num_classes: int = 1024, **known: object) -> Facts:
    return {**known, "image_size": image_size, "num_classes": num_classes}


RESNET_SIZES = {
    "tiny": _resnet_facts(16, 8, num_layers=[1, 2], in_channels=4, width_factor=2),
    **_sizes("resnet", _resnet_facts),
}
_EXPANSION = 4


def resnet(size: str, facts: Facts) -> Model:
    base, factor = facts["in_channels"], facts["width_factor"]
    layers = _Layers()

    def convolution(name: str, x: str, shape: tuple[int, int, int, int, int]) -> str:
        ins, outs, width, kernel, stride = shape
        return layers.add(
            Convolution,
            name,
            x,
            in_channels=ins,
            out_channels=outs,
            width=width,
            kernel=kernel,
            stride=stride,
            padding=kernel // 2,
        )

    def block(name: str, x: str, shape: tuple[int, int, int, int]) -> str:
        ins, channels, width, stride = shape
        wide, outs, after = channels * factor, channels * _EXPANSION, width // stride
        y = convolution(f"{name}-conv1", x, (ins, channels, width, 1, 1))
        y = layers.add(BatchNorm, f"{name}-bn1", y, channels=channels, width=width, relu=True)
        y = convolution(f"{name}-conv2", y, (channels, wide, width, 3, stride))
        y = layers.add(BatchNorm, f"{name}-bn2", y, channels=wide, width=after, relu=True)
        y = convolution(f"{name}-conv3", y, (wide, outs, after, 1, 1))
        y = layers.add(BatchNorm, f"{name}-bn3", y, channels=outs, width=after)
        fits = ins == outs and stride == 1
        y = layers.add(
            Shortcut,
            f"{name}-downsample",
            y,
            x,
            in_channels=ins,
            out_channels=outs,
            width=after,
            stride=stride,
            convolves=not fits,
        )
        return layers.add(Relu, f"{name}-relu", y, channels=outs, width=after)

    width = facts["image_size"]
    x = convolution("conv1", "image", (3, base, width, 7, 2))
    width //= 2
    x = layers.add(BatchNorm, "bn1", x, channels=base, width=width)
    x = layers.add(Relu, "relu1", x, channels=base, width=width)
    x = layers.add(MaxPool, "maxpool", x, channels=base, width=width)
    width //= 2
    ins = base
    for group, blocks in enumerate(facts["num_layers"]):
        for number in range(blocks):
            stride = 2 if group and not number else 1
            channels = base * 2**group
            x = block(f"block-{group}-{number}", x, (ins, channels, width, stride))
            ins, width = channels * _EXPANSION, width // stride
    x = layers.add(AveragePool, "avgpool", x, channels=ins)
    layers.add(ClassLoss, "fc", x, "labels", features=ins, classes=facts["num_classes"])
    data = {
        "image": Value((3, facts["image_size"], facts["image_size"]), differentiable=False),
        "labels": Value((), torch.int64, high=facts["num_classes"], differentiable=False),
    }
    return Model("resnet", size, tuple(layers.operators), data, dict(facts)).check()


MODELS: dict[str, tuple[Callable[[str, Facts], Model], dict[str, Facts]]] = {
    "gpt": (gpt, GPT_SIZES),
    "t5": (t5, T5_SIZES),
    "resnet": (resnet, RESNET_SIZES),
}


def build(name: str, size: str, **changes: object) -> Model:
    """A built-in model, or one that a function makes.

    Args:
        name: "gpt", "t5" or "resnet"; or ``package.module:function``, which is called with the size
            and the changes and returns a `Model`, such as `fusedpg.plan.traced.trace` makes.
        size: one of its sizes.
        changes: facts that differ from that size, such as ``num_layers=12`` or ``dropout=0.0``.

    Raises:
        PlanError: for an unknown name, size or fact.
    """
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise PlanError(f"no model {name!r}: {error}") from error
        made: Model = make(size, **changes)
        return made
    if name == "scale-layer":  # Aceso's name of a GPT whose number of layers varies
        name, size = "gpt", "scale-layer"
    if name not in MODELS:
        raise PlanError(f"no model {name!r}: there are {', '.join(MODELS)}")
    built_in, sizes = MODELS[name]
    if size not in sizes:
        raise PlanError(f"no size {size!r} of {name}: there are {', '.join(sizes)}")
    if unknown := set(changes) - set(sizes[size]):
        raise PlanError(f"{name} has no {', '.join(sorted(unknown))}")
    return built_in(size, {**sizes[size], **changes})


def of_plan(plan: Plan, **changes: object) -> Model:
    """The built-in model that a plan is for; its file says in which facts it differs.

    Raises:
        PlanError: if there is none, or the plan has not as many operators.
    """
    model = build(plan.model_name, plan.model_size)
    said = {key: value for key, value in plan.model.items() if key in model.facts}
    model = build(plan.model_name, plan.model_size, **{**said, **changes})
    plan.check(model.names)
    return model
