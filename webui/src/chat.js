// The conversation of this tab: state and the one request that may be running.

import { signal } from "@preact/signals";
import { ApiError, streamChat } from "./api.js";

export const messages = signal(restore());
export const running = signal(null); // {controller, place, prompt} while a request runs
export const options = signal({ system: "", temperature: 0.7, maxTokens: 512, seed: "" });

function restore() {
  try {
    return JSON.parse(sessionStorage.getItem("messages")) ?? [];
  } catch {
    return [];
  }
}

function keep(list) {
  messages.value = list;
  sessionStorage.setItem("messages", JSON.stringify(list));
}

export function clear() {
  stop();
  keep([]);
}

export function stop() {
  running.value?.controller.abort();
}

function request() {
  const { system, temperature, maxTokens, seed } = options.value;
  const history = messages.value.filter((m) => !m.error || m.content).map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    temperature,
    max_tokens: maxTokens,
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

export async function send(text) {
  if (running.value || !text.trim()) return;
  keep([...messages.value, { role: "user", content: text }]);
  const body = request();
  const answer = { role: "assistant", content: "", reasoning: "" };
  const before = messages.value;
  const controller = new AbortController();
  running.value = { controller, place: null, prompt: null };
  const show = () => keep([...before, { ...answer }]);
  show();
  try {
    for await (const part of streamChat(body, controller.signal)) {
      if (part.place) running.value = { ...running.value, place: part.place };
      if (part.prompt) running.value = { ...running.value, place: null, prompt: part.prompt };
      if (part.text || part.reasoning) {
        answer.content += part.text ?? "";
        answer.reasoning += part.reasoning ?? "";
        if (running.value.place || running.value.prompt) running.value = { controller, place: null, prompt: null };
      }
      if (part.finish) answer.finish = part.finish;
      if (part.timings) answer.timings = part.timings;
      show();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error instanceof ApiError ? error.message : "the server cannot be reached";
    show();
  } finally {
    running.value = null;
  }
}
