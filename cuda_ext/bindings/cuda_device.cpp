// The checks of the device primitives, for tests.
#include <nanobind/stl/string.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>

#include "cuda_arrays.h"
#include "device_checks/primitive_checks.h"

namespace nb = nanobind;
using namespace tandem;
using bindings::CardArray;

template <class T>
using Input = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<nb::numpy, T>;

namespace {

// The host's side of a conversation through mapped memory.
class MappedWords {
  public:
    explicit MappedWords(size_t num) {
        CUDA_CHECK(
            cudaHostAlloc(reinterpret_cast<void**>(&words_), num * sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable));
        std::fill_n(words_, num, 0);
    }
    MappedWords(const MappedWords&) = delete;
    MappedWords& operator=(const MappedWords&) = delete;
    ~MappedWords() { cudaFreeHost(words_); }

    uint32_t* word(size_t i) const { return words_ + i; }
    std::atomic_ref<uint32_t> atomic(size_t i) const { return std::atomic_ref<uint32_t>(words_[i]); }

  private:
    uint32_t* words_ = nullptr;
};

class Stream {
  public:
    Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const { return stream_; }
    void synchronise() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  private:
    cudaStream_t stream_ = nullptr;
};

Output<int32_t> multiply_s8(const Input<int8_t>& a, const Input<int8_t>& b) {
    CardArray left(a.data(), a.nbytes()), right(b.data(), b.nbytes()), d(16 * 8 * sizeof(int32_t));
    device_checks::multiply_s8(left.as<int8_t>(), right.as<int8_t>(), d.as<int32_t>(), nullptr);
    return d.numpy<int32_t>({16, 8});
}

Output<float> multiply_f16(const Input<uint16_t>& a, const Input<uint16_t>& b) {
    CardArray left(a.data(), a.nbytes()), right(b.data(), b.nbytes()), d(16 * 16 * sizeof(float));
    device_checks::multiply_f16(left.as<uint16_t>(), right.as<uint16_t>(), d.as<float>(), nullptr);
    return d.numpy<float>({16, 16});
}

Output<int32_t> warp_operations(const Input<int32_t>& values) {
    CardArray in(values.data(), values.nbytes()), out(device_checks::kWarpResults * 32 * sizeof(int32_t));
    device_checks::warp_operations(in.as<int32_t>(), out.as<int32_t>(), nullptr);
    return out.numpy<int32_t>({device_checks::kWarpResults, 32});
}

// `skip`: the rows start that many bytes behind an aligned address.
Output<uint8_t> copy_staged(const Input<uint8_t>& rows, size_t skip) {
    const size_t num_rows = rows.shape(0), row_bytes = rows.shape(1);
    CardArray in(skip + rows.size()), out(rows.size());
    CUDA_CHECK(cudaMemcpy(in.as<uint8_t>() + skip, rows.data(), rows.size(), cudaMemcpyHostToDevice));
    device_checks::copy_staged(in.as<uint8_t>() + skip, row_bytes, static_cast<int>(num_rows), out.as<uint8_t>(), nullptr);
    return out.numpy<uint8_t>({num_rows, row_bytes});
}

Output<uint8_t> copy_grouped(const Input<uint8_t>& rows) {
    CardArray in(rows.data(), rows.nbytes()), out(rows.nbytes());
    device_checks::copy_grouped(in.as<uint8_t>(), rows.shape(1), static_cast<int>(rows.shape(0)), out.as<uint8_t>(), nullptr);
    return out.numpy<uint8_t>({rows.shape(0), rows.shape(1)});
}

Output<int32_t> chain(int32_t value, int num) {
    const Stream stream;
    CardArray between(num * sizeof(int32_t)), out(num * sizeof(int32_t));
    device_checks::chain(value, between.as<int32_t>(), out.as<int32_t>(), num, stream);
    stream.synchronise();
    return out.numpy<int32_t>({static_cast<size_t>(num)});
}

// Captures a fork and a join around `count_run`, and replays it.
Output<int32_t> replay(int num_replays) {
    const Stream main, side;
    CardArray ticket_words(2 * sizeof(unsigned)), counter_words(2 * sizeof(int32_t));
    auto* tickets = ticket_words.as<unsigned>();
    auto* counters = counter_words.as<int32_t>();
    CUDA_CHECK(cudaMemset(tickets, 0, ticket_words.nbytes()));
    CUDA_CHECK(cudaMemset(counters, 0, counter_words.nbytes()));
    cudaEvent_t fork = nullptr, join = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaEventRecord(fork, main));
    CUDA_CHECK(cudaStreamWaitEvent(side, fork, 0));
    device_checks::count_run(tickets, counters, main);
    device_checks::count_run(tickets + 1, counters + 1, side);
    CUDA_CHECK(cudaEventRecord(join, side));
    CUDA_CHECK(cudaStreamWaitEvent(main, join, 0));
    device_checks::count_run(tickets, counters, main);
    CUDA_CHECK(cudaStreamEndCapture(main, &graph));
    cudaGraphExec_t executable = nullptr;
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < num_replays; i++) CUDA_CHECK(cudaGraphLaunch(executable, main));
    main.synchronise();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    return counter_words.numpy<int32_t>({2});
}

// The card posts `value`; a host thread answers with 3 * value + 1, through a captured graph, several times.
Output<uint32_t> ask_host(uint32_t value, int num_times) {
    const Stream stream;
    const MappedWords words(3);  // posted, answered, answer
    CardArray out(sizeof(uint32_t));
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    device_checks::ask_host(value, words.word(0), words.word(1), words.word(2), out.as<uint32_t>(), stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < num_times; i++) {
        for (int w = 0; w < 3; w++) *words.word(w) = 0;
        std::thread host([&] {
            while (words.atomic(0).load(std::memory_order_acquire) != value) std::this_thread::yield();
            *words.word(2) = 3 * value + 1;
            words.atomic(1).store(value, std::memory_order_release);
        });
        CUDA_CHECK(cudaGraphLaunch(executable, stream));
        host.join();
        stream.synchronise();
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    return out.numpy<uint32_t>({1});
}

#ifdef TANDEM_EMULATED
// A chain of kernels that writes to memory which was freed; returns what the card says when other memory is freed.
std::string write_after_free() {
    int32_t* between = nullptr;
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&between), 64 * sizeof(int32_t)));
    CUDA_CHECK(cudaFree(between));
    std::string said;
    {
        CardArray out(64 * sizeof(int32_t));
        device_checks::chain(1, between, out.as<int32_t>(), 64, nullptr);
        CUDA_CHECK(cudaStreamSynchronize(nullptr));
    }
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) said = cudaGetErrorString(error);
    cudaDeviceReset();
    return said;
}

// Returns what the card says about the mistake; the card works again afterwards.
std::string make_mistake(const std::string& name) {
    using device_checks::Mistake;
    static const std::map<std::string, Mistake> mistakes = {
        {"lane_missing", Mistake::lane_missing},         {"different_operations", Mistake::different_operations},
        {"barrier_missing", Mistake::barrier_missing},   {"shared_overrun", Mistake::shared_overrun},
        {"copy_not_awaited", Mistake::copy_not_awaited}, {"no_prerequisites", Mistake::no_prerequisites}};
    CardArray out(64 * sizeof(int32_t));
    std::string said;
    try {
        device_checks::make_mistake(mistakes.at(name), out.as<int32_t>(), nullptr);
        CUDA_CHECK(cudaStreamSynchronize(nullptr));
    } catch (const device::CudaError& error) {
        said = error.what();
    }
    cudaDeviceReset();
    return said;
}
#endif

}  // namespace

void bind_cuda_device(nb::module_& module) {
    nb::module_ checks = module.def_submodule("device_checks", "Small kernels around the device primitives.");
    checks.def("multiply_s8", &multiply_s8, nb::arg("a"), nb::arg("b"));
    checks.def("multiply_f16", &multiply_f16, nb::arg("a"), nb::arg("b"));
    checks.def("warp_operations", &warp_operations, nb::arg("values"));
    checks.def("copy_staged", &copy_staged, nb::arg("rows"), nb::arg("skip"));
    checks.def("copy_grouped", &copy_grouped, nb::arg("rows"));
    checks.def("chain", &chain, nb::arg("value"), nb::arg("num"));
    checks.def("replay", &replay, nb::arg("num_replays"));
    checks.def("ask_host", &ask_host, nb::arg("value"), nb::arg("num_times"));
#ifdef TANDEM_EMULATED
    checks.def("make_mistake", &make_mistake, nb::arg("name"));
    checks.def("write_after_free", &write_after_free);
#endif
}
