// The tile kernel, which runs in clusters of CTAs, is not emulated; smxx_union.cuh wants its parameters alone.
#pragma once

#include "cuda/dense_params.hpp"
#include "cuda/ptx/convert.cuh"
