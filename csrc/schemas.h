// The schema of every op.
#pragma once

#include <torch/csrc/stable/library.h>

namespace dlrm {

inline void define_ops(torch::stable::detail::StableLibrary& m) {
  m.def("dot_interaction(Tensor dense, Tensor embeddings) -> Tensor");
  m.def(
      "dot_interaction_backward(Tensor grad, Tensor dense, Tensor embeddings)"
      " -> (Tensor, Tensor)");
  m.def(
      "joint_embedding(Tensor weight, Tensor ids, Tensor table_offsets, *, ScalarType? dtype=None)"
      " -> Tensor");
  m.def(
      "joint_embedding_bag(Tensor weight, Tensor ids, Tensor lengths, Tensor table_offsets,"
      " Tensor? sample_weights, bool mean, ScalarType? dtype) -> Tensor");
  m.def(
      "joint_embedding_bag_backward(Tensor grad, Tensor ids, Tensor lengths, Tensor table_offsets,"
      " Tensor? sample_weights, bool mean) -> (Tensor rows, Tensor values)");
  m.def(
      "joint_embedding_bag_sample_weights_backward(Tensor grad, Tensor weight, Tensor rows,"
      " Tensor lengths, bool mean) -> Tensor");
  // Weights of ids by target attention, 1 for ids of other fields. `lists` are pairs of fields,
  // list and candidate, each with a unit; see dlrm/ops/attended_bag.py. The gradient of the rows is
  // added to `values`, and the result has the gradients of the units' weights, in their order.
  m.def(
      "attention_weights(Tensor weight, Tensor ids, Tensor lengths, Tensor table_offsets,"
      " int[] lists, Tensor items, Tensor products, Tensor candidates, Tensor bias, Tensor output,"
      " Tensor output_bias) -> Tensor");
  m.def(
      "attention_weights_backward(Tensor grad, Tensor(a!) values, Tensor weight, Tensor rows,"
      " Tensor lengths, int[] lists, Tensor items, Tensor products, Tensor candidates, Tensor bias,"
      " Tensor output, Tensor output_bias)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // `rule` is its place in ROW_RULES of dlrm/ops/row_rules.py, and `constants` are in their order
  // there. `low` has the lower halves of a BFloat16 weight's values, and there is none beside a
  // Float one. With `table_sizes` the rows are [batch, tables] flattened (see row_update.h).
  m.def(
      "row_update_(int rule, Tensor(a!) weight, Tensor(b!)[] states, Tensor rows, Tensor grad,"
      " Tensor lr, Tensor? step, float[] constants, float l2, Tensor(c!)? low, int[]? table_sizes,"
      " Tensor? grad_scale, Tensor? found_inf) -> ()");
  // The L2 term of steps that did not touch a row; see cpu/row_decay.cpp.
  m.def(
      "row_decay_(int rule, Tensor(a!) weight, Tensor(b!)[] states, Tensor(c!) done, Tensor steps,"
      " Tensor? rows, float[] constants, float l2, Tensor(d!)? low) -> ()");
  // Adam of dense weights; see cpu/dense_adam.cpp. `steps` are the numbers of updates so far.
  m.def(
      "dense_adam_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] exp_avgs,"
      " Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, Tensor lr, float beta1, float beta2,"
      " float eps, float weight_decay, Tensor? grad_scale, Tensor? found_inf) -> ()");
  m.def("piecewise_linear(Tensor numerical, Tensor edges, Tensor weight, Tensor bias) -> Tensor");
  m.def(
      "piecewise_linear_backward(Tensor grad, Tensor numerical, Tensor edges)"
      " -> (Tensor grad_weight, Tensor grad_bias)");
  // Bottom MLP, dot interaction, top MLP and logit; the embeddings' dtype is computed in. With ids
  // the embeddings are those of joint_embedding, and `embeddings` is its weight.
  // `network_gradients` returns the logistic loss of logits + added_logits and its gradients: of
  // these logits, the embeddings, and the weights and biases of both MLPs and the logit.
  m.def(
      "network(Tensor numerical, Tensor embeddings, Tensor[] bottom_weights,"
      " Tensor[] bottom_biases, Tensor[] top_weights, Tensor[] top_biases, Tensor logit_weight,"
      " Tensor logit_bias, Tensor? ids=None, Tensor? table_offsets=None, ScalarType? dtype=None)"
      " -> Tensor");
  m.def(
      "network_gradients(Tensor numerical, Tensor embeddings, Tensor[] bottom_weights,"
      " Tensor[] bottom_biases, Tensor[] top_weights, Tensor[] top_biases, Tensor logit_weight,"
      " Tensor logit_bias, Tensor? added_logits, Tensor labels, float divisor)"
      " -> Tensor[]");
  m.def("logistic_loss(Tensor logits, Tensor labels, float divisor) -> (Tensor loss, Tensor grad)");
  // One layer of these networks' MLPs on a CPU. With `keeps` the second result is what the gradient
  // needs, whose results are those of the inputs, with `needs_inputs`, the weight and the bias.
  m.def(
      "linear_relu(Tensor inputs, Tensor weight, Tensor bias, bool keeps)"
      " -> (Tensor output, Tensor kept)");
  m.def(
      "linear_relu_backward(Tensor grad, Tensor output, Tensor kept, Tensor weight,"
      " bool needs_inputs) -> Tensor[]");
  m.def("relu_bias_backward(Tensor grad, Tensor output) -> (Tensor grad_input, Tensor grad_bias)");
  // For the CUDA kernels: returns and clears the first bad value on the device of `at` (see
  // cuda/errors.h), and the process's switches (see cuda/runtime.h).
  m.def("take_cuda_error(Tensor at) -> Tensor");
  m.def("cuda_switches(int switches=-1) -> int");
  m.def("cpu_isa(int limit=-1) -> int");
}

}  // namespace dlrm
