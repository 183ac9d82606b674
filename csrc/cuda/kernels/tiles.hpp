#pragma once

// The bodies of all kernels, for the GPU and for the host.
#include "cuda/kernels/blocks.hpp"
#include "cuda/kernels/elements.hpp"
#include "cuda/kernels/moves.hpp"
#include "cuda/kernels/scalars.hpp"
#include "cuda/kernels/updates.hpp"
