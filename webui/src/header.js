// Model, state of the server, load progress, and the notices that a user must see.

import { setKey } from "./api.js";
import { bytes, duration } from "./format.js";
import { html } from "./html.js";
import { keyWanted, problem, status } from "./status.js";

const PHASES = { loading: "loading", ready: "ready", draining: "shutting down", failed: "failed" };
const STAGES = {
  download: "Fetching the model",
  reserve: "Taking shared memory",
  arena: "Reading experts into shared memory",
  dense: "Loading dense weights",
  cache: "Filling the expert caches",
  warmup: "Warming up",
};

export function Header() {
  const now = status.value;
  const phase = problem.value ? "away" : (now?.phase ?? "away");
  return html`
    <header>
      <h1>Tandem</h1>
      <span class="model" title="Model">${now?.model?.name ?? ""}</span>
      <span class="pill ${phase}" role="status">${PHASES[phase] ?? "connecting"}</span>
    </header>
    ${now?.phase === "loading" && html`<${Loading} load=${now.load} />`}
    ${now?.phase === "failed" && html`<p class="notice bad" role="alert">${now.reason}</p>`}
    ${problem.value && html`<p class="notice bad" role="alert">${problem.value}</p>`}
    ${keyWanted.value && html`<${KeyForm} />`}
    ${now?.model?.is_demo &&
    html`<p class="notice">
      This is the demo model, a pocket dictionary: ask it “What is a harbor?”. Start <code>tandem serve MODEL.gguf</code> for a real one.
    </p>`}
  `;
}

function Loading({ load }) {
  if (!load) return html`<p class="notice">Starting…</p>`;
  const { stage, done_bytes: done, total_bytes: total, bytes_per_s: rate, left_s: left } = load;
  return html`
    <section class="notice loading" aria-label="Loading">
      <span>${STAGES[stage] ?? stage}</span>
      <progress max=${total || 1} value=${done}></progress>
      <span class="quiet">
        ${bytes(done)} of ${bytes(total)}${rate ? html`, ${bytes(rate)}/s` : ""}${left != null ? html`, ${duration(left)} left` : ""}
      </span>
    </section>
  `;
}

function KeyForm() {
  const submit = (event) => {
    event.preventDefault();
    setKey(new FormData(event.target).get("key"));
    event.target.reset();
  };
  return html`
    <form class="notice" onSubmit=${submit}>
      <label>API key <input name="key" type="password" autocomplete="off" required /></label>
      <button>Use</button>
    </form>
  `;
}
