// Kernels of dense_adam_ for one instruction set; see for_each_isa.h.

#include "row_vectors.h"

// Elements [begin, end) of one weight: one pass over the weight, its gradient and its state.
inline void adam_elements(const AdamStep& step, const DenseAdam& tensor, int64_t begin,
                          int64_t end) {
  const Vec inverse_scale = broadcast(step.inverse_scale), decay = broadcast(step.weight_decay);
  const Vec new_of_average = broadcast(1 - step.beta1), new_of_square = broadcast(1 - step.beta2);
  const Vec step_size = broadcast(tensor.step_size), eps = broadcast(tensor.eps);
  float* weights = tensor.weight + begin;
  const float* grads = tensor.grad + begin;
  float* averages = tensor.exp_avg + begin;
  float* squares = tensor.exp_avg_sq + begin;
  for_each_vector(end - begin, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    const Vec weight = load(weights + i, part);
    const Vec grad = load(grads + i, part) * inverse_scale + decay * weight;
    Vec average = load(averages + i, part), square = load(squares + i, part);
    average += new_of_average * (grad - average);
    square += new_of_square * (grad * grad - square);
    store(averages + i, average, part);
    store(squares + i, square, part);
    store(weights + i, weight - step_size * average / (square_root(square) + eps), part);
  });
}
