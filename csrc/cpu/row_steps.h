// Steps of the rules for vectors of a row, for one instruction set; see for_each_isa.h.

#include "row_vectors.h"

// Elements of a weight and of its states.
template <typename Rule>
struct Held {
  Vec weight, states[kMostStates];
};
template <typename Rule, typename Weight, typename Part>
DLRM_INLINE Held<Rule> load_held(const Rows<Weight>& rows, int64_t i, Part part) {
  Held<Rule> held;
  held.weight = load(rows.weight + i, part);
  for (size_t s = 0; s < Rule::kStates.size(); ++s) held.states[s] = load(rows.states[s] + i, part);
  return held;
}
template <typename Rule, typename Weight, typename Part>
DLRM_INLINE void store_held(const Rows<Weight>& rows, int64_t i, Part part,
                            const Held<Rule>& held) {
  for (size_t s = 0; s < Rule::kStates.size(); ++s) store(rows.states[s] + i, held.states[s], part);
  store(rows.weight + i, held.weight, part);
}

// numerator / (the root of the square + eps), exactly or to 2^-21, for eps above 1e-12. AVX-512's
// estimates with a step of Newton's each take a third of the time of its root and division.
template <bool kExact>
DLRM_INLINE Vec over_root(Vec numerator, Vec square, Vec eps) {
#if DLRM_LANES == 16
  if constexpr (!kExact) {
    const Vec above_zero = (Vec)_mm512_max_ps((__m512)square, _mm512_set1_ps(1e-30f));
    Vec inverse_root = (Vec)_mm512_rsqrt14_ps((__m512)above_zero);
    inverse_root *= 1.5f - 0.5f * above_zero * inverse_root * inverse_root;
    const Vec divisor = above_zero * inverse_root + eps;
    const Vec inverse = (Vec)_mm512_rcp14_ps((__m512)divisor);
    return numerator * (inverse * (2.0f - divisor * inverse));
  }
#endif
  return numerator / (square_root(square) + eps);
}

template <bool kExact>
DLRM_INLINE void step(const Sgd&, Held<Sgd>& held, Vec grad, Vec rate, Vec) {
  held.weight -= rate * grad;
}
template <bool kExact>
DLRM_INLINE void step(const Adagrad&, Held<Adagrad>& held, Vec grad, Vec rate, Vec eps) {
  held.states[0] += grad * grad;
  held.weight -= over_root<kExact>(rate * grad, held.states[0], eps);
}
template <bool kExact>
DLRM_INLINE void step(const Adam& rule, Held<Adam>& held, Vec grad, Vec rate, Vec eps) {
  held.states[0] += broadcast(rule.new_of_average) * (grad - held.states[0]);
  held.states[1] += broadcast(rule.new_of_square) * (grad * grad - held.states[1]);
  held.weight -= over_root<kExact>(rate * held.states[0], held.states[1], eps);
}
