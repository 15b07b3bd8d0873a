// The activation unit of a list as its kernels take it, and the memory of a task.
#pragma once

#include <cstdint>

namespace dlrm {

// Weights in float, with zeros up to whole vectors: `columns` of a row, `neurons` of a layer.
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

}  // namespace dlrm
