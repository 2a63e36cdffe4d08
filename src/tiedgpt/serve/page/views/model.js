// Model.

import { html, Panel } from "../parts.js";

export default function Model() {
  return html`<${Panel} title="Model" says="This view is being built." />`;
}
