// Ends with 0 if the hooks of enqueue.cc do what they are for.
#include "enqueue.cc"

int main() {
  const Info sum{7, {ncclDevSum, 1}};
  const Info update{7, {ncclDevFusedpgUpdate, 1}};
  const Info moments{7, {ncclDevFusedpgUpdate, 0}};
  const auto asked = [](int protocol) { return Info{7, {ncclDevFusedpgUpdate, 2 * protocol + 2}}; };
  const Info low = asked(NCCL_PROTO_LL), line = asked(NCCL_PROTO_LL128), simple = asked(NCCL_PROTO_SIMPLE);
  const Info all{7, {ncclDevFusedpgUpdate, 2 * NCCL_PROTO_SIMPLE + 3}};
  const auto bits = [](int a) { return 7 << (3 * a); };
  const bool network = operation_of_network(&sum) == 7 && operation_of_network(&update) == ncclSum;
  const bool chosen = candidates(&sum) == (bits(0) | bits(1)) &&
      candidates(&update) == bits(1) &&
      candidates(&low) == 1 << 3 && candidates(&line) == 2 << 3 && candidates(&simple) == 4 << 3 &&
      candidates(&all) == 4 << 3;
  const bool steps = steps_of(&sum, 4) == 3 && steps_of(&update, 4) == 6 &&
      steps_of(&moments, 4) == 3 &&
      steps_of(&simple, 4) == 3 && steps_of(&all, 4) == 6;
  return network && chosen && steps ? 0 : 1;
}
