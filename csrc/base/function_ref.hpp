#pragma once

namespace fusedpg {

template <typename Signature>
class FunctionRef;

// Refers to a function that outlives it, so that it needs no memory.
template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <typename Function>
  FunctionRef(const Function& function)
      : function_(&function),
        call_([](const void* called, Arguments... arguments) -> Result {
          return (*static_cast<const Function*>(called))(arguments...);
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(function_, arguments...);
  }

 private:
  const void* function_;
  Result (*call_)(const void*, Arguments...);
};

} // namespace fusedpg
