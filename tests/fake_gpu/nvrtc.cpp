// NVRTC for the fake GPU: the source is compiled by the C++ compiler, behind
// module.hpp, into a library that driver.cpp loads. FUSEDPG_NVRTC_LIB names it.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "calls.hpp"
#include "image.hpp"

extern char** environ;

namespace {

enum Result : int {
  kSuccess = 0,
  kInvalidInput = 3,
  kInvalidProgram = 4,
  kInvalidOption = 5,
  kCompilation = 6
};

struct Program {
  std::string source;
  std::string log;
  std::string image;
};

std::set<const Program*>& programs() {
  static auto* made = new std::set<const Program*>;
  return *made;
}
std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}

bool known(const Program* program) {
  const std::lock_guard<std::mutex> lock(mutex());
  return programs().count(program) != 0;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The kernels' names, as NVRTC would export them.
std::string entries(const std::string& source) {
  static const std::regex kernel(
      R"(__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\()");
  std::string text;
  for (std::sregex_iterator it(source.begin(), source.end(), kernel), end;
       it != end;
       ++it) {
    text += "\nFUSEDPG_FAKE_KERNEL(" + (*it)[1].str() + ")";
  }
  return text + "\n";
}

bool run(std::vector<std::string> line, const std::filesystem::path& said) {
  std::vector<char*> words;
  for (std::string& word : line) {
    words.push_back(word.data());
  }
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(
      &actions, 2, said.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t pid = 0;
  const int failed =
      posix_spawnp(&pid, words[0], &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 1;
  return failed == 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

// Arithmetic as a GPU's is asked to be: nothing contracted; and what stops a
// GPU stops this.
Result compile(Program& program, int architecture) {
  namespace fs = std::filesystem;
  std::string name = fs::temp_directory_path() / "fusedpg_fake_nvrtc.XXXXXX";
  if (mkdtemp(name.data()) == nullptr) {
    return kCompilation;
  }
  const fs::path place = name;
  std::ofstream(place / "module.cpp")
      << "#include \"module.hpp\"\n"
      << program.source << entries(program.source);
  const bool done =
      run({"c++",
           "-std=c++17",
           "-O1",
           "-shared",
           "-fPIC",
           "-fvisibility=hidden",
           "-ffp-contract=off",
           "-fsanitize=alignment,bounds,shift",
           "-fsanitize-undefined-trap-on-error",
           std::string("-I") + FUSEDPG_FAKE_SIMT,
           "-o",
           place / "module.so",
           place / "module.cpp"},
          place / "log");
  program.log = content(place / "log");
  if (done) {
    program.image =
        fusedpg::fake::Image{architecture, content(place / "module.so")}.text();
  }
  fs::remove_all(place);
  return done ? kSuccess : kCompilation;
}

} // namespace

using fusedpg::fake::calls;

FUSEDPG_FAKE_EXPORT const char* nvrtcGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "NVRTC_SUCCESS";
    case kInvalidInput:
      return "NVRTC_ERROR_INVALID_INPUT";
    case kInvalidProgram:
      return "NVRTC_ERROR_INVALID_PROGRAM";
    case kInvalidOption:
      return "NVRTC_ERROR_INVALID_OPTION";
    case kCompilation:
      return "NVRTC_ERROR_COMPILATION";
    default:
      return "NVRTC_ERROR unknown";
  }
}

FUSEDPG_FAKE_EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 8;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 80;
  architectures[1] = fusedpg::fake::kFakeArchitecture;
  architectures[2] = 100; // which the device does not know
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcCreateProgram(
    Program** program,
    const char* source,
    const char* /* name */,
    int num_headers,
    const char* const* /* headers */,
    const char* const* /* their names */) {
  if (source == nullptr || num_headers != 0) {
    return kInvalidInput;
  }
  auto* made = new Program{source, {}, {}};
  const std::lock_guard<std::mutex> lock(mutex());
  programs().insert(made);
  *program = made;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcDestroyProgram(Program** program) {
  const std::lock_guard<std::mutex> lock(mutex());
  if (programs().erase(*program) == 0) {
    return kInvalidProgram;
  }
  delete *program;
  *program = nullptr;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcCompileProgram(
    Program* program,
    int count,
    const char* const* options) {
  if (!known(program)) {
    return kInvalidProgram;
  }
  if (const int fault = calls().enter("nvrtcCompileProgram"); fault != 0) {
    program->log = "a fault that the test asked for";
    return fault;
  }
  static const std::string kArchitecture = "--gpu-architecture=compute_";
  // Without one of these a kernel may have other bits than the CPU's.
  std::set<std::string> wanted = {
      "--std=c++17",
      "--fmad=false",
      "--ftz=false",
      "--prec-div=true",
      "--prec-sqrt=true"};
  int architecture = 0;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.rfind(kArchitecture, 0) == 0) {
      architecture = std::atoi(option.c_str() + kArchitecture.size());
    } else if (wanted.erase(option) == 0) {
      program->log = "unrecognized option " + option;
      return kInvalidOption;
    }
  }
  if (!wanted.empty() || architecture == 0) {
    program->log = "an option is missing: " +
        (wanted.empty() ? kArchitecture : *wanted.begin());
    return kInvalidOption;
  }
  return compile(*program, architecture);
}

// Sizes include the zero at the end.
FUSEDPG_FAKE_EXPORT int nvrtcGetProgramLogSize(
    Program* program,
    size_t* bytes) {
  if (!known(program)) {
    return kInvalidProgram;
  }
  *bytes = program->log.size() + 1;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
  if (!known(program)) {
    return kInvalidProgram;
  }
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcGetPTXSize(Program* program, size_t* bytes) {
  if (!known(program) || program->image.empty()) {
    return kInvalidProgram;
  }
  *bytes = program->image.size() + 1;
  return kSuccess;
}

FUSEDPG_FAKE_EXPORT int nvrtcGetPTX(Program* program, char* ptx) {
  if (!known(program) || program->image.empty()) {
    return kInvalidProgram;
  }
  std::memcpy(ptx, program->image.c_str(), program->image.size() + 1);
  return kSuccess;
}
