// src/cuda/ptx/wgmma256.cuh: the emulator's products are of any width.
#pragma once

#include "cuda/ptx/wgmma.cuh"
