#include "cards/cuda_link.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/require.h"
#include "cards/cuda_check.h"
#include "link/channel_words.h"

namespace tandem {

namespace {

constexpr std::chrono::seconds kSilenceLimit{2};

}  // namespace

// The file, so that cards read and write it in place.
class CudaLink::RegisteredFile {
  public:
    explicit RegisteredFile(const View& file) : file_(file) {
        CUDA_CHECK(cudaHostRegister(file.data(), file.nbytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    }
    ~RegisteredFile() { cudaHostUnregister(file_.data()); }
    RegisteredFile(const RegisteredFile&) = delete;
    RegisteredFile& operator=(const RegisteredFile&) = delete;

  private:
    View file_;
};

CudaLink::CudaLink(View file, const Options& options, std::shared_ptr<CudaProgram> program, std::shared_ptr<CudaExpertTable> table)
    : program_(std::move(program)),
      table_(std::move(table)),
      registered_(std::make_unique<RegisteredFile>(file)),
      presence_(std::move(file), options.role, options.fingerprint, options.geometry, options.stuck_after_s),
      geometry_(options.geometry) {
    const size_t num_experts = static_cast<size_t>(geometry_.num_layers) * geometry_.num_experts;
    require(table_->mirror().num_layers() == static_cast<int>(geometry_.num_layers) &&
                table_->mirror().num_experts() == static_cast<int>(geometry_.num_experts),
            "the residency table is not of the link's geometry");
    for (const HostTier::Layer& layer : program_->host_layers())
        require(program_->card().is_pinned(layer.blobs),
                "the system did not pin all of the arena, but rows for another engine may have to be computed from it; the link "
                "needs it");
    offered_ = View::of(allocate_device(num_experts), 0, num_experts);
    staged_offered_ = View::of(allocate_mapped(num_experts), 0, num_experts);
    const link::Channel& channel = presence_.served();
    server_ = std::make_unique<CudaRowServer>(program_->card(), *table_, program_->host_layers(), geometry_,
                                              CudaRowServer::Requests{channel, channel, true, true});
    server_->set_beat([this] { presence_.beat(); });
    table_->mirror().set_published(presence_.resident());
    presence_.arrive();
    program_->set_source(cuda::kLinkedSource, cuda::MissPost::of(presence_.asked(), presence_.asked()), true);
    program_->set_partner(this);
    table_->set_settle([this] { server_->settle(); });
}

CudaLink::~CudaLink() {
    close();
}

void CudaLink::close() {
    if (closed_) return;
    closed_ = true;
    presence_.set_serving(false);
    program_->set_partner(nullptr);
    table_->set_settle(nullptr);
    table_->mirror().set_published(nullptr);
    await_silence();
    server_->stop();
    presence_.leave();
    registered_.reset();
}

// Whether the partner's card will ask nothing more; false after a while of waiting for that.
bool CudaLink::await_silence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // as in begin_window
    const auto deadline = std::chrono::steady_clock::now() + kSilenceLimit;
    while (presence_.partner_attached() && link::load(presence_.partner().asking) != 0 && presence_.partner_lives()) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
}

void CudaLink::serve(bool serving) {
    require(!closed_, "the link is closed");
    const link::Channel& channel = presence_.served();
    if (serving && !server_->running()) server_->start(link::load(channel.words->done));
    presence_.set_serving(serving);
    if (!serving && await_silence()) server_->stop();  // a partner that is stuck may ask later
}

// What the partner offers, on the card of the window that begins; null if it is not asked.
const uint8_t* CudaLink::begin_window(int num_rows, cudaStream_t stream) {
    if (num_rows > server_->max_rows()) return nullptr;  // the partner's kernels are the same, as a rule
    if (refused_by_ != 0 && refused_by_ == link::load(presence_.partner().num_attached)) return nullptr;
    link::store(presence_.own().asking, 1);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // a partner that withdraws sees this, or this sees it withdrawn
    asking_ = presence_.may_ask_partner();
    if (!asking_) {
        link::store(presence_.own().asking, 0);
        return nullptr;
    }
    const uint32_t sequence = link::load(presence_.asked().words->seq);
    if (sequence != last_asked_) program_->set_posted(cuda::kLinkedSource, sequence);
    offer(stream);
    presence_.expect_partner();
    return offer_place();
}

const uint8_t* CudaLink::offer_place() const {
    return offered_.as<const uint8_t>();
}

void CudaLink::offer(cudaStream_t stream) {
    if (std::memcmp(staged_offered_.data(), presence_.partner_resident(), offered_.nbytes) == 0) return;
    std::memcpy(staged_offered_.data(), presence_.partner_resident(), offered_.nbytes);
    CUDA_CHECK(cudaMemcpyAsync(offered_.data(), staged_offered_.data(), offered_.nbytes, cudaMemcpyHostToDevice, stream));
}

void CudaLink::end_window(bool voided) {
    if (!asking_) return;
    asking_ = false;
    last_asked_ = link::load(presence_.asked().words->seq);
    const auto status = static_cast<link::Status>(link::load(presence_.asked().words->status));
    lost_ = voided && (!link::is_answered(*presence_.asked().words) || status != link::Status::computed);
    if (lost_ && status == link::Status::refused) refused_by_ = link::load(presence_.partner().num_attached);
    num_losses_ += lost_;
    link::store(presence_.own().asking, 0);
}

}  // namespace tandem
