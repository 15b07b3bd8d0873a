#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "bag_offsets.h"
#include "isa.h"
#include "tasks.h"

namespace dlrm {
namespace {

// The activation unit of a list: weights in float, with zeros up to whole vectors: `columns` of a
// row, `neurons` of a layer.
struct AttentionUnit {
  int64_t dim, columns;     // of items
  int64_t hidden, neurons;  // of the layer
  const float* items;       // [dim, neurons], as products and candidates
  const float* products;
  const float* candidates;
  const float* items_by_neuron;  // [hidden, columns], as products
  const float* products_by_neuron;
  const float* bias;  // [neurons]
  const float* output;
  float output_bias;
};

struct AttentionScratch {
  float* candidate;    // [columns]
  float* added;        // [neurons]
  float* matrix;       // [dim, neurons]
  float* items;        // [kItems, columns]
  float* transposed;   // [hidden, columns]; this and the next for the gradient only
  float* grad_hidden;  // [kItems, neurons]
  float* grad_matrix;  // [dim, neurons]
  float* grad_added;   // [neurons]
};

// Gradients of a unit, summed over the samples of a task; each as the unit's weights.
struct AttentionSums {
  float* items;
  float* products;
  float* candidates;
  float* bias;
  float* output;
  float* output_bias;
};

}  // namespace
}  // namespace dlrm

#define DLRM_KERNELS "attention_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

constexpr const char* kName = "attention_weights";
constexpr int64_t kPadding = 16;    // floats of the widest vector
constexpr int64_t kMostItems = 8;   // of a block
constexpr int64_t kMostTasks = 64;  // of a list: sums do not depend on the threads

int64_t padded(int64_t size) { return (size + kPadding - 1) / kPadding * kPadding; }

// The activation units of a call.
struct Units {
  int64_t lists, hidden, dim;
  std::vector<int64_t> fields, targets;
  Tensor items, products, candidates, bias, output, output_bias;  // contiguous

  Units(const std::vector<int64_t>& pairs, int64_t num_fields, int64_t dim_, const Tensor& items_,
        const Tensor& products_, const Tensor& candidates_, const Tensor& bias_,
        const Tensor& output_, const Tensor& output_bias_)
      : lists(pairs.size() / 2), hidden(items_.dim() == 3 ? items_.size(1) : 0), dim(dim_) {
    const auto check = [&](const Tensor& given, std::initializer_list<int64_t> sizes,
                           const char* name) {
      DLRM_EXPECT(given,
                  has_shape(given, sizes) && given.is_cpu() &&
                      given.scalar_type() == ScalarType::Float && hidden > 0,
                  kName, ": expected ", name, " of ", lists, " lists, ", hidden,
                  " neurons and dim ", dim, " in Float");
      return as_contiguous(given);
    };
    const auto matrix = {lists, hidden, dim}, vector = {lists, hidden};
    items = check(items_, matrix, "items");
    products = check(products_, matrix, "products");
    candidates = check(candidates_, matrix, "candidates");
    bias = check(bias_, vector, "bias");
    output = check(output_, vector, "output");
    output_bias = check(output_bias_, {lists}, "output_bias");
    DLRM_CHECK(pairs.size() % 2 == 0, kName, ": expected pairs of fields, got ", pairs.size(),
               " numbers");
    for (size_t i = 0; i < pairs.size(); ++i) {
      DLRM_CHECK(pairs[i] >= 0 && pairs[i] < num_fields, kName, ": expected lists of fields below ",
                 num_fields, ", got ", pairs[i]);
      (i % 2 == 0 ? fields : targets).push_back(pairs[i]);
    }
    for (int64_t i = 0; i < lists; ++i) {
      DLRM_CHECK(
          fields[i] != targets[i] && std::count(fields.begin(), fields.end(), fields[i]) == 1,
          kName, ": expected each list once, with another field as candidate, got field ",
          fields[i], " with ", targets[i]);
    }
  }
};

// A unit's weights, padded and transposed.
struct Packed {
  Scratch<float> memory;
  AttentionUnit unit;

  static int64_t size(int64_t columns, int64_t dim, int64_t hidden, int64_t neurons) {
    return 3 * dim * neurons + 2 * hidden * columns + 2 * neurons;
  }

  Packed(const Units& units, int64_t list)
      : memory(size(padded(units.dim), units.dim, units.hidden, padded(units.hidden))) {
    const int64_t dim = units.dim, hidden = units.hidden;
    const int64_t columns = padded(dim), neurons = padded(hidden);
    float* next = memory.get();
    const auto take = [&](int64_t count) {
      float* own = next;
      next += count;
      return own;
    };
    const auto data = [&](const Tensor& given, int64_t count) {
      return given.const_data_ptr<float>() + list * count;
    };
    const auto transposed = [&](const Tensor& given) {
      const float* from = data(given, hidden * dim);
      float* to = take(dim * neurons);
      for (int64_t h = 0; h < hidden; ++h) {
        for (int64_t d = 0; d < dim; ++d) to[d * neurons + h] = from[h * dim + d];
      }
      return to;
    };
    const auto rows = [&](const Tensor& given, int64_t count, int64_t size, int64_t stride) {
      const float* from = data(given, count * size);
      float* to = take(count * stride);
      for (int64_t i = 0; i < count; ++i) std::copy_n(from + i * size, size, to + i * stride);
      return to;
    };
    unit.dim = dim;
    unit.columns = columns;
    unit.hidden = hidden;
    unit.neurons = neurons;
    unit.items = transposed(units.items);
    unit.products = transposed(units.products);
    unit.candidates = transposed(units.candidates);
    unit.items_by_neuron = rows(units.items, hidden, dim, columns);
    unit.products_by_neuron = rows(units.products, hidden, dim, columns);
    unit.bias = rows(units.bias, 1, hidden, neurons);
    unit.output = rows(units.output, 1, hidden, neurons);
    unit.output_bias = *data(units.output_bias, 1);
  }
};

// The memory of a task.
struct OwnScratch {
  Scratch<float> memory;
  AttentionScratch own;

  OwnScratch(const AttentionUnit& unit, bool backward)
      : memory(unit.columns + unit.neurons + unit.dim * unit.neurons + kMostItems * unit.columns +
               backward * (unit.hidden * unit.columns + kMostItems * unit.neurons +
                           unit.dim * unit.neurons + unit.neurons)) {
    float* next = memory.get();
    const auto take = [&](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    own.candidate = take(unit.columns);
    own.added = take(unit.neurons);
    own.matrix = take(unit.dim * unit.neurons);
    own.items = take(kMostItems * unit.columns);
    own.transposed = own.grad_hidden = own.grad_matrix = own.grad_added = nullptr;
    if (!backward) return;
    own.transposed = take(unit.hidden * unit.columns);
    own.grad_hidden = take(kMostItems * unit.neurons);
    own.grad_matrix = take(unit.dim * unit.neurons);
    own.grad_added = take(unit.neurons);
  }
};

int64_t samples_per_task(int64_t batch) { return (batch + kMostTasks - 1) / kMostTasks; }

Tensor attention_weights(const Tensor& weight_, const Tensor& ids, const Tensor& lengths,
                         const Tensor& table_offsets, std::vector<int64_t> lists,
                         const Tensor& items, const Tensor& products, const Tensor& candidates,
                         const Tensor& bias, const Tensor& output, const Tensor& output_bias) {
  const BagInputs inputs(ids, lengths, table_offsets, std::nullopt);
  const Tensor weight = checked_weight(weight_, inputs.lengths);
  const int64_t fields = inputs.tables, dim = weight.size(1);
  const Units units(lists, fields, dim, items, products, candidates, bias, output, output_bias);
  const TableRanges ranges(inputs.table_offsets);
  ranges.check(fields, weight.size(0));
  const Tensor offsets = bag_offsets_of(inputs);
  const int64_t* bags = offsets.const_data_ptr<int64_t>();
  Tensor found = allocate(weight, {inputs.total}, ScalarType::Float);
  float* weights = found.mutable_data_ptr<float>();
  std::fill_n(weights, inputs.total, 1.0f);
  FirstBad bad;
  for (int64_t list = 0; list < units.lists; ++list) {
    const Packed packed(units, list);
    const int64_t field = units.fields[list], target = units.targets[list];
    dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
      dispatch_id(inputs.ids.scalar_type(), [&]<typename id_t>() {
        const auto* weight_data = weight.const_data_ptr<weight_t>();
        const auto* ids_data = inputs.ids.const_data_ptr<id_t>();
        const auto weigh = DLRM_KERNEL(weigh_items<weight_t>);
        torch::stable::parallel_for(
            0, inputs.batch, samples_per_task(inputs.batch), [&](int64_t begin, int64_t end) {
              const OwnScratch scratch(packed.unit, false);
              std::vector<int64_t> rows;
              const auto add_rows = [&](int64_t bag) {
                const int64_t column = bag % fields, first = ranges.begins[column];
                const auto size = static_cast<uint64_t>(ranges.ends[column] - first);
                for (int64_t i = bags[bag]; i < bags[bag + 1]; ++i) {
                  const int64_t id = ids_data[i];
                  if (static_cast<uint64_t>(id) >= size) {
                    bad.report(i);
                    return false;
                  }
                  rows.push_back(first + id);
                }
                return true;
              };
              for (int64_t sample = begin; sample < end; ++sample) {
                const int64_t bag = sample * fields + field, first = bags[bag];
                const int64_t count = bags[bag + 1] - first;
                rows.clear();
                if (!add_rows(bag) || !add_rows(sample * fields + target)) return;
                if (count == 0) continue;
                weigh(packed.unit, weight_data, rows.data(), count, rows.data() + count,
                      static_cast<int64_t>(rows.size()) - count, scratch.own, weights + first);
              }
            });
        if (bad.any()) {
          ranges.fail_for(ids_data[bad.position()], bag_of(bad.position(), bags, inputs.bags),
                          fields);
        }
      });
    });
  }
  return found;
}

using UnitGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

UnitGrads attention_weights_backward(const Tensor& grad_, Tensor values, const Tensor& weight_,
                                     const Tensor& rows_, const Tensor& lengths,
                                     std::vector<int64_t> lists, const Tensor& items,
                                     const Tensor& products, const Tensor& candidates,
                                     const Tensor& bias, const Tensor& output,
                                     const Tensor& output_bias) {
  const BagLengths inputs(lengths, rows_.numel());
  const Tensor weight = checked_weight(weight_, inputs.lengths);
  const int64_t fields = inputs.tables, dim = weight.size(1), total = inputs.total;
  const Units units(lists, fields, dim, items, products, candidates, bias, output, output_bias);
  DLRM_EXPECT(grad_, has_shape(grad_, {total}) && grad_.scalar_type() == ScalarType::Float, kName,
              ": expected grad [total] Float");
  DLRM_EXPECT(values,
              has_shape(values, {total, dim}) && is_floating(values.scalar_type()) &&
                  values.is_contiguous() && values.is_cpu(),
              kName, ": expected contiguous values [", total, ", ", dim, "]");
  const Tensor rows = inputs.checked_rows(rows_), grad = as_contiguous(grad_);
  const int64_t* rows_data = rows.const_data_ptr<int64_t>();
  const float* grad_data = grad.const_data_ptr<float>();
  const Tensor offsets = bag_offsets_of(inputs);
  const int64_t* bags = offsets.const_data_ptr<int64_t>();
  const auto total_rows = static_cast<uint64_t>(weight.size(0));
  for (int64_t i = 0; i < total; ++i) {
    DLRM_CHECK(static_cast<uint64_t>(rows_data[i]) < total_rows, kName, ": row ", rows_data[i],
               " at position ", i, ": expected 0 <= row < ", weight.size(0));
  }
  std::vector<Tensor> found;
  for (int i = 0; i < 3; ++i) {
    found.push_back(allocate(units.items, {units.lists, units.hidden, dim}));
  }
  for (int i = 0; i < 2; ++i) found.push_back(allocate(units.bias, {units.lists, units.hidden}));
  found.push_back(allocate(units.output_bias, {units.lists}));
  for (int64_t list = 0; list < units.lists; ++list) {
    const Packed packed(units, list);
    const AttentionUnit& unit = packed.unit;
    const int64_t field = units.fields[list], target = units.targets[list];
    const int64_t matrix = unit.dim * unit.neurons, size = 3 * matrix + 2 * unit.neurons + kPadding;
    const int64_t each = std::max<int64_t>(1, samples_per_task(inputs.batch));
    const int64_t tasks = (inputs.batch + each - 1) / each;
    const Scratch<float> memory(std::max<int64_t>(1, tasks) * size);
    const auto sums_of = [&](int64_t task) {
      float* own = memory.get() + task * size;
      float* vectors = own + 3 * matrix;
      return AttentionSums{own,     own + matrix,           own + 2 * matrix,
                           vectors, vectors + unit.neurons, vectors + 2 * unit.neurons};
    };
    dispatch_floating(weight.scalar_type(), [&]<typename weight_t>() {
      dispatch_floating(values.scalar_type(), [&]<typename value_t>() {
        const auto* weight_data = weight.const_data_ptr<weight_t>();
        auto* values_data = values.mutable_data_ptr<value_t>();
        const auto weigh = DLRM_KERNEL(weigh_items_backward<weight_t, value_t>);
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
          const OwnScratch scratch(unit, true);
          for (int64_t task = begin; task < end; ++task) {
            const int64_t last = std::min(inputs.batch, (task + 1) * each);
            for (int64_t sample = task * each; sample < last; ++sample) {
              const int64_t bag = sample * fields + field, first = bags[bag];
              const int64_t own = sample * fields + target, candidate = bags[own];
              if (bags[bag + 1] == first) continue;
              weigh(unit, weight_data, rows_data + first, bags[bag + 1] - first,
                    rows_data + candidate, bags[own + 1] - candidate, grad_data + first,
                    scratch.own, sums_of(task), values_data + first * dim,
                    values_data + candidate * dim);
            }
          }
        });
      });
    });
    const AttentionSums all = sums_of(0);
    for (int64_t task = 1; task < tasks; ++task) {
      const float* own = sums_of(task).items;
      for (int64_t i = 0; i < size; ++i) all.items[i] += own[i];
    }
    const auto place = [&](size_t number, int64_t count) {
      return found[number].mutable_data_ptr<float>() + list * count;
    };
    const float* matrices[] = {all.items, all.products, all.candidates};
    for (size_t number = 0; number < 3; ++number) {
      float* to = place(number, unit.hidden * dim);
      for (int64_t h = 0; h < unit.hidden; ++h) {
        for (int64_t d = 0; d < dim; ++d) to[h * dim + d] = matrices[number][d * unit.neurons + h];
      }
    }
    std::copy_n(all.bias, unit.hidden, place(3, unit.hidden));
    std::copy_n(all.output, unit.hidden, place(4, unit.hidden));
    *place(5, 1) = *all.output_bias;
  }
  return {found[0], found[1], found[2], found[3], found[4], found[5]};
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("attention_weights", TORCH_BOX(&dlrm::attention_weights));
  m.impl("attention_weights_backward", TORCH_BOX(&dlrm::attention_weights_backward));
}
