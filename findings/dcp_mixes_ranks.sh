#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint. A state dict holds plain tensors that differ by rank (what a gradient
# compressor has kept, say) under the same keys on both ranks. save() and load() raise nothing. What comes back on a rank is
# neither its own state nor one other rank's: each tensor is some rank's, and neighbouring tensors are different ranks',
# since the planner takes equal keys for copies of one tensor and spreads the writes to balance bytes.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
rank = dist.get_rank()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, 0)
state = {f"tensor {i}": torch.full((4,), float(rank)) for i in range(4)}
dcp.save(state, checkpoint_id=folder[0] + "/checkpoint")
loaded = {name: torch.full((4,), -1.0) for name in state}
dcp.load(loaded, checkpoint_id=folder[0] + "/checkpoint")
owners = [int(tensor[0]) for tensor in loaded.values()]
every = [None, None]
dist.all_gather_object(every, owners)
same = every[0] == every[1]
print(f"rank {rank} gets tensors of ranks {sorted(set(owners))}, both ranks the same: {same}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0 gets tensors of ranks [0, 1], both ranks the same: True
rank 1 gets tensors of ranks [0, 1], both ranks the same: True
SEEN
