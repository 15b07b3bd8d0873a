// Kernels of mlp and its gradient for one instruction set; see for_each_isa.h.
//
// Matrices are stored in panels of kPanel columns, each with all rows of its columns, so that a
// tile of six rows and one panel reads consecutive memory. bf16 values are kept twice where the
// processor multiplies pairs: rows of values, whose neighbors make pairs for the product with a
// weight, and pairs of rows, for the product that is a weight's gradient.

#include "transpose.h"
#include "units.h"

constexpr int64_t kPanelVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kPanel = kPanelVectors * kLanes;  // columns
constexpr int64_t kTile = 6;                        // rows of a tile; even
constexpr int64_t kUnitsAtOnce = 512;  // of a weight's gradient: they stay in the cache

// The type of one value in memory: where no pairs are multiplied, rounded values are kept as
// floats.
template <typename scalar_t>
using Stored = std::conditional_t<std::is_same_v<Unit<scalar_t>, BFloat16Pair>, BFloat16, float>;

template <typename T>
struct Panels {
  T* data;
  int64_t rows, width;

  int64_t count() const { return (width + kPanel - 1) / kPanel; }
  // Columns of a panel, zeros behind the width included.
  int64_t columns(int64_t panel) const {
    return std::min(kPanel, round_up(width - panel * kPanel, kLanes));
  }
  T* at(int64_t panel, int64_t row) const {
    return data + rows * kPanel * panel + row * columns(panel);
  }
};

template <typename scalar_t>
DLRM_INLINE int64_t units_of(int64_t values) {
  constexpr int64_t kPer = kPerUnit<Unit<scalar_t>>;
  return (values + kPer - 1) / kPer;
}

// What the host must know: units of a packed matrix, whole vectors of columns, panels.
template <typename scalar_t>
int64_t packed_units(int64_t depth, int64_t columns) {
  return units_of<scalar_t>(depth) * round_up(columns, kLanes);
}
template <typename scalar_t>
int64_t whole_vectors(int64_t columns) {
  return round_up(columns, kLanes);
}
template <typename scalar_t>
int64_t count_panels(int64_t columns) {
  return (columns + kPanel - 1) / kPanel;
}

#include "mlp_packing.h"

// Where rows of values go; parts with a null pointer are left out.
template <typename scalar_t>
struct Target {
  using unit_t = Unit<scalar_t>;

  Panels<Stored<scalar_t>> rows;  // from row `first` on
  int64_t first;
  Panels<unit_t> pairs;  // of all rows; without pairs, `rows` does
  scalar_t* plain;       // [batch, width]
  int64_t batch, width;

  // Puts kLanes columns of two rows, of which the first has an even number.
  DLRM_INLINE void put(const Target& to, int64_t panel, int64_t column, int64_t row, Vec even,
                       Vec odd) {
    if (to.rows.data != nullptr) {
      auto* at = to.rows.at(panel, row - to.first) + column;
      put_values(at, even);
      put_values(at + to.rows.columns(panel), odd);
    }
    if constexpr (kPerUnit<unit_t> == 2) {
      if (to.pairs.data != nullptr) {
        const Vec pair =
            pair_rows(row < to.batch ? even : zero(), row + 1 < to.batch ? odd : zero());
        std::memcpy(to.pairs.at(panel, row / 2) + column, &pair, sizeof pair);
      }
    }
    if (to.plain != nullptr) {
      const int64_t at = panel * kPanel + column, count = to.width - at;
      for (int64_t r = row; r < std::min(row + 2, to.batch); ++r) {
        scalar_t* plain = to.plain + r * to.width + at;
        const Vec values = r == row ? even : odd;
        if (count >= kLanes) {
          put_values(plain, values);
        } else {
          store_first(plain, values, count);
        }
      }
    }
  }

  template <typename T>
  static DLRM_ALWAYS_INLINE void put_values(T* to, Vec values) {
    if constexpr (std::is_same_v<T, float>) {
      store(to, rounded<scalar_t>(values));
    } else {
      const Halves halves = round_to_bfloat16(values);
      std::memcpy(to, &halves, sizeof halves);
    }
  }
};

// Multiplies rows of values, from `first` on, with a panel of weights, tile by tile. `finish` gets
// each tile and its row, counted from `first`.
template <typename scalar_t, int kVectors, typename Finish>
DLRM_INLINE void multiply_panel(const Panels<Stored<scalar_t>>& from, int64_t first,
                                int64_t num_rows, const Unit<scalar_t>* packed, const float* start,
                                const Finish& finish) {
  using unit_t = Unit<scalar_t>;
  for (int64_t row = 0; row < num_rows; row += kTile) {
    Vec acc[kTile][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Vec begin = start == nullptr ? zero() : load(start + v * kLanes);
      for (int r = 0; r < kTile; ++r) acc[r][v] = begin;
    }
    const unit_t* weights = packed;
    for (int64_t panel = 0; panel < from.count(); ++panel) {
      const int64_t stride = from.columns(panel) / kPerUnit<unit_t>;
      const int64_t depth = units_of<scalar_t>(std::min(kPanel, from.width - panel * kPanel));
      const auto* values = reinterpret_cast<const unit_t*>(from.at(panel, first + row));
      for (int64_t k = 0; k < depth; ++k) {
        Vec columns[kVectors];
        for (int v = 0; v < kVectors; ++v) columns[v] = load_units(weights + v * kLanes);
        weights += kVectors * kLanes;
        for (int r = 0; r < kTile; ++r) {
          const Vec value = broadcast_unit(values + r * stride + k);
          for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = multiply_add<unit_t>(value, columns[v], acc[r][v]);
          }
        }
      }
    }
    finish(row, acc);
  }
}

// Calls f(width) with a constant number of vectors.
template <typename Function>
DLRM_INLINE void with_vectors(int64_t columns, const Function& f) {
  switch (columns / kLanes) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      if constexpr (kPanelVectors > 2) return f(std::integral_constant<int, 3>());
      return;
    default:
      if constexpr (kPanelVectors > 2) return f(std::integral_constant<int, 4>());
  }
}

// Lanes of `grad` where the value that a ReLU returned is above 0 or NaN, else 0.
DLRM_INLINE Vec where_positive(Vec grad, Vec value) {
  return (Vec)((Bits)grad & ~(Bits)(value <= 0));
}

DLRM_INLINE Vec positive(Vec values) { return where_positive(values, values); }  // NaN stays NaN

// The rows of a run between two layers: kept ones if there are, else in one of two buffers.
template <typename scalar_t>
DLRM_INLINE Target<scalar_t> between(const MlpPass& pass, void* kept, int64_t width,
                                     Stored<scalar_t>* scratch, int64_t begin) {
  using unit_t = Unit<scalar_t>;
  Target<scalar_t> to{};
  to.batch = pass.batch;
  to.width = width;
  to.first = begin;
  to.rows = {scratch, pass.rows_of_run, width};
  if constexpr (kPerUnit<unit_t> == 1) {
    if (kept != nullptr) {
      to.rows = {static_cast<float*>(kept), pass.padded_batch, width};
      to.first = 0;
    }
  } else {
    to.pairs = {static_cast<unit_t*>(kept), pass.padded_batch / 2, width};
  }
  return to;
}

// The input's rows [begin, end), in panels.
template <typename scalar_t>
DLRM_INLINE void take_rows(const scalar_t* input, int64_t width, const Target<scalar_t>& to,
                           int64_t begin, int64_t end) {
  for (int64_t panel = 0; panel < to.rows.count(); ++panel) {
    const int64_t columns = to.rows.columns(panel);
    for (int64_t row = begin; row < end; row += 2) {
      for (int64_t column = 0; column < columns; column += kLanes) {
        const int64_t at = panel * kPanel + column;
        const scalar_t* from = input + row * width + at;
        const Vec even = row < to.batch ? load_some(from, width - at) : zero();
        const Vec odd = row + 1 < to.batch ? load_some(from + width, width - at) : zero();
        Target<scalar_t>::put(to, panel, column, row, even, odd);
      }
    }
  }
}

// The product of rows [begin, end) with a packed matrix; `finish` gets each panel's tiles.
template <typename scalar_t, typename Finish>
DLRM_INLINE void multiply(const Target<scalar_t>& from, const void* packed, int64_t columns,
                          const float* start, int64_t begin, int64_t end, const Finish& finish) {
  const int64_t depth = units_of<scalar_t>(from.rows.width);
  for (int64_t first = 0; first < columns; first += kPanel) {
    const auto* weights = static_cast<const Unit<scalar_t>*>(packed) + first * depth;
    const float* own = start == nullptr ? nullptr : start + first;
    with_vectors(
        std::min(kPanel, round_up(columns - first, kLanes)), [&](auto vectors) DLRM_ALWAYS_INLINE {
          constexpr int kVectors = decltype(vectors)::value;
          multiply_panel<scalar_t, kVectors>(
              from.rows, begin - from.first, end - begin, weights, own,
              [&](int64_t row, Vec(&acc)[kTile][kVectors])
                  DLRM_ALWAYS_INLINE { finish(first / kPanel, begin + row, vectors, acc); });
        });
  }
}

// The logit of a row, whose vectors of values `at` returns the address of.
template <typename At>
DLRM_INLINE float logit_of(const MlpLogit& logit, int64_t width, const At& at) {
  Vec sum = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    sum += load(at(i)) * load_some(logit.weight + i, width - i);
  }
  return sum_lanes(sum) + logit.bias;
}

// Writes the logits of rows [begin, end) from the last layer's outputs.
template <typename scalar_t>
DLRM_INLINE void write_logits(const MlpPass& pass, const Target<scalar_t>& from, float* logits,
                              int64_t begin, int64_t end) {
  for (int64_t row = begin; row < std::min(end, pass.batch); ++row) {
    logits[row] = logit_of(pass.logit, from.width, [&](int64_t i) {
      return from.rows.at(i / kPanel, row - from.first) + i % kPanel;
    });
  }
}

// Rows [begin, end) through all layers. `scratch` holds two buffers of a run's widest rows. The
// output is `[batch, outputs]` of the last layer, or the logits, `[batch]` float32.
template <typename scalar_t>
void forward_run(const MlpPass& pass, const scalar_t* input, void* output, float* scratch,
                 int64_t begin, int64_t end) {
  const int64_t size = pass.rows_of_run * pass.widest;
  auto* first = reinterpret_cast<Stored<scalar_t>*>(scratch);
  Stored<scalar_t>* const buffers[2] = {first, first + size};
  const MlpLayer* layers = pass.layers;
  const bool logits = pass.logit.weight != nullptr;
  auto from = between<scalar_t>(pass, layers[0].values, layers[0].inputs, buffers[0], begin);
  take_rows(input, layers[0].inputs, from, begin, end);
  for (int64_t l = 0; l < pass.count; ++l) {
    const MlpLayer& layer = layers[l];
    const bool last = l + 1 == pass.count, plain = last && !logits;
    auto to = between<scalar_t>(pass, last ? pass.logit.values : layers[l + 1].values,
                                layer.outputs, plain ? nullptr : buffers[(l + 1) % 2], begin);
    if (plain) to.plain = static_cast<scalar_t*>(output);
    multiply(from, layer.of_outputs, layer.outputs, layer.start, begin, end,
             [&](int64_t panel, int64_t row, auto vectors, auto& acc) DLRM_ALWAYS_INLINE {
               for (int v = 0; v < vectors; ++v) {
                 for (int r = 0; r < kTile; r += 2) {
                   Target<scalar_t>::put(to, panel, v * kLanes, row + r, positive(acc[r][v]),
                                         positive(acc[r + 1][v]));
                 }
               }
             });
    from = to;
  }
  if (logits) write_logits<scalar_t>(pass, from, static_cast<float*>(output), begin, end);
}

// Reads back a kept vector of values of two rows.
template <typename scalar_t>
DLRM_INLINE void kept_values(const MlpPass& pass, void* values, int64_t width, int64_t panel,
                             int64_t column, int64_t row, Vec& even, Vec& odd) {
  using unit_t = Unit<scalar_t>;
  if constexpr (kPerUnit<unit_t> == 1) {
    const Panels<float> kept{static_cast<float*>(values), pass.padded_batch, width};
    const float* at = kept.at(panel, row) + column;
    even = load(at);
    odd = load(at + kept.columns(panel));
  } else {
    const Panels<unit_t> kept{static_cast<unit_t*>(values), pass.padded_batch / 2, width};
    const Bits pair = (Bits)load_units(kept.at(panel, row / 2) + column);
    even = (Vec)(pair << 16);
    odd = (Vec)(pair & 0xffff0000);
  }
}

// The last layer's gradients of rows [begin, end) before its ReLU, from those of its outputs; and
// their sums.
template <typename scalar_t>
DLRM_INLINE void take_gradients(const MlpPass& pass, const scalar_t* grad, const scalar_t* output,
                                const Target<scalar_t>& to, float* sums, int64_t begin,
                                int64_t end) {
  for (int64_t at = 0; at < to.width; at += kLanes) {
    const int64_t left = to.width - at;
    Vec sum = zero();
    for (int64_t row = begin; row < end; row += 2) {
      Vec passed[2];
      for (int64_t r = 0; r < 2; ++r) {
        const int64_t i = (row + r) * to.width + at;
        passed[r] = row + r < pass.batch
                        ? where_positive(load_some(grad + i, left), load_some(output + i, left))
                        : zero();
        sum += passed[r];
      }
      Target<scalar_t>::put(to, at / kPanel, at % kPanel, row, passed[0], passed[1]);
    }
    store(sums + at, sum);
  }
}

// The same from the gradients of the logits, and those of the logits' layer.
template <typename scalar_t>
DLRM_INLINE void take_gradients_of_logits(const MlpPass& pass, const float* grad,
                                          const Target<scalar_t>& to, float* sums, int64_t run,
                                          int64_t begin, int64_t end) {
  const int64_t whole = round_up(to.width, kLanes);
  const auto of_row = [&](int64_t row) { return row < pass.batch ? grad[row] : 0.0f; };
  for (int64_t at = 0; at < to.width; at += kLanes) {
    const Vec weight = load_some(pass.logit.weight + at, to.width - at);
    Vec sum = zero(), of_weight = zero();
    for (int64_t row = begin; row < end; row += 2) {
      Vec values[2], passed[2];
      kept_values<scalar_t>(pass, pass.logit.values, to.width, at / kPanel, at % kPanel, row,
                            values[0], values[1]);
      for (int64_t r = 0; r < 2; ++r) {
        const Vec of_logit = broadcast(of_row(row + r));
        if (row + r < pass.batch) of_weight += of_logit * values[r];
        passed[r] = where_positive(rounded<scalar_t>(of_logit * weight), values[r]);
        sum += passed[r];
      }
      Target<scalar_t>::put(to, at / kPanel, at % kPanel, row, passed[0], passed[1]);
    }
    store(sums + at, sum);
    store(pass.logit.grad_weight + run * whole + at, of_weight);
  }
  float sum = 0;
  for (int64_t row = begin; row < end; ++row) sum += of_row(row);
  pass.logit.grad_bias[run] = sum;
}

// The gradients of rows [begin, end), from the last layer to the first, and the sums over these
// rows of each layer's: a layer's `grad_bias` is that of this run. `scratch` as in forward_run.
template <typename scalar_t>
void backward_run(const MlpPass& pass, const void* grad, const scalar_t* output,
                  scalar_t* grad_input, float* scratch, int64_t begin, int64_t end) {
  const int64_t size = pass.rows_of_run * pass.widest;
  auto* first = reinterpret_cast<Stored<scalar_t>*>(scratch);
  Stored<scalar_t>* const buffers[2] = {first, first + size};
  const int64_t run = begin / pass.rows_of_run;
  const auto sums_of = [&](const MlpLayer& layer) {
    return layer.grad_bias + run * layer.stride_of_sums;
  };
  const MlpLayer& last = pass.layers[pass.count - 1];
  auto from = between<scalar_t>(pass, last.grad, last.outputs, buffers[0], begin);
  if (pass.logit.weight != nullptr) {
    take_gradients_of_logits(pass, static_cast<const float*>(grad), from, sums_of(last), run, begin,
                             end);
  } else {
    take_gradients(pass, static_cast<const scalar_t*>(grad), output, from, sums_of(last), begin,
                   end);
  }
  for (int64_t l = pass.count - 1; l >= 0; --l) {
    const MlpLayer& layer = pass.layers[l];
    if (l == 0 && grad_input == nullptr) return;
    Target<scalar_t> to{};
    float* own_sums = nullptr;
    if (l == 0) {
      to.plain = grad_input;
      to.batch = pass.batch;
      to.width = layer.inputs;
    } else {
      to = between<scalar_t>(pass, pass.layers[l - 1].grad, layer.inputs,
                             buffers[(pass.count - l) % 2], begin);
      own_sums = sums_of(pass.layers[l - 1]);
    }
    multiply(from, layer.of_inputs, layer.inputs, nullptr, begin, end,
             [&](int64_t panel, int64_t row, auto vectors, auto& acc) DLRM_ALWAYS_INLINE {
               for (int v = 0; v < vectors; ++v) {
                 if (own_sums != nullptr) {
                   Vec sum = zero();
                   for (int r = 0; r < kTile; r += 2) {
                     Vec even, odd;
                     kept_values<scalar_t>(pass, layer.values, layer.inputs, panel, v * kLanes,
                                           row + r, even, odd);
                     acc[r][v] = where_positive(acc[r][v], even);
                     acc[r + 1][v] = where_positive(acc[r + 1][v], odd);
                     sum += acc[r][v] + acc[r + 1][v];
                   }
                   float* at = own_sums + panel * kPanel + v * kLanes;
                   store(at, load(at) + sum);
                 }
                 for (int r = 0; r < kTile; r += 2) {
                   Target<scalar_t>::put(to, panel, v * kLanes, row + r, acc[r][v], acc[r + 1][v]);
                 }
               }
             });
    from = to;
  }
}

// Adds to kRows rows of a tile the products of `count` units of their gradients and the values.
template <typename unit_t, int kRows, int kVectors>
DLRM_INLINE void add_products(const unit_t* grads, int64_t grad_columns, const unit_t* values,
                              int64_t count, bool first, float* tile) {
  constexpr int64_t kColumns = kVectors * kLanes;
  Vec acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = first ? zero() : load(tile + r * kPanel + v * kLanes);
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    Vec columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = load_units(values + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec grad = broadcast_unit(grads + r);
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = multiply_add<unit_t>(grad, columns[v], acc[r][v]);
      }
    }
    grads += grad_columns;
    values += kColumns;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(tile + r * kPanel + v * kLanes, acc[r][v]);
  }
}

// The gradients of the weights of one panel of outputs and one of inputs, `[outputs, inputs]`;
// the batch is summed in order.
template <typename scalar_t>
void weight_gradient(const MlpPass& pass, const MlpLayer& layer, float* to, int64_t out_panel,
                     int64_t in_panel) {
  using unit_t = Unit<scalar_t>;
  const int64_t rows = pass.padded_batch / kPerUnit<unit_t>;
  const int64_t units = units_of<scalar_t>(pass.batch);
  const Panels<unit_t> grads{static_cast<unit_t*>(layer.grad), rows, layer.outputs};
  const Panels<unit_t> values{static_cast<unit_t*>(layer.values), rows, layer.inputs};
  const int64_t grad_columns = grads.columns(out_panel);
  alignas(64) float tile[kPanel * kPanel];
  with_vectors(values.columns(in_panel), [&](auto vectors) DLRM_ALWAYS_INLINE {
    constexpr int kVectors = decltype(vectors)::value;
    for (int64_t unit = 0; unit < units; unit += kUnitsAtOnce) {
      const int64_t count = std::min(kUnitsAtOnce, units - unit);
      const unit_t* x = values.at(in_panel, unit);
      int64_t row = 0;
      const auto add = [&](auto size) DLRM_ALWAYS_INLINE {
        constexpr int kRows = decltype(size)::value;
        for (; row + kRows <= grad_columns; row += kRows) {
          add_products<unit_t, kRows, kVectors>(grads.at(out_panel, unit) + row, grad_columns, x,
                                                count, unit == 0, tile + row * kPanel);
        }
      };
      add(std::integral_constant<int, 6>());
      add(std::integral_constant<int, 4>());
      add(std::integral_constant<int, 2>());
    }
  });
  const int64_t first = in_panel * kPanel, columns = std::min(kPanel, layer.inputs - first);
  const int64_t outputs = std::min(kPanel, layer.outputs - out_panel * kPanel);
  for (int64_t row = 0; row < outputs; ++row) {
    float* at = to + (out_panel * kPanel + row) * layer.inputs + first;
    if (units == 0) {
      std::fill_n(at, columns, 0.0f);
    } else {
      copy_elements(tile + row * kPanel, at, columns);
    }
  }
}

#include "mlp_few_rows.h"
