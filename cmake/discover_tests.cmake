# cmake -DTESTS=<program> -DOUT=<file> -P discover_tests.cmake
#
# Tells ctest of every test that the program lists, so that each runs, fails and
# times out by itself.
execute_process(
  COMMAND "${TESTS}" --list
  OUTPUT_VARIABLE names
  COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" names "${names}")
set(text "")
foreach(name IN LISTS names)
  if(name)
    string(APPEND text "add_test(${name} \"${TESTS}\" --exact ${name})\n")
  endif()
endforeach()
file(WRITE "${OUT}" "${text}")
