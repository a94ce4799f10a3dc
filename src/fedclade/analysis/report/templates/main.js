// Puts it all together: draws, listens to the choices, and asks for news where the page is live.

redraws.push(drawDiagnosis, drawCompare, drawRun);

byId("run-select").addEventListener("change", (event) => change({ run: event.target.value, group: null, zoom: {} }));
byId("group-select").addEventListener("change", (event) =>
  change({ group: event.target.value === "" ? null : Number(event.target.value) }),
);
byId("gain-new").addEventListener("change", (event) => change({ gain: [event.target.value, null], zoom: {} }));
byId("gain-old").addEventListener("change", (event) => change({ gain: [byId("gain-new").value, event.target.value], zoom: {} }));

let width = window.innerWidth;
window.addEventListener("resize", () => {
  // On a phone the height changes with every scroll.
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  redrawAll();
});
// Paper has its own width, and is never dark.
for (const media of ["(prefers-color-scheme: dark)", "print"]) window.matchMedia(media).addEventListener("change", redrawAll);
window.addEventListener("scroll", tip.hide, { passive: true });

function head() {
  document.title = `${data.title} · fedclade`;
  for (const name of ["title", "headline", "version"]) say(name, data[name]);
}

async function ask(last) {
  let text = last;
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    text = await answer.text();
    if (text !== last) {
      data = JSON.parse(text);
      head();
      redrawAll();
    }
    say("status", data.runs.some((run) => run.progress) ? "Live: the page follows the run." : "The run has ended; this is its result.");
  } catch {
    say("status", "The run's server does not answer; this is what was known last.");
  }
  window.setTimeout(() => ask(text), 2000);
}

redrawAll();
if (document.body.dataset.live === "yes") ask(null);
