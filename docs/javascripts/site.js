// What a screen reader and the keyboard need and the theme lacks: a name of the search, and focus for what moves sideways.

window.addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset p:has(> img)"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
});
