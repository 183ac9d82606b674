#include "c10d/default_kernels.hpp"

#include "base/options.hpp"
#include "c10d/errors.hpp"
#include "collectives/engine.hpp"

namespace fusedpg {

const kernels::Table& default_kernels() {
  static const kernels::Table& table = translate([]() -> const kernels::Table& {
    return select_kernels(resolve(Options{}));
  });
  return table;
}

} // namespace fusedpg
