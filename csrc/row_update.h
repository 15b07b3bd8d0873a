// Rules, sizes and checks of updates and decays of rows of tables, for every backend.
#pragma once

#include <array>
#include <bit>
#include <optional>
#include <vector>

#include "tensors.h"

namespace dlrm {

// The rules of ROW_RULES in dlrm/ops/row_rules.py, each with the states that it keeps for a weight,
// or for a row if it is `kRowWise`, and its constants, in their order there.
struct Sgd {
  static constexpr std::array<const char*, 0> kStates{};
  static constexpr size_t kConstants = 0;
  static constexpr bool kRowWise = false, kCountsSteps = false;
  static constexpr float eps = 0;

  Sgd() = default;
  explicit Sgd(const std::vector<double>&) {}
};
struct Adagrad {
  static constexpr std::array kStates{"state_sum"};
  static constexpr size_t kConstants = 1;
  static constexpr bool kRowWise = false, kCountsSteps = false;
  float eps;

  explicit Adagrad(const std::vector<double>& constants) : eps(static_cast<float>(constants[0])) {}
};
struct RowWiseAdagrad : Adagrad {
  static constexpr bool kRowWise = true;
  using Adagrad::Adagrad;
};
struct Adam {
  static constexpr std::array kStates{"exp_avg", "exp_avg_sq"};
  static constexpr size_t kConstants = 3;
  static constexpr bool kRowWise = false, kCountsSteps = true;
  float new_of_average, new_of_square, eps;  // 1 - beta1 and 1 - beta2

  explicit Adam(const std::vector<double>& constants)
      : new_of_average(static_cast<float>(1 - constants[0])),
        new_of_square(static_cast<float>(1 - constants[1])),
        eps(static_cast<float>(constants[2])) {}
};
constexpr size_t kMostStates = 2;

// Calls f(rule) with the rule of a number, which is its place in ROW_RULES. (Numbers, since torch's
// stable ABI does not free the strings that it passes to an operator: 2.11 to 2.13.)
template <typename Function>
void dispatch_rule(const char* name, int64_t number, const std::vector<double>& constants,
                   const Function& f) {
  const auto call = [&]<typename Rule>() {
    DLRM_CHECK(constants.size() == Rule::kConstants, name, ": expected ", Rule::kConstants,
               " constants, got ", constants.size());
    f(Rule(constants));
  };
  switch (number) {
    case 0:
      return call.template operator()<Sgd>();
    case 1:
      return call.template operator()<Adagrad>();
    case 2:
      return call.template operator()<RowWiseAdagrad>();
    case 3:
      return call.template operator()<Adam>();
    default:
      fail(name, ": expected the number of a rule, 0 to 3, got ", number);
  }
}

// A weight of table rows, and what is beside it.
struct RowTensors {
  const char* name;  // of the operator
  Tensor weight;     // [total_rows, dim], contiguous
  int64_t total_rows;
  int64_t dim;

  // `low` has the lower halves of the weight's values if the weight is BFloat16.
  RowTensors(const char* name_, const Tensor& weight_, const std::optional<Tensor>& low)
      : name(name_), weight(weight_) {
    DLRM_CHECK(
        weight.dim() == 2 && weight.size(1) > 0 &&
            weight.scalar_type() == (low ? ScalarType::BFloat16 : ScalarType::Float) &&
            weight.is_contiguous(),
        name,
        ": expected a contiguous Float weight [rows, dim > 0], or a BFloat16 one with low, got ",
        shape_of(weight), " ", dtype_of(weight), low ? " with low" : " without low");
    total_rows = weight.size(0);
    dim = weight.size(1);
    if (low) check("low", *low, ScalarType::Short, dim);
  }

  template <typename Rule>
  void check_states(const Rule&, const std::vector<Tensor>& states) const {
    DLRM_CHECK(states.size() == Rule::kStates.size(), name, ": expected ", Rule::kStates.size(),
               " states, got ", states.size());
    for (size_t i = 0; i < states.size(); ++i) {
      check(Rule::kStates[i], states[i], ScalarType::Float, Rule::kRowWise ? 0 : dim);
    }
  }

  // A tensor with `columns` values for each row: [rows, columns], or [rows] if `columns` is 0.
  void check(const char* what, const Tensor& tensor, ScalarType dtype, int64_t columns) const {
    const bool fits =
        columns == 0 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns;
    DLRM_CHECK(fits && tensor.size(0) == total_rows && tensor.scalar_type() == dtype &&
                   tensor.is_contiguous() && tensor.device() == weight.device(),
               name, ": expected contiguous ", torch::headeronly::toString(dtype), " ", what, " [",
               total_rows, columns == 0 ? "" : ", " + std::to_string(columns),
               "] on the weight's device, got ", shape_of(tensor), " ", dtype_of(tensor));
  }

  // Numbers of rows, possibly repeated, in any order; returns them contiguous.
  Tensor checked_rows(const Tensor& rows) const {
    DLRM_CHECK(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long &&
                   rows.device() == weight.device(),
               name, ": expected rows [count] Long on the weight's device, got ", shape_of(rows),
               " ", dtype_of(rows));
    return as_contiguous(rows);
  }
};

using TableSizes = std::optional<std::vector<int64_t>>;

struct RowUpdateInputs : RowTensors {
  int64_t count;  // of (row, gradient) pairs
  Tensor rows;    // [count] int64, contiguous
  Tensor grad;    // [count, dim], contiguous
  // If given, the tables' rows are consecutive in the weight, and pair i belongs to table i %
  // tables: the rows are [batch, tables] flattened.
  std::vector<int64_t> table_sizes;

  RowUpdateInputs(const Tensor& weight, const std::optional<Tensor>& low, const Tensor& rows_,
                  const Tensor& grad_, const TableSizes& table_sizes_)
      : RowTensors("row_update_", weight, low), rows(checked_rows(rows_)) {
    count = rows.size(0);
    DLRM_CHECK(grad_.dim() == 2 && grad_.size(0) == count && grad_.size(1) == dim &&
                   is_floating(grad_.scalar_type()) && grad_.device() == weight.device(),
               name, ": expected grad [", count, ", ", dim,
               "] of Float, BFloat16 or Half on the weight's device, got ", shape_of(grad_), " ",
               dtype_of(grad_));
    grad = as_contiguous(grad_);
    DLRM_CHECK(std::bit_width(static_cast<uint64_t>(total_rows)) +
                       std::bit_width(static_cast<uint64_t>(count)) <=
                   64,
               name, ": ", count, " gradients of ", total_rows,
               " rows are more than 64 bits can number");
    if (table_sizes_) {
      table_sizes = *table_sizes_;
      check_tables();
    }
  }

 private:
  void check_tables() const {
    int64_t left = total_rows;
    bool fit = true;
    std::ostringstream shown;
    for (int64_t size : table_sizes) {
      fit = fit && size >= 0 && size <= left;
      left -= fit ? size : 0;
      shown << (shown.tellp() > 0 ? ", " : "") << size;
    }
    DLRM_CHECK(fit && left == 0, name, ": expected table_sizes >= 0 that add up to the weight's ",
               total_rows, " rows, got [", shown.str(), "]");
    const auto tables = static_cast<int64_t>(table_sizes.size());
    DLRM_CHECK(tables == 0 ? count == 0 : count % tables == 0, name,
               ": expected as many rows of each of the ", tables, " tables of table_sizes, got ",
               count, " rows");
  }
};

}  // namespace dlrm
