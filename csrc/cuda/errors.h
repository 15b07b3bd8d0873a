// Bad values that kernels find, kept on the device until the host asks, so that nothing waits.
//
// Each device has one word in static memory. What the first launch reports is kept until it is
// taken, and of that launch's reports the one of least position; while the word holds one, row
// updates change nothing. A launch that a CUDA graph replays has the number that it was captured
// with. So that the first replay's report is kept, every row update seals the word; only where a
// graph has look-ups and no row update behind them is it the one of least position of all replays.
#pragma once

#include "runtime.h"

namespace dlrm {

// In the order of _OPS and _MESSAGES in dlrm/ops/device_errors.py.
enum ReportingOp : int64_t { kJointEmbedding, kRowUpdate };
enum Problem : int64_t {
  kBadId,       // value, table, batch row; limit: rows of the table
  kBadLength,   // value, table, batch row; limit: the number of ids
  kBadTotal,    // value; limit: the number of ids
  kBadRow,      // value, position; limit: rows of the weight
  kBadOffset,   // value, table; limit: rows of the weight
  kBadStep,     // value
  kBadTableRow  // value, position, table; first, limit: where the table's rows begin and end
};

struct Report {
  int64_t problem, position, table, batch_row, value, limit, first;
};

struct ErrorWord {
  unsigned long long lock;
  unsigned long long launch;  // 0: nothing was reported
  int64_t op;
  Report report;
};

// Receiver of a kernel's reports; of one launch, so that its reports are distinct from another's.
struct Errors {
  static constexpr unsigned long long kSealed = ~0ull;  // no launch's number

  ErrorWord* word;
  unsigned long long launch;
  int64_t op;

  Errors(const Launcher& launch, ReportingOp op);

  // Any number of threads may report. A thread whose error is later in the batch than the recorded
  // one returns at once. The lanes of a warp take the lock one after another, since a lane that
  // waits for the lock could block the lane of its warp that holds it.
  __device__ void report(const Report& found) const {
    if (is_known(found)) return;
    const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
    const unsigned together = __activemask();
    for (unsigned waiting = together; waiting != 0; waiting &= waiting - 1) {
      if (__ffs(static_cast<int>(waiting)) - 1 == static_cast<int>(lane)) keep(found);
      __syncwarp(together);
    }
  }

  // One thread asks whether something is kept; if so, no later report replaces it.
  __device__ bool seal() const {
    const auto kept = static_cast<volatile const ErrorWord*>(word)->launch;
    if (kept != 0) atomicCAS(&word->launch, kept, kSealed);  // fails where it is taken meanwhile
    return kept != 0;
  }

 private:
  // Whether another launch's report is kept, or one of this launch that comes before.
  __device__ bool is_known(const Report& found) const {
    const volatile ErrorWord* kept = word;
    const auto by = kept->launch;
    if (by == 0) return false;
    __threadfence();  // the launch is written last, and read first
    return by != launch || kept->report.position <= found.position;
  }

  __device__ void keep(const Report& found) const {
    volatile ErrorWord* kept = word;
    while (!is_known(found)) {
      if (atomicCAS(&word->lock, 0ull, 1ull) != 0) continue;
      __threadfence();
      if (!is_known(found)) {
        kept->op = op;
        kept->report.problem = found.problem;
        kept->report.position = found.position;
        kept->report.table = found.table;
        kept->report.batch_row = found.batch_row;
        kept->report.value = found.value;
        kept->report.limit = found.limit;
        kept->report.first = found.first;
        __threadfence();
        kept->launch = launch;
      }
      __threadfence();
      atomicExch(&word->lock, 0ull);
    }
  }
};

}  // namespace dlrm
