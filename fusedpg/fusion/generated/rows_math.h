namespace {

template <typename T>
T one_of(T x, Vec<T> (*function)(const Vec<T>&)) {
  alignas(64) T values[Vec<T>::size()];
  function(Vec<T>(x)).store(values);
  return values[0];
}

} // namespace
