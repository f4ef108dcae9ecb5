// The page: a header, the conversation, the composer, and the two lanes with their tiers below.

import { render } from "preact";
import { html } from "./html.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { Header } from "./header.js";
import { Lanes } from "./lanes.js";
import { poll } from "./status.js";

function Page() {
  return html`
    <${Header} />
    <main>
      <${Conversation} />
      <${Composer} />
      <${Lanes} />
    </main>
  `;
}

poll();
render(html`<${Page} />`, document.body);
