// Two cards: how fast they copy, and what a step costs that goes from card 0 to card 1 and back. Prints lines `RESULT {json}`.
//
// In each of 48 steps card 0 sends 2.5 KB, card 1 answers with 32 KB, card 0 takes them; per step, the median of some runs:
//
//   on one card    all of it on card 0
//   graph edge     one captured graph, forked to card 1 and joined by events
//   wait value     a graph per card, card 1's launched before; a kernel raises a flag, the other card's stream waits for the value
//   spinning       the same, but the kernels that need the flag look at it themselves
//
// Flags and data lie in mapped host memory, or each in the memory of the card that waits for it. nvcc -O2 -arch=sm_90 -o wires
// wires.cu -ldl

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define CHECK(call)                                                                  \
    do {                                                                             \
        int code = static_cast<int>(call);                                           \
        if (code != 0) {                                                             \
            std::printf("line %d: %s failed with code %d\n", __LINE__, #call, code); \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

constexpr int steps = 48, runs = 30;
constexpr int request_words = 160, answer_words = 2048;  // of 16 bytes
constexpr int answer_blocks = 8, threads = 256;
constexpr size_t copy_bytes = size_t{2} << 30, box_bytes = size_t{1} << 16;
constexpr long long patience_cycles = 2'000'000'000;  // about a second; then a flag that never came ends the run

using Word = unsigned int;

__device__ void wait_for(const Word* flag, Word value) {
    if (flag == nullptr) return;
    if (threadIdx.x == 0) {
        long long start = clock64();
        while (*reinterpret_cast<const volatile Word*>(flag) < value)
            if (clock64() - start > patience_cycles) __trap();
        __threadfence_system();
    }
    __syncthreads();
}

__global__ void send(uint4* box, const uint4* x, Word* flag, Word value) {
    for (int word = threadIdx.x; word < request_words; word += blockDim.x) box[word] = x[word];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0 && flag != nullptr) *reinterpret_cast<volatile Word*>(flag) = value;
}

__global__ void answer(const Word* asked, uint4* rows, const uint4* box, Word* arrived, Word* flag, Word value) {
    wait_for(asked, value);
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 seen = box[thread % request_words];
    for (int word = thread; word < answer_words; word += gridDim.x * blockDim.x) {
        seen.x += word;
        rows[word] = seen;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0 || flag == nullptr) return;
    if (atomicAdd(arrived, 1) == gridDim.x - 1) {
        *arrived = 0;
        __threadfence_system();
        *reinterpret_cast<volatile Word*>(flag) = value;
    }
}

__global__ void take(const Word* answered, uint4* y, const uint4* rows, Word value) {
    wait_for(answered, value);
    for (int word = blockIdx.x * blockDim.x + threadIdx.x; word < answer_words; word += gridDim.x * blockDim.x)
        y[word] = rows[word];
}

__global__ void read_all(const float4* values, size_t count, float* sum) {
    float own = 0;
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
        float4 value = values[i];
        own += value.x + value.y + value.z + value.w;
    }
    if (own == 0.5f) *sum = own;  // so that the reads are not left out
}

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

WaitValue find_wait_value() {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = driver == nullptr ? nullptr : dlsym(driver, "cuStreamWaitValue32_v2");
    if (found == nullptr) {
        std::printf("the driver has no cuStreamWaitValue32\n");
        std::exit(1);
    }
    return reinterpret_cast<WaitValue>(found);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void say(const char* name, double value) {
    std::printf("RESULT {\"%s\": %.2f}\n", name, value);
    std::fflush(stdout);
}

struct Card {
    int id;
    cudaStream_t stream;
    char* data;
    uint4 *box, *rows;  // a request to this card, an answer to it
    Word *asked, *answered, *arrived;

    explicit Card(int number) : id(number) {
        CHECK(cudaSetDevice(id));
        int least, greatest;
        CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
        CHECK(cudaMalloc(&data, 4 * box_bytes));
        CHECK(cudaMemset(data, 1, 4 * box_bytes));
        box = reinterpret_cast<uint4*>(data);
        rows = reinterpret_cast<uint4*>(data + box_bytes);
        asked = reinterpret_cast<Word*>(data + 3 * box_bytes);
        answered = asked + 64;
        arrived = asked + 128;
        clear();
    }

    uint4* other() const { return reinterpret_cast<uint4*>(data + 2 * box_bytes); }

    void clear() const {
        CHECK(cudaSetDevice(id));
        CHECK(cudaMemset(asked, 0, 1024));
        CHECK(cudaDeviceSynchronize());
    }
};

struct Places {  // where request and answer travel
    uint4 *box, *rows;
    Word *asked, *answered;
};

cudaGraphExec_t capture(const Card& card, const std::function<void()>& enqueue) {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CHECK(cudaSetDevice(card.id));
    CHECK(cudaStreamBeginCapture(card.stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    CHECK(cudaSetDevice(card.id));
    CHECK(cudaStreamEndCapture(card.stream, &graph));
    CHECK(cudaGraphInstantiate(&ready, graph, 0));
    CHECK(cudaGraphUpload(ready, card.stream));
    CHECK(cudaStreamSynchronize(card.stream));
    return ready;
}

cudaEvent_t new_event(const Card& card) {
    cudaEvent_t event;
    CHECK(cudaSetDevice(card.id));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

double one_graph(const Card& first, const Card& second, bool forks) {
    const Card& worker = forks ? second : first;
    std::vector<cudaEvent_t> forked, joined;
    for (int step = 0; step < steps; step++) {
        forked.push_back(new_event(first));
        joined.push_back(new_event(second));
    }
    cudaGraphExec_t graph = capture(first, [&] {
        for (int step = 0; step < steps; step++) {
            send<<<1, 192, 0, first.stream>>>(worker.box, first.other(), nullptr, 0);
            if (forks) {
                CHECK(cudaEventRecord(forked[step], first.stream));
                CHECK(cudaSetDevice(second.id));
                CHECK(cudaStreamWaitEvent(second.stream, forked[step], 0));
            }
            answer<<<answer_blocks, threads, 0, worker.stream>>>(nullptr, first.rows, worker.box, worker.arrived, nullptr, 0);
            if (forks) {
                CHECK(cudaEventRecord(joined[step], second.stream));
                CHECK(cudaSetDevice(first.id));
                CHECK(cudaStreamWaitEvent(first.stream, joined[step], 0));
            }
            take<<<answer_blocks, threads, 0, first.stream>>>(nullptr, first.other(), first.rows, 0);
        }
    });
    std::vector<double> times;
    for (int run = 0; run < runs; run++) {
        double start = seconds();
        CHECK(cudaGraphLaunch(graph, first.stream));
        CHECK(cudaStreamSynchronize(first.stream));
        times.push_back((seconds() - start) / steps * 1e6);
    }
    return median(times);
}

double two_graphs(const Card& first, const Card& second, const Places& at, WaitValue wait_value,
                  const std::function<void()>& clear) {
    auto wait = [&](cudaStream_t stream, Word* flag, Word value) {
        CHECK(wait_value(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WAIT_VALUE_GEQ));
    };
    cudaGraphExec_t server = capture(second, [&] {
        for (Word value = 1; value <= steps; value++) {
            if (wait_value != nullptr) wait(second.stream, at.asked, value);
            const Word* asked = wait_value == nullptr ? at.asked : nullptr;
            answer<<<answer_blocks, threads, 0, second.stream>>>(asked, at.rows, at.box, second.arrived, at.answered, value);
        }
    });
    cudaGraphExec_t requester = capture(first, [&] {
        for (Word value = 1; value <= steps; value++) {
            send<<<1, 192, 0, first.stream>>>(at.box, first.other(), at.asked, value);
            if (wait_value != nullptr) wait(first.stream, at.answered, value);
            const Word* answered = wait_value == nullptr ? at.answered : nullptr;
            take<<<answer_blocks, threads, 0, first.stream>>>(answered, first.other(), at.rows, value);
        }
    });
    std::vector<double> times;
    for (int run = 0; run < runs; run++) {
        clear();
        CHECK(cudaSetDevice(second.id));
        CHECK(cudaGraphLaunch(server, second.stream));
        usleep(300);
        CHECK(cudaSetDevice(first.id));
        double start = seconds();
        CHECK(cudaGraphLaunch(requester, first.stream));
        CHECK(cudaStreamSynchronize(first.stream));
        times.push_back((seconds() - start) / steps * 1e6);
        CHECK(cudaSetDevice(second.id));
        CHECK(cudaStreamSynchronize(second.stream));
    }
    return median(times);
}

double rate(const Card& card, const std::function<void()>& move) {
    cudaEvent_t begin, end;
    CHECK(cudaSetDevice(card.id));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> rates;
    for (int run = 0; run < 5; run++) {
        CHECK(cudaEventRecord(begin, card.stream));
        move();
        CHECK(cudaEventRecord(end, card.stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        rates.push_back(copy_bytes / 1e6 / ms);
    }
    return median(rates);
}

void measure_rates(const Card& first, const Card& second) {
    char* memory[2];
    for (const Card* card : {&first, &second}) {
        CHECK(cudaSetDevice(card->id));
        CHECK(cudaMalloc(&memory[card->id], copy_bytes));
        CHECK(cudaMemset(memory[card->id], 1, copy_bytes));
        CHECK(cudaDeviceSynchronize());
    }
    auto copies = [&](const Card& to, const Card& from) {
        return rate(from,
                    [&] { CHECK(cudaMemcpyPeerAsync(memory[to.id], to.id, memory[from.id], from.id, copy_bytes, from.stream)); });
    };
    auto reads = [&](const Card& by, const Card& from) {
        return rate(by, [&] {
            auto* values = reinterpret_cast<const float4*>(memory[from.id]);
            read_all<<<528, 512, 0, by.stream>>>(values, copy_bytes / sizeof(float4), reinterpret_cast<float*>(by.other()));
        });
    };
    say("copy from card 0 to card 1, GB/s", copies(second, first));
    say("copy from card 1 to card 0, GB/s", copies(first, second));
    say("a kernel on card 0 reads card 1, GB/s", reads(first, second));
    say("a kernel on card 1 reads card 0, GB/s", reads(second, first));
    for (char* pointer : memory) CHECK(cudaFree(pointer));
}

int main() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    if (count < 2) {
        std::printf("there are %d cards, and two are needed\n", count);
        return 1;
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceEnablePeerAccess(0, 0));
    Card first(0), second(1);
    measure_rates(first, second);
    say("on one card, us", one_graph(first, second, false));
    say("graph edge, us", one_graph(first, second, true));

    char* host;
    CHECK(cudaHostAlloc(&host, 4 * box_bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    Word* flags = reinterpret_cast<Word*>(host + 2 * box_bytes);
    Places in_host{reinterpret_cast<uint4*>(host), reinterpret_cast<uint4*>(host + box_bytes), flags, flags + 64};
    Places in_cards{second.box, first.rows, second.asked, first.answered};
    auto clear = [&] {
        std::memset(flags, 0, 1024);
        first.clear();
        second.clear();
    };
    WaitValue wait_value = find_wait_value();
    say("wait value, in host memory, us", two_graphs(first, second, in_host, wait_value, clear));
    say("wait value, in the cards' memory, us", two_graphs(first, second, in_cards, wait_value, clear));
    say("spinning, in host memory, us", two_graphs(first, second, in_host, nullptr, clear));
    say("spinning, in the cards' memory, us", two_graphs(first, second, in_cards, nullptr, clear));
    return 0;
}
