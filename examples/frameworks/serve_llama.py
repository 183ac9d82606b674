"""A Llama of Hugging Face on several CPU processes: each multiplies a part of every weight.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/serve_llama.py --model NAME

Without --model it is a small one of random weights, for a try without a download. --check compares
the logits with those of the whole model on one rank.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fusedpg.tensor_parallel

# Two products, one sum: the first of a pair is cut by columns, the second by rows.
COLUMNS = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]


def plan(styles: Any) -> dict[str, Any]:
    """`styles`: fusedpg.tensor_parallel, or torch.distributed.tensor.parallel."""
    cut = {f"model.layers.*.{name}": styles.ColwiseParallel() for name in COLUMNS}
    return cut | {f"model.layers.*.{name}": styles.RowwiseParallel() for name in ROWS}


def load(args: argparse.Namespace) -> torch.nn.Module:
    dtype = getattr(torch, args.dtype)
    if args.model is not None:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    torch.manual_seed(0)  # alike on all ranks
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=4,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="fused", choices=("fused", "gloo"))
    parser.add_argument("--styles", default="fusedpg", choices=("fusedpg", "torch", "none"))
    parser.add_argument("--model", help="a name of the hub, or a folder")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--layers", type=int, default=4, help="of the model of random weights")
    parser.add_argument("--width", type=int, default=512, help="of the same")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    threads = torch.get_num_threads()  # OMP_NUM_THREADS is a rank's share already
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    torch.set_num_threads(threads)
    model = load(args).eval()
    prompt = torch.arange(1, 9)[None]
    with torch.no_grad():
        whole = model(prompt).logits if args.check else None
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        styles = fusedpg.tensor_parallel if args.styles == "fusedpg" else parallel
        if args.styles != "none":  # that: each rank multiplies all of every weight
            parallelize_module(model, mesh["tp"], plan(styles))
        logits = model(prompt).logits
        if whole is not None:
            torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)
        model.generate(prompt, max_new_tokens=4)  # plans, compiles
        begin = time.perf_counter()
        tokens = model.generate(
            prompt, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False
        )
        seconds = time.perf_counter() - begin
    everyone = [torch.empty_like(tokens) for _ in range(world_size)]
    dist.all_gather(everyone, tokens)
    assert all(torch.equal(tokens, other) for other in everyone)
    if rank == 0:
        ms = 1e3 * seconds / args.tokens
        ranks = f"{world_size} ranks of {threads} threads"
        print(f"{ranks}: the same {args.tokens} tokens on each, {ms:.1f} ms a token")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
