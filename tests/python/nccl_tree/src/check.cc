// Ends with 0 if the hooks of enqueue.cc do what they are for.
#include "enqueue.cc"

int main() {
  const Info sum{7, {ncclDevSum, 1 << 16 | 1}};
  const Info update{7, {ncclDevFusedpgUpdate, 1}};
  const Info moments{7, {ncclDevFusedpgUpdate, 0}};
  const Info skipping{7, {ncclDevFusedpgUpdate, 1 << 16 | 1}};
  const auto asked = [](int protocol) { return Info{7, {ncclDevFusedpgUpdate, 2 * protocol + 2}}; };
  const Info low = asked(NCCL_PROTO_LL), line = asked(NCCL_PROTO_LL128), simple = asked(NCCL_PROTO_SIMPLE);
  const Info all{7, {ncclDevFusedpgUpdate, 2 * NCCL_PROTO_SIMPLE + 3}};
  const auto bits = [](int a, bool ll128) { return (ll128 ? 7 : 5) << (3 * a); };
  const bool network = operation_of_network(&sum) == 7 && operation_of_network(&update) == ncclSum;
  const bool chosen = candidates(&sum) == (bits(0, true) | bits(1, true)) &&
      candidates(&update) == bits(1, true) && candidates(&skipping) == bits(1, false) &&
      candidates(&low) == 1 << 3 && candidates(&line) == 2 << 3 && candidates(&simple) == 4 << 3 &&
      candidates(&all) == 4 << 3;
  const bool chunks = chunk_of(&sum, 1 << 20) == 1 << 20 && chunk_of(&update, 100) == 100 &&
      chunk_of(&all, 100) == 100 &&
      chunk_of(&skipping, 1 << 20) == 1 << 16 && chunk_of(&skipping, 40000) == 1 << 15;
  const bool steps = steps_of(&sum, 4) == 3 && steps_of(&update, 4) == 6 &&
      steps_of(&moments, 4) == 3 &&
      steps_of(&simple, 4) == 3 && steps_of(&all, 4) == 6 && steps_of(&skipping, 4) == 6;
  return network && chosen && chunks && steps ? 0 : 1;
}
