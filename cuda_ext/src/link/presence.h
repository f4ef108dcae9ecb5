// One engine's place in a link file, and what it sees of the other engine there.
#pragma once
#include <chrono>
#include <string>

#include "link/layout.h"

namespace tandem::link {

// Size of the file. Throws std::invalid_argument for a geometry without rows, experts or hidden values.
size_t file_bytes(const Geometry& geometry);
// Writes the header of a new file, whose memory is zeroed; `fingerprint` of at most kFingerprintBytes.
void format(const View& file, const std::string& fingerprint, const Geometry& geometry);

// Thread rule: `beat` by the thread that serves, the rest by the thread that drives the card.
class Presence {
  public:
    // `stuck_after_s`: a partner that makes no progress for so long is given up. Throws std::invalid_argument for a file of another
    // model or geometry, or a role that is not 0 or 1.
    Presence(View file, int role, const std::string& fingerprint, const Geometry& geometry, double stuck_after_s);
    ~Presence() { leave(); }
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;

    const Channel& asked() const { return parts_.channels[role_]; }       // this engine's requests
    const Channel& served() const { return parts_.channels[1 - role_]; }  // the partner's
    uint8_t* resident() const { return parts_.resident[role_]; }
    const uint8_t* partner_resident() const { return parts_.resident[1 - role_]; }
    RoleWords& own() const { return *parts_.roles[role_]; }
    const RoleWords& partner() const { return *parts_.roles[1 - role_]; }

    // Tells the partner that this process is here. What its predecessor was asked and never answered is dropped.
    void arrive();
    // Not here any more; the file's memory is not touched again. Idempotent.
    void leave();
    void set_serving(bool serving);
    bool is_serving() const;
    void beat();

    bool partner_serves() const;
    // Whether the partner has a process here. It may have died this moment.
    bool partner_attached() const;
    // Whether its process is still there.
    bool partner_lives();
    // Whether the partner could be asked now; from here on its process is watched.
    bool may_ask_partner();
    // A wait for the partner begins.
    void expect_partner();
    // It lives, is attached, and makes progress: slow is not gone. An answer that is there already counts.
    bool partner_is_there();

  private:
    void watch_partner();

    View file_;
    Parts parts_{};
    int role_;
    bool is_here_ = false;
    double stuck_after_s_;
    int partner_fd_ = -1;  // pidfd
    uint32_t partner_attached_ = 0;
    uint32_t last_beat_ = 0;
    std::chrono::steady_clock::time_point last_progress_;
};

}  // namespace tandem::link
