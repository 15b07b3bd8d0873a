// Kernels of network for one instruction set; see for_each_isa.h.

template <typename from_t, typename to_t>
void cast_values(const from_t* from, to_t* to, int64_t count) {
  copy_elements(from, to, count);
}
