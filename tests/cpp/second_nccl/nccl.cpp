// Two libraries like two versions of NCCL, which call functions that they also
// export.

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int ncclVersionOfThisLibrary() {
  return SECOND_NCCL_VERSION;
}

EXPORT int ncclGetVersion(int* version) {
  *version = ncclVersionOfThisLibrary();
  return 0;
}

#define STUB(name)    \
  EXPORT int name() { \
    return 0;         \
  }
STUB(ncclGetErrorString)
STUB(ncclCommGetAsyncError)
STUB(ncclGroupStart)
STUB(ncclGroupSimulateEnd)
