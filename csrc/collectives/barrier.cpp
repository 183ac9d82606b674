#include "collectives/collectives.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void barrier(Way& way) {
  OpDescriptor d;
  d.op = OpCode::kBarrier;
  way.enter(nullptr, d, {});
}

} // namespace fusedpg
