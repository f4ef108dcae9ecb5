import assert from "node:assert/strict";
import { test } from "node:test";
import { readEvents } from "../src/sse.js";

function streamOf(parts) {
  const encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      for (const part of parts) controller.enqueue(typeof part === "string" ? encoder.encode(part) : part);
      controller.close();
    },
  });
}

async function all(parts) {
  const events = [];
  for await (const event of readEvents(streamOf(parts))) events.push(event);
  return events;
}

test("comments and data arrive in order", async () => {
  assert.deepEqual(await all([": queued 2\n\ndata: {}\n\ndata: [DONE]\n\n"]), [{ comment: "queued 2" }, { data: "{}" }, { data: "[DONE]" }]);
});

test("an event cut anywhere is put together again", async () => {
  const text = 'data: {"a":"é€"}\n\n: x\n\n';
  const whole = new TextEncoder().encode(text);
  for (let cut = 1; cut < whole.length; cut += 1) {
    assert.deepEqual(await all([whole.slice(0, cut), whole.slice(cut)]), [{ data: '{"a":"é€"}' }, { comment: "x" }]);
  }
});

test("an event that never ends is not reported", async () => {
  assert.deepEqual(await all(["data: half"]), []);
});
