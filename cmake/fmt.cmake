# fmt's headers, for messages: those that come with torch, or without torch the system's. A link in a
# folder of its own is on the include path, as the engine uses nothing else of torch. With several
# torches they are the first one's.
if(FUSEDPG_TORCH_PATHS)
  list(GET FUSEDPG_TORCH_PATHS 0 torch_dir)
  string(APPEND torch_dir "/torch")
else()
  execute_process(
    COMMAND
      "${FUSEDPG_PYTHON}" -c
      "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(fmt "${torch_dir}/include/fmt")
if(torch_dir AND EXISTS "${fmt}/base.h")
  set(FUSEDPG_FMT_INCLUDE_DIR "${CMAKE_CURRENT_BINARY_DIR}/fmt_include")
  file(MAKE_DIRECTORY "${FUSEDPG_FMT_INCLUDE_DIR}")
  file(CREATE_LINK "${fmt}" "${FUSEDPG_FMT_INCLUDE_DIR}/fmt" SYMBOLIC)
else()
  find_path(FUSEDPG_FMT_INCLUDE_DIR fmt/base.h REQUIRED)
endif()
