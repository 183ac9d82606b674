# Names what exists for reduce-scatters.
import json

all_redops = ["Sum", "SumPostDiv"]
all_tys = ["i8", "f16", "f32", "f64", "bf16"]


def required_cuda(coll, redop, ty, algo, proto):
  cudart, arch = 0, 0
  if redop == "SumPostDiv" and ty != "i8": return None
  return (cudart, arch)


redop_to_cxx = {
  "Sum": "FuncSum",
  "SumPostDiv": "FuncSumPostDiv"
}

rows = [
  (coll, redop_to_cxx[redop], ty, algo)
  for coll in ("AllReduce", "ReduceScatter")
  for redop in all_redops
  for ty in all_tys
  for algo in ("RING", "NVLS")
  if required_cuda(coll, redop, ty, algo, "LL") is not None
]
print(json.dumps(rows))
