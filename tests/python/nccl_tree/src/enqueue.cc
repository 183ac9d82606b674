// The places of the hooks, as functions that tests can call.
#include <algorithm>

struct Reduction {
  int op;
  int proxyOp;
};
struct Info {
  int opHost;
  Reduction opDev;
};
enum { ncclDevSum, OUR_OPERATION, ncclSum = 100 };
enum { NCCL_ALGO_TREE, NCCL_ALGO_RING, NCCL_NUM_ALGORITHMS };
enum { NCCL_PROTO_LL, NCCL_PROTO_LL128, NCCL_PROTO_SIMPLE, NCCL_NUM_PROTOCOLS };
enum { ncclPatternRing, ncclPatternRingTwice };

int operation_of_network(const Info* info) {
  int netOp = info->opHost;
  return netOp;
}

// Which algorithms and protocols are open, as bits.
int candidates(const Info* info) {
  int open = 0;
  const auto ncclTopoGetAlgoTime = [&](int a, int p) { open |= 1 << (a * NCCL_NUM_PROTOCOLS + p); };
#define NCCLCHECK(call) call
  for (int a = 0; a < NCCL_NUM_ALGORITHMS; a++) {
    for (int p = 0; p < NCCL_NUM_PROTOCOLS; p++) {
      NCCLCHECK(ncclTopoGetAlgoTime(a, p));
    }
  }
  return open;
}

int steps_of(const Info* info, int ranks) {
  int pattern = ncclPatternRing;
  int nstepsPerLoop, nchunksPerLoop;
  nchunksPerLoop = ranks;
  nstepsPerLoop = (pattern == ncclPatternRingTwice ? 2 : 1) * (nchunksPerLoop - 1);
  return nstepsPerLoop;
}
