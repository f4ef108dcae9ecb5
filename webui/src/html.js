// JSX without a compiler step: html`<p>...</p>`.

import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);
