// The description of a network that the kernels of mlp take, for every instruction set.
#pragma once

#include <cstdint>

namespace dlrm {

// Batches of so few rows are multiplied with the weights as they are, unless a gradient is wanted.
constexpr int64_t kFewRows = 4;

// One layer, relu(x W^T + b). Pointers to packed memory are of 32-bit units; see units.h.
struct MlpLayer {
  int64_t inputs, outputs;
  const float* weight;  // [outputs, inputs]
  const float* bias;    // [outputs]
  void* of_outputs;     // the weight packed for x W^T
  void* of_inputs;      // the weight packed for the gradient of x
  float* start;         // the bias, rounded as the layer computes, with zeros up to whole vectors
  void* values;         // x in panels, kept for the gradient
  void* grad;           // the gradient before the ReLU in panels
  float* grad_bias;     // partial sums, [runs, stride_of_sums]
  int64_t stride_of_sums;
};

// A last layer without a ReLU and with one output, in float32.
struct MlpLogit {
  const float* weight;  // [inputs]; null: there is no such layer
  float bias;
  void* values;        // the last layer's outputs in panels, kept for the gradient
  float* grad_weight;  // partial sums, [runs, whole vectors of inputs]
  float* grad_bias;    // partial sums, [runs]
};

struct MlpPass {
  MlpLayer* layers;
  int64_t count;
  int64_t batch, padded_batch;  // rows, and the same as whole tiles
  int64_t rows_of_run;          // rows that go through all layers before the next ones
  int64_t widest;               // columns of the widest matrix, as whole vectors
  MlpLogit logit;
};

}  // namespace dlrm
