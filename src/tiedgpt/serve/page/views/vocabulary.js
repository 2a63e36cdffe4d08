// Vocabulary.

import { html, Panel } from "../parts.js";

export default function Vocabulary() {
  return html`<${Panel} title="Vocabulary" says="This view is being built." />`;
}
