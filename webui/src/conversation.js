// The messages so far; follows the newest text unless the reader has scrolled up.

import { useEffect, useRef } from "preact/hooks";
import { messages, running } from "./chat.js";
import { count, perSecond } from "./format.js";
import { html } from "./html.js";
import { toHtml } from "./markdown.js";

const NEAR_END_PX = 80;

export function Conversation() {
  const box = useRef(null);
  const follow = useRef(true);
  useEffect(() => {
    if (follow.current) box.current.scrollTop = box.current.scrollHeight;
  }, [messages.value, running.value]);
  const onScroll = ({ target }) => {
    follow.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END_PX;
  };
  const list = messages.value;
  return html`
    <section class="conversation" ref=${box} onScroll=${onScroll} aria-live="polite" aria-busy=${Boolean(running.value)}>
      ${list.length === 0 && html`<p class="empty">Ask something. Two conversations run at once: open this page in a second tab.</p>`}
      ${list.map((message, index) => html`<${Message} key=${index} message=${message} last=${index === list.length - 1} />`)}
    </section>
  `;
}

function Message({ message, last }) {
  const waiting = last && running.value && !message.content && !message.reasoning;
  return html`
    <article class=${message.role}>
      ${message.reasoning && html`<details class="reasoning"><summary>Thinking</summary>${message.reasoning}</details>`}
      ${message.role === "user"
        ? html`<p>${message.content}</p>`
        : html`<div class="text" dangerouslySetInnerHTML=${{ __html: toHtml(message.content) }}></div>`}
      ${message.role === "assistant" && waiting && html`<p class="quiet waiting">${waitingFor(running.value)}</p>`}
      ${message.error && html`<p class="error" role="alert">${message.error}</p>`}
      <${Footnote} message=${message} />
    </article>
  `;
}

function waitingFor({ place, prompt }) {
  if (place) return `Waiting for a lane: place ${place} in line`;
  if (prompt) return `Reading the prompt: ${count(prompt[0])} of ${count(prompt[1])} tokens`;
  return "…";
}

function Footnote({ message }) {
  const parts = [];
  const { timings: t, finish } = message;
  if (t) {
    parts.push(`${count(t.generated_tokens)} tokens`, perSecond(t.generated_tokens, t.decode_ms));
    if (t.cached_tokens) parts.push(`${count(t.cached_tokens)} of ${count(t.prompt_tokens)} prompt tokens reused`);
  }
  if (finish === "length") parts.push("cut off at the length limit");
  if (finish === "stopped") parts.push("stopped");
  const text = parts.filter(Boolean).join(" · ");
  return text && html`<p class="quiet footnote">${text}</p>`;
}
