// Everything the page asks of the server. All addresses are relative, so a path prefix needs no setting.

import { readEvents } from "./sse.js";

export class ApiError extends Error {}

let key = sessionStorage.getItem("key") ?? "";

export function setKey(value) {
  key = value.trim();
  sessionStorage.setItem("key", key);
}

function headers(extra = {}) {
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not our error shape: the status has to do
  }
  const error = new ApiError(message);
  error.status = response.status;
  return error;
}

export async function fetchStatus() {
  const response = await fetch("status", { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields {place}, {prompt: [done, total]}, {text}, {reasoning}, {finish}, {timings} as they arrive; throws ApiError.
export async function* streamChat(request, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const event of readEvents(response.body)) {
    if (event.comment !== undefined) {
      const words = event.comment.split(" ");
      if (words[0] === "queued") yield { place: Number(words[1]) };
      if (words[0] === "prompt") yield { prompt: words[1].split("/").map(Number) };
      continue;
    }
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.timings) yield { timings: chunk.timings };
  }
  throw new ApiError("the answer broke off: the connection was closed");
}
