# cmake -DNM=... -DOBJECTS=... -P check_isa_symbols.cmake
#
# A weak symbol (an inline function or template that was not inlined) in a file
# compiled for a newer ISA may be the copy that the linker keeps for everybody,
# and then an older machine dies of an illegal instruction.
set(found)
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "kernels_avx")
    continue()
  endif()
  execute_process(
    COMMAND "${NM}" --defined-only --demangle "${object}"
    OUTPUT_VARIABLE symbols
    COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  foreach(symbol IN LISTS weak)
    string(APPEND found "${object}: ${symbol}\n")
  endforeach()
endforeach()
if(found)
  message(FATAL_ERROR "weak symbols in ISA-specific files:\n${found}")
endif()
