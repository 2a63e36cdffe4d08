// Matrix.

import { html, Panel } from "../parts.js";

export default function Matrix() {
  return html`<${Panel} title="Matrix" says="This view is being built." />`;
}
