// Code that runs on the host and, in a CUDA build, on the device too.
#pragma once

#ifdef __CUDACC__
#define TANDEM_HD __host__ __device__ __forceinline__
#else
// Always inlined: the same function is compiled for several instruction sets, and a shared out-of-line copy could be the
// one that this CPU cannot run.
#define TANDEM_HD inline __attribute__((always_inline))
#endif

// A constant table, in the memory of whichever side reads it.
#ifdef __CUDA_ARCH__
#define TANDEM_TABLE static __device__ constexpr
#else
#define TANDEM_TABLE static constexpr
#endif
