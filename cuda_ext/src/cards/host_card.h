// A card in host memory: an in-order command thread, a copy thread, and memory counted by use.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "cache/expert_table.h"
#include "cards/command_queue.h"
#include "cards/program.h"
#include "pool/pool.h"
#include "quant/row.h"

namespace tandem {

// Thread-safe.
class HostCard {
  public:
    HostCard(std::shared_ptr<Pool> pool, quant::Isa isa);

    Pool& pool() const { return *pool_; }
    quant::Isa isa() const { return isa_; }

    // Throws std::bad_alloc.
    std::shared_ptr<Buffer> allocate(const std::string& use, size_t nbytes);
    // What lives now of what `allocate` gave out.
    std::map<std::string, size_t> bytes_by_use() const;

    // Sets the window and runs the program behind all earlier commands; returns when it is through.
    // Throws std::invalid_argument, Interrupted. One run at a time per program.
    void run(const std::shared_ptr<Program>& program, std::span<const int32_t> tokens, int64_t position, int num_logits);

    // Changes entries of a residency table behind all earlier commands.
    Ticket update(std::shared_ptr<ExpertTable> table, std::vector<TableEntry> entries);
    void wait(Ticket ticket) { commands_.wait(ticket); }

    // Copies on the copy thread, not before command `after` is through. Throws std::invalid_argument if sizes differ.
    Ticket copy(const View& to, const View& from, Ticket after);
    bool copied(Ticket copy) const { return copies_.done(copy); }
    void wait_copied(Ticket copy) { copies_.wait(copy); }

  private:
    std::shared_ptr<Pool> pool_;
    quant::Isa isa_;
    mutable std::mutex mutex_;
    std::vector<std::pair<std::string, std::weak_ptr<Buffer>>> allocated_;
    CommandQueue commands_;
    CommandQueue copies_;  // destroyed first: copies wait for commands
};

}  // namespace tandem
