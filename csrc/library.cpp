// Defines the library, and the op that reports its instruction set.

#include <torch/csrc/stable/library.h>

#include "cpu/isa.h"
#include "schemas.h"

namespace {

// Returns the instruction set in use as an Isa; `limit` >= 0 caps it (for tests), -1 changes
// nothing.
int64_t cpu_isa(int64_t limit) {
  if (limit >= 0) dlrm::limit_isa(static_cast<dlrm::Isa>(limit));
  return static_cast<int64_t>(dlrm::current_isa());
}

}  // namespace

STABLE_TORCH_LIBRARY(dlrm, m) { dlrm::define_ops(m); }

STABLE_TORCH_LIBRARY_IMPL(dlrm, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}
