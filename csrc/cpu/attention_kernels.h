// Kernels of attention_weights for one instruction set; see for_each_isa.h.

constexpr int64_t kItems = kLanes == 16 ? 8 : 4;  // of a block, whose neurons are in registers
constexpr int64_t kChunk = kLanes == 16 ? 3 : 2;  // vectors of neurons in registers for each

// Calls f<vectors>(first element) for each chunk of `size` elements, a multiple of kLanes.
template <typename Function>
DLRM_INLINE void for_each_chunk(int64_t size, const Function& f) {
  int64_t first = 0;
  for (; first + kChunk * kLanes <= size; first += kChunk * kLanes) {
    f.template operator()<kChunk>(first);
  }
  for (; first < size; first += kLanes) f.template operator()<1>(first);
}

// Copies rows as floats, `stride` apart, with zeros behind each.
template <typename weight_t>
DLRM_INLINE void load_rows(const weight_t* weight, const int64_t* rows, int64_t count, int64_t dim,
                           int64_t stride, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const weight_t* row = weight + rows[i] * dim;
    for (int64_t d = 0; d < stride; d += kLanes) {
      store(to + i * stride + d, load_some(row + d, dim - d));
    }
  }
}

// What an activation unit is for the candidate of one sample.
//
// The candidate is the sum of its rows. The unit's neurons for an item x are `matrix x + added`,
// where the matrix has dim rows of neurons.
template <typename weight_t>
DLRM_INLINE void prepare(const AttentionUnit& unit, const weight_t* weight,
                         const int64_t* candidates, int64_t count, const AttentionScratch& own) {
  const int64_t neurons = unit.neurons, columns = unit.columns;
  for (int64_t d = 0; d < columns; d += kLanes) {
    Vec sum = zero();
    for (int64_t i = 0; i < count; ++i) {
      sum += load_some(weight + candidates[i] * unit.dim + d, unit.dim - d);
    }
    store(own.candidate + d, sum);
  }
  for (int64_t h = 0; h < neurons; h += kLanes) {
    Vec sum = load(unit.bias + h);
    for (int64_t d = 0; d < unit.dim; ++d) {
      const Vec value = broadcast(own.candidate[d]);
      sum += value * load(unit.candidates + d * neurons + h);
      store(own.matrix + d * neurons + h,
            load(unit.items + d * neurons + h) + value * load(unit.products + d * neurons + h));
    }
    store(own.added + h, sum);
  }
}

// The neurons of a block of items before the ReLU.
template <int64_t kVectors>
DLRM_INLINE void neurons_of(const AttentionUnit& unit, const AttentionScratch& own, int64_t first,
                            Vec (&hidden)[kItems][kVectors]) {
  for (int64_t v = 0; v < kVectors; ++v) {
    const Vec added = load(own.added + first + v * kLanes);
    for (int64_t i = 0; i < kItems; ++i) hidden[i][v] = added;
  }
  for (int64_t d = 0; d < unit.dim; ++d) {
    Vec column[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      column[v] = load(own.matrix + d * unit.neurons + first + v * kLanes);
    }
    for (int64_t i = 0; i < kItems; ++i) {
      const Vec value = broadcast(own.items[i * unit.columns + d]);
      for (int64_t v = 0; v < kVectors; ++v) hidden[i][v] += value * column[v];
    }
  }
}

DLRM_INLINE Vec relu(Vec v) { return (Vec)((Bits)v & ~(Bits)(v < zero())); }  // keeps NaN

// Writes the weights of a sample's items: reads each row once, and the unit once.
template <typename weight_t>
void weigh_items(const AttentionUnit& unit, const weight_t* weight, const int64_t* rows,
                 int64_t count, const int64_t* candidates, int64_t num_candidates,
                 const AttentionScratch& own, float* weights) {
  prepare(unit, weight, candidates, num_candidates, own);
  for (int64_t begin = 0; begin < count; begin += kItems) {
    const int64_t items = std::min(kItems, count - begin);
    load_rows(weight, rows + begin, items, unit.dim, unit.columns, own.items);
    Vec sums[kItems];
    for (int64_t i = 0; i < kItems; ++i) sums[i] = zero();
    for_each_chunk(unit.neurons, [&]<int64_t kVectors>(int64_t first) DLRM_ALWAYS_INLINE {
      Vec hidden[kItems][kVectors];
      neurons_of(unit, own, first, hidden);
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vec output = load(unit.output + first + v * kLanes);
        for (int64_t i = 0; i < kItems; ++i) sums[i] += relu(hidden[i][v]) * output;
      }
    });
    for (int64_t i = 0; i < items; ++i) weights[begin + i] = unit.output_bias + sum_lanes(sums[i]);
  }
}

// Adds a row of gradients, `dim` floats, to one of another dtype.
template <typename value_t>
DLRM_INLINE void add_row(const float* from, value_t* to, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(to + d) + load(from + d));
  if (d < dim) {
    store_first(to + d, load_first(to + d, dim - d) + load_first(from + d, dim - d), dim - d);
  }
}

// The gradients of a sample, given those of its items' weights. Adds those of rows to `values`,
// which belong to the items, and to those of the candidate; adds those of the unit to `sums`.
template <typename weight_t, typename value_t>
void weigh_items_backward(const AttentionUnit& unit, const weight_t* weight, const int64_t* rows,
                          int64_t count, const int64_t* candidates, int64_t num_candidates,
                          const float* grad, const AttentionScratch& own, const AttentionSums& sums,
                          value_t* values, value_t* of_candidates) {
  const int64_t neurons = unit.neurons, columns = unit.columns, dim = unit.dim;
  prepare(unit, weight, candidates, num_candidates, own);
  for (int64_t h = 0; h < unit.hidden; ++h) {  // the matrix with a row of columns for each neuron
    for (int64_t d = 0; d < columns; d += kLanes) {
      const int64_t at = h * columns + d;
      store(own.transposed + at, load(unit.items_by_neuron + at) +
                                     load(own.candidate + d) * load(unit.products_by_neuron + at));
    }
  }
  for (int64_t i = 0; i < dim * neurons; i += kLanes) store(own.grad_matrix + i, zero());
  for (int64_t h = 0; h < neurons; h += kLanes) store(own.grad_added + h, zero());
  for (int64_t begin = 0; begin < count; begin += kItems) {
    const int64_t items = std::min(kItems, count - begin);
    load_rows(weight, rows + begin, items, dim, columns, own.items);
    float of_weights[kItems] = {};
    for (int64_t i = 0; i < items; ++i) {
      of_weights[i] = grad[begin + i];
      *sums.output_bias += of_weights[i];
    }
    for_each_chunk(neurons, [&]<int64_t kVectors>(int64_t first) DLRM_ALWAYS_INLINE {
      Vec hidden[kItems][kVectors];
      neurons_of(unit, own, first, hidden);
      for (int64_t v = 0; v < kVectors; ++v) {
        const int64_t h = first + v * kLanes;
        const Vec output = load(unit.output + h);
        Vec of_output = load(sums.output + h), of_added = load(own.grad_added + h);
        for (int64_t i = 0; i < kItems; ++i) {
          const Vec factor = broadcast(of_weights[i]);
          of_output += factor * relu(hidden[i][v]);
          const Bits active = (Bits)(hidden[i][v] > zero());
          hidden[i][v] = (Vec)((Bits)(factor * output) & active);
          of_added += hidden[i][v];
          store(own.grad_hidden + i * neurons + h, hidden[i][v]);
        }
        store(sums.output + h, of_output);
        store(own.grad_added + h, of_added);
      }
      for (int64_t d = 0; d < dim; ++d) {
        float* to = own.grad_matrix + d * neurons + first;
        Vec sum[kVectors];
        for (int64_t v = 0; v < kVectors; ++v) sum[v] = load(to + v * kLanes);
        for (int64_t i = 0; i < kItems; ++i) {
          const Vec value = broadcast(own.items[i * columns + d]);
          for (int64_t v = 0; v < kVectors; ++v) sum[v] += value * hidden[i][v];
        }
        for (int64_t v = 0; v < kVectors; ++v) store(to + v * kLanes, sum[v]);
      }
    });
    for (int64_t d = 0; d < columns; d += kLanes) {
      Vec sum[kItems];
      for (int64_t i = 0; i < kItems; ++i) sum[i] = zero();
      for (int64_t h = 0; h < unit.hidden; ++h) {
        const Vec row = load(own.transposed + h * columns + d);
        for (int64_t i = 0; i < kItems; ++i) {
          sum[i] += broadcast(own.grad_hidden[i * neurons + h]) * row;
        }
      }
      for (int64_t i = 0; i < kItems; ++i) store(own.items + i * columns + d, sum[i]);
    }
    for (int64_t i = 0; i < items; ++i) {
      add_row(own.items + i * columns, values + (begin + i) * dim, dim);
    }
  }
  for (int64_t h = 0; h < neurons; h += kLanes) {
    store(sums.bias + h, load(sums.bias + h) + load(own.grad_added + h));
  }
  for (int64_t d = 0; d < dim; ++d) {
    const Vec value = broadcast(own.candidate[d]);
    Vec of_candidate = zero();
    for (int64_t h = 0; h < neurons; h += kLanes) {
      const int64_t at = d * neurons + h;
      const Vec of_matrix = load(own.grad_matrix + at), of_added = load(own.grad_added + h);
      store(sums.items + at, load(sums.items + at) + of_matrix);
      store(sums.products + at, load(sums.products + at) + value * of_matrix);
      store(sums.candidates + at, load(sums.candidates + at) + value * of_added);
      of_candidate += of_matrix * load(unit.products + at) + of_added * load(unit.candidates + at);
    }
    own.candidate[d] = sum_lanes(of_candidate);
  }
  for (int64_t i = 0; i < num_candidates; ++i) add_row(own.candidate, of_candidates + i * dim, dim);
}
