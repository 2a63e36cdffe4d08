// Dot product.

import { html, Panel } from "../parts.js";

export default function Dot() {
  return html`<${Panel} title="Dot product" says="This view is being built." />`;
}
