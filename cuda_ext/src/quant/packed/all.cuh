// Packed<T> of every block type.
#pragma once
#include "quant/packed/iq.cuh"
#include "quant/packed/k.cuh"
#include "quant/packed/levels.cuh"
#include "quant/packed/plain.cuh"
