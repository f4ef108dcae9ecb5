// Levels of the four-bit types that choose from a table.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace tandem::quant {

TANDEM_TABLE int8_t kLevelsIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// E2M1, doubled so that they are integers.
TANDEM_TABLE int8_t kLevelsFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace tandem::quant
