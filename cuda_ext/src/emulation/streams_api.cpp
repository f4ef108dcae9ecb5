// The runtime's calls for streams, events, captures and graphs.
#include "emulation/memory.h"
#include "emulation/stream.h"

using namespace tandem::emulation;

namespace {

cudaError_t status() {
    return health().failed() ? cudaErrorLaunchFailure : cudaSuccess;
}

void merge(Clock& into, const Clock& from) {
    for (const auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

cudaError_t record_captured(CUevent_st& event, const CUstream_st& stream) {
    event.capture = stream.capture;
    event.clock = stream.clock;
    return status();
}

cudaError_t wait_captured(CUstream_st& stream, const CUevent_st& event, const std::shared_ptr<Capture>& capture) {
    if (stream.capture && stream.capture != capture) return cudaErrorStreamCaptureInvalidated;
    if (!stream.capture) {
        stream.capture = capture;
        stream.clock.clear();
        capture->streams.push_back(&stream);
    }
    merge(stream.clock, event.clock);
    return status();
}

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = CUstream_st::create();
    return status();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return CUstream_st::destroy(stream) ? status() : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return cudaErrorStreamCaptureUnsupported;
    stream->wait_idle();
    return status();
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return cudaErrorStreamCaptureUnsupported;
    return !stream->idle() ? cudaErrorNotReady : status();
}

cudaError_t cudaDeviceSynchronize() {
    for (const auto& stream : CUstream_st::all()) {
        if (stream->device != device()) continue;
        if (stream->capture) return cudaErrorStreamCaptureUnsupported;
        stream->wait_idle();
    }
    return status();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* user_data) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    stream->enqueue([function, user_data] { function(user_data); });
    return status();
}

// ---- events ----

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st;
    return status();
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return status();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || event == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->capture && flags != cudaEventRecordExternal) return record_captured(*event, *stream);
    event->capture.reset();
    if (stream->capture) {  // every replay records anew
        stream->enqueue([state = event->state] {
            uint64_t number;
            {
                std::lock_guard lock(state->mutex);
                number = ++state->num_recorded;
            }
            state->pass(number);
        });
        return status();
    }
    std::unique_lock lock(event->state->mutex);
    const uint64_t number = ++event->state->num_recorded;
    lock.unlock();
    stream->enqueue([state = event->state, number] { state->pass(number); });
    return status();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || event == nullptr) return cudaErrorInvalidResourceHandle;
    const std::shared_ptr<Capture> capture = event->capture.lock();
    if (capture && flags != cudaEventWaitExternal) return wait_captured(*stream, *event, capture);
    if (stream->capture && flags != cudaEventWaitExternal) return cudaErrorStreamCaptureUnsupported;
    auto newest = [](CUevent_st::State& state) {
        std::lock_guard lock(state.mutex);
        return state.num_recorded;
    };
    if (stream->capture)
        stream->enqueue([state = event->state, newest] { state->wait(newest(*state)); });
    else
        stream->enqueue([state = event->state, number = newest(*event->state)] { state->wait(number); });
    return status();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    std::unique_lock lock(event->state->mutex);
    const uint64_t number = event->state->num_recorded;
    lock.unlock();
    event->state->wait(number);
    return status();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    return event->state->passed() ? status() : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (start == nullptr || end == nullptr) return cudaErrorInvalidResourceHandle;
    if (!start->state->passed() || !end->state->passed()) return cudaErrorNotReady;
    *ms = static_cast<float>((end->state->passed_s - start->state->passed_s) * 1e3);
    return status();
}

// ---- captures and graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || handle == nullptr) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture) return cudaErrorInvalidValue;
    stream->capture = std::make_shared<Capture>(Capture{stream.get(), {}, {}, {stream.get()}});
    stream->clock.clear();
    return status();
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || !stream->capture || stream->capture->origin != stream.get()) return cudaErrorInvalidValue;
    const std::shared_ptr<Capture> capture = stream->capture;
    for (CUstream_st* member : capture->streams) member->capture.reset();
    *graph = nullptr;
    for (const auto& [member, count] : capture->issued)
        if (stream->clock[member] != count) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{std::move(capture->jobs)};
    return status();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* capturing) {
    const auto stream = CUstream_st::of(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *capturing = stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return status();
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, CUgraphNode_st** nodes, size_t* num_nodes) {
    if (nodes != nullptr) return cudaErrorNotSupported;
    *num_nodes = graph->jobs.size();
    return status();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    if (graph == nullptr) return cudaErrorInvalidValue;
    *executable = new CUgraphExec_st{std::make_shared<const std::vector<Job>>(graph->jobs)};
    return status();
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return status();
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    const auto stream = CUstream_st::of(handle);
    if (!stream || executable == nullptr) return cudaErrorInvalidValue;
    stream->enqueue([jobs = executable->jobs] {
        for (const Job& job : *jobs) job();
    });
    return status();
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return status();
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return status();
}
