// A browser starts no worker for a page that is opened as a file, and the site's search runs in one. Here it runs in a
// hidden frame of the page instead. The theme's search asks for `IFrameWorker`; nothing is fetched from elsewhere.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inner.document.body.append(script);
        });
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(new URL(url, location.href).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
