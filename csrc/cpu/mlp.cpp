#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "isa.h"
#include "mlp_layers.h"
#include "network.h"
#include "tasks.h"

#define DLRM_KERNELS "mlp_kernels.h"
#include "for_each_isa.h"

namespace dlrm {
namespace {

// The checked arguments of a call.
struct MlpInputs {
  int64_t batch;
  Tensor inputs;                        // [batch, inputs], contiguous
  std::vector<Tensor> weights, biases;  // [outputs, inputs] and [outputs] of each layer, contiguous

  MlpInputs(const Tensor& inputs_, const std::vector<Tensor>& weights_,
            const std::vector<Tensor>& biases_) {
    const ScalarType dtype = inputs_.scalar_type();
    DLRM_CHECK(inputs_.dim() == 2 && (dtype == ScalarType::Float || dtype == ScalarType::BFloat16),
               "mlp: expected inputs [batch, inputs], Float or BFloat16, got ", shape_of(inputs_),
               " ", dtype_of(inputs_));
    DLRM_CHECK(!weights_.empty() && weights_.size() == biases_.size(),
               "mlp: expected a bias for every weight, got ", weights_.size(), " weights, ",
               biases_.size(), " biases");
    batch = inputs_.size(0);
    inputs = as_contiguous(inputs_);
    int64_t width = inputs_.size(1);
    for (size_t layer = 0; layer < weights_.size(); ++layer) {
      const Tensor &weight = weights_[layer], &bias = biases_[layer];
      DLRM_CHECK(weight.dim() == 2 && weight.size(1) == width && bias.dim() == 1 &&
                     bias.size(0) == weight.size(0),
                 "mlp: layer ", layer, ": expected weight [outputs, ", width,
                 "] and bias [outputs], got weight ", shape_of(weight), " and bias ",
                 shape_of(bias));
      DLRM_CHECK(weight.scalar_type() == ScalarType::Float &&
                     bias.scalar_type() == ScalarType::Float && weight.is_cpu() && bias.is_cpu(),
                 "mlp: layer ", layer, ": expected weight and bias of Float on the CPU, got ",
                 dtype_of(weight), " and ", dtype_of(bias));
      weights.push_back(as_contiguous(weight));
      biases.push_back(as_contiguous(bias));
      width = weight.size(0);
    }
  }
};

// The layer of one logit behind the last ReLU.
struct LogitLayer {
  Tensor weight, bias;  // [1, inputs] and [1] of Float, contiguous

  LogitLayer(const Tensor& weight_, const Tensor& bias_, int64_t inputs)
      : weight(as_contiguous(weight_)), bias(as_contiguous(bias_)) {
    DLRM_CHECK(weight.dim() == 2 && weight.size(0) == 1 && weight.size(1) == inputs &&
                   bias.numel() == 1 && weight.scalar_type() == ScalarType::Float &&
                   bias.scalar_type() == ScalarType::Float && weight.is_cpu() && bias.is_cpu(),
               "mlp: expected the logit's weight [1, ", inputs, "] and bias [1], Float, got ",
               shape_of(weight), " ", dtype_of(weight), " and ", shape_of(bias), " ",
               dtype_of(bias));
  }
};

// Rows that go through all layers at once: few for small batches, so that all threads have some.
// They depend on the shape alone, as the sums of biases' gradients do.
constexpr int64_t kTileRows = 6, kRowsOfSmallRuns = 24, kRowsOfRuns = 96, kSmallBatch = 1024;

// Consecutive parts of one allocation, counted in units of 4 bytes.
class Units {
 public:
  int64_t take(int64_t count) {
    const int64_t begin = size_;
    size_ += count;
    return begin;
  }
  int64_t size() const { return size_; }
  Tensor allocate(const Tensor& like) const {
    return dlrm::allocate(like, {size_}, ScalarType::Float);
  }

 private:
  int64_t size_ = 0;
};

// The sizes of a network's passes, as the kernels of scalar_t lay matrices out.
template <typename scalar_t>
struct MlpSizes {
  std::vector<MlpLayer> layers;
  MlpPass pass;

  MlpSizes(int64_t batch, const std::vector<Tensor>& weights) : layers(weights.size()) {
    const auto whole = DLRM_KERNEL(whole_vectors<scalar_t>);
    pass = {layers.data(), static_cast<int64_t>(layers.size()), batch};
    pass.padded_batch = (batch + kTileRows - 1) / kTileRows * kTileRows;
    pass.rows_of_run =
        std::min(pass.padded_batch, batch <= kSmallBatch ? kRowsOfSmallRuns : kRowsOfRuns);
    for (size_t l = 0; l < layers.size(); ++l) {
      layers[l] = {weights[l].size(1), weights[l].size(0)};
      layers[l].stride_of_sums = whole(layers[l].outputs);
      pass.widest = std::max({pass.widest, whole(layers[l].inputs), whole(layers[l].outputs)});
    }
  }
  MlpSizes(const MlpSizes&) = delete;

  int64_t runs() const {
    return pass.batch == 0 ? 0 : (pass.padded_batch + pass.rows_of_run - 1) / pass.rows_of_run;
  }
  int64_t end_of(int64_t run) const {
    return std::min(pass.padded_batch, (run + 1) * pass.rows_of_run);
  }
  int64_t packed(int64_t depth, int64_t columns) const {
    return DLRM_KERNEL(packed_units<scalar_t>)(depth, columns);
  }
  int64_t panels(int64_t columns) const { return DLRM_KERNEL(count_panels<scalar_t>)(columns); }
  int64_t kept(int64_t columns) const { return packed(pass.padded_batch, columns); }
  // Values of two buffers of a run's widest rows.
  int64_t scratch() const { return 2 * pass.rows_of_run * pass.widest; }
};

// Where the gradient finds what the forward pass kept; the layout depends on the sizes alone.
template <typename scalar_t>
struct Kept {
  Units units;
  std::vector<int64_t> of_inputs, values;

  int64_t last_values = -1;

  Kept(const MlpSizes<scalar_t>& sizes, bool logit) {
    for (const MlpLayer& layer : sizes.layers) {
      of_inputs.push_back(units.take(sizes.packed(layer.outputs, layer.inputs)));
      values.push_back(units.take(sizes.kept(layer.inputs)));
    }
    if (logit) last_values = units.take(sizes.kept(sizes.layers.back().outputs));
  }
  void place(MlpSizes<scalar_t>& sizes, float* data) const {
    for (size_t l = 0; l < sizes.layers.size(); ++l) {
      sizes.layers[l].of_inputs = data + of_inputs[l];
      sizes.layers[l].values = data + values[l];
    }
    if (last_values >= 0) sizes.pass.logit.values = data + last_values;
  }
};

// Packs the weights of all layers, panel by panel.
template <typename scalar_t>
void pack(const MlpSizes<scalar_t>& sizes, bool for_gradient) {
  struct Task {
    const MlpLayer* layer;
    int64_t panel;
    bool of_outputs;
  };
  std::vector<Task> tasks;
  for (const MlpLayer& layer : sizes.layers) {
    for (int64_t p = 0; p < sizes.panels(layer.outputs); ++p) tasks.push_back({&layer, p, true});
    if (!for_gradient) continue;
    for (int64_t p = 0; p < sizes.panels(layer.inputs); ++p) tasks.push_back({&layer, p, false});
  }
  const auto of_outputs = DLRM_KERNEL(pack_of_outputs<scalar_t>);
  const auto of_inputs = DLRM_KERNEL(pack_of_inputs<scalar_t>);
  take_tasks(tasks.size(), [&](const auto& take) {
    for (int64_t i = take(); i >= 0; i = take()) {
      (tasks[i].of_outputs ? of_outputs : of_inputs)(*tasks[i].layer, tasks[i].panel);
    }
  });
}

constexpr int64_t kWeightsPerTask = 1 << 18;  // of a few rows
constexpr int64_t kMostLanes = 16;

// The output of a few rows: that of the last layer, or the logits.
template <typename scalar_t>
void run_few_rows(const MlpInputs& inputs, const std::optional<LogitLayer>& logit, void* output) {
  const int64_t rows = inputs.batch;
  const MlpSizes<scalar_t> sizes(rows, inputs.weights);
  const int64_t stride = sizes.pass.widest + 2 * kMostLanes;  // vectors of pairs may end behind it
  const Scratch<float> first(rows * stride), second(rows * stride);
  void *from = first.get(), *to = second.get();
  DLRM_KERNEL(take_few_rows<scalar_t>)(inputs.inputs.const_data_ptr<scalar_t>(),
                                       inputs.inputs.size(1), from, stride, rows);
  const auto multiply = DLRM_KERNEL(few_rows<scalar_t>);
  for (size_t l = 0; l < inputs.weights.size(); ++l) {
    MlpLayer layer = sizes.layers[l];
    layer.weight = inputs.weights[l].const_data_ptr<float>();
    layer.bias = inputs.biases[l].const_data_ptr<float>();
    const int64_t vectors = (layer.outputs + kMostLanes - 1) / kMostLanes;
    const int64_t of_vector = kMostLanes * std::max<int64_t>(layer.inputs, 1);
    torch::stable::parallel_for(0, vectors, std::max<int64_t>(kWeightsPerTask / of_vector, 1),
                                [&](int64_t begin, int64_t end) {
                                  multiply(layer, from, to, stride, rows, begin * kMostLanes,
                                           std::min(layer.outputs, end * kMostLanes));
                                });
    std::swap(from, to);
  }
  const int64_t width = inputs.weights.back().size(0);
  if (!logit) {
    DLRM_KERNEL(give_few_rows<scalar_t>)(from, stride, static_cast<scalar_t*>(output), width, rows);
    return;
  }
  MlpLogit layer{};
  layer.weight = logit->weight.const_data_ptr<float>();
  layer.bias = *logit->bias.const_data_ptr<float>();
  DLRM_KERNEL(logits_of_few_rows<scalar_t>)(layer, from, stride, static_cast<float*>(output), width,
                                            rows);
}

template <typename Function>
void dispatch_computed(ScalarType dtype, const Function& f) {
  dtype == ScalarType::Float ? f.template operator()<float>() : f.template operator()<BFloat16>();
}

}  // namespace

std::tuple<Tensor, Tensor> mlp(const Tensor& inputs_, std::vector<Tensor> weights_,
                               std::vector<Tensor> biases_, std::optional<Tensor> logit_weight,
                               std::optional<Tensor> logit_bias, bool keeps) {
  const MlpInputs inputs(inputs_, weights_, biases_);
  const int64_t outputs = inputs.weights.back().size(0);
  Tensor output;
  std::optional<LogitLayer> logit;
  if (logit_weight && logit_bias) {
    logit.emplace(*logit_weight, *logit_bias, outputs);
    output = allocate(inputs.inputs, {inputs.batch}, ScalarType::Float);
  } else {
    output = allocate(inputs.inputs, {inputs.batch, outputs});
  }
  Tensor kept;
  dispatch_computed(inputs.inputs.scalar_type(), [&]<typename scalar_t>() {
    void* output_data = logit ? static_cast<void*>(output.mutable_data_ptr<float>())
                              : output.mutable_data_ptr<scalar_t>();
    if (!keeps && inputs.batch <= kFewRows) {
      kept = allocate(inputs.inputs, {0}, ScalarType::Float);
      run_few_rows<scalar_t>(inputs, logit, output_data);
      return;
    }
    MlpSizes<scalar_t> sizes(inputs.batch, inputs.weights);
    const Kept<scalar_t> places(sizes, logit.has_value());
    kept = keeps ? places.units.allocate(inputs.inputs)
                 : allocate(inputs.inputs, {0}, ScalarType::Float);
    if (keeps) places.place(sizes, kept.mutable_data_ptr<float>());
    Units units;
    std::vector<int64_t> packed, starts;
    for (const MlpLayer& layer : sizes.layers) {
      packed.push_back(units.take(sizes.packed(layer.inputs, layer.outputs)));
      starts.push_back(units.take(layer.stride_of_sums));
    }
    Tensor scratch = units.allocate(inputs.inputs);
    for (size_t l = 0; l < sizes.layers.size(); ++l) {
      sizes.layers[l].of_outputs = scratch.mutable_data_ptr<float>() + packed[l];
      sizes.layers[l].start = scratch.mutable_data_ptr<float>() + starts[l];
      sizes.layers[l].weight = inputs.weights[l].const_data_ptr<float>();
      sizes.layers[l].bias = inputs.biases[l].const_data_ptr<float>();
    }
    pack<scalar_t>(sizes, keeps);
    const auto* input_data = inputs.inputs.const_data_ptr<scalar_t>();
    if (logit) sizes.pass.logit.weight = logit->weight.const_data_ptr<float>();
    if (logit) sizes.pass.logit.bias = *logit->bias.const_data_ptr<float>();
    const auto forward = DLRM_KERNEL(forward_run<scalar_t>);
    take_tasks(sizes.runs(), [&](const auto& take) {
      const Scratch<float> buffers(sizes.scratch());
      for (int64_t run = take(); run >= 0; run = take()) {
        forward(sizes.pass, input_data, output_data, buffers.get(), run * sizes.pass.rows_of_run,
                sizes.end_of(run));
      }
    });
  });
  return {output, kept};
}

namespace {

template <typename scalar_t>
void weight_gradients(const MlpSizes<scalar_t>& sizes, std::vector<Tensor>& grads) {
  struct Task {
    const MlpLayer* layer;
    float* to;
    int64_t out_panel, in_panel;
  };
  std::vector<Task> tasks;
  for (size_t l = 0; l < sizes.layers.size(); ++l) {
    const MlpLayer& layer = sizes.layers[l];
    for (int64_t o = 0; o < sizes.panels(layer.outputs); ++o) {
      for (int64_t i = 0; i < sizes.panels(layer.inputs); ++i) {
        tasks.push_back({&layer, grads[l].mutable_data_ptr<float>(), o, i});
      }
    }
  }
  const auto gradient = DLRM_KERNEL(weight_gradient<scalar_t>);
  take_tasks(tasks.size(), [&](const auto& take) {
    for (int64_t i = take(); i >= 0; i = take()) {
      const Task& task = tasks[i];
      gradient(sizes.pass, *task.layer, task.to, task.out_panel, task.in_panel);
    }
  });
}

// Adds up the runs' sums, in order.
void add_runs(const float* sums, int64_t stride, int64_t runs, float* to, int64_t count) {
  std::vector<float> total(count, 0.0f);
  for (int64_t run = 0; run < runs; ++run) {
    for (int64_t i = 0; i < count; ++i) total[i] += sums[run * stride + i];
  }
  std::copy(total.begin(), total.end(), to);
}

}  // namespace

std::vector<Tensor> mlp_backward(const Tensor& grad_, const Tensor& output_, const Tensor& kept,
                                 std::vector<Tensor> weights, std::optional<Tensor> logit_weight,
                                 std::optional<Tensor> logit_bias, ScalarType dtype,
                                 bool needs_inputs) {
  const Tensor grad = as_contiguous(grad_);
  const Tensor output = as_contiguous(output_);
  const int64_t batch = output.size(0), width = weights[0].size(1);
  std::optional<LogitLayer> logit;
  if (logit_weight && logit_bias) {
    logit.emplace(*logit_weight, *logit_bias, weights.back().size(0));
  }
  std::vector<Tensor> found{allocate(output, {needs_inputs ? batch : 0, width}, dtype)};
  dispatch_computed(dtype, [&]<typename scalar_t>() {
    MlpSizes<scalar_t> sizes(batch, weights);
    const Kept<scalar_t> places(sizes, logit.has_value());
    places.place(sizes, const_cast<float*>(kept.const_data_ptr<float>()));
    const int64_t runs = sizes.runs(), stride_of_last = sizes.layers.back().stride_of_sums;
    Units units;
    std::vector<int64_t> grads, sums;
    for (const MlpLayer& layer : sizes.layers) {
      grads.push_back(units.take(sizes.kept(layer.outputs)));
      sums.push_back(units.take(runs * layer.stride_of_sums));
    }
    const int64_t logit_sums = units.take(runs * (stride_of_last + 1));
    Tensor scratch = units.allocate(output);
    auto* data = scratch.mutable_data_ptr<float>();
    for (size_t l = 0; l < sizes.layers.size(); ++l) {
      MlpLayer& layer = sizes.layers[l];
      layer.grad = data + grads[l];
      layer.grad_bias = data + sums[l];
      std::fill_n(layer.grad_bias, runs * layer.stride_of_sums, 0.0f);
    }
    MlpLogit& last = sizes.pass.logit;
    if (logit) last.weight = logit->weight.const_data_ptr<float>();
    last.grad_weight = data + logit_sums;
    last.grad_bias = data + logit_sums + runs * stride_of_last;
    const void* grad_data = logit ? static_cast<const void*>(grad.const_data_ptr<float>())
                                  : grad.const_data_ptr<scalar_t>();
    const auto* output_data = logit ? nullptr : output.const_data_ptr<scalar_t>();
    auto* input_data = needs_inputs ? found[0].mutable_data_ptr<scalar_t>() : nullptr;
    const auto backward = DLRM_KERNEL(backward_run<scalar_t>);
    take_tasks(runs, [&](const auto& take) {
      const Scratch<float> buffers(sizes.scratch());
      for (int64_t run = take(); run >= 0; run = take()) {
        backward(sizes.pass, grad_data, output_data, input_data, buffers.get(),
                 run * sizes.pass.rows_of_run, sizes.end_of(run));
      }
    });
    const size_t count = weights.size();
    for (const Tensor& weight : weights) {
      found.push_back(allocate(weight, {weight.size(0), weight.size(1)}));
    }
    for (const Tensor& weight : weights) {
      found.push_back(allocate(weight, {weight.size(0)}));
    }
    std::vector<Tensor> of_weights(found.begin() + 1, found.begin() + 1 + count);
    weight_gradients<scalar_t>(sizes, of_weights);
    for (size_t l = 0; l < count; ++l) {
      const MlpLayer& layer = sizes.layers[l];
      add_runs(layer.grad_bias, layer.stride_of_sums, runs,
               found[1 + count + l].mutable_data_ptr<float>(), layer.outputs);
    }
    if (logit) {
      const int64_t outputs = weights.back().size(0);
      found.push_back(allocate(logit->weight, {1, outputs}));
      found.push_back(allocate(logit->weight, {1}));
      add_runs(last.grad_weight, stride_of_last, runs,
               found[1 + 2 * count].mutable_data_ptr<float>(), outputs);
      add_runs(last.grad_bias, 1, runs, found[2 + 2 * count].mutable_data_ptr<float>(), 1);
    }
  });
  return found;
}

namespace {

std::tuple<Tensor, Tensor> linear_relu(const Tensor& inputs, const Tensor& weight,
                                       const Tensor& bias, bool keeps) {
  return mlp(inputs, {weight}, {bias}, std::nullopt, std::nullopt, keeps);
}

std::vector<Tensor> linear_relu_backward(const Tensor& grad, const Tensor& output,
                                         const Tensor& kept, const Tensor& weight,
                                         bool needs_inputs) {
  return mlp_backward(grad, output, kept, {weight}, std::nullopt, std::nullopt,
                      output.scalar_type(), needs_inputs);
}

}  // namespace
}  // namespace dlrm

STABLE_TORCH_LIBRARY_IMPL(dlrm, CPU, m) {
  m.impl("linear_relu", TORCH_BOX(&dlrm::linear_relu));
  m.impl("linear_relu_backward", TORCH_BOX(&dlrm::linear_relu_backward));
}
