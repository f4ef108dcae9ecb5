#include "cards/cuda_card.h"

#include <algorithm>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "cards/cuda_driver.h"

namespace tandem {

namespace {

constexpr size_t kStagedEntries = 1 << 14;
constexpr size_t kFewEntries = 256;  // more than that: the whole table is written

void check_rows(const View& on_card, const RowCopy& rows) {
    require(rows.num_rows > 0 && rows.row_bytes > 0, "there are no rows to copy");
    require(rows.row_bytes <= rows.card_pitch && rows.row_bytes <= rows.host_pitch,
            "rows of " + std::to_string(rows.row_bytes) + " bytes cannot lie " + std::to_string(rows.card_pitch) +
                " bytes apart on the card and " + std::to_string(rows.host_pitch) + " in the host");
    require(rows.row_bytes <= on_card.nbytes && rows.num_rows - 1 <= (on_card.nbytes - rows.row_bytes) / rows.card_pitch,
            std::to_string(rows.num_rows) + " rows, " + std::to_string(rows.card_pitch) +
                " bytes apart, do not lie in a place of " + std::to_string(on_card.nbytes));
}

}  // namespace

int cuda_device_count() {
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    return count;
}

DeviceScope::DeviceScope(int device) {
    const bool is_known = cudaGetDevice(&before_) == cudaSuccess;
    if (is_known && before_ == device) return;
    // Setting a device makes a context on it: a thread that has used no card yet stays with this one.
    is_restored_ = is_known && has_context(before_);
    cudaSetDevice(device);  // a card that has failed says so in the calls that follow
}

DeviceScope::~DeviceScope() {
    if (is_restored_) cudaSetDevice(before_);
}

CudaCard::CudaCard(int device, std::shared_ptr<Pool> pool, quant::Isa isa) : device_(device), pool_(std::move(pool)), isa_(isa) {
    require(pool_ != nullptr, "a CUDA card needs a host pool");
    require(quant::isa_runs(isa), std::string("this machine cannot run ") + quant::isa_name(isa));
    const int num_devices = cuda_device_count();
    require(device >= 0 && device < num_devices,
            "there is no cuda:" + std::to_string(device) + "; this machine shows " + std::to_string(num_devices) + " GPUs");
    const DeviceScope scope(device);
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    shape_ = {properties.multiProcessorCount, properties.sharedMemPerBlockOptin, properties.sharedMemPerMultiprocessor};
    name_ = properties.name;
    int lowest = 0, highest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    serving_priority_ = highest;
    CUDA_CHECK(cudaStreamCreateWithPriority(&compute_, cudaStreamNonBlocking, std::min(lowest, highest + 1)));
    CUDA_CHECK(cudaStreamCreateWithPriority(&copy_, cudaStreamNonBlocking, lowest));
    entries_ = allocate_mapped(kStagedEntries * sizeof(int32_t));
}

void CudaCard::make_current() const {
    CUDA_CHECK(cudaSetDevice(device_));
}

CudaCard::~CudaCard() {
    const DeviceScope scope(device_);
    cudaStreamSynchronize(copy_);
    cudaStreamSynchronize(compute_);
    cudaStreamDestroy(copy_);
    cudaStreamDestroy(compute_);
}

std::shared_ptr<Buffer> CudaCard::allocate(const std::string& use, size_t nbytes) {
    const DeviceScope scope(device_);
    std::shared_ptr<Buffer> buffer = allocate_device(nbytes);
    note(use, buffer);
    return buffer;
}

std::shared_ptr<Buffer> CudaCard::allocate_segments(const std::string& use, size_t nbytes, bool present) {
    const DeviceScope scope(device_);
    std::shared_ptr<Buffer> buffer = tandem::allocate_segments(device_, nbytes, present, sharers_);
    note(use, buffer);
    return buffer;
}

void CudaCard::note(const std::string& use, const std::shared_ptr<Buffer>& buffer) {
    std::erase_if(allocated_, [](const auto& entry) { return entry.second.expired(); });
    allocated_.emplace_back(use, buffer);
}

std::map<std::string, size_t> CudaCard::bytes_by_use() const {
    std::map<std::string, size_t> bytes;
    for (const auto& [use, weak] : allocated_)
        if (const std::shared_ptr<Buffer> buffer = weak.lock()) bytes[use] += buffer->nbytes();
    return bytes;
}

size_t CudaCard::free_bytes() const {
    const DeviceScope scope(device_);
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
}

bool CudaCard::reach(CudaCard& other) {
    if (other.device_ == device_) return true;
    int there = 0, back = 0;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&there, device_, other.device_));
    CUDA_CHECK(cudaDeviceCanAccessPeer(&back, other.device_, device_));
    if (there == 0 || back == 0) return false;
    for (const auto& [own, peer] : {std::pair(this, &other), std::pair(&other, this)}) {
        const DeviceScope scope(own->device_);
        const cudaError_t status = cudaDeviceEnablePeerAccess(peer->device_, 0);
        if (status != cudaErrorPeerAccessAlreadyEnabled) CUDA_CHECK(status);
        cudaGetLastError();
        own->sharers_ = {peer->device_};
    }
    return true;
}

size_t CudaCard::pin(const View& arena) {
    const DeviceScope scope(device_);
    arena_ = arena;
    pinned_ = std::make_shared<PinnedRange>(arena.data(), arena.nbytes);
    return std::min(pinned_->pinned_bytes(), arena.nbytes);
}

void CudaCard::unpin() {
    pinned_.reset();
    arena_ = {};
}

bool CudaCard::is_pinned(const View& part) const {
    return pinned_ && pinned_->is_pinned(part.data(), part.nbytes);
}

void CudaCard::write(const View& to, const void* data, size_t nbytes, size_t offset) {
    require(offset <= to.nbytes && to.nbytes - offset >= nbytes,
            "cannot write " + std::to_string(nbytes) + " bytes to a place of " + std::to_string(to.nbytes));
    CUDA_CHECK(cudaMemcpy(to.data() + offset, data, nbytes, cudaMemcpyHostToDevice));
}

void CudaCard::read_rows(void* to, const View& from, const RowCopy& rows) {
    check_rows(from, rows);
    CUDA_CHECK(cudaMemcpy2DAsync(to, rows.host_pitch, from.data(), rows.card_pitch, rows.row_bytes, rows.num_rows,
                                 cudaMemcpyDeviceToHost, compute_));
    CUDA_CHECK(cudaStreamSynchronize(compute_));
}

void CudaCard::write_rows(const View& to, const void* from, const RowCopy& rows) {
    check_rows(to, rows);
    CUDA_CHECK(cudaMemcpy2DAsync(to.data(), rows.card_pitch, from, rows.host_pitch, rows.row_bytes, rows.num_rows,
                                 cudaMemcpyHostToDevice, compute_));
    CUDA_CHECK(cudaStreamSynchronize(compute_));
}

Ticket CudaCard::update(const std::shared_ptr<CudaExpertTable>& table, const std::vector<TableEntry>& entries) {
    const DeviceScope scope(device_);
    const bool withdraws = std::any_of(entries.begin(), entries.end(), [](const TableEntry& entry) { return entry.slot < 0; });
    for (const TableEntry& entry : entries) table->set_entry(entry.layer, entry.expert, entry.slot);
    write_entries(*table, entries);
    if (table->viewer()) write_entries(*table->viewer(), entries);
    if (withdraws) {
        CUDA_CHECK(cudaStreamSynchronize(compute_));  // who looks now finds the entries gone
        table->settle();
    }
    return updates_.record(compute_);
}

void CudaCard::write_entries(const CudaExpertTable& table, const std::vector<TableEntry>& entries) {
    if (entries.size() > kFewEntries) {
        CUDA_CHECK(cudaStreamSynchronize(table.stream()));
        table.write_all();
        return;
    }
    auto* staged = reinterpret_cast<int32_t*>(entries_->data());
    for (const TableEntry& entry : entries) {
        if (next_entry_ == kStagedEntries) {
            CUDA_CHECK(cudaStreamSynchronize(compute_));
            next_entry_ = 0;
        }
        staged[next_entry_] = table.entry_on_card(entry.layer, entry.expert);
        CUDA_CHECK(cudaMemcpyAsync(table.slots_on_card(entry.layer) + entry.expert, staged + next_entry_++, sizeof(int32_t),
                                   cudaMemcpyHostToDevice, table.stream()));
    }
    if (table.stream() != compute_) CUDA_CHECK(cudaStreamSynchronize(table.stream()));  // a second card is idle between windows
}

void CudaCard::wait(Ticket ticket) {
    if (const cudaEvent_t event = updates_.event(ticket)) CUDA_CHECK(cudaEventSynchronize(event));
}

Ticket CudaCard::copy(const View& to, const View& from, Ticket after) {
    const DeviceScope scope(device_);
    require(!to.empty() && !from.empty() && to.nbytes == from.nbytes,
            "cannot copy " + std::to_string(from.nbytes) + " bytes to a place of " + std::to_string(to.nbytes));
    if (const cudaEvent_t event = updates_.event(after)) CUDA_CHECK(cudaStreamWaitEvent(copy_, event, 0));
    enqueue_copy(to.data(), from);
    return copies_.record(copy_);
}

void CudaCard::enqueue_copy(std::byte* to, const View& from) {
    for (size_t done = 0; done < from.nbytes;) {
        const size_t rest = from.nbytes - done;
        const size_t step = pinned_ ? std::min(rest, pinned_->copyable_bytes(from.data() + done)) : rest;
        CUDA_CHECK(cudaMemcpyAsync(to + done, from.data() + done, step, cudaMemcpyHostToDevice, copy_));
        done += step;
    }
}

void CudaCard::set_streamed_ratio(float ratio) {
    require(ratio >= 0.0f && ratio <= 1.0f, "the streamed share of misses is between 0 and 1");
    streamed_ratio_ = ratio;
}

bool CudaCard::copied(Ticket ticket) {
    const cudaEvent_t event = copies_.event(ticket);
    if (event == nullptr) return true;
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) return false;
    CUDA_CHECK(status);
    return true;
}

void CudaCard::wait_copied(Ticket ticket) {
    if (const cudaEvent_t event = copies_.event(ticket)) CUDA_CHECK(cudaEventSynchronize(event));
}

CudaCard::Tickets::~Tickets() {
    for (const auto& [ticket, event] : events_) cudaEventDestroy(event);
}

Ticket CudaCard::Tickets::record(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    if (events_.size() < kKept) {
        CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
        event = events_.front().second;
        CUDA_CHECK(cudaEventSynchronize(event));  // so that whoever still asks for its ticket is told the truth
        events_.pop_front();
    }
    CUDA_CHECK(cudaEventRecord(event, stream));
    events_.emplace_back(++last_, event);
    return last_;
}

cudaEvent_t CudaCard::Tickets::event(Ticket ticket) {
    require(ticket <= last_, "there is no ticket " + std::to_string(ticket));
    if (events_.empty() || ticket < events_.front().first) return nullptr;
    return events_[ticket - events_.front().first].second;
}

}  // namespace tandem
