"""Threads, shares and shared files of the lanes: alone, side by side, or as an elastic pair."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.desk.config import ElasticConfig
from appliance.memory.limits import usable_cores
from appliance.memory.link_file import link_path, remove_unused_links
from appliance.memory.parked import parked_folder, remove_unused_folders
from appliance.memory.plan import Plan, is_gpu
from appliance.settings import Settings
from appliance.units import MIB


@dataclass(frozen=True, slots=True)
class PairOptions:
    """What the desk and the engines are started with."""

    lanes: tuple[tuple[str, ...], ...]
    """Options of each engine's command line."""
    elastic: ElasticConfig | None
    shared_files: tuple[Path, ...]
    """What the engines make in shared memory for this server alone; it goes with the server."""


def pair_options(settings: Settings, plan: Plan, content_id: str) -> PairOptions:
    """Removes what servers that are gone have left, too."""
    remove_unused_links(settings.shm_dir)
    remove_unused_folders(settings.shm_dir)
    server = str(os.getpid())
    folder = parked_folder(settings.shm_dir, content_id, server)
    parked_mib = plan.host.parked_bytes // MIB
    parked = ("--parked", str(folder), "--parked-mib", str(parked_mib)) if parked_mib else ()
    files = (folder,) if parked_mib else ()
    if settings.elastic.enabled:
        link = link_path(settings.shm_dir, content_id, server)
        return _elastic(settings, plan, parked, link, files)
    count = len(plan.cards)
    threads = settings.pool_threads or max(1, usable_cores() // count)
    lanes = tuple(("--threads", str(threads), "--share", f"{index}/{count}", *parked) for index in range(count))
    return PairOptions(lanes, None, files)


def _elastic(settings: Settings, plan: Plan, parked: tuple[str, ...], link: Path, files: tuple[Path, ...]) -> PairOptions:
    """The lead has all cores, and lets the helper have its own while it computes."""
    elastic = settings.elastic
    lead_threads = settings.pool_threads or usable_cores()
    helper_threads = settings.pool_threads or max(1, usable_cores() // 2)
    held = min(helper_threads, lead_threads - 1) if elastic.hold_threads is None else elastic.hold_threads
    second = plan.cards[1]
    peer = ("--peer-device", second.card, "--peer-slots", str(second.slots)) if elastic.peer else ()
    help_threads = ("--link-threads", str(elastic.link_threads))
    meet = ("--peer-link", str(link), *help_threads) if elastic.link else ()
    role = [("--peer-link-role", str(index)) if elastic.link else () for index in (0, 1)]
    hot = ("--peer-hot", str(elastic.peer_hot_ratio))
    lead = ("--threads", str(lead_threads), "--share", "0/2", *hot, *peer, *meet, *role[0], *parked)
    helper = ("--threads", str(helper_threads), "--share", "1/2", *hot, "--asleep", *meet, *role[1], *parked)
    config = ElasticConfig(
        hold_s=elastic.hold_s,
        wake_limit_s=elastic.wake_limit_s,
        bar_s=elastic.bar_s,
        hold_threads=held,
        prompts_take_threads=not is_gpu(second.card),
        peer=elastic.peer,
        link=elastic.link,
    )
    return PairOptions((lead, helper), config, (*files, link) if elastic.link else files)
