// OpenMSA: MiniMax Sparse Attention. Includes the whole public C++ face.
#pragma once

#include "openmsa/attention.hpp"
#include "openmsa/batch.hpp"
#include "openmsa/cache.hpp"
#include "openmsa/config.hpp"
#include "openmsa/cuda.hpp"
#include "openmsa/error.hpp"
#include "openmsa/half.hpp"
#include "openmsa/indexer.hpp"
#include "openmsa/info.hpp"
#include "openmsa/tensor.hpp"
#include "openmsa/training.hpp"
#include "openmsa/workspace.hpp"
