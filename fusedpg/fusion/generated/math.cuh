namespace {

// The formulas of torch's kernels.
DEVICE float exp_of(float x) {
  return expf(x);
}
DEVICE double exp_of(double x) {
  return exp(x);
}
DEVICE float log_of(float x) {
  return logf(x);
}
DEVICE double log_of(double x) {
  return log(x);
}
DEVICE float tanh_of(float x) {
  return tanhf(x);
}
DEVICE double tanh_of(double x) {
  return tanh(x);
}
DEVICE float erf_of(float x) {
  return erff(x);
}
DEVICE double erf_of(double x) {
  return erf(x);
}
template <typename T>
DEVICE T sigmoid_of(T x) {
  return T(1) / (T(1) + exp_of(-x));
}
template <typename T>
DEVICE T silu_of(T x) {
  return x / (T(1) + exp_of(-x));
}
template <typename T>
DEVICE T gelu_of(T x) {
  const T alpha = T(0.70710678118654752440);
  return x * T(0.5) * (T(1) + erf_of(x * alpha));
}
template <typename T>
DEVICE T gelu_tanh_of(T x) {
  const T beta = T(1.41421356237309504880 * 1.12837916709551257390 * 0.5);
  const T inner = beta * (x + T(0.044715) * (x * x * x));
  return T(0.5) * x * (T(1) + tanh_of(inner));
}

} // namespace
