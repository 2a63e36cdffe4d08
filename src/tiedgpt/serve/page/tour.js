// The guided tour: six questions, answered on the live model.

import { html, Panel } from "./parts.js";

export default function Tour() {
  return html`<${Panel} title="Six questions" says="The tour is being built." />`;
}
