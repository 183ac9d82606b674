# libfusedpg_cuda.so: the CUDA kernels, loaded at run time. It links neither
# torch nor NCCL, and CUDA's runtime statically. nvcc is called directly:
# CMake's own CUDA language fails the whole configuration where nvcc does not
# like the machine, and its older versions do not know newer toolkits.
set(FUSEDPG_CUDA AUTO CACHE STRING
    "Build the CUDA kernels: AUTO (for a torch with CUDA, if nvcc works), ON, OFF")
set(FUSEDPG_CUDA_ARCHITECTURES "" CACHE STRING
    "As CMAKE_CUDA_ARCHITECTURES; empty: what the toolkit knows of 80, 90, 100")

set(cuda_library "${FUSEDPG_MODULE_DIR}/libfusedpg_cuda.so")

# Sets cuda_why_not, or cuda_nvcc, cuda_version and cuda_flags.
function(fusedpg_find_nvcc)
  set(why_not)
  find_program(
    FUSEDPG_NVCC nvcc
    HINTS "${CMAKE_CUDA_COMPILER}" ENV CUDACXX
    PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda
    PATH_SUFFIXES bin)
  mark_as_advanced(FUSEDPG_NVCC)
  set(nvcc "${FUSEDPG_NVCC}")
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  endif()
  set(host_compiler "${CMAKE_CXX_COMPILER}")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(host_compiler "${CMAKE_CUDA_HOST_COMPILER}")
  endif()
  set(flags
      -ccbin "${host_compiler}"
      -std=c++20
      -O3
      -Xfatbin=-compress-all
      -DNDEBUG
      # As on the CPU: no contraction, so that both give the same bits.
      -fmad=false
      --expt-relaxed-constexpr
      "-I${CMAKE_CURRENT_SOURCE_DIR}/csrc"
      -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra)

  if(NOT nvcc)
    set(why_not "no nvcc found (PATH, CUDA_HOME, CMAKE_CUDA_COMPILER)")
  else()
    execute_process(
      COMMAND "${nvcc}" --version
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
      RESULT_VARIABLE result)
    if(NOT result EQUAL 0 OR NOT output MATCHES "release ([0-9]+\\.[0-9]+)")
      set(why_not "${nvcc} --version failed")
    elseif(CMAKE_MATCH_1 VERSION_LESS 12.0)
      set(why_not "${nvcc} is ${CMAKE_MATCH_1}, 12.0 is needed")
    endif()
    set(version "${CMAKE_MATCH_1}")
  endif()
  if(NOT why_not)
    # The host compiler may be too new for it.
    set(probe "${CMAKE_BINARY_DIR}/fusedpg_cuda")
    file(WRITE "${probe}/probe.cu" "#include <cmath>\n__global__ void probe() {}\n")
    execute_process(
      COMMAND "${nvcc}" ${flags} -c "${probe}/probe.cu" -o "${probe}/probe.o"
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
      RESULT_VARIABLE result)
    if(NOT result EQUAL 0)
      file(WRITE "${probe}/probe.log" "${output}")
      set(why_not "${nvcc} does not work here, see ${probe}/probe.log")
    endif()
  endif()
  set(cuda_why_not "${why_not}" PARENT_SCOPE)
  set(cuda_nvcc "${nvcc}" PARENT_SCOPE)
  set(cuda_version "${version}" PARENT_SCOPE)
  set(cuda_flags "${flags}" PARENT_SCOPE)
endfunction()

# Sets cuda_code to the flags for FUSEDPG_CUDA_ARCHITECTURES.
function(fusedpg_cuda_code version)
  set(architectures ${FUSEDPG_CUDA_ARCHITECTURES})
  if(NOT architectures)
    set(architectures 80-real 90-real)
    if(version VERSION_GREATER_EQUAL 12.8)
      list(APPEND architectures 100-real 100-virtual)
    else()
      list(APPEND architectures 90-virtual)
    endif()
  endif()
  set(code)
  foreach(architecture IN LISTS architectures)
    if(NOT architecture MATCHES "^([0-9]+[a-z]?)(-real|-virtual)?$")
      message(FATAL_ERROR "FUSEDPG_CUDA_ARCHITECTURES: ${architecture}?")
    endif()
    set(number "${CMAKE_MATCH_1}")
    if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
      list(APPEND code "-gencode=arch=compute_${number},code=sm_${number}")
    endif()
    if(NOT CMAKE_MATCH_2 STREQUAL "-real")
      list(APPEND code "-gencode=arch=compute_${number},code=compute_${number}")
    endif()
  endforeach()
  set(cuda_architectures "${architectures}" PARENT_SCOPE)
  set(cuda_code "${code}" PARENT_SCOPE)
endfunction()

function(fusedpg_add_cuda)
  fusedpg_cuda_code("${cuda_version}")
  set(sources api direct moves program scalars updates_float updates_double)
  set(objects)
  foreach(name IN LISTS sources)
    set(source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/kernels/${name}.cu")
    set(object "${CMAKE_BINARY_DIR}/fusedpg_cuda/${name}.o")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${cuda_nvcc}" ${cuda_flags} ${cuda_code} -MD -MF "${object}.d" -c
              "${source}" -o "${object}"
      DEPENDS "${source}"
      DEPFILE "${object}.d"
      COMMENT "nvcc ${name}.cu"
      VERBATIM)
    list(APPEND objects "${object}")
  endforeach()
  add_custom_command(
    OUTPUT "${cuda_library}"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${FUSEDPG_MODULE_DIR}"
    # A new file, never a rewrite: a process may have the old one mapped.
    COMMAND "${CMAKE_COMMAND}" -E rm -f "${cuda_library}"
    COMMAND
      "${cuda_nvcc}" ${cuda_flags} -shared -cudart=static -o "${cuda_library}"
      ${objects}
      -Xlinker=--as-needed,--gc-sections,-s,--no-undefined,--exclude-libs,ALL
    DEPENDS ${objects}
    COMMENT "Linking libfusedpg_cuda.so"
    VERBATIM)
  add_custom_target(fusedpg_cuda ALL DEPENDS "${cuda_library}")
  list(JOIN cuda_architectures " " architectures)
  message(STATUS "CUDA kernels: nvcc ${cuda_version} for ${architectures}")
endfunction()

set(cuda_why_not)
if(NOT FUSEDPG_CUDA)
  set(cuda_why_not "switched off by FUSEDPG_CUDA=${FUSEDPG_CUDA}")
elseif(FUSEDPG_CUDA STREQUAL "AUTO" AND NOT FUSEDPG_BUILD_PYTHON)
  set(cuda_why_not "no Python module is built")
elseif(FUSEDPG_CUDA STREQUAL "AUTO" AND NOT FUSEDPG_ANY_TORCH_CUDA)
  # Minutes of compilation for kernels that this torch can never run.
  set(cuda_why_not "this torch has no CUDA (FUSEDPG_CUDA=ON builds them all the same)")
elseif(CMAKE_CROSSCOMPILING OR FUSEDPG_SANITIZE)
  set(cuda_why_not "not in cross builds, nor with sanitizers")
else()
  fusedpg_find_nvcc()
  if(cuda_why_not AND NOT FUSEDPG_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "FUSEDPG_CUDA=${FUSEDPG_CUDA}: ${cuda_why_not}")
  endif()
endif()
if(cuda_why_not)
  # One of an earlier configuration must not be taken for this one's.
  file(REMOVE "${cuda_library}")
  message(STATUS "CUDA kernels: not built: ${cuda_why_not}")
else()
  fusedpg_add_cuda()
  if(FUSEDPG_BUILD_PYTHON AND NOT FUSEDPG_ANY_TORCH_CUDA)
    message(STATUS "CUDA kernels: for tests only, this torch has no CUDA")
  endif()
endif()
