// Browsers start no worker for a page that was opened as a file, and the theme searches in one.
// There, what would be a worker runs in a hidden frame of the page. The theme's script looks for
// this name in its parent, and then finds its own address by the frame's script.
window.IFrameWorker = class extends EventTarget {
  onmessage = null;

  constructor(url) {
    super();
    this.frame = document.body.appendChild(document.createElement("iframe"));
    this.frame.hidden = true;
    this.inside = this.frame.contentWindow;
    this.inside.document.write("<!doctype html><body></body>");
    this.inside.document.close();
    this.inside.postMessage = (data) => this.#receive(data);
    this.inside.importScripts = async (...urls) => {
      for (const each of urls) await this.#load(each);
    };
    this.ready = this.#load(url);
  }

  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }

  #receive(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    this.onmessage?.(event);
  }

  #load(url) {
    return new Promise((loaded, failed) => {
      const script = this.inside.document.createElement("script");
      Object.assign(script, { src: url, onload: loaded, onerror: failed });
      this.inside.document.body.append(script);
    });
  }
};

if (location.protocol === "file:") window.Worker = window.IFrameWorker;
