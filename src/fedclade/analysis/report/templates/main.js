// Draws the page, handles the controls, and fetches new data if the page is live.

redraws.push(drawDiagnosis, drawCompare, drawRun);

byId("run-select").addEventListener("change", (event) => change({ run: event.target.value, group: null, zoom: {} }));
byId("group-select").addEventListener("change", (event) =>
  change({ group: event.target.value === "" ? null : Number(event.target.value) }),
);
byId("gain-new").addEventListener("change", (event) => change({ gain: [event.target.value, null], zoom: {} }));
byId("gain-old").addEventListener("change", (event) => change({ gain: [byId("gain-new").value, event.target.value], zoom: {} }));

let width = window.innerWidth;
window.addEventListener("resize", () => {
  // On a phone, scrolling changes the height.
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  redrawAll();
});
// Print has a different width, and no dark mode.
for (const media of ["(prefers-color-scheme: dark)", "print"]) window.matchMedia(media).addEventListener("change", redrawAll);
window.addEventListener("scroll", tip.hide, { passive: true });

function head() {
  document.title = `${data.title} · fedclade`;
  for (const name of ["title", "headline", "version"]) setText(name, data[name]);
}

async function update(last) {
  let text = last;
  try {
    const response = await fetch("data.json", { cache: "no-store" });
    if (!response.ok) throw new Error(response.statusText);
    text = await response.text();
    if (text !== last) {
      data = JSON.parse(text);
      head();
      redrawAll();
    }
    setText("status", data.runs.some((run) => run.progress) ? "Live: this page follows the run." : "The run is finished; this is its result.");
  } catch {
    setText("status", "The server of the run does not respond; this is the last known state.");
  }
  window.setTimeout(() => update(text), 2000);
}

redrawAll();
if (document.body.dataset.live === "yes") update(null);
