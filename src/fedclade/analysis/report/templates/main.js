// Draws the page, handles the controls, and fetches new data if the page is live.

redraws.push(drawProgress, drawDiagnosis, drawCompare, drawRun);

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

// The progress of all runs; nothing on the page of finished runs.
function drawProgress() {
  const { progress } = data;
  if (!show("progress", Boolean(progress))) return;
  byId("progress-bar").value = progress.share;
  const isLive = document.body.dataset.live === "yes";
  setText("progress-text", `${progress.text}${isLive && progress.left ? ` ${titled(progress.left)} left.` : ""}`);
}

function head() {
  document.title = `${data.title} · fedclade`;
  for (const name of ["title", "headline", "version"]) setText(name, data[name]);
}

const liveText = () => (data.progress.runs > 1 ? "Live: this page follows the runs." : "Live: this page follows the run.");

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
    setText("status", data.progress ? liveText() : "Finished: this is the result.");
  } catch {
    setText("status", "The server of the run does not respond; this is the last known state.");
  }
  window.setTimeout(() => update(text), 2000);
}

redrawAll();
if (document.body.dataset.live === "yes") update(null);
