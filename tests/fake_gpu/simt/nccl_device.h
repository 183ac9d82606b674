#pragma once

#include "nccl.h"

struct ncclTeam_t {
  int nRanks;
  int rank;
  int stride;
};
struct ncclDevCommRequirements_t {
  bool lsaMultimem;
};
using ncclDevCommRequirements = ncclDevCommRequirements_t;
struct ncclDevComm {
  struct {
    void* mcBasePtr;
  } lsaMultimem;
};
using ncclDevComm_t = ncclDevComm;

void* ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer);
// An address that only multimem instructions may use.
void* ncclGetLsaMultimemPointer(
    ncclWindow_t window,
    size_t offset,
    const ncclDevComm& comm);
