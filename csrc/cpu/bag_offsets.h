// Where bags begin; defined in joint_embedding.cpp.
#pragma once

#include "../joint_embedding.h"

namespace dlrm {

// Returns [bags + 1] int64: the first id of each bag, and the number of ids. Fails for lengths that
// do not fit.
Tensor bag_offsets_of(const BagLengths& bags);

// Returns the bag of an id.
int64_t bag_of(int64_t position, const int64_t* bag_offsets, int64_t bags);

}  // namespace dlrm
