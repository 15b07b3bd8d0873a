// Kernels of relu_bias_backward for one instruction set; see for_each_isa.h.

// Stores kLanes elements of `grad` where the output is above 0 (or NaN), else 0, as torch's
// threshold_backward does; returns them.
template <typename scalar_t>
DLRM_INLINE Vec pass_positive(const scalar_t* grad, const scalar_t* output, scalar_t* to) {
  const Vec passed = (Vec)((Bits)load(grad) & ~(Bits)(load(output) <= 0));
  store(to, passed);
  return passed;
}

// The same on the bits of bfloat16, whose rounding would take longer than all else.
DLRM_INLINE Vec pass_positive(const BFloat16* grad, const BFloat16* output, BFloat16* to) {
  Halves passed;
  SignedHalves sign;
  std::memcpy(&passed, grad, sizeof passed);
  std::memcpy(&sign, output, sizeof sign);
  const SignedHalves is_nan = (sign & 0x7fff) > 0x7f80;
  passed &= (Halves)((sign > 0) | is_nan);
  std::memcpy(to, &passed, sizeof passed);
  return from_bfloat16(passed);
}

// Rows [begin, end): reads each element of grad and output once, writes each of grad_input once,
// and adds the rows to `sums`, which stays in the cache.
template <typename scalar_t>
void relu_bias_backward_rows(const scalar_t* grad, const scalar_t* output, scalar_t* grad_input,
                             float* sums, int64_t width, int64_t begin, int64_t end) {
  const int64_t whole = width - width % kLanes;
  for (int64_t at = begin * width; at < end * width; at += width) {
    for (int64_t column = 0; column < whole; column += kLanes) {
      const int64_t i = at + column;
      store(sums + column,
            load(sums + column) + pass_positive(grad + i, output + i, grad_input + i));
    }
    for (int64_t column = whole; column < width; ++column) {
      const int64_t i = at + column;
      const bool blocked = static_cast<float>(output[i]) <= 0;
      grad_input[i] = blocked ? scalar_t(0.0f) : grad[i];
      sums[column] += static_cast<float>(grad_input[i]);
    }
  }
}
