#include "ops/route.h"

namespace tandem {

namespace {

void choose(const float* scores, int num_experts, int top_k, int32_t* ids) {
    for (int expert = 0; expert < num_experts; expert++) {
        int place = std::min(expert, top_k);
        while (place > 0 && scores[expert] > scores[ids[place - 1]]) place--;
        if (place == top_k) continue;
        for (int i = std::min(expert, top_k - 1); i > place; i--) ids[i] = ids[i - 1];
        ids[place] = expert;
    }
}

// Turns scores of `num` experts into gate values; `most`: the logit of the first chosen.
void gate(const RouteProblem& p, float inverse, float most, int num, float* scores) {
    if (p.gating == Gating::softmax) {
        for (int i = 0; i < num; i++) scores[i] *= inverse;
        return p.kernels->exp_below(scores, most, num, scores);
    }
    for (int i = 0; i < num; i++) scores[i] = -(scores[i] * inverse);
    p.kernels->exp_below(scores, 0.0f, num, scores);
    for (int i = 0; i < num; i++) scores[i] = 1.0f / (1.0f + scores[i]);
}

void route_row(const RouteProblem& p, int64_t row) {
    const int top_k = p.routed.top_k;
    const int64_t* sums = p.sums + row * p.num_experts;
    int32_t* ids = p.routed.ids + row * top_k;
    float* weights = p.routed.weights + row * top_k;
    alignas(64) float scores[kMaxExperts];
    for (int i = 0; i < p.num_experts; i++) scores[i] = router_score(sums[i]);
    choose(scores, p.num_experts, top_k, ids);
    const float inverse = p.inverse[row], most = scores[ids[0]] * inverse;
    for (int k = 0; k < top_k; k++) weights[k] = scores[ids[k]];
    gate(p, inverse, most, top_k, weights);
    float sum = 1.0f;
    if (p.renormalise) {
        sum = 0.0f;
        for (int k = 0; k < top_k; k++) sum += weights[k];
    } else if (p.gating == Gating::softmax) {
        gate(p, inverse, most, p.num_experts, scores);
        sum = sum8(scores, p.num_experts);
    }
    for (int k = 0; k < top_k; k++) weights[k] = weights[k] / sum * p.scale;
}

// Counting sort of the pairs by expert; looks every expert in use up in the residency table.
void sort_by_expert(const RouteProblem& p, int64_t pairs) {
    const Routed& routed = p.routed;
    std::fill_n(routed.counts, p.num_experts, 0);
    for (int64_t pair = 0; pair < pairs; pair++) routed.counts[routed.ids[pair]]++;
    int32_t first = 0, used = 0, linked = 0;
    for (int expert = 0; expert < p.num_experts; expert++) {
        const int32_t count = routed.counts[expert];
        routed.counts[expert] = first;
        if (count == 0) continue;
        const ExpertTable::Found found = p.table->find(p.layer, expert);
        p.table->count(p.layer, expert, found.tier, count);
        (found.tier == Tier::linked ? routed.linked(linked++) : routed.experts[used++]) = {found.blob, expert, first, count};
        first += count;
    }
    *routed.num_experts = used;
    *routed.num_linked = linked;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t place = routed.counts[routed.ids[pair]]++;
        routed.order[place] = static_cast<int32_t>(pair);
        routed.places[pair] = place;
    }
}

}  // namespace

void route(Pool& pool, const RouteProblem& p, const Window& window) {
    pool.parallel_for(window.num_rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) route_row(p, row);
    });
    sort_by_expert(p, int64_t{window.num_rows} * p.routed.top_k);
}

}  // namespace tandem
