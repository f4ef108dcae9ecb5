#include "cards/cuda_peer.h"

#include <algorithm>
#include <string>

#include "base/require.h"
#include "cards/cuda_check.h"

namespace tandem {

namespace {

View channel_memory(const CudaCard& card, const link::Geometry& geometry, bool direct) {
    const DeviceScope scope(card.device());
    const size_t nbytes = link::channel_bytes(geometry);
    return View::of(direct ? allocate_device(nbytes) : allocate_mapped(nbytes), 0, nbytes);
}

}  // namespace

CudaPeer::CudaPeer(std::shared_ptr<CudaProgram> program, std::shared_ptr<CudaExpertTable> table,
                   std::shared_ptr<CudaCard> peer_card, std::shared_ptr<CudaExpertTable> peer_table, bool direct)
    : program_(std::move(program)),
      table_(std::move(table)),
      card_(std::move(peer_card)),
      peer_table_(std::move(peer_table)),
      geometry_(program_->post_shape().geometry()),
      asked_memory_(channel_memory(*card_, geometry_, direct)),
      answered_memory_(channel_memory(program_->card(), geometry_, direct)),
      asked_(link::Channel::in(asked_memory_.data(), geometry_)),
      answered_(link::Channel::in(answered_memory_.data(), geometry_)) {
    card_->share_pinned(program_->card());
    table_->set_peer(*peer_table_, direct);
    const bool shares_card = card_->device() == program_->card().device();
    program_->set_source(cuda::kPeerSource, cuda::MissPost::of(asked_, answered_), shares_card);
    server_ = std::make_unique<CudaRowServer>(*card_, *peer_table_, program_->host_layers(), geometry_,
                                              CudaRowServer::Requests{asked_, answered_, false, shares_card});
    require(server_->max_rows() == cuda::kMaxWindowRows,
            "its experts are too large for windows of " + std::to_string(cuda::kMaxWindowRows) + " rows");
    program_->set_peer_recovery([this] { server_->await(program_->posted(cuda::kPeerSource)); });
}

CudaPeer::~CudaPeer() {
    program_->set_peer_recovery(nullptr);
}

void CudaPeer::attach() {
    if (server_->running()) return;
    server_->start(last_);
    program_->set_peer_ratio(streamed_ratio_);
}

void CudaPeer::set_streamed_ratio(float ratio) {
    require(ratio >= 0.0f && ratio <= 1.0f, "the streamed share of misses is between 0 and 1");
    const std::vector<HostTier::Layer>& layers = program_->host_layers();
    const bool is_pinned =
        std::all_of(layers.begin(), layers.end(), [&](const HostTier::Layer& layer) { return card_->is_pinned(layer.blobs); });
    streamed_ratio_ = is_pinned ? ratio : 0.0f;
    if (server_->running()) program_->set_peer_ratio(streamed_ratio_);
}

void CudaPeer::detach() {
    if (!server_->running()) return;
    program_->set_peer_ratio(0.0f);
    last_ = server_->stop();
    program_->set_posted(cuda::kPeerSource, last_);
}

}  // namespace tandem
