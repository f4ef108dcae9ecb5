// The two lanes, live: what each is doing, how full its context is, and in which tier its expert rows were computed.

import { count } from "./format.js";
import { html } from "./html.js";
import { status } from "./status.js";

const TIERS = ["own", "peer", "linked", "fetched", "streamed", "host"];
const TIER_TITLES = {
  own: "computed from this card's expert cache",
  peer: "computed on the second card as this engine's own cache",
  linked: "computed by the other engine's card",
  fetched: "computed on this card, weights copied from the second card",
  streamed: "computed on this card, weights read from host memory",
  host: "computed by the CPU pool from host memory",
};

export function Lanes() {
  const now = status.value;
  if (!now) return null;
  return html`
    <section class="lanes" aria-label="Lanes">
      ${now.lanes.map((lane) => html`<${Lane} key=${lane.name} lane=${lane} context=${now.model?.context ?? 0} />`)}
      <p class="quiet queue">${now.queue_length ? `${now.queue_length} waiting in line` : "Nobody is waiting"}</p>
    </section>
  `;
}

function Lane({ lane, context }) {
  const used = lane.context_used ?? 0;
  return html`
    <article class="lane">
      <h2>${lane.name} <span class="quiet">${lane.card}</span> <span class="pill ${lane.state}">${lane.state}</span></h2>
      <p class="rate">${lane.request ? `${lane.request.tokens_per_s.toFixed(1)} tok/s` : ""}</p>
      <label class="quiet">Context ${count(used)} of ${count(context)} <meter min="0" max=${context || 1} value=${used}></meter></label>
      <${Tiers} stats=${lane.stats} />
      ${lane.restarts > 0 && html`<p class="quiet">Restarted ${lane.restarts} ${lane.restarts === 1 ? "time" : "times"}</p>`}
    </article>
  `;
}

function Tiers({ stats }) {
  const rows = stats?.rows_by_tier ?? {};
  const total = TIERS.reduce((sum, tier) => sum + (rows[tier] ?? 0), 0);
  const shown = TIERS.filter((tier) => rows[tier] > 0);
  return html`
    <p class="quiet">Expert rows ${count(total)}${stats ? html`, ${count(stats.resident_experts)} experts cached, ${count(stats.swaps)} swaps` : ""}</p>
    <div class="tiers" role="img" aria-label=${shown.map((tier) => `${tier} ${percent(rows[tier], total)}`).join(", ") || "no rows yet"}>
      ${shown.map((tier) => html`<span class="tier ${tier}" style=${{ flexGrow: rows[tier] / total }} title="${tier}: ${TIER_TITLES[tier]}"></span>`)}
    </div>
    <p class="legend quiet">${shown.map((tier) => html`<span key=${tier} title=${TIER_TITLES[tier]}><i class="tier ${tier}"></i>${tier} ${percent(rows[tier], total)}</span>`)}</p>
  `;
}

function percent(part, whole) {
  return `${Math.round((100 * part) / whole)} %`;
}
