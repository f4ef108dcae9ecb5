#include "cuda_ops/choose_window.h"

#include "cuda_ops/likeliest.cuh"
#include "device/launch.h"
#include "device/primitives.cuh"

namespace tandem::cuda {

namespace {

constexpr int kWeighBlocks = 64;
constexpr int kWeighThreads = 512;
constexpr int kPickBlocks = 32;
constexpr int kPickThreads = 1024;
constexpr int kPickWarps = kPickThreads / 32;
constexpr int kKeysPerThread = kMaxCandidates / kPickThreads;
static_assert(kChoiceBins <= kPickThreads, "a thread has a bin");

// ---- changed logits ----

// A copy of the row with its changes, and the likeliest token of that. Does nothing where there are none.
__global__ void __launch_bounds__(kLikeliestThreads) change_kernel(ChooseProblem p) {
    const int num_changes = p.state->choice.num_changes;
    device::wait_prerequisites();
    device::launch_dependents();
    if (num_changes == 0) return;
    const int part = (p.vocab + kLikeliestParts - 1) / kLikeliestParts;
    const int first = static_cast<int>(blockIdx.x) * part, end = min(first + part, p.vocab);
    for (int token = first + threadIdx.x; token < end; token += kLikeliestThreads) p.changed[token] = __ldcg(p.logits + token);
    __syncthreads();
    for (int i = threadIdx.x; i < num_changes; i += kLikeliestThreads) {
        const LogitChange change = p.changes[i];
        if (change.token >= first && change.token < end)
            p.changed[change.token] = changed_logit(__ldcg(p.logits + change.token), change);
    }
    __syncthreads();
    Likeliest best = no_likeliest();
    for (int token = first + threadIdx.x; token < end; token += kLikeliestThreads)
        take_greater(best, likeliest_of(token, p.changed[token]));
    likeliest_of_row(best, p.scratch->changed);
}

// The row that tokens are drawn from. Its bins are as narrow as its logits allow.
struct Row {
    const float* logits;
    float peak;
    float temperature;
    float bins_per_unit;

    __device__ float depth(float logit) const { return choice_depth(logit, peak, temperature); }
    __device__ int bin(float depth) const { return choice_bin(depth, bins_per_unit); }
};

__device__ Row row_of(const ChooseProblem& p, const ChoiceRule& rule) {
    const bool has_changes = rule.num_changes != 0;
    const Likeliest best = read_likeliest(has_changes ? &p.scratch->changed.whole : &p.parts->whole);
    const float deepest = fminf(choice_depth(best.lowest, best.peak, rule.temperature), kChoiceReach);
    return {has_changes ? p.changed : p.logits, best.peak, rule.temperature, fminf(kChoiceBins / deepest, kMostBinsPerUnit)};
}

// ---- weights by depth ----

__global__ void __launch_bounds__(kWeighThreads) weigh_kernel(ChooseProblem p) {
    __shared__ uint32_t mass_low[kChoiceBins], mass_high[kChoiceBins], count[kChoiceBins];
    const ChoiceRule rule = p.state->choice;
    for (int bin = threadIdx.x; bin < kChoiceBins; bin += kWeighThreads) mass_low[bin] = mass_high[bin] = count[bin] = 0;
    device::wait_prerequisites();
    device::launch_dependents();
    if (rule.temperature == 0.0f) return;
    __syncthreads();
    const Row row = row_of(p, rule);
    for (int token = blockIdx.x * kWeighThreads + threadIdx.x; token < p.vocab; token += kWeighBlocks * kWeighThreads) {
        const float depth = row.depth(__ldcg(row.logits + token));
        if (!in_reach(depth)) continue;
        const int bin = row.bin(depth);
        const uint64_t weight = choice_weight(depth);
        const auto low = static_cast<uint32_t>(weight);
        const uint32_t carry = atomicAdd(&mass_low[bin], low) > ~low ? 1 : 0;  // 64-bit sums in shared memory are loops
        atomicAdd(&mass_high[bin], static_cast<uint32_t>(weight >> 32) + carry);
        atomicAdd(&count[bin], 1u);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < kChoiceBins; bin += kWeighThreads) {
        if (count[bin] == 0) continue;
        const uint64_t mass = static_cast<uint64_t>(mass_high[bin]) << 32 | mass_low[bin];
        atomicAdd(reinterpret_cast<unsigned long long*>(&p.scratch->mass[bin]), mass);
        atomicAdd(&p.scratch->count[bin], count[bin]);
    }
}

// ---- the choice ----

constexpr int kNoBin = -1;

__device__ uint64_t fewer(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

// A part of the order, by the mass in front of it and up to its end.
struct Stretch {
    uint64_t before;
    uint64_t end;

    __device__ bool has(uint64_t place) const { return before <= place && place < end; }
};

// Where in the order the choice is decided: the bins whose tokens have to be put in order.
struct Sought {
    uint64_t total;  // mass of all bins
    int top;         // holds the last of top_k; kNoBin: that cuts nothing
    Stretch top_at;  // without a bin: behind everything
    int mass_first;  // to mass_last: one of them holds the last token within top_p; kNoBin
    int mass_last;
    Stretch mass_at;
    int least;  // holds the last that may be above the least; kNoBin
    Stretch least_at;
    int drawn_first;  // to drawn_last: one of them holds the drawn token
    int drawn_last;

    __device__ bool has(int bin) const {
        return bin == top || (bin >= mass_first && bin <= mass_last) ||
               (bin == least && least_at.before < fewer(top_at.end, mass_at.end)) || (bin >= drawn_first && bin <= drawn_last);
    }
};

// What a block of pick_kernel shares.
struct PickShared {
    unsigned long long of_warps[kPickWarps];
    Sought sought;
    bool is_last;
    unsigned long long kept[3];                 // mass that top_k, top_p and the least leave
    unsigned long long mass_left[kChoiceBins];  // mass in front of a bin that is not in `keys`
    uint32_t count_left[kChoiceBins];           // number of tokens, likewise
    uint64_t keys[kMaxCandidates];
};

// The sum up to and with the own thread's value. For all threads of the block.
__device__ uint64_t sum_up_to(uint64_t value, PickShared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t below = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += below;
    }
    __syncthreads();  // nobody reads what was there before
    if (lane == 31) shared.of_warps[warp] = value;
    __syncthreads();
    for (int i = 0; i < warp; i++) value += shared.of_warps[i];
    return value;
}

// A thread's bin.
struct Bin {
    uint64_t mass;
    uint64_t count;
    Stretch at;
    uint64_t num_before;
};

__device__ Bin own_bin(const ChooseProblem& p, PickShared& shared) {
    Bin own{};
    if (threadIdx.x < kChoiceBins) {
        own.mass = __ldcg(&p.scratch->mass[threadIdx.x]);
        own.count = __ldcg(&p.scratch->count[threadIdx.x]);
    }
    own.at.end = sum_up_to(own.mass, shared);
    own.at.before = own.at.end - own.mass;
    own.num_before = sum_up_to(own.count, shared) - own.count;
    return own;
}

// Fills shared.sought. The masses that top_k, top_p and the least leave are known to a bin each here, and so is the drawn place.
__device__ void seek(const ChoiceRule& rule, const Row& row, const Bin& own, PickShared& shared) {
    Sought& sought = shared.sought;
    const int bin = threadIdx.x;
    const Stretch& at = own.at;
    if (bin == kPickThreads - 1) {
        const Stretch behind{at.end, at.end};
        sought = {at.end, kNoBin, behind, kNoBin, kNoBin, behind, kNoBin, behind, kNoBin, kNoBin};
    }
    __syncthreads();
    const auto top_k = static_cast<uint64_t>(rule.top_k);
    if (own.num_before < top_k && top_k <= own.num_before + own.count) {
        sought.top = bin;
        sought.top_at = at;
    }
    const float least_depth = row.depth(least_logit(rule, row.peak));
    if (in_reach(least_depth) && bin == row.bin(least_depth)) {
        sought.least = bin;
        sought.least_at = at;
    }
    __syncthreads();
    if (within_mass(rule, at.before, sought.top_at.before) && !within_mass(rule, at.end, sought.top_at.before)) {
        sought.mass_first = bin;
        sought.mass_at.before = at.before;
    }
    if (within_mass(rule, at.before, sought.top_at.end) && !within_mass(rule, at.end, sought.top_at.end)) {
        sought.mass_last = bin;
        sought.mass_at.end = at.end;
    }
    __syncthreads();
    const uint64_t fewest = fewer(sought.top_at.before, fewer(sought.mass_at.before, sought.least_at.before));
    const uint64_t most = fewer(sought.top_at.end, fewer(sought.mass_at.end, sought.least_at.end));
    if (at.has(drawn_place(rule, fewest))) sought.drawn_first = bin;
    if (at.has(drawn_place(rule, most))) sought.drawn_last = bin;
    __syncthreads();
}

__device__ void gather(const ChooseProblem& p, const Row& row, const Sought& sought) {
    for (int token = blockIdx.x * kPickThreads + threadIdx.x; token < p.vocab; token += kPickBlocks * kPickThreads) {
        const float logit = __ldcg(row.logits + token), depth = row.depth(logit);
        if (!in_reach(depth) || !sought.has(row.bin(depth))) continue;
        const uint32_t place = atomicAdd(&p.scratch->num_keys, 1u);
        if (place < kMaxCandidates) p.scratch->keys[place] = choice_key(logit, token);
    }
}

// Puts the first `size` keys, a power of two, in order: Batcher's bitonic sort.
__device__ void sort_keys(uint64_t* keys, int size) {
    for (int run = 2; run <= size; run *= 2) {
        for (int distance = run / 2; distance > 0; distance /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += kPickThreads) {
                const int low = pair / distance * distance * 2 + pair % distance, high = low + distance;
                const uint64_t a = keys[low], b = keys[high];
                if ((a > b) == ((low & run) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Chooses among `num` gathered tokens; a thread has kKeysPerThread neighbours of their order.
__device__ void draw(const ChooseProblem& p, const ChoiceRule& rule, const Row& row, const Bin& own, int num, PickShared& shared) {
    const Sought& sought = shared.sought;
    int size = 1;
    while (size < num) size *= 2;
    for (int i = threadIdx.x; i < size; i += kPickThreads) shared.keys[i] = i < num ? __ldcg(&p.scratch->keys[i]) : ~uint64_t{0};
    const bool is_sought = sought.has(threadIdx.x);
    const uint64_t mass_there = sum_up_to(is_sought ? own.mass : 0, shared),
                   count_there = sum_up_to(is_sought ? own.count : 0, shared);
    if (is_sought) {
        shared.mass_left[threadIdx.x] = own.at.end - mass_there;
        shared.count_left[threadIdx.x] = static_cast<uint32_t>(own.num_before + own.count - count_there);
    }
    if (threadIdx.x == 0) {
        shared.kept[0] = shared.kept[1] = sought.total;
        shared.kept[2] = sought.least_at.before;
    }
    __syncthreads();
    sort_keys(shared.keys, size);

    uint64_t weights[kKeysPerThread], sum = 0;
    for (int i = 0; i < kKeysPerThread; i++) {
        const int place = threadIdx.x * kKeysPerThread + i;
        weights[i] = place < num ? choice_weight(row.depth(key_logit(shared.keys[place]))) : 0;
        sum += weights[i];
    }
    uint64_t before = sum_up_to(sum, shared) - sum;
    Stretch at[kKeysPerThread] = {};
    for (int i = 0; i < kKeysPerThread; before += weights[i++]) {
        const int place = threadIdx.x * kKeysPerThread + i;
        if (place >= num) continue;
        const float logit = key_logit(shared.keys[place]);
        const int bin = row.bin(row.depth(logit));
        at[i].before = before + shared.mass_left[bin];
        at[i].end = at[i].before + weights[i];
        if (rule.top_k > 0 && place + shared.count_left[bin] + 1 == static_cast<uint32_t>(rule.top_k)) shared.kept[0] = at[i].end;
        if (bin == sought.least && logit >= least_logit(rule, row.peak)) atomicAdd(&shared.kept[2], weights[i]);
    }
    __syncthreads();
    const uint64_t top = shared.kept[0];
    for (int i = 0; i < kKeysPerThread; i++)
        if (within_mass(rule, at[i].before, top) && !within_mass(rule, at[i].end, top)) shared.kept[1] = at[i].end;
    __syncthreads();
    const uint64_t by_mass = shared.kept[1], above_least = shared.kept[2],
                   drawn = drawn_place(rule, fewer(top, fewer(by_mass, above_least)));
    for (int i = 0; i < kKeysPerThread; i++)
        if (at[i].has(drawn)) *p.token = key_token(shared.keys[threadIdx.x * kKeysPerThread + i]);
}

__global__ void __launch_bounds__(kPickThreads) pick_kernel(ChooseProblem p) {
    __shared__ PickShared shared;
    const ChoiceRule rule = p.state->choice;
    device::wait_prerequisites();
    device::launch_dependents();
    if (rule.temperature == 0.0f) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            *p.token = __ldcg(rule.num_changes ? &p.scratch->changed.whole.token : &p.parts->whole.token);
        return;
    }
    const Row row = row_of(p, rule);
    const Bin own = own_bin(p, shared);
    seek(rule, row, own, shared);
    gather(p, row, shared.sought);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(&p.scratch->num_done, 1u) == kPickBlocks - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    const int num = static_cast<int>(__ldcg(&p.scratch->num_keys));
    if (num == 0 || num > kMaxCandidates) {
        if (threadIdx.x == 0) *p.token = kNotChosen;
    } else {
        draw(p, rule, row, own, num, shared);
    }
    if (threadIdx.x < kChoiceBins) p.scratch->mass[threadIdx.x] = p.scratch->count[threadIdx.x] = 0;
    if (threadIdx.x == 0) p.scratch->num_keys = p.scratch->num_done = 0;
}

}  // namespace

void choose_window(const ChooseProblem& problem, bool dependent, cudaStream_t stream) {
    device::launch({dim3(kLikeliestParts), dim3(kLikeliestThreads), 0, stream, dependent}, change_kernel, problem);
    device::launch({dim3(kWeighBlocks), dim3(kWeighThreads), 0, stream, dependent}, weigh_kernel, problem);
    device::launch({dim3(kPickBlocks), dim3(kPickThreads), 0, stream, dependent}, pick_kernel, problem);
}

}  // namespace tandem::cuda
