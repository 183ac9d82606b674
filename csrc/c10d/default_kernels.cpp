#include "c10d/default_kernels.hpp"

#include <cstdlib>

#include "base/options.hpp"
#include "c10d/errors.hpp"
#include "collectives/engine.hpp"

namespace fusedpg {

const kernels::Table& default_kernels() {
  static const kernels::Table& table = translate([]() -> const kernels::Table& {
    Settings settings;
    const char* isa = std::getenv("FUSEDPG_ISA");
    settings.isa = isa == nullptr ? "" : isa;
    return select_kernels(settings);
  });
  return table;
}

} // namespace fusedpg
