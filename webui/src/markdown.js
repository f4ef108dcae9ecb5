// Markdown of an answer as safe HTML. Images and forms are dropped: nothing on this page loads from elsewhere.

import DOMPurify from "dompurify";
import { marked } from "marked";

const FORBIDDEN = ["img", "picture", "video", "audio", "source", "form", "input", "button", "style", "iframe", "svg", "math"];

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

export function toHtml(text) {
  const html = marked.parse(text, { gfm: true, breaks: true, async: false });
  return DOMPurify.sanitize(html, { FORBID_TAGS: FORBIDDEN, FORBID_ATTR: ["style"] });
}
