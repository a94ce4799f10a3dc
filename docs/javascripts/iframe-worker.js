// A browser starts no worker for a page that was opened as a file, so the search would not work there.
// This runs the worker's script in a hidden frame instead. It is loaded from the site itself: nothing needs the network.

class FileWorker extends EventTarget {
  #frame = document.createElement("iframe");
  #waiting = []; // messages from before the script was loaded

  constructor(url) {
    super();
    this.#frame.hidden = true;
    this.#frame.title = "Search";
    this.#frame.addEventListener("load", () => this.#start(url), { once: true });
    this.#frame.srcdoc = "<!doctype html><title>Search</title>";
    document.body.append(this.#frame);
  }

  #start(url) {
    const inside = this.#frame.contentWindow;
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = inside.document.createElement("script");
    script.addEventListener("load", () => {
      const waiting = this.#waiting;
      this.#waiting = null;
      waiting.forEach((data) => this.postMessage(data));
    });
    script.src = url;
    inside.document.head.append(script);
  }

  postMessage(data) {
    if (this.#waiting) this.#waiting.push(data);
    else this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
  }

  terminate() {
    this.#frame.remove();
  }
}

if (window.location.protocol === "file:") window.Worker = FileWorker;
