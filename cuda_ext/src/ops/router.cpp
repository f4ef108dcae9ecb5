#include "ops/router.h"

#include <algorithm>

#include "ops/tiles.h"

namespace tandem {

void router(Pool& pool, const RouterProblem& p, const Window& window) {
    constexpr int kLeast = 16;  // experts of an item: a cache line of a weight row
    const bool is_short = int64_t{window.num_rows} * num_tiles(p.num_experts, kTile) < 2 * pool.num_active();
    const int tile = is_short ? kLeast : kTile;
    const int64_t tiles = num_tiles(p.num_experts, tile);
    pool.parallel_for(window.num_rows * tiles, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t row = item / tiles;
            const int first = static_cast<int>(item % tiles) * tile;
            p.kernels->router_sums({p.x + row * p.width, p.gamma, p.weights + first, p.num_experts, p.width,
                                    std::min(tile, p.num_experts - first), p.sums + row * p.num_experts + first});
        }
    });
}

}  // namespace tandem
