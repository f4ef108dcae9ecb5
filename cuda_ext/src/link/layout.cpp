#include "link/layout.h"

#include <algorithm>

#include "ops/activations.h"

namespace tandem::link {

namespace {

class Carver {
  public:
    explicit Carver(std::byte* memory) : memory_(memory) {}

    template <class T>
    T* take(size_t count) {
        std::byte* part = memory_ ? memory_ + used_ : nullptr;
        used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
        return reinterpret_cast<T*>(part);
    }
    size_t used() const { return used_; }

  private:
    std::byte* memory_;
    size_t used_ = 0;
};

Channel channel_in(Carver& carver, const Geometry& geometry) {
    const size_t rows = geometry.max_rows, pairs = rows * geometry.top_k;
    Channel channel{};
    channel.words = carver.take<ChannelWords>(1);
    channel.request = carver.take<Request>(1);
    channel.experts = carver.take<RequestExpert>(std::min<size_t>(geometry.num_experts, pairs));
    channel.pair_rows = carver.take<int32_t>(pairs);
    channel.groups = carver.take<quant::ActGroup>(rows * groups_of(geometry.hidden));
    channel.values = carver.take<float>(rows * geometry.hidden);
    channel.rows = carver.take<float>(pairs * geometry.hidden);
    return channel;
}

}  // namespace

Channel Channel::in(std::byte* memory, const Geometry& geometry) {
    Carver carver(memory);
    return channel_in(carver, geometry);
}

size_t channel_bytes(const Geometry& geometry) {
    Carver carver(nullptr);
    channel_in(carver, geometry);
    return carver.used();
}

Parts Parts::in(std::byte* memory, const Geometry& geometry) {
    Carver carver(memory);
    Parts parts{};
    parts.header = carver.take<FileHeader>(1);
    for (RoleWords*& role : parts.roles) role = carver.take<RoleWords>(1);
    for (uint8_t*& resident : parts.resident)
        resident = carver.take<uint8_t>(static_cast<size_t>(geometry.num_layers) * geometry.num_experts);
    for (Channel& channel : parts.channels) channel = channel_in(carver, geometry);
    parts.total_bytes = (carver.used() + kPage - 1) / kPage * kPage;
    return parts;
}

}  // namespace tandem::link
