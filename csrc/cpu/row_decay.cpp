// The L2 term of the steps that did not touch a row.
//
// An optimizer counts the steps since all rows of a weight were last up to date. `steps` has the
// numbers of each step, `done` the number of steps that each row has had. All rows, or those of a
// batch, possibly repeated, get the remaining steps.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace dlrm {
namespace {

// Neighboring rows that have missed the same steps: from `begin` on.
struct LateRows {
  int64_t row, count;
  int32_t begin;
};

// The numbers of a step: the rate, and for Adam also eps; for SGD, the sum of log(1 - lr * l2) up
// to the step.
template <typename Rule>
constexpr int64_t columns_of = Rule::kCountsSteps ? 2 : 1;

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "row_decay_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr const char* kName = "row_decay_";
constexpr int64_t kElementsPerTask = 16384;

struct RowDecayInputs : RowTensors {
  int64_t num_steps;
  int64_t count;               // of rows that are asked for
  std::optional<Tensor> rows;  // [count] int64, contiguous; all rows where there is none
  Tensor steps;                // [num_steps, columns] on the CPU, contiguous

  RowDecayInputs(const Tensor& weight, const std::optional<Tensor>& low, const Tensor& done,
                 const Tensor& steps_, const std::optional<Tensor>& rows_)
      : RowTensors(kName, weight, low), steps(as_contiguous(steps_)) {
    check("done", done, ScalarType::Int, 0);
    DLRM_CHECK(steps.dim() == 2 && steps.is_cpu() && steps.size(0) <= INT32_MAX, kName,
               ": expected steps [steps, columns] on the CPU, got ", shape_of(steps));
    num_steps = steps.size(0);
    if (rows_) rows = checked_rows(*rows_);
    count = rows ? rows->size(0) : total_rows;
  }

  template <typename number_t>
  const number_t* numbers(ScalarType dtype, int64_t columns) const {
    DLRM_CHECK(steps.size(1) == columns && steps.scalar_type() == dtype, kName,
               ": expected steps [steps, ", columns, "] of ", torch::headeronly::toString(dtype),
               ", got ", shape_of(steps), " ", dtype_of(steps));
    return steps.const_data_ptr<number_t>();
  }
};

// Flushes numbers below 1e-38 to zero within its scope: decaying values end there, and processors
// take a hundred times as long for them.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() { _mm_setcsr(before_ | 0x8040); }  // of results and of operands
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#else
  FlushToZero() {}
#endif
};

// Groups rows that have missed equally many steps, or 255 and more.
void order_by_steps(std::vector<LateRows>& late, std::vector<LateRows>& ordered, int64_t end) {
  const auto bucket = [&](const LateRows& rows) {
    return std::min<int64_t>(end - rows.begin, 255);
  };
  int64_t places[257] = {};
  for (const LateRows& rows : late) ++places[bucket(rows) + 1];
  for (int i = 0; i < 256; ++i) places[i + 1] += places[i];
  ordered.resize(late.size());
  for (const LateRows& rows : late) ordered[places[bucket(rows)]++] = rows;
  late.swap(ordered);
}

// A task applies to its rows the steps that they have missed.
template <typename Kernel, typename FindLate>
void decay_late(const RowDecayInputs& inputs, const Kernel& kernel, const FindLate& find_late) {
  const int64_t per_task = std::max<int64_t>(1, kElementsPerTask / inputs.dim);
  torch::stable::parallel_for(0, inputs.count, per_task, [&](int64_t first, int64_t last) {
    const FlushToZero flush;
    std::vector<LateRows> late, ordered;
    for (int64_t begin = first; begin < last; begin += per_task) {
      late.clear();
      find_late(begin, std::min(begin + per_task, last), late);
      order_by_steps(late, ordered, inputs.num_steps);
      kernel(late.data(), static_cast<int64_t>(late.size()));
    }
  });
}

// Of a batch's rows, a task owns those that it is first to mark as up to date. Rows outside the
// weight are left to the lookup, which reports them.
template <typename Kernel>
void decay(const RowDecayInputs& inputs, const Kernel& kernel, Tensor& done_) {
  if (inputs.num_steps == 0) return;
  auto* done = done_.mutable_data_ptr<int32_t>();
  const auto end = static_cast<int32_t>(inputs.num_steps);
  if (!inputs.rows) {
    return decay_late(inputs, kernel, [&](int64_t row, int64_t last, std::vector<LateRows>& late) {
      for (int64_t next; row < last; row = next) {
        const int32_t begin = done[row];
        for (next = row; next < last && done[next] == begin;) done[next++] = end;
        if (begin < end) late.push_back({row, next - row, begin});
      }
    });
  }
  const int64_t* rows = inputs.rows->const_data_ptr<int64_t>();
  decay_late(inputs, kernel, [&](int64_t i, int64_t last, std::vector<LateRows>& late) {
    for (; i < last; ++i) {
      const int64_t row = rows[i];
      if (row < 0 || row >= inputs.total_rows) continue;
      int32_t begin = __atomic_load_n(done + row, __ATOMIC_RELAXED);
      if (begin < end && __atomic_compare_exchange_n(done + row, &begin, end, false,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        late.push_back({row, 1, begin});
      }
    }
  });
}

void row_decay(int64_t number, Tensor weight, std::vector<Tensor> states, Tensor done,
               const Tensor& steps, std::optional<Tensor> rows, std::vector<double> constants,
               double l2, std::optional<Tensor> low) {
  const RowDecayInputs inputs(weight, low, done, steps, rows);
  dispatch_rule(kName, number, constants, [&]<typename Rule>(const Rule& rule) {
    inputs.check_states(rule, states);
    using number_t = std::conditional_t<std::is_same_v<Rule, Sgd>, double, float>;
    const auto* numbers = inputs.numbers<number_t>(
        std::is_same_v<Rule, Sgd> ? ScalarType::Double : ScalarType::Float, columns_of<Rule>);
    dispatch_rows(weight, low, states, [&]<typename Weight>(const Rows<Weight>& own) {
      const auto kernel = DLRM_KERNEL(decay_rows<Rule, Weight, number_t>);
      decay(
          inputs,
          [&](const LateRows* late, int64_t count) {
            kernel(rule, own, numbers, static_cast<float>(l2), late, count, inputs.dim,
                   inputs.num_steps);
          },
          done);
    });
  });
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) { m.impl("row_decay_", TORCH_BOX(&dlrm::row_decay)); }
