// Where the user types; Enter sends, Shift+Enter breaks the line, Escape stops.

import { useRef } from "preact/hooks";
import { clear, messages, options, running, send, stop } from "./chat.js";
import { html } from "./html.js";
import { status } from "./status.js";

export function Composer() {
  const input = useRef(null);
  const ready = status.value?.phase === "ready";
  const submit = (event) => {
    event?.preventDefault();
    if (!ready || running.value || !input.current.value.trim()) return;
    const text = input.current.value;
    input.current.value = "";
    send(text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && running.value) stop();
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      <textarea ref=${input} rows="2" aria-label="Message" placeholder="Write a message" onKeyDown=${onKeyDown} autofocus></textarea>
      <div class="buttons">
        ${running.value
          ? html`<button type="button" class="stop" onClick=${stop}>Stop</button>`
          : html`<button class="send" disabled=${!ready}>Send</button>`}
        <button type="button" class="plain" onClick=${clear} disabled=${messages.value.length === 0}>New chat</button>
      </div>
      <${Options} />
    </form>
  `;
}

function Options() {
  const set = (name, read) => (event) => {
    options.value = { ...options.value, [name]: read(event.target) };
  };
  const { system, temperature, maxTokens, seed } = options.value;
  return html`
    <details class="options">
      <summary>Options</summary>
      <label>System prompt <input value=${system} onInput=${set("system", (t) => t.value)} /></label>
      <label>Temperature <input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${set("temperature", (t) => t.valueAsNumber || 0)} /></label>
      <label>Longest answer <input type="number" min="1" step="1" value=${maxTokens} onInput=${set("maxTokens", (t) => t.valueAsNumber || 1)} /></label>
      <label>Seed <input type="number" min="0" step="1" placeholder="random" value=${seed} onInput=${set("seed", (t) => t.value)} /></label>
    </details>
  `;
}
