// What the server says of itself, fetched once a second while the page is visible. Reading it costs the engines nothing.

import { signal } from "@preact/signals";
import { fetchStatus } from "./api.js";

export const status = signal(null);
export const problem = signal(null); // a sentence while the status cannot be read
export const keyWanted = signal(false);

const PERIOD_MS = 1000;

export async function poll() {
  if (!document.hidden) {
    try {
      status.value = await fetchStatus();
      problem.value = null;
      keyWanted.value = false;
    } catch (error) {
      keyWanted.value = error.status === 401;
      problem.value = error.status ? error.message : "The server cannot be reached; trying again.";
    }
  }
  setTimeout(poll, PERIOD_MS);
}
