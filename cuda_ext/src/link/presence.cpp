#include "link/presence.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstring>

#include "base/require.h"
#include "link/channel_words.h"

namespace tandem::link {

namespace {

bool same(const Geometry& a, const Geometry& b) {
    return std::memcmp(&a, &b, sizeof(Geometry)) == 0;
}

std::string padded(const std::string& fingerprint) {
    require(fingerprint.size() <= kFingerprintBytes, "a fingerprint has at most 64 characters");
    std::string text = fingerprint;
    text.resize(kFingerprintBytes, '\0');
    return text;
}

}  // namespace

size_t file_bytes(const Geometry& geometry) {
    require(
        geometry.num_layers > 0 && geometry.num_experts > 0 && geometry.top_k > 0 && geometry.max_rows > 0 && geometry.hidden > 0,
        "a link needs layers, experts, rows and hidden values");
    return Parts::in(nullptr, geometry).total_bytes;
}

void format(const View& file, const std::string& fingerprint, const Geometry& geometry) {
    require(file.nbytes == file_bytes(geometry), "the link file has not the size of its geometry");
    FileHeader& header = *file.as<FileHeader>();
    header.magic = kMagic;
    header.version = kVersion;
    std::memcpy(header.fingerprint, padded(fingerprint).data(), kFingerprintBytes);
    header.geometry = geometry;
    header.total_bytes = file.nbytes;
    store(header.state, static_cast<uint32_t>(FileState::ready));
}

Presence::Presence(View file, int role, const std::string& fingerprint, const Geometry& geometry, double stuck_after_s)
    : file_(std::move(file)), role_(role), stuck_after_s_(stuck_after_s) {
    require(role == 0 || role == 1, "a link has the roles 0 and 1");
    require(file_.nbytes == file_bytes(geometry), "the link file has not the size of its geometry");
    parts_ = Parts::in(file_.data(), geometry);
    const FileHeader& header = *parts_.header;
    require(load(header.state) == static_cast<uint32_t>(FileState::ready) && header.magic == kMagic && header.version == kVersion,
            "this is no link file of this version");
    require(std::memcmp(header.fingerprint, padded(fingerprint).data(), kFingerprintBytes) == 0 && same(header.geometry, geometry),
            "the link file is of another model or of other sizes; use one chunk and one model for both engines");
}

void Presence::arrive() {
    store(own().serving, 0);
    store(own().asking, 0);
    begin_serving(*served().words);
    is_here_ = true;
    store(own().num_attached, own().num_attached + 1);
    store(own().pid, static_cast<uint32_t>(getpid()));
}

void Presence::leave() {
    if (!is_here_) return;
    is_here_ = false;
    store(own().serving, 0);
    store(own().asking, 0);
    store(own().pid, 0);
    if (partner_fd_ >= 0) ::close(partner_fd_);
    partner_fd_ = -1;
}

void Presence::set_serving(bool serving) {
    store(own().serving, serving);
}

bool Presence::is_serving() const {
    return load(own().serving) != 0;
}

void Presence::beat() {
    store(own().heartbeat, own().heartbeat + 1);
}

bool Presence::partner_serves() const {
    return load(partner().serving) != 0;
}

bool Presence::partner_attached() const {
    return load(partner().pid) != 0;
}

bool Presence::may_ask_partner() {
    if (!partner_serves() || !may_ask(*asked().words) || !partner_attached()) return false;
    watch_partner();
    return true;
}

void Presence::watch_partner() {
    const uint32_t attached = load(partner().num_attached);
    if (attached == partner_attached_ && partner_fd_ >= 0) return;
    if (partner_fd_ >= 0) ::close(partner_fd_);
    partner_fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(load(partner().pid)), 0));
    partner_attached_ = attached;
}

bool Presence::partner_lives() {
    if (!partner_attached()) return false;
    watch_partner();
    pollfd exited{partner_fd_, POLLIN, 0};
    return partner_fd_ >= 0 && poll(&exited, 1, 0) == 0;
}

void Presence::expect_partner() {
    last_progress_ = std::chrono::steady_clock::now();
    last_beat_ = load(partner().heartbeat);
}

bool Presence::partner_is_there() {
    if (!partner_lives()) return is_answered(*asked().words);
    const auto now = std::chrono::steady_clock::now();
    const uint32_t beat = load(partner().heartbeat);
    if (beat != last_beat_) {
        last_beat_ = beat;
        last_progress_ = now;
    }
    return std::chrono::duration<double>(now - last_progress_).count() < stuck_after_s_;
}

}  // namespace tandem::link
