// Heads.

import { html, Panel } from "../parts.js";

export default function Heads() {
  return html`<${Panel} title="Heads" says="This view is being built." />`;
}
