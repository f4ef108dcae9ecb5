#include "cards/host_card.h"

#include <cstring>

#include "base/require.h"

namespace tandem {

HostCard::HostCard(std::shared_ptr<Pool> pool, quant::Isa isa) : pool_(std::move(pool)), isa_(isa) {
    require(pool_ != nullptr, "a host card needs a pool");
    require(quant::isa_runs(isa), std::string("this machine cannot run ") + quant::isa_name(isa));
}

std::shared_ptr<Buffer> HostCard::allocate(const std::string& use, size_t nbytes) {
    std::shared_ptr<Buffer> buffer = Buffer::allocate(nbytes);
    std::lock_guard lock(mutex_);
    std::erase_if(allocated_, [](const auto& entry) { return entry.second.expired(); });
    allocated_.emplace_back(use, buffer);
    return buffer;
}

std::map<std::string, size_t> HostCard::bytes_by_use() const {
    std::map<std::string, size_t> bytes;
    std::lock_guard lock(mutex_);
    for (const auto& [use, weak] : allocated_)
        if (const std::shared_ptr<Buffer> buffer = weak.lock()) bytes[use] += buffer->nbytes();
    return bytes;
}

void HostCard::run(const std::shared_ptr<Program>& program, std::span<const int32_t> tokens, int64_t position, int num_logits) {
    commands_.wait(commands_.push([&] {
        program->set_window(tokens, position, num_logits);
        program->run(*pool_);
    }));
}

Ticket HostCard::update(std::shared_ptr<ExpertTable> table, std::vector<TableEntry> entries) {
    return commands_.push([table = std::move(table), entries = std::move(entries)] { table->change(entries); });
}

Ticket HostCard::copy(const View& to, const View& from, Ticket after) {
    require(!to.empty() && !from.empty() && to.nbytes == from.nbytes,
            "cannot copy " + std::to_string(from.nbytes) + " bytes to a place of " + std::to_string(to.nbytes));
    return copies_.push([this, to, from, after] {
        commands_.wait(after);
        std::memcpy(to.data(), from.data(), to.nbytes);
    });
}

}  // namespace tandem
