// Kernels of dense_adam_ for one instruction set; see for_each_isa.h.

// The first kLanes of `count` elements, with zeros behind the last, and the way back.
DLRM_INLINE Vec load_part(const float* from, int64_t count) {
  return count >= kLanes ? load(from) : load_first(from, count);
}
DLRM_INLINE void store_part(float* to, Vec values, int64_t count) {
  count >= kLanes ? store(to, values) : store_first(to, values, count);
}

// Elements [begin, end) of one weight: one pass over the weight, its gradient and its state.
inline void adam_elements(const AdamStep& step, const DenseAdam& tensor, int64_t begin,
                          int64_t end) {
  const Vec inverse_scale = broadcast(step.inverse_scale), decay = broadcast(step.weight_decay);
  const Vec new_of_average = broadcast(1 - step.beta1), new_of_square = broadcast(1 - step.beta2);
  const Vec step_size = broadcast(tensor.step_size), eps = broadcast(tensor.eps);
  for (int64_t i = begin; i < end; i += kLanes) {
    const int64_t left = end - i;
    const Vec weight = load_part(tensor.weight + i, left);
    const Vec grad = load_part(tensor.grad + i, left) * inverse_scale + decay * weight;
    Vec average = load_part(tensor.exp_avg + i, left);
    Vec square = load_part(tensor.exp_avg_sq + i, left);
    average += new_of_average * (grad - average);
    square += new_of_square * (grad * grad - square);
    store_part(tensor.exp_avg + i, average, left);
    store_part(tensor.exp_avg_sq + i, square, left);
    store_part(tensor.weight + i, weight - step_size * average / (square_root(square) + eps), left);
  }
}
