# Asks Python for the torch, or torches, to build for. find_package(Torch) is not used: it looks for
# the CUDA toolkit that torch was built with, which we do not need.

# Sets the variables below, TORCH_LIB_DIR, TORCH_INCLUDE_DIRS and TORCH_LIBRARIES for the torch in a
# folder; "default": the one of FUSEDPG_PYTHON.
macro(fusedpg_use_torch path)
  set(query_path "${path}")
  if(query_path STREQUAL "default")
    set(query_path)
  endif()
  execute_process(
    COMMAND "${FUSEDPG_PYTHON}"
            "${CMAKE_CURRENT_SOURCE_DIR}/cmake/query_torch.py" ${query_path}
    OUTPUT_VARIABLE query_output
    ERROR_VARIABLE query_error
    RESULT_VARIABLE query_result)
  if(NOT query_result EQUAL 0)
    message(
      FATAL_ERROR
        "No torch for ${FUSEDPG_PYTHON}:\n${query_error}\n"
        "Install torch first and build with 'pip install --no-build-isolation', "
        "or pass -DFUSEDPG_BUILD_PYTHON=OFF for the C++ parts alone.")
  endif()
  foreach(
    key
    FUSEDPG_TORCH_VERSION
    FUSEDPG_TORCH_FULL_VERSION
    FUSEDPG_TORCH_TAG
    FUSEDPG_TORCH_CUDA
    FUSEDPG_PYTHON_INCLUDE_DIR
    FUSEDPG_PYTHON_SUFFIX
    TORCH_DIR)
    if(NOT query_output MATCHES "${key}=([^\n]*)")
      message(FATAL_ERROR "query_torch.py did not print ${key}")
    endif()
    set(${key} "${CMAKE_MATCH_1}")
  endforeach()
  set(TORCH_LIB_DIR "${TORCH_DIR}/lib")
  set(TORCH_INCLUDE_DIRS "${TORCH_DIR}/include"
                         "${TORCH_DIR}/include/torch/csrc/api/include")
  set(TORCH_LIBRARIES)
  foreach(lib torch_python torch torch_cpu c10)
    list(APPEND TORCH_LIBRARIES "${TORCH_LIB_DIR}/lib${lib}.so")
  endforeach()
  message(STATUS "torch ${FUSEDPG_TORCH_FULL_VERSION} in ${TORCH_DIR}")
endmacro()

set(FUSEDPG_TORCHES ${FUSEDPG_TORCH_PATHS})
if(NOT FUSEDPG_TORCHES)
  set(FUSEDPG_TORCHES default)
endif()
# The kernels are worth their minutes of nvcc if any of them can run them.
set(FUSEDPG_ANY_TORCH_CUDA)
foreach(torch IN LISTS FUSEDPG_TORCHES)
  fusedpg_use_torch("${torch}")
  string(APPEND FUSEDPG_ANY_TORCH_CUDA "${FUSEDPG_TORCH_CUDA}")
endforeach()
