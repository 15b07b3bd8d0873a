// Kernels of piecewise_linear for one instruction set; see for_each_isa.h.

#include "row_vectors.h"

// to += factor * from.
DLRM_INLINE void add_scaled(float factor, const float* from, float* to, int64_t dim) {
  const Vec scale = broadcast(factor);
  for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
    store(to + i, load(to + i, part) + scale * load(from + i, part), part);
  });
}

// The vectors of one field. First writes to `starts` [bins, dim] the vector at each bin's lower
// edge, a running sum; then reads each value once and writes each vector once.
void piecewise_field(const BinsOfField& field, const float* numerical, int64_t stride,
                     const float* weight, const float* bias, int64_t dim, float* starts,
                     float* output, int64_t batch) {
  std::copy_n(bias, dim, starts);
  for (int64_t bin = 0; bin + 1 < field.bins; ++bin) {
    std::copy_n(starts + bin * dim, dim, starts + (bin + 1) * dim);
    if (field.width(bin) > 0) add_scaled(1, weight + bin * dim, starts + (bin + 1) * dim, dim);
  }
  for (int64_t sample = 0; sample < batch; ++sample) {
    const BinPlace place = field.place(numerical[sample * stride]);
    const float* start = starts + place.bin * dim;
    const float* step = weight + place.bin * dim;
    float* to = output + sample * stride * dim;
    const Vec share = broadcast(place.share);
    for_each_vector(dim, [&](int64_t i, auto part) DLRM_ALWAYS_INLINE {
      store(to + i, load(start + i, part) + share * load(step + i, part), part);
    });
  }
}

// The gradients of one field's weight and bias. Reads each value and each gradient once: adds the
// gradient to `sums` [bins, dim] of its bin, and its share to the bin's weight. Each weight then
// also gets the sums of all later bins.
void piecewise_field_backward(const BinsOfField& field, const float* numerical, int64_t stride,
                              const float* grad, int64_t dim, float* sums, float* grad_weight,
                              float* grad_bias, int64_t batch) {
  std::fill_n(sums, field.bins * dim, 0.0f);
  std::fill_n(grad_weight, field.bins * dim, 0.0f);
  std::fill_n(grad_bias, dim, 0.0f);
  for (int64_t sample = 0; sample < batch; ++sample) {
    const BinPlace place = field.place(numerical[sample * stride]);
    const float* from = grad + sample * stride * dim;
    add_scaled(1, from, sums + place.bin * dim, dim);
    if (place.share != 0) add_scaled(place.share, from, grad_weight + place.bin * dim, dim);
  }
  for (int64_t bin = field.bins - 1; bin >= 0; --bin) {
    if (field.width(bin) > 0) add_scaled(1, grad_bias, grad_weight + bin * dim, dim);
    add_scaled(1, sums + bin * dim, grad_bias, dim);
  }
}
