// Bundles the page into the package: one script, one style sheet, one HTML file. Nothing is loaded from elsewhere.

import { copyFile, mkdir, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const out = fileURLToPath(new URL("../appliance/web/static/", import.meta.url));

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({
  entryPoints: [`${here}src/main.js`],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "linked",
  outfile: `${out}page.js`,
});
await build({ entryPoints: [`${here}src/page.css`], bundle: true, minify: true, outfile: `${out}page.css` });
await copyFile(`${here}src/index.html`, `${out}index.html`);
await copyFile(`${here}src/icon.svg`, `${out}icon.svg`);
