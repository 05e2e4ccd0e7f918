// Search without a server: browsers start no worker for a page that was opened from a folder, so a hidden frame does its
// work. The search script of the theme looks for the name IFrameWorker and for an importScripts that can be waited for.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = this.onerror = null
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search"
      this.frame.srcdoc = `<!doctype html><html><body><script>
        window.postMessage = data => parent.postMessage(data, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.body.appendChild(script)
        })), Promise.resolve())
      </${"script"}><script src="${new URL(url, location)}"></${"script"}></body></html>`
      this.received = event => {
        if (event.source !== this.frame.contentWindow) return
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      }
      addEventListener("message", this.received)
      this.frame.addEventListener("load", () => {
        const sent = this.waiting
        this.waiting = null
        sent.forEach(data => this.postMessage(data))
      })
      document.body.appendChild(this.frame)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      // The frame's own name for this leads to the parent; the window's is asked for from outside.
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      removeEventListener("message", this.received)
      this.frame.remove()
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
