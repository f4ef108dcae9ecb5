// Everything that device code may use beyond plain CUDA C++.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/aligned_span.cuh"
#include "device/copy_async.cuh"
#include "device/dynamic_shared.cuh"
#include "device/mma.cuh"
#include "device/order.cuh"
#include "device/permute.cuh"
#include "device/shared_address.cuh"
#include "device/staged_copy.cuh"
