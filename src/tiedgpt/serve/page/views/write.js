// Write.

import { html, Panel } from "../parts.js";

export default function Write() {
  return html`<${Panel} title="Write" says="This view is being built." />`;
}
