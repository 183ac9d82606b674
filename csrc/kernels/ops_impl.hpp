// Part of kernels_impl.hpp: what a reduction does with one element. `first`
// takes the lowest rank's value, `next` folds in a further one.

// Unsigned and at least 32 bits: integers wrap, and the promotion of narrow
// types to int must not overflow.
template <typename T>
struct Wide {
  using type = uint32_t;
};
template <>
struct Wide<uint64_t> {
  using type = uint64_t;
};
template <>
struct Wide<float> {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

#define FUSEDPG_OP inline __attribute__((always_inline))

template <typename T>
struct Keep {
  using Value = T;
  FUSEDPG_OP T first(T x) const {
    return x;
  }
};

template <typename T>
struct Sum : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    using W = typename Wide<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(x));
  }
};

template <typename T>
struct Product : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    using W = typename Wide<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(x));
  }
};

// A NaN on either side wins; of equal values (-0 and +0) the lowest rank's
// stays.
template <typename T>
struct Min : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    return (x < a) | (x != x) ? x : a;
  }
};

template <typename T>
struct Max : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    return (x > a) | (x != x) ? x : a;
  }
};

template <typename T>
struct And : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    return static_cast<T>(a & x);
  }
};

template <typename T>
struct Or : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    return static_cast<T>(a | x);
  }
};

template <typename T>
struct Xor : Keep<T> {
  FUSEDPG_OP T next(T a, T x) const {
    return static_cast<T>(a ^ x);
  }
};

// Bools are bytes; any byte but 0 is true, results are 0 or 1.
template <template <typename> class Bitwise>
struct Logical {
  using Value = uint8_t;
  FUSEDPG_OP uint8_t first(uint8_t x) const {
    return x != 0;
  }
  FUSEDPG_OP uint8_t next(uint8_t a, uint8_t x) const {
    return Bitwise<uint8_t>().next(a, x != 0);
  }
};

template <typename T>
struct PremulSum {
  using Value = T;
  T factor;
  FUSEDPG_OP T first(T x) const {
    return x * factor;
  }
  FUSEDPG_OP T next(T a, T x) const {
    return a + x * factor;
  }
};

#undef FUSEDPG_OP
