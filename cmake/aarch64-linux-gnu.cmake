# Cross-build of the C++ tests; ctest runs them under qemu-user:
#   apt-get install g++-aarch64-linux-gnu qemu-user
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
# Static, so that qemu needs no path to the target's loader and libraries.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
find_program(FUSEDPG_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(FUSEDPG_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${FUSEDPG_QEMU}")
endif()
