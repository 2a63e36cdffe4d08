// Layers.

import { html, Panel } from "../parts.js";

export default function Layers() {
  return html`<${Panel} title="Layers" says="This view is being built." />`;
}
