// A wide table scrolls by keyboard, too. The theme wraps the tables when it starts.
addEventListener("load", () =>
  setTimeout(() => {
    for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0;
  }),
);
